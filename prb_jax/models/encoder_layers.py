"""Operations of encoders' layers: layer norm and activations."""

from __future__ import annotations

from collections.abc import Mapping
from types import MappingProxyType
from typing import Literal

import jax
import jax.numpy as jnp

from prb_jax.models.layers import inverse_root_mean_square

EncoderActivation = Literal["gelu", "gelu_tanh", "relu", "tanh"]


ACTIVATIONS: Mapping[str, EncoderActivation] = MappingProxyType(
    {
        "gelu": "gelu",
        "gelu_new": "gelu_tanh",
        "gelu_pytorch_tanh": "gelu_tanh",
        "relu": "relu",
        "tanh": "tanh",
    }
)
"""Activation functions by their name in the ``config.json`` of an encoder."""


def layer_norm(x: jax.Array, weight: jax.Array, bias: jax.Array | None, *, eps: float) -> jax.Array:
    """Apply layer norm over the last axis of x [..., D], with statistics and products in float32."""
    wide = x.astype(jnp.float32)
    centred = wide - jnp.mean(wide, axis=-1, keepdims=True)
    out = centred * inverse_root_mean_square(centred, eps=eps) * weight.astype(jnp.float32)
    return (out if bias is None else out + bias.astype(jnp.float32)).astype(x.dtype)


def activate(x: jax.Array, kind: EncoderActivation) -> jax.Array:
    """Apply an encoder's activation, computed in float32, in x's dtype."""
    wide = x.astype(jnp.float32)
    if kind in ("relu", "tanh"):
        return (jax.nn.relu(wide) if kind == "relu" else jnp.tanh(wide)).astype(x.dtype)
    return jax.nn.gelu(wide, approximate=kind == "gelu_tanh").astype(x.dtype)
