"""Batches of trees in fixed shapes, and the deterministic plan that fills them.

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

from prb_jax.errors import MeshError, short_repr
from prb_jax.sharding import batch_sharding
from prb_jax.trees.buckets import Bucket, Buckets, balanced_batch, choose_buckets
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


@dataclass(frozen=True)
class PlannedBatch:
    """Which trees make up one batch: `indices` into the full list, padded to `batch` rows."""

    bucket: Bucket
    batch: int
    indices: tuple[int, ...]

    __repr__ = short_repr


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


def plan_batches(
    shapes: Sequence[tuple[int, int, int]],
    *,
    tokens_per_batch: int = 16_384,
    divisor: int = 1,
    buckets: Buckets | None = None,
) -> list[PlannedBatch]:
    """Deals the trees of these shapes (p, K, r) into batches of fixed shapes.

    The plan is a pure function of the full list and of the options: it does not depend on how many
    processes run it, nor on which rows are already scored. Larger buckets come first, so that a
    batch that does not fit in memory shows at once; within a bucket rows keep their input order.

    Args:
      shapes: `tree.shape` of every tree.
      tokens_per_batch: padded tokens of a batch, B * (P + K * R), stay at or below this where one
        row (or `divisor` rows) allows it.
      divisor: every batch size is a multiple of it: the number of data shards of the mesh.
      buckets: result of `choose_buckets` on the same shapes; chosen here, with its defaults, when
        not given.

    Raises:
      ValueError: the buckets were chosen for another number of trees.
    """
    if not shapes:
        return []
    if buckets is None:
        buckets = choose_buckets(shapes, tokens_per_batch=tokens_per_batch, divisor=divisor)
    if len(buckets.assignment) != len(shapes):
        raise ValueError(f"buckets were chosen for {len(buckets.assignment)} trees, found {len(shapes)}")
    plan: list[PlannedBatch] = []
    order = sorted(
        range(len(buckets.buckets)), key=lambda b: (-buckets.buckets[b].tokens, buckets.buckets[b])
    )
    for b in order:
        bucket = buckets.buckets[b]
        rows = np.flatnonzero(buckets.assignment == b)
        if len(rows) == 0:
            continue
        batch = balanced_batch(len(rows), bucket, tokens_per_batch=tokens_per_batch, divisor=divisor)
        for start in range(0, len(rows), batch):
            indices = tuple(int(row) for row in rows[start : start + batch])
            plan.append(PlannedBatch(bucket, batch, indices))
    return plan


def process_slice(planned: PlannedBatch, process_index: int, process_count: int) -> slice:
    """The contiguous rows of a batch that one process feeds.

    Raises:
      MeshError: the batch does not divide by the number of processes.
    """
    if planned.batch % process_count:
        raise MeshError(f"a batch of {planned.batch} rows does not divide by {process_count} processes")
    if not 0 <= process_index < process_count:
        raise ValueError(f"process index {process_index} is outside 0..{process_count - 1}")
    rows = planned.batch // process_count
    return slice(process_index * rows, (process_index + 1) * rows)


def padding_waste(tokens: Sequence[int], plan: Sequence[PlannedBatch]) -> float:
    """Share of the computed tokens that are padding, in [0, 1].

    Args:
      tokens: `tree.tokens` of every tree of the plan, by index.
      plan: the batches, whose every row costs P + K * R tokens.
    """
    computed = sum(planned.batch * planned.bucket.tokens for planned in plan)
    real = sum(tokens[index] for planned in plan for index in planned.indices)
    return 1.0 - real / computed if computed else 0.0
