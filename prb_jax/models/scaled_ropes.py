"""Rotary frequencies of models with extended context: YaRN (arXiv 2309.00071), LongRoPE, the rule of Llama 3.1.

Arguments of each rule are the rope, its plain inverse frequencies, and their reciprocals, float32 ``[R/2]``.
"""

from __future__ import annotations

import math

import numpy as np

from prb_jax.models.config.fields import FieldReader
from prb_jax.models.layers import RopeConfig


def yarn_attention_factor(rope: FieldReader, factor: float) -> float:
    """Return 0.1 ln(factor) + 1 (YaRN, arXiv 2309.00071, eq. 22), unless the file contains another value."""

    def magnitude(weight: float) -> float:
        return 1.0 if factor <= 1 else 0.1 * weight * math.log(factor) + 1.0

    mscale = rope.number("mscale", default=0.0, positive=False)
    mscale_all_dim = rope.number("mscale_all_dim", default=0.0, positive=False)
    if rope.has("attention_factor"):
        return rope.number("attention_factor")
    if mscale and mscale_all_dim:
        return magnitude(mscale) / magnitude(mscale_all_dim)
    return magnitude(1.0)


def llama3(rope: RopeConfig, frequencies: np.ndarray, powers: np.ndarray) -> np.ndarray:
    """Slow long wavelengths by ``factor``, keep short wavelengths, and blend between them."""
    factor, low, high = (np.float32(x) for x in (rope.factor, rope.low_freq_factor, rope.high_freq_factor))
    length = np.float32(rope.original_max_position_embeddings)
    wavelengths = np.float32(2 * math.pi) / frequencies
    keep = (length / wavelengths - low) / (high - low)
    blended = (1 - keep) * frequencies / factor + keep * frequencies
    is_long = wavelengths > np.float32(rope.original_max_position_embeddings / rope.low_freq_factor)
    is_short = wavelengths < np.float32(rope.original_max_position_embeddings / rope.high_freq_factor)
    return np.where(is_long, frequencies / factor, np.where(is_short, frequencies, blended))


def yarn(rope: RopeConfig, frequencies: np.ndarray, powers: np.ndarray) -> np.ndarray:
    """Keep pairs that rotate often, slow pairs that rotate rarely, with a linear ramp between them."""

    def pair_of(rotations: float) -> float:
        """Return the (fractional) pair index with this many rotations over the original context."""
        turns = rope.original_max_position_embeddings / (rotations * 2 * math.pi)
        return rope.rotary_dim * math.log(turns) / (2 * math.log(rope.theta))

    first, last = pair_of(rope.beta_fast), pair_of(rope.beta_slow)
    if rope.truncate:
        first, last = math.floor(first), math.ceil(last)
    first, last = max(first, 0), min(last, rope.rotary_dim - 1)
    if first == last:
        last += 0.001  # a step instead of a ramp, without dividing by zero
    pairs = np.arange(rope.rotary_dim // 2, dtype=np.float32)
    ramp = np.clip((pairs - np.float32(first)) / np.float32(last - first), 0, 1)
    kept = 1 - ramp
    slowed = np.float32(1.0) / (np.float32(rope.factor) * powers)
    return slowed * (1 - kept) + frequencies * kept


def longrope(rope: RopeConfig, frequencies: np.ndarray, powers: np.ndarray) -> np.ndarray:
    """Slow every pair by a separate factor from the config, found by a search (arXiv 2402.13753)."""
    return np.float32(1.0) / (np.asarray(rope.short_factor, np.float32) * powers)
