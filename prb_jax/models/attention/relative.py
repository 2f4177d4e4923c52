"""Scores from distances: the two extra terms of DeBERTa's attention (arXiv 2006.03654, section 3.1)."""

from __future__ import annotations

import jax
import jax.numpy as jnp
import numpy as np
from jax import lax

from prb_jax.models.config.encoder import RelativePositions
from prb_jax.models.layers import matmul_precision


def distance_rows(length: int, relative: RelativePositions) -> np.ndarray:
    """Rows of the table of distances for d = L - 1, L - 2, ..., -(L - 1): int32 [2L - 1].

    A distance d = query - key has row span + d; where there are buckets, one beyond half of them stands
    for itself no more but shares a row with others of about the same logarithm.

    Args:
      length: L, of the text.
      relative: the model's.
    """
    distance = np.arange(length - 1, -length, -1)
    if relative.buckets > 0:
        # In float32 as transformers does: a bucket's border can hang on the last bit.
        half = relative.buckets // 2
        size = np.where(np.abs(distance) < half, half - 1, np.abs(distance)).astype(np.float32)
        with np.errstate(divide="ignore", invalid="ignore"):
            steps = np.log(size / np.float32(half)) / np.log(np.float32((relative.max_distance - 1) / half))
            far = np.ceil(steps * np.float32(half - 1)) + half
        distance = np.where(size <= half, distance, (far * np.sign(distance))).astype(np.int64)
    return np.clip(distance + relative.span, 0, 2 * relative.span - 1).astype(np.int32)


def distance_scores(vectors: jax.Array, table: jax.Array) -> jax.Array:
    """Products of each token's vector with the one of its distance to every other token.

    No gather over L x L entries: products with the vectors of all 2L - 1 distances, then each row moved
    by one more than the row before it, which is a reshape.

    Args:
      vectors: [B, L, N, H], of the tokens.
      table: [2L - 1, N, H], vectors of the distances L - 1, ..., -(L - 1).

    Returns:
      float32 [B, N, L, L]: entry (i, j) is the product of token i's vector with that of distance i - j.
    """
    batch, length, heads, _ = vectors.shape
    products = jnp.einsum(
        "blnh,tnh->bnlt",
        vectors,
        table,
        precision=matmul_precision(vectors.dtype),
        preferred_element_type=jnp.float32,
    )
    # Entry (i, j) stands in column j + L - 1 - i; with rows of 2L that is place i (2L - 1) + j + L - 1.
    flat = jnp.pad(products, ((0, 0), (0, 0), (0, 0), (0, 1))).reshape(batch, heads, -1)
    moved = lax.slice_in_dim(flat, length - 1, length - 1 + length * (2 * length - 1), axis=2)
    return moved.reshape(batch, heads, length, 2 * length - 1)[..., :length]
