"""Which blocks of a stream's tokens meet in attention: the tables of a program that walks through blocks."""

from __future__ import annotations

from dataclasses import dataclass

import jax
import numpy as np

from prb_jax.errors import short_repr

BLOCK = 128
"""Tokens of a block of queries, and of a block of keys: what two such blocks need fits the caches of a core."""


@jax.tree_util.register_dataclass
@dataclass(frozen=True)
class BlockTable:
    """Which blocks of S streams of N tokens meet, see :func:`block_table`. int32 arrays.

    Attributes:
      keys: [S, N / BLOCK, N / BLOCK], for each block of queries numbers of blocks of keys.
      counts: [S, N / BLOCK, 2], how many of them are seen wholly, and how many are not.
    """

    keys: np.ndarray | jax.Array
    counts: np.ndarray | jax.Array

    __repr__ = short_repr


def block_table(
    until: np.ndarray, positions: np.ndarray, used: int, *, window: int | None
) -> tuple[np.ndarray, np.ndarray]:
    """Return, for every block of queries of one stream, the blocks of keys of which one of its queries sees something.

    Token i sees token j if ``j <= i < until[j]`` and ``positions[i] - positions[j] < window``.

    Args:
      until: int32 [N], N a multiple of :data:`BLOCK`.
      positions: int32 [N].
      used: tokens of the stream; what follows is padding.
      window: None for no window.

    Returns:
      int32 [N / BLOCK, N / BLOCK], the numbers of blocks of keys: first those of which all queries see all, so that
      nothing has to be masked, then the others; and int32 [N / BLOCK, 2], how many there are of both kinds. A block of
      padding has none.
    """
    count = len(until) // BLOCK
    numbers = np.arange(count)
    starts = numbers * BLOCK
    last = until.reshape(count, BLOCK).max(axis=1)
    first = until.reshape(count, BLOCK).min(axis=1)
    real = (used + BLOCK - 1) // BLOCK
    # [queries, keys]: something is seen; everything is seen by everyone.
    some = (starts[None] <= starts[:, None]) & (last[None] > starts[:, None])
    every = (starts[None] < starts[:, None]) & (first[None] >= starts[:, None] + BLOCK)
    if window is not None:
        near, whole = _within_window(until, positions, real, window)
        some, every = some & near, every & whole
    table = np.zeros((count, count), np.int32)
    counts = np.zeros((count, 2), np.int32)
    for query in range(real):
        whole, partly = np.flatnonzero(every[query]), np.flatnonzero(some[query] & ~every[query])
        table[query, : len(whole)] = whole
        table[query, len(whole) : len(whole) + len(partly)] = partly
        counts[query] = len(whole), len(partly)
    return table, counts


def _within_window(
    until: np.ndarray, positions: np.ndarray, real: int, window: int
) -> tuple[np.ndarray, np.ndarray]:
    """bool [queries, keys] twice: some pair of tokens that see each other is within the window; all pairs are."""
    count = len(until) // BLOCK
    places = np.arange(len(until))
    near, whole = np.zeros((count, count), bool), np.zeros((count, count), bool)
    for query in range(real):
        low, high = query * BLOCK, (query + 1) * BLOCK
        # Keys before the block: queries of the trees that begin within it see none of them. The nearest of the
        # others bounds the distance from below.
        of_queries = positions[low:high]
        begins = np.flatnonzero(of_queries == 0)
        before = of_queries[: begins[0]] if len(begins) else of_queries
        nearest = positions.copy()
        nearest[:low] = before.min(initial=np.iinfo(np.int32).max)
        seen = (until > low) & (places < high)
        near[query] = (seen & (nearest - positions < window)).reshape(count, BLOCK).any(axis=1)
        whole[query] = (of_queries.max() - positions < window).reshape(count, BLOCK).all(axis=1)
    return near, whole
