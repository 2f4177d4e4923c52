"""Batches of trees that are padded to a fixed shape, and the one statement of who sees whom in them.

The tokens of a tree lie as ``[prefix | response 1 | ... | response K]`` in ``T = P + K * R`` columns: the prefix
right-aligned in P, every response left-aligned in its R. A token sees itself and what comes before it in the prefix and
in its own response, never a sibling. Because prefix and responses meet at a fixed column, the distance between two
tokens that see each other is static, and so are causality and sliding windows. Only the padding on the left of the
prefix is dynamic; padding on the right of a response is hidden from real tokens by causality.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
from jax.sharding import Mesh

from prb_jax.errors import short_repr
from prb_jax.sharding import batch_sharding
from prb_jax.trees.tree import Tree

Sides = tuple[int, int, int]  # (P, K, R) of a bucket, or (p, K, r) of a tree


@dataclass(frozen=True, order=True)
class Bucket:
    """A fixed shape that trees are padded to: P prefix tokens, K responses, R tokens each."""

    prefix: int
    responses: int
    response_length: int

    @property
    def sides(self) -> Sides:
        """(P, K, R)."""
        return self.prefix, self.responses, self.response_length

    @property
    def tokens(self) -> int:
        """T = P + K * R."""
        return self.prefix + self.responses * self.response_length

    def fits(self, shape: Sides) -> bool:
        """Whether a tree of this shape (p, K, r) can be padded to the bucket."""
        return all(size <= side for size, side in zip(shape, self.sides, strict=True))

    def inside(self, column: Any) -> Any:
        """How many tokens of its own response come before the token in ``column``; 0 in the prefix.

        Args:
          column: integers, of NumPy or JAX.
        """
        return (column >= self.prefix) * ((column - self.prefix) % self.response_length)


@dataclass(frozen=True)
class TreeMask:
    """Which keys a query sees, padding apart."""

    bucket: Bucket
    window: int | None = None
    """A token sees only this many last tokens of its conversation, itself included; None for all."""

    def sees(self, query: Any, key: Any, inside: Any = None) -> Any:
        """Whether the token in column ``query`` sees the one in ``key``: bool, of the broadcast shape.

        Args:
          query, key: integers, of NumPy, JAX, or inside a kernel.
          inside: ``bucket.inside(query)`` where that is at hand: kernels have no cheap remainder.
        """
        prefix = self.bucket.prefix
        inside = self.bucket.inside(query) if inside is None else inside
        in_prefix = key < prefix
        visible = (key <= query) & (in_prefix | (key >= query - inside))
        if self.window is None:
            return visible
        # From a response, the prefix ends where the response begins.
        back = query - key
        skipped = (query >= prefix) & in_prefix
        return visible & (back - skipped * (query - prefix - inside) < self.window)


@jax.tree_util.register_dataclass
@dataclass(frozen=True)
class TreeBatch:
    """B trees padded to one bucket (P, K, R). A JAX pytree of int32 arrays."""

    prefix: np.ndarray | jax.Array  # [B, P] token ids, right-aligned; padding holds id 0
    prefix_lengths: np.ndarray | jax.Array  # [B] real prefix tokens; 0 in rows that only fill up the batch
    responses: np.ndarray | jax.Array  # [B, K, R] token ids, left-aligned; padding holds id 0
    response_lengths: np.ndarray | jax.Array  # [B, K] real response tokens; 0 where a response is absent
    read: np.ndarray | jax.Array  # [B, K] index within the response of the token whose state gives the score

    __repr__ = short_repr

    @property
    def bucket(self) -> Bucket:
        """Its static shape."""
        return Bucket(self.prefix.shape[1], *self.responses.shape[1:])

    @property
    def tokens(self) -> jax.Array:
        """int32 [B, T]: the ids in all columns."""
        responses = jnp.asarray(self.responses).reshape(self.responses.shape[0], -1)
        return jnp.concatenate([jnp.asarray(self.prefix), responses], axis=1)

    @property
    def positions(self) -> jax.Array:
        """int32 [B, T]: each response continues from its prefix; padding left of the prefix is 0."""
        bucket, lengths = self.bucket, jnp.asarray(self.prefix_lengths)[:, None]
        prefix = jnp.maximum(jnp.arange(bucket.prefix)[None] - (bucket.prefix - lengths), 0)
        response = jnp.tile(jnp.arange(bucket.response_length), bucket.responses)[None] + lengths
        return jnp.concatenate([prefix, response], axis=1).astype(jnp.int32)


def tree_batch_shardings(mesh: Mesh) -> TreeBatch:
    """The sharding of each array of a batch whose rows are dealt over the mesh, as :func:`jax.jit` takes them."""
    return TreeBatch(*(batch_sharding(mesh, rank) for rank in (2, 1, 3, 2, 2)))  # pyright: ignore[reportArgumentType]


def make_batch(trees: Sequence[Tree], bucket: Bucket, *, batch: int) -> TreeBatch:
    """Pad trees to `bucket` and to `batch` rows (missing rows have length 0 throughout).

    Raises:
      ValueError: more trees than rows, or a tree larger than the bucket.
    """
    if len(trees) > batch:
        raise ValueError(f"{len(trees)} trees do not fit a batch of {batch} rows")
    prefix = np.zeros((batch, bucket.prefix), np.int32)
    prefix_lengths = np.zeros((batch,), np.int32)
    responses = np.zeros((batch, bucket.responses, bucket.response_length), np.int32)
    response_lengths, read = np.zeros((2, batch, bucket.responses), np.int32)
    for row, tree in enumerate(trees):
        if not bucket.fits(tree.shape):
            raise ValueError(f"row {row}: a tree of shape (p, K, r) = {tree.shape} does not fit {bucket}")
        prefix_lengths[row] = length = len(tree.prefix)
        prefix[row, bucket.prefix - length :] = tree.prefix
        read[row, : len(tree.read)] = tree.read
        for k, response in enumerate(tree.responses):
            responses[row, k, : len(response)] = response
            response_lengths[row, k] = len(response)
    return TreeBatch(prefix, prefix_lengths, responses, response_lengths, read)
