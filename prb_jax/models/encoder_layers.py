"""Operations of encoders' layers: layer norm and activations."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from types import MappingProxyType
from typing import Any, Literal

import jax
import jax.numpy as jnp
from flax import nnx
from jax import lax

from prb_jax.models.layers import inverse_root_mean_square, row_of

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


def run_stack(
    body: Callable[..., jax.Array], x: jax.Array, layers: nnx.State, *inputs: jax.Array
) -> jax.Array:
    """Return x after ``body(x, state of a layer, *its inputs)`` of each layer, all stacked on axis 0."""
    leaves, structure = jax.tree.flatten(layers)
    # Slices of a scan would convert all layers on CPUs: see prb_jax.models.layers.in_bits.
    sliced = [None if leaf.dtype == jnp.bfloat16 else leaf for leaf in leaves]

    def one(x: jax.Array, given: Any) -> tuple[jax.Array, None]:
        number, some, own = given
        rows = [row_of(leaf, number) if row is None else row for leaf, row in zip(leaves, some, strict=True)]
        return body(x, jax.tree.unflatten(structure, rows), *own), None

    return lax.scan(one, x, (jnp.arange(len(leaves[0])), sliced, inputs))[0]


def activate(x: jax.Array, kind: EncoderActivation) -> jax.Array:
    """Apply an encoder's activation, computed in float32, in x's dtype."""
    wide = x.astype(jnp.float32)
    if kind in ("relu", "tanh"):
        return (jax.nn.relu(wide) if kind == "relu" else jnp.tanh(wide)).astype(x.dtype)
    return jax.nn.gelu(wide, approximate=kind == "gelu_tanh").astype(x.dtype)
