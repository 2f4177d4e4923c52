"""The configuration of a tiny model, and sizes of it that tests count by hand."""

from __future__ import annotations

from importlib.util import find_spec
from typing import Any

import pytest

from prb_jax.models.config.decoder import parse_config

GIB = 1024**3
TINY: dict[str, Any] = {
    "architectures": ["Qwen3ForSequenceClassification"],
    "model_type": "qwen3",
    "vocab_size": 512,
    "hidden_size": 256,
    "intermediate_size": 512,
    "num_hidden_layers": 3,
    "num_attention_heads": 4,
    "num_key_value_heads": 2,
    "head_dim": 64,
    "rms_norm_eps": 1e-6,
    "max_position_embeddings": 1024,
    "num_labels": 1,
    "pad_token_id": 0,
}
CONFIG = parse_config(TINY, where="tiny")
MATRICES = 256 * (2 * 256 + 2 * 128 + 3 * 512)
"""Weights of the matrices of a layer."""

needs_libtpu = pytest.mark.skipif(find_spec("libtpu") is None, reason="compiled by libtpu")
