"""A reward model as GPUs score it with the attention "streams", on any machine."""

from __future__ import annotations

import functools
from dataclasses import replace
from typing import Any

import jax.numpy as jnp
import pytest

from prb_jax.models.attention import cudnn
from prb_jax.models.attention.choice import CUDNN_STREAM_ATTENTION
from prb_jax.readouts.score_tree import make_stream_fn
from prb_jax.scoring.reward_model import RewardModel


def over_cudnn_streams(model: RewardModel, monkeypatch: pytest.MonkeyPatch) -> RewardModel:
    """The same model over packed streams with tables of keys; XLA computes what cuDNN would."""
    by_xla = functools.partial(cudnn.cudnn_stream_attention, implementation="xla")
    monkeypatch.setattr(cudnn, "cudnn_stream_attention", by_xla)
    options: Any = {"mesh": model.mesh, "dtype": jnp.dtype(model.dtype)}
    scorer = make_stream_fn(model.decoder, readout=model.readout, **options)
    return replace(model, stream_fn=scorer, attention=CUDNN_STREAM_ATTENTION)
