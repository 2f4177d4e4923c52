"""Rotary position embedding: inverse frequencies and angles.

Sources: RoFormer (arXiv 2104.09864), linear scaling (arXiv 2306.15595), YaRN (arXiv 2309.00071) and
the frequency rule of Llama 3.1. Rounding follows transformers step by step in float32: at position
4,096 the last bit of a frequency is already 2e-4 of a radian, and published models were trained with
those bits.
"""

import math

import jax
import jax.numpy as jnp
import numpy as np

from prb_jax.models.config.rope import RopeConfig

__all__ = ["RopeConfig", "inverse_frequencies", "rotary_angles"]


def inverse_frequencies(rope: RopeConfig) -> np.ndarray:
    """Radians per token of each rotated pair, float32 ``[H/2]``."""
    powers = _powers_of_theta(rope)
    frequencies = np.float32(1.0) / powers
    if rope.rope_type == "default":
        return frequencies
    if rope.rope_type == "linear":
        return frequencies / np.float32(rope.factor)
    if rope.rope_type == "llama3":
        return _llama3(rope, frequencies)
    return _yarn(rope, frequencies, powers)


def rotary_angles(positions: jax.Array | np.ndarray, rope: RopeConfig) -> tuple[jax.Array, jax.Array]:
    """Cosine and sine for the given positions, scaled by the rope's attention factor.

    Args:
      positions: int32 ``[...]``.
      rope: the layer's rope.

    Returns:
      ``(cos, sin)``, float32 ``[..., H/2]``. Pair i of a head is (x[i], x[i + H/2]).
    """
    # float32 whatever the model's dtype: in bfloat16 position 257 would become 256.
    frequencies = jnp.asarray(inverse_frequencies(rope))
    angles = jnp.asarray(positions).astype(jnp.float32)[..., None] * frequencies
    scale = jnp.float32(rope.attention_factor)
    return jnp.cos(angles) * scale, jnp.sin(angles) * scale


def _powers_of_theta(rope: RopeConfig) -> np.ndarray:
    """theta ** (2i / H), float32 ``[H/2]``: the exponent is rounded to float32, then the power."""
    exponents = np.arange(0, rope.head_dim, 2, dtype=np.float32) / np.float32(rope.head_dim)
    return np.power(np.float64(np.float32(rope.theta)), exponents.astype(np.float64)).astype(np.float32)


def _llama3(rope: RopeConfig, frequencies: np.ndarray) -> np.ndarray:
    """Long wavelengths are slowed by ``factor``, short ones kept, those between blended."""
    factor, low, high = (np.float32(x) for x in (rope.factor, rope.low_freq_factor, rope.high_freq_factor))
    length = np.float32(rope.original_max_position_embeddings)
    wavelengths = np.float32(2 * math.pi) / frequencies
    keep = (length / wavelengths - low) / (high - low)
    blended = (1 - keep) * frequencies / factor + keep * frequencies
    is_long = wavelengths > np.float32(rope.original_max_position_embeddings / rope.low_freq_factor)
    is_short = wavelengths < np.float32(rope.original_max_position_embeddings / rope.high_freq_factor)
    return np.where(is_long, frequencies / factor, np.where(is_short, frequencies, blended))


def _yarn(rope: RopeConfig, frequencies: np.ndarray, powers: np.ndarray) -> np.ndarray:
    """Pairs that turn often are kept, pairs that turn rarely are slowed, with a linear ramp between."""

    def pair_of(rotations: float) -> float:
        """The (fractional) pair that makes this many turns over the original context."""
        turns = rope.original_max_position_embeddings / (rotations * 2 * math.pi)
        return rope.head_dim * math.log(turns) / (2 * math.log(rope.theta))

    first, last = pair_of(rope.beta_fast), pair_of(rope.beta_slow)
    if rope.truncate:
        first, last = math.floor(first), math.ceil(last)
    first, last = max(first, 0), min(last, rope.head_dim - 1)
    if first == last:
        last += 0.001  # a step instead of a ramp, without dividing by zero
    pairs = np.arange(rope.head_dim // 2, dtype=np.float32)
    ramp = np.clip((pairs - np.float32(first)) / np.float32(last - first), 0, 1)
    kept = 1 - ramp
    slowed = np.float32(1.0) / (np.float32(rope.factor) * powers)
    return slowed * (1 - kept) + frequencies * kept
