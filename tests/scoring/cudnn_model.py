"""A reward model as GPUs score it in bfloat16, on any machine."""

from __future__ import annotations

import functools
from dataclasses import replace
from typing import Any

import jax.numpy as jnp
import pytest

from prb_jax.models.attention import cudnn
from prb_jax.models.attention.choice import StreamAttention
from prb_jax.models.readouts.score_tree import make_score_fn
from prb_jax.scoring.reward_model import RewardModel


def over_cudnn_streams(model: RewardModel, monkeypatch: pytest.MonkeyPatch) -> RewardModel:
    """The same model over streams with tables of keys; XLA computes what cuDNN would."""
    by_xla = functools.partial(cudnn.cudnn_stream_attention, implementation="xla")
    monkeypatch.setattr(cudnn, "cudnn_stream_attention", by_xla)
    options: Any = {"mesh": model.mesh, "dtype": jnp.dtype(model.dtype), "readout": model.readout}
    scorer = make_score_fn(model.decoder, **options)
    return replace(model, score_fn=scorer, streams=StreamAttention("cuDNN over packed streams", "keys"))
