"""The pieces of a decoder layer as pure functions: norms, projections, rotary embedding, gated mlp.

Statistics of norms, rotary angles and every accumulation are float32, also when activations are bfloat16.
"""

from __future__ import annotations

from collections.abc import Mapping
from types import MappingProxyType
from typing import Any, Literal

import jax
import jax.numpy as jnp
import numpy as np
from jax import lax
from jax.custom_derivatives import SymbolicZero

Activation = Literal["silu", "gelu_pytorch_tanh"]
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
"""The name of an activation in the ``config.json`` of an encoder -> the function."""

Axes = int | tuple[int, ...]

PROJECTED = "projected"
"""The name of the result of a layer's projection, for policies of rematerialisation: they see no products inside a
derivative that is written by hand."""


def matmul_precision(dtype: jnp.dtype) -> lax.Precision | None:
    """float32 asked for means float32: accelerators would otherwise round factors to bfloat16 or TF32."""
    return lax.Precision.HIGHEST if dtype == jnp.float32 else None


def product(a: jax.Array, b: jax.Array, over: tuple[Axes, Axes] = (-1, 0), *, batch: int = 0) -> jax.Array:
    """Products of two arrays of one dtype, accumulated in float32, which they stay.

    Args:
        a, b: the factors.
        over: the axes of each that are summed over.
        batch: how many leading axes both share.
    """
    summed = [tuple(n % x.ndim for n in np.atleast_1d(axes).tolist()) for x, axes in zip((a, b), over)]
    shared = tuple(range(batch))
    return lax.dot_general(
        a,
        b,
        ((summed[0], summed[1]), (shared, shared)),
        precision=matmul_precision(a.dtype),
        preferred_element_type=jnp.float32,
    )


def float32_einsum(form: str, *factors: jax.Array) -> jax.Array:
    """Products and sums as :func:`jax.numpy.einsum` writes them, accumulated in float32, which they stay."""
    precision = matmul_precision(factors[0].dtype)
    return jnp.einsum(form, *factors, precision=precision, preferred_element_type=jnp.float32)


def soft_capped(scores: jax.Array, softcap: float | None) -> jax.Array:
    """``softcap * tanh(scores / softcap)``; the scores themselves where there is no cap."""
    return scores if softcap is None else softcap * jnp.tanh(scores / softcap)


def without_unit_axes(x: jax.Array) -> jax.Array:
    """x [..., D] without its leading axes of size 1, such as that of a batch of one stream.

    Where another axis has size 1, XLA for CPUs computes a sum of products over the last axis in plain loops: the
    gradient of a norm takes six times as long, and the entropy of a distribution thirty times.
    """
    return x.reshape(*(size for size in x.shape[:-1] if size != 1), x.shape[-1])


def project(x: jax.Array, weight: jax.Array, bias: jax.Array | None = None) -> jax.Array:
    """x [..., I] times weight [I, O] plus bias [O], accumulated in float32, in x's dtype.

    The float32 accumulation is asked for by name: besides being exact, it is what makes bfloat16
    products run at full speed on CPUs. The same holds for the two products of the backward pass, and the
    gradient of a float32 weight stays float32.
    """
    out = matmul(x, weight)
    if bias is not None:
        out = out + bias.astype(jnp.float32)
    return out.astype(x.dtype)


@jax.custom_vjp
def matmul(x: jax.Array, weight: jax.Array) -> jax.Array:
    """[..., I] x [I, O] -> float32 [..., O], both factors in x's dtype."""
    return product(x, weight.astype(x.dtype))


# The derivative written by hand: left to itself, JAX multiplies the float32 cotangent of the float32
# output with the narrow factors, in products of mixed types that no machine runs fast. And a factor is
# kept for the backward pass only where the other one has a gradient: nothing for frozen weights.
def _matmul_forward(x: Any, weight: Any) -> tuple[jax.Array, tuple[Any, ...]]:
    kept_x = x.value if weight.perturbed else None
    kept_weight = weight.value if x.perturbed else None
    kinds = (jnp.zeros((0,), x.value.dtype), jnp.zeros((0,), weight.value.dtype))
    return product(x.value, weight.value.astype(x.value.dtype)), (kept_x, kept_weight, *kinds)


def _matmul_backward(kept: tuple[Any, ...], cotangent: Any) -> tuple[Any, Any]:
    x, weight, like_x, like_weight = kept
    if isinstance(cotangent, SymbolicZero):
        return None, None
    narrow = cotangent.astype(like_x.dtype)
    to_x = to_weight = None
    if weight is not None:
        to_x = product(narrow, weight.astype(like_x.dtype), (-1, 1)).astype(like_x.dtype)
    if x is not None:
        leading = tuple(range(x.ndim - 1))
        to_weight = product(x, narrow, (leading, leading)).astype(like_weight.dtype)
    return to_x, to_weight


matmul.defvjp(_matmul_forward, _matmul_backward, symbolic_zeros=True)


def inverse_root_mean_square(wide: jax.Array, *, eps: float) -> jax.Array:
    """The factor [..., 1] by which a norm scales float32 values [..., D]; NaN where their squares overflow.

    The root's inverse would be 0 there: every score would be the same plausible number, and no error.
    """
    mean_square = jnp.mean(jnp.square(wide), axis=-1, keepdims=True)
    return jnp.where(mean_square < jnp.inf, lax.rsqrt(mean_square + eps), jnp.nan)


def rms_norm(
    x: jax.Array, weight: jax.Array, *, eps: float, plus_one: bool, scale_after_cast: bool
) -> jax.Array:
    """Root-mean-square norm over the last axis, x [..., D], weight [D].

    Args:
        plus_one: multiply by ``1 + weight`` (Gemma) instead of ``weight``.
        scale_after_cast: cast the normalised value to x's dtype before multiplying (Llama); otherwise
            multiply in float32 and cast the product (Gemma).
    """
    wide = without_unit_axes(x).astype(jnp.float32)
    normed = wide * inverse_root_mean_square(wide, eps=eps)
    scale = weight.astype(jnp.float32) + 1.0 if plus_one else weight.astype(jnp.float32)
    if scale_after_cast:
        normed = normed.astype(x.dtype).astype(jnp.float32)
    return (normed * scale).astype(x.dtype).reshape(x.shape)


def rotate(
    x: jax.Array, cos: jax.Array, sin: jax.Array, *, scale: float = 1.0, interleaved: bool = False
) -> jax.Array:
    """Rotary embedding of x [B, T, N, H] by angles [B, T, R/2], times ``scale``; channels from R on are not turned.

    Args:
        x: queries or keys.
        cos, sin: of the angles.
        scale: multiplies the result.
        interleaved: pairs are neighbours (x[2i], x[2i + 1]), not (x[i], x[i + R/2]). All first members of pairs come
            before all second ones in the result: products of queries and keys are the same in any order.
    """
    half = cos.shape[-1]
    wide, whole = x.astype(jnp.float32), x.shape[-1] == 2 * half
    turned = wide if whole else wide[..., : 2 * half]
    pairs = (turned[..., ::2], turned[..., 1::2]) if interleaved else (turned[..., :half], turned[..., half:])
    first, second = pairs
    cos, sin = cos[:, :, None, :] * scale, sin[:, :, None, :] * scale
    parts = [first * cos - second * sin, second * cos + first * sin]
    if not whole:
        parts.append(wide[..., 2 * half :] * scale)
    return jnp.concatenate(parts, axis=-1).astype(x.dtype)


def gated(gate: jax.Array, up: jax.Array, kind: Activation) -> jax.Array:
    """activation(gate) * up, computed in float32, in gate's dtype."""
    wide = gate.astype(jnp.float32)
    active = wide * lax.logistic(wide) if kind == "silu" else jax.nn.gelu(wide, approximate=True)
    return (active * up.astype(jnp.float32)).astype(gate.dtype)


def activate(x: jax.Array, kind: EncoderActivation) -> jax.Array:
    """An encoder's non-linearity, computed in float32, in x's dtype."""
    wide = x.astype(jnp.float32)
    if kind in ("relu", "tanh"):
        return (jax.nn.relu(wide) if kind == "relu" else jnp.tanh(wide)).astype(x.dtype)
    return jax.nn.gelu(wide, approximate=kind == "gelu_tanh").astype(x.dtype)
