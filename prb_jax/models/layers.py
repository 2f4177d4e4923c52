"""The pieces of a decoder layer as pure functions: norms, projections, rotary embedding, gated mlp.

Statistics of norms, rotary angles and every accumulation are float32, also when activations are bfloat16.
"""

from __future__ import annotations

from typing import Literal

import jax
import jax.numpy as jnp
from jax import lax

Activation = Literal["silu", "gelu_pytorch_tanh"]


def matmul_precision(dtype: jnp.dtype) -> lax.Precision | None:
    """float32 asked for means float32: accelerators would otherwise round factors to bfloat16 or TF32."""
    return lax.Precision.HIGHEST if dtype == jnp.float32 else None


def project(x: jax.Array, weight: jax.Array, bias: jax.Array | None = None) -> jax.Array:
    """x [..., I] times weight [I, O] plus bias [O], accumulated in float32, in x's dtype.

    The float32 accumulation is asked for by name: besides being exact, it is what makes bfloat16
    products run at full speed on CPUs.
    """
    out = lax.dot_general(
        x,
        weight.astype(x.dtype),
        (((x.ndim - 1,), (0,)), ((), ())),
        precision=matmul_precision(x.dtype),
        preferred_element_type=jnp.float32,
    )
    if bias is not None:
        out = out + bias.astype(jnp.float32)
    return out.astype(x.dtype)


def rms_norm(
    x: jax.Array, weight: jax.Array, *, eps: float, plus_one: bool, scale_after_cast: bool
) -> jax.Array:
    """Root-mean-square norm over the last axis, x [..., D], weight [D].

    Args:
        plus_one: multiply by ``1 + weight`` (Gemma) instead of ``weight``.
        scale_after_cast: cast the normalised value to x's dtype before multiplying (Llama); otherwise
            multiply in float32 and cast the product (Gemma).
    """
    wide = x.astype(jnp.float32)
    normed = wide * lax.rsqrt(jnp.mean(jnp.square(wide), axis=-1, keepdims=True) + eps)
    scale = weight.astype(jnp.float32) + 1.0 if plus_one else weight.astype(jnp.float32)
    if scale_after_cast:
        normed = normed.astype(x.dtype).astype(jnp.float32)
    return (normed * scale).astype(x.dtype)


def rotate(x: jax.Array, cos: jax.Array, sin: jax.Array, *, scale: float = 1.0) -> jax.Array:
    """Rotary embedding of x [B, T, N, H] by angles [B, T, H/2] in half-split order, times ``scale``."""
    half = x.shape[-1] // 2
    wide = x.astype(jnp.float32)
    first, second = wide[..., :half], wide[..., half:]
    cos, sin = cos[:, :, None, :] * scale, sin[:, :, None, :] * scale
    return jnp.concatenate([first * cos - second * sin, second * cos + first * sin], axis=-1).astype(x.dtype)


def activation(x: jax.Array, kind: Activation) -> jax.Array:
    """The gate's non-linearity, float32 in and out."""
    if kind == "silu":
        return x * lax.logistic(x)
    return jax.nn.gelu(x, approximate=True)


def gated_mlp(
    x: jax.Array,
    gate: jax.Array,
    up: jax.Array,
    down: jax.Array,
    *,
    kind: Activation,
    biases: tuple[jax.Array, jax.Array, jax.Array] | None = None,
) -> jax.Array:
    """down(activation(gate x) * up x): x [..., D], gate and up [D, F], down [F, D]."""
    gate_bias, up_bias, down_bias = biases if biases is not None else (None, None, None)
    gated = activation(project(x, gate, gate_bias).astype(jnp.float32), kind)
    hidden = (gated * project(x, up, up_bias).astype(jnp.float32)).astype(x.dtype)
    return project(hidden, down, down_bias)
