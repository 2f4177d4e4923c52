"""Who sees whom in a stream, as a table: which blocks of queries and keys meet, for the XLA program.

The tables of kernels are in :mod:`prb_jax.trees.kernel_tables`.
"""

from __future__ import annotations

from dataclasses import dataclass

import jax
import numpy as np

from prb_jax.errors import short_repr

BLOCK = 128
"""Tokens of a block of queries, and of a block of keys: what two such blocks need fits the caches of a core."""

CHUNK = 64
"""Most tokens of a chunk of a recurrent layer: longer ones have fewer steps, and more products within each."""


def round_up(size: int, multiple: int) -> int:
    """Return the least multiple that is not below the size."""
    return -(-size // multiple) * multiple


def query_order(blocks: int, parts: int) -> np.ndarray:
    """Return which blocks of queries each part of a mesh's axis ``sequence`` computes, int64 [parts, blocks / parts].

    Of twice as many runs of blocks as there are parts each part has one from the front and one from the back: where
    every token sees all before it, all parts have the same work. A run with an even number comes first: the two
    halves of a part's own tokens, one of which has an even number, go to different parts as a whole."""
    if parts == 1:
        return np.arange(blocks)[None]
    runs = np.arange(blocks).reshape(2 * parts, -1)
    return np.stack(
        [runs[sorted((part, 2 * parts - 1 - part), key=lambda run: run % 2)] for part in range(parts)]
    ).reshape(parts, -1)


@jax.tree_util.register_dataclass
@dataclass(frozen=True)
class BlockTable:
    """Which blocks of S streams of N tokens meet. int32 arrays."""

    keys: np.ndarray | jax.Array
    """[S, N / BLOCK, N / BLOCK], for each block of queries the numbers of the blocks of keys of which one of its
    queries sees something: first those of which all queries see all, so that nothing has to be masked."""
    # [S, N / BLOCK, 2], how many of them are seen wholly, and how many are not; a block of padding has none
    counts: np.ndarray | jax.Array

    __repr__ = short_repr


def block_table(
    until: np.ndarray, positions: np.ndarray, used: np.ndarray, *, window: int | None
) -> BlockTable:
    """Return which blocks of streams meet.

    Args:
      until, positions: int32 [S, N], N a multiple of :data:`BLOCK`.
      used: of each stream how many tokens it has.
      window: as of :func:`meeting_blocks`.
    """
    ranks = []
    for stream in zip(until, positions, used, strict=True):
        some, every = meeting_blocks(*stream, block=BLOCK, window=window)
        rank = np.where(every, 0, np.where(some, 1, 2))
        rank[-(-stream[2] // BLOCK) :] = 2
        ranks.append(rank)
    rank = np.stack(ranks)
    counts = np.stack([(rank == 0).sum(axis=2), (rank == 1).sum(axis=2)], axis=2).astype(np.int32)
    keys = np.argsort(rank, axis=2, kind="stable").astype(np.int32)
    return BlockTable(np.where(np.sort(rank, axis=2) < 2, keys, 0), counts)


def meeting_blocks(
    until: np.ndarray, positions: np.ndarray, used: int, *, block: int, window: int | None
) -> tuple[np.ndarray, np.ndarray]:
    """Return which blocks of queries and keys of one stream meet.

    Token i sees token j if ``j <= i < until[j]`` and ``positions[i] - positions[j] < window``.

    Args:
      until: int32 [N], N a multiple of the block.
      positions: int32 [N].
      used: tokens of the stream; what follows is padding.
      block: tokens of a block of queries, and of one of keys.
      window: None for no window.

    Returns:
      bool [N / block, N / block] of queries and keys, twice: some query sees some key, and all queries see all keys.
      Blocks of padding meet themselves, or none.
    """
    starts = np.arange(len(until) // block) * block
    last, first = until.reshape(-1, block).max(axis=1), until.reshape(-1, block).min(axis=1)
    some = (starts[None] <= starts[:, None]) & (last[None] > starts[:, None])
    every = (starts[None] < starts[:, None]) & (first[None] >= starts[:, None] + block)
    if window is not None:
        near, whole = _within_window(until, positions, -(-used // block), block, window)
        some, every = some & near, every & whole
    return some, every


def _within_window(
    until: np.ndarray, positions: np.ndarray, real: int, block: int, window: int
) -> tuple[np.ndarray, np.ndarray]:
    """bool [queries, keys] twice: some pair of tokens that see each other is within the window; all pairs are."""
    count = len(until) // block
    places = np.arange(len(until))
    near, whole = np.zeros((count, count), bool), np.zeros((count, count), bool)
    for query in range(real):
        low, high = query * block, (query + 1) * block
        # Keys before the block: queries of the trees that begin within it see none of them. The nearest of the
        # others bounds the distance from below.
        of_queries = positions[low:high]
        begins = np.flatnonzero(of_queries == 0)
        before = of_queries[: begins[0]] if len(begins) else of_queries
        nearest = positions.copy()
        nearest[:low] = before.min(initial=np.iinfo(np.int32).max)
        seen = (until > low) & (places < high)
        near[query] = (seen & (nearest - positions < window)).reshape(count, block).any(axis=1)
        whole[query] = (of_queries.max() - positions < window).reshape(count, block).all(axis=1)
    return near, whole
