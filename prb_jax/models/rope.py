"""Rotary position embedding: parameters and angles.

Sources: RoFormer (arXiv 2104.09864) and linear scaling (arXiv 2306.15595); YaRN and the rule of Llama 3.1 are in
:mod:`prb_jax.models.scaled_ropes`. Rounding follows transformers step by step in float32: at position
4,096 the last bit of a frequency amounts to 2e-4 radians, and published models were trained with this
rounding.
"""

from __future__ import annotations

from dataclasses import dataclass, replace
from typing import Literal

import jax
import jax.numpy as jnp
import numpy as np

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
