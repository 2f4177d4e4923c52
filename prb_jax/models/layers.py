"""Parts of a decoder layer as pure functions: norms, projections, rotary embedding, gated mlp.

Statistics of norms, rotary angles and all accumulations are float32, even if activations are bfloat16.
"""

from __future__ import annotations

import functools
import math
import re
from collections.abc import Callable
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any, Literal

import jax
import jax.numpy as jnp
import numpy as np
from jax import lax
from jax.custom_derivatives import SymbolicZero
from jax.typing import DTypeLike

from prb_jax.models.config.family import Family
from prb_jax.models.config.fields import FieldReader
from prb_jax.seams import get

RopeType = Literal["default", "linear", "llama3", "yarn", "longrope"]


@dataclass(frozen=True, kw_only=True)
class RopeConfig:
    """Parameters of the rotary angles of one kind of layer."""

    rope_type: RopeType
    theta: float  # base of the geometric series of wavelengths
    rotary_dim: int  # number of rotated channels, the first ones of a head
    factor: float = 1.0  # factor of context extension (1 for ``default``)
    low_freq_factor: float = 1.0  # bounds of the blended band (``llama3``)
    high_freq_factor: float = 1.0
    original_max_position_embeddings: int = (
        0  # context length in pre-training, in tokens (``llama3``, ``yarn``)
    )
    beta_fast: float = 32.0  # rotations over the original context at the bounds of the ramp (``yarn``)
    beta_slow: float = 1.0
    truncate: bool = True  # round the bounds of the ramp outwards to whole dimensions (``yarn``)
    attention_factor: float = 1.0  # factor of cos and sin (``yarn``, ``longrope``; 1 otherwise)
    short_factor: tuple[float, ...] = ()  # divisor of each pair's frequency (``longrope``)
    long_factor: tuple[float, ...] = ()
    """Divisors for conversations of more than `original_max_position_embeddings` tokens, from their first token on
    (``longrope``); empty if they are the same."""
    query_growth: float = 0.0
    """b: queries are multiplied by 1 + b ln(1 + floor(position / original_max_position_embeddings))."""


def parse_ropes(
    fields: FieldReader, family: Family, *, head_dim: int, longest: int
) -> tuple[RopeConfig, RopeConfig | None]:
    """Return the ropes of full and sliding layers; the second is None in families with one rope for all layers.

    Arguments and errors are as in :func:`prb_jax.models.config.ropes.parse_ropes`, which reads all but the plain rope.
    """
    scaled = ("rope_scaling", "rope_parameters", "original_max_position_embeddings")
    if family.plain_rope and not head_dim % 2 and not any(map(fields.has, scaled)):
        theta = fields.number("rope_theta", default=family.defaults["rope_theta"])
        return RopeConfig(rope_type="default", theta=theta, rotary_dim=head_dim), None
    return get("ropes", "parse").value(fields, family, head_dim=head_dim, longest=longest)


def inverse_frequencies(rope: RopeConfig, *, long: bool = False) -> np.ndarray:
    """Return radians per token of each rotated pair, float32 ``[R/2]`` for R rotated channels.

    Args:
      rope: Rope of the layer.
      long: If True, return the frequencies of conversations for which the rope has other factors.
    """
    if long:
        rope = replace(rope, short_factor=rope.long_factor)
    # theta ** (2i / R): the exponent is rounded to float32, then the power.
    exponents = np.arange(0, rope.rotary_dim, 2, dtype=np.float32) / np.float32(rope.rotary_dim)
    powers = np.power(np.float64(np.float32(rope.theta)), exponents.astype(np.float64)).astype(np.float32)
    frequencies = np.float32(1.0) / powers
    if rope.rope_type == "default":
        return frequencies
    if rope.rope_type == "linear":
        return frequencies / np.float32(rope.factor)
    return get("ropes", rope.rope_type).value(rope, frequencies, powers)


def rotary_angles(
    positions: jax.Array | np.ndarray, rope: RopeConfig, *, long: jax.Array | None = None
) -> tuple[jax.Array, jax.Array]:
    """Return cosine and sine for the given positions, scaled by the rope's attention factor.

    Args:
      positions: Positions int32 ``[...]``.
      rope: Rope of the layer.
      long: True for tokens of conversations for which the rope has other factors, bool ``[...]``; None for no tokens.

    Returns:
      ``(cos, sin)``, float32 ``[..., R/2]``. Pair i of a head is (x[i], x[i + R/2]), or adjacent channels in families
      with interleaved pairs.
    """
    # float32 regardless of the model's dtype: in bfloat16 position 257 would become 256.
    frequencies = jnp.asarray(inverse_frequencies(rope))
    if long is not None and rope.long_factor:
        of_long = jnp.asarray(inverse_frequencies(rope, long=True))
        frequencies = jnp.where(long[..., None], of_long, frequencies)
    angles = jnp.asarray(positions).astype(jnp.float32)[..., None] * frequencies
    scale = jnp.float32(rope.attention_factor)
    return jnp.cos(angles) * scale, jnp.sin(angles) * scale


def query_growth(positions: jax.Array | np.ndarray, rope: RopeConfig) -> jax.Array:
    """Return the factors that scale queries by position, float32 in the shape of ``positions``."""
    rounds = jnp.floor(jnp.asarray(positions).astype(jnp.float32) / rope.original_max_position_embeddings)
    return 1 + rope.query_growth * jnp.log(1 + rounds)


Activation = Literal["silu", "gelu_pytorch_tanh"]

Axes = int | tuple[int, ...]

PROJECTED = "projected"
"""Name of the results of projections for rematerialisation policies, which cannot see products inside a custom
derivative."""

_WIDENED = 64
"""Rows of a product from which the conversion of both factors to float32 costs less than it saves."""

_PROCESSOR = Path("/proc/cpuinfo")

_TURNED = 1 << 14
"""Number of values that are transposed at once on CPUs, if their rows are short."""


def matmul_precision(dtype: jnp.dtype) -> lax.Precision | None:
    """Return the precision that keeps float32 factors; by default accelerators round them to bfloat16 or TF32."""
    return lax.Precision.HIGHEST if dtype == jnp.float32 else None


def product(a: jax.Array, b: jax.Array, over: tuple[Axes, Axes] = (-1, 0), *, batch: int = 0) -> jax.Array:
    """Return products of two arrays of one dtype, accumulated and returned in float32.

    Args:
        a, b: Factors.
        over: Axes of each factor to sum over.
        batch: Number of shared leading axes.
    """
    multiply = functools.partial(narrow_product, over=over, batch=batch)
    few = a.size < _WIDENED * math.prod(a.shape[:batch]) * np.prod(np.take(a.shape, over[0]))
    return multiply(a, b) if few else _widened(multiply, a, b)


def narrow_product(
    a: jax.Array, b: jax.Array, over: tuple[Axes, Axes] = (-1, 0), *, batch: int = 0
) -> jax.Array:
    """Same as :func:`product`, without a choice by processor: for kernels."""
    summed = [tuple(n % x.ndim for n in np.atleast_1d(axes).tolist()) for x, axes in zip((a, b), over)]
    shared = tuple(range(batch))
    return lax.dot_general(
        a,
        b,
        ((summed[0], summed[1]), (shared, shared)),
        precision=matmul_precision(a.dtype),
        preferred_element_type=jnp.float32,
    )


def _widened(multiply: Callable[..., jax.Array], *factors: jax.Array) -> jax.Array:
    """Return multiply(*factors), with bfloat16 as float32 where that is faster; only the order of sums differs."""
    if factors[0].dtype != jnp.bfloat16 or multiplies_bfloat16():
        return multiply(*factors)

    def wide(*factors: jax.Array) -> jax.Array:
        return multiply(*(x.astype(jnp.float32) for x in factors))

    return lax.platform_dependent(*factors, cpu=wide, default=multiply)


@functools.cache
def multiplies_bfloat16() -> bool:
    """Return whether Linux names instructions of the processor for products of bfloat16.

    Without them, XLA for CPUs takes about twice as long as for products of float32.
    """
    content = _PROCESSOR.read_text(errors="replace") if _PROCESSOR.exists() else ""
    return bool(re.search(r"^(flags|Features)\b.* (amx_bf16|avx512_bf16|bf16)\b", content, re.MULTILINE))


def in_bits(x: jax.Array) -> jax.Array:
    """Return a bfloat16 array as int16, and others unchanged.

    XLA for CPUs multiplies bfloat16, but moves it as float32: to slice or update an array, it converts the whole array,
    and in a loop it keeps the copy. Integers are moved as they are, but unsigned ones are transposed ten times as
    slowly. They have no gradient.
    """
    return lax.bitcast_convert_type(x, jnp.int16) if x.dtype == jnp.bfloat16 else x


def from_bits(x: jax.Array, dtype: DTypeLike) -> jax.Array:
    """Invert :func:`in_bits`."""
    return lax.bitcast_convert_type(x, dtype) if x.dtype != dtype else x


def rounded(x: jax.Array, dtype: DTypeLike) -> jax.Array:
    """Return float32 numbers in a dtype: for bfloat16, CPUs take a fourth of the time of a conversion that keeps every
    kind of NaN."""
    if dtype != jnp.bfloat16:
        return x.astype(dtype)
    bits = lax.bitcast_convert_type(x, jnp.uint32)
    bits = (bits + 0x7FFF + ((bits >> 16) & 1)) >> 16  # half to even
    return from_bits(bits.astype(jnp.int16), dtype)


def row_of(stack: jax.Array, number: jax.Array | int) -> jax.Array:
    """Return stack[number]; on CPUs without converting a stack of bfloat16, see :func:`in_bits`."""
    return _row_of_bits(stack, number) if stack.dtype == jnp.bfloat16 else _row_of(stack, number)


def _row_of(stack: jax.Array, number: jax.Array | int) -> jax.Array:
    return lax.dynamic_index_in_dim(stack, number, keepdims=False)


@jax.custom_jvp
def _row_of_bits(stack: jax.Array, number: jax.Array | int) -> jax.Array:
    def of_bits(stack: jax.Array, number: jax.Array | int) -> jax.Array:
        # Without the barrier, XLA would copy the whole stack before a loop.
        stack, number = lax.optimization_barrier((stack, number))
        return from_bits(_row_of(in_bits(stack), number), stack.dtype)

    return lax.platform_dependent(stack, number, cpu=of_bits, default=_row_of)


@_row_of_bits.defjvp
def _row_of_bits_jvp(primals: tuple[Any, Any], tangents: tuple[Any, Any]) -> tuple[jax.Array, jax.Array]:
    return _row_of_bits(*primals), _row_of(tangents[0], primals[1])


@jax.tree_util.register_dataclass
@dataclass(frozen=True)
class Row:
    """A row of a stack that a layer reads itself, so that nothing copies the stack, or keeps the row for gradients."""

    stack: jax.Array
    number: jax.Array | int

    @staticmethod
    def read(node: Any) -> Any:
        """Return the row, or another leaf unchanged."""
        return row_of(node.stack, node.number) if isinstance(node, Row) else node


def soft_capped(scores: jax.Array, softcap: float | None) -> jax.Array:
    """Return ``softcap * tanh(scores / softcap)``, or the scores unchanged without a cap."""
    return scores if softcap is None else softcap * jnp.tanh(scores / softcap)


def with_sinks(out: jax.Array, log: jax.Array, sinks: jax.Array | None) -> jax.Array:
    """Add attention sinks: an additional logit per head in each softmax, without a value.

    Args:
        out: Attention without sinks [..., heads, H].
        log: Logarithms of the softmax denominators, float32 [..., heads].
        sinks: Logits [heads]; None for no sinks.
    """
    if sinks is None:
        return out
    # A logistic function would lose precision in its derivative, a difference from 1, because most sinks have little
    # weight. The exponent is bounded because padding has denominators of almost 0.
    kept = 1.0 / (1.0 + jnp.exp(jnp.minimum(sinks.astype(jnp.float32) - log, 80.0)))
    return (out.astype(jnp.float32) * kept[..., None]).astype(out.dtype)


def without_unit_axes(x: jax.Array) -> jax.Array:
    """Remove leading axes of size 1 from x [..., D], e.g. the axis of a batch of one stream.

    If another axis has size 1, XLA for CPUs computes sums of products over the last axis in plain loops: the gradient
    of a norm becomes six times slower, and the entropy of a distribution thirty times.
    """
    return x.reshape(*(size for size in x.shape[:-1] if size != 1), x.shape[-1])


def project(x: jax.Array, weight: jax.Array, bias: jax.Array | None = None) -> jax.Array:
    """Return x [..., I] times weight [I, O] plus bias [O], accumulated in float32, in x's dtype.

    The float32 accumulation is explicit: it is exact, and bfloat16 products need it to run at full speed on
    CPUs. The two products of the backward pass do the same, and the gradient of a float32 weight stays float32.
    """
    out = matmul(x, weight)
    if bias is not None:
        out = out + bias.astype(jnp.float32)
    return out.astype(x.dtype)


def sum_over_tokens(x: jax.Array, gradient: jax.Array) -> jax.Array:
    """Return the gradient of a matrix: x [..., I] times gradient [..., O], summed over all tokens, float32 [I, O]."""
    # Of tokens that are split over a mesh, parts would have to be gathered.
    if jax.device_count() > 1:
        return _sum_at_once(x, gradient)
    return lax.platform_dependent(x, gradient, cpu=_sum_of_turned, default=_sum_at_once)


def _sum_at_once(x: jax.Array, gradient: jax.Array) -> jax.Array:
    tokens = tuple(range(x.ndim - 1))
    return product(x, gradient, (tokens, tokens))


def _sum_of_turned(x: jax.Array, gradient: jax.Array) -> jax.Array:
    """Same as :func:`_sum_at_once`. XLA for CPUs transposes one factor of this product, and takes up to ten times as
    long for the whole at once as for the narrower one, part by part."""
    x, gradient = (each.reshape(-1, each.shape[-1]) for each in (x, gradient))
    if x.shape[1] > gradient.shape[1]:
        return lax.optimization_barrier(_sum_of_turned(gradient, x)).T
    rows, bits = math.gcd(len(x), 1 << max(_TURNED // x.shape[1], 16).bit_length() - 1), in_bits(x)

    def part(number: jax.Array, turned: jax.Array) -> jax.Array:
        some = lax.dynamic_slice_in_dim(bits, number * rows, rows)
        return lax.dynamic_update_slice_in_dim(turned, some.T, number * rows, 1)

    turned = lax.fori_loop(0, len(x) // rows, part, jnp.zeros((x.shape[1], len(x)), bits.dtype))
    # With one part XLA would transpose the product instead of its factor, and CPUs lack this product in bfloat16.
    return product(from_bits(lax.optimization_barrier(turned), x.dtype), gradient)


@jax.custom_vjp
def matmul(x: jax.Array, weight: jax.Array) -> jax.Array:
    """Multiply [..., I] by [I, O]: float32 [..., O], with both factors in x's dtype."""
    return product(x, weight.astype(x.dtype))


# Custom derivative: by default JAX multiplies the float32 cotangent of the float32 output by narrow
# factors, and products of mixed dtypes are slow on every machine. A factor is kept for the backward pass
# only if the other factor has a gradient: nothing for frozen weights.
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
        to_weight = sum_over_tokens(x, narrow).astype(like_weight.dtype)
    return to_x, to_weight


matmul.defvjp(_matmul_forward, _matmul_backward, symbolic_zeros=True)


def inverse_root_mean_square(wide: jax.Array, *, eps: float) -> jax.Array:
    """Return the factor [..., 1] by which a norm scales float32 values [..., D]; NaN if their squares overflow.

    The inverse of the root would be 0: every score would be the same plausible number, without an error.
    """
    mean_square = jnp.mean(jnp.square(wide), axis=-1, keepdims=True)
    return jnp.where(mean_square < jnp.inf, lax.rsqrt(mean_square + eps), jnp.nan)


def rms_norm(
    x: jax.Array, weight: jax.Array, *, eps: float, plus_one: bool, scale_after_cast: bool
) -> jax.Array:
    """Apply a root-mean-square norm over the last axis of x [..., D], with weight [D].

    Args:
        plus_one: If True, multiply by ``1 + weight`` (Gemma) instead of ``weight``.
        scale_after_cast: If True, cast the normalised value to x's dtype before multiplying (Llama); otherwise
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
    """Rotate x [B, T, N, H] by angles [B, T, R/2] and multiply by ``scale``; channels from R on are not rotated.

    Args:
        x: Queries or keys.
        cos, sin: Cosines and sines of the angles.
        scale: Factor of the result.
        interleaved: If True, pairs are (x[2i], x[2i + 1]) instead of (x[i], x[i + R/2]). In the result all first
          members precede all second members, because products of queries and keys do not depend on the order.
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
    """Return activation(gate) * up, computed in float32, in gate's dtype."""
    wide = gate.astype(jnp.float32)
    active = wide * lax.logistic(wide) if kind == "silu" else jax.nn.gelu(wide, approximate=True)
    return (active * up.astype(jnp.float32)).astype(gate.dtype)


def float32_einsum(form: str, *factors: jax.Array) -> jax.Array:
    """Evaluate :func:`jax.numpy.einsum` with accumulation and result in float32."""

    def multiply(*factors: jax.Array) -> jax.Array:
        precision = matmul_precision(factors[0].dtype)
        return jnp.einsum(form, *factors, precision=precision, preferred_element_type=jnp.float32)

    return _widened(multiply, *factors)
