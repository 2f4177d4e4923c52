"""Queries of attention with a gate."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

import jax.numpy as jnp
from flax import nnx
from jax.typing import DTypeLike

from prb_jax.models.decoder_layer import DecoderLayer
from prb_jax.models.parameter import drawn, parameter, places_in_tensor


def declare_gated_queries(
    layer: DecoderLayer, *, rngs: nnx.Rngs, dtype: DTypeLike, uses: Mapping[str, Any]
) -> None:
    """Declare queries and their gate, which a file stores in one tensor: query, then gate, for each head."""
    config, size = layer.config, layer.config.head_dim
    heads = config.num_attention_heads
    for name, stored in places_in_tensor({"q": heads * size, "q_gate": heads * size}, groups=heads).items():
        shape, axes = (config.hidden_size, heads * size), ("model", "heads")
        declared: dict[str, Any] = {"axes": axes, "hf": "self_attn.q_proj.weight", "dtype": dtype}
        setattr(layer, name, drawn(rngs, *shape, **declared, **stored, **uses))
        if config.attention_bias:
            zeros = jnp.zeros((heads * size,), dtype)
            bias = parameter(zeros, axes=("heads",), hf="self_attn.q_proj.bias", **stored)
            setattr(layer, f"{name}_bias", bias)
