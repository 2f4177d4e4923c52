"""The arrays of a batch of trees in a fixed shape.

Layout of a batch: the prefix right-aligned in P columns (its padding on the left), each response
left-aligned in its R columns. The distance between any two tokens that see each other is then the
same in every row, so the attention mask of a bucket is static but for padding.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

import jax
import numpy as np
from jax.sharding import Mesh

from prb_jax.errors import short_repr
from prb_jax.sharding import batch_sharding
from prb_jax.trees.shapes import Bucket
from prb_jax.trees.tree import Tree


@jax.tree_util.register_dataclass
@dataclass(frozen=True)
class TreeBatch:
    """B trees padded to one bucket (P, K, R). A JAX pytree of int32 arrays.

    Attributes:
      prefix: [B, P] token ids, right-aligned (padding on the left); padding holds id 0.
      prefix_lengths: [B] real prefix tokens; 0 in rows that only fill up the batch.
      responses: [B, K, R] token ids, left-aligned; padding holds id 0.
      response_lengths: [B, K] real response tokens; 0 where a response is absent.
      read: [B, K] index within the response of the token whose state gives the score.
    """

    prefix: np.ndarray | jax.Array
    prefix_lengths: np.ndarray | jax.Array
    responses: np.ndarray | jax.Array
    response_lengths: np.ndarray | jax.Array
    read: np.ndarray | jax.Array

    __repr__ = short_repr


def tree_batch_shardings(mesh: Mesh) -> TreeBatch:
    """The sharding of each array of a batch whose rows are dealt over the mesh, as :func:`jax.jit` takes them."""
    return TreeBatch(*(batch_sharding(mesh, rank) for rank in (2, 1, 3, 2, 2)))  # pyright: ignore[reportArgumentType]


def make_batch(trees: Sequence[Tree], bucket: Bucket, *, batch: int) -> TreeBatch:
    """Pads `trees` to `bucket` and to `batch` rows (missing rows have length 0 throughout).

    Raises:
      ValueError: more trees than rows, or a tree larger than the bucket.
    """
    if len(trees) > batch:
        raise ValueError(f"{len(trees)} trees do not fit a batch of {batch} rows")
    prefix = np.zeros((batch, bucket.prefix), np.int32)
    prefix_lengths = np.zeros((batch,), np.int32)
    responses = np.zeros((batch, bucket.responses, bucket.response_length), np.int32)
    response_lengths = np.zeros((batch, bucket.responses), np.int32)
    read = np.zeros((batch, bucket.responses), np.int32)
    for row, tree in enumerate(trees):
        if not bucket.fits(tree.shape):
            raise ValueError(f"row {row}: a tree of shape (p, K, r) = {tree.shape} does not fit {bucket}")
        length = len(tree.prefix)
        prefix[row, bucket.prefix - length :] = tree.prefix
        prefix_lengths[row] = length
        read[row, : len(tree.read)] = tree.read
        for k, response in enumerate(tree.responses):
            responses[row, k, : len(response)] = response
            response_lengths[row, k] = len(response)
    return TreeBatch(prefix, prefix_lengths, responses, response_lengths, read)
