"""Visibility tables of streams for the XLA program: which blocks of queries see which blocks of keys.

Tables for kernels are in :mod:`prb_jax.trees.kernel_tables`.
"""

from __future__ import annotations

from dataclasses import dataclass

import jax
import numpy as np

from prb_jax.errors import short_repr

BLOCK = 128
"""Tokens of a block of queries, and of a block of keys: the work on two such blocks fits the caches of a core."""

CHUNK = 64
"""Maximum tokens of a chunk of a recurrent layer: longer chunks need fewer steps but more products per step."""


def round_up(size: int, multiple: int) -> int:
    """Round a size up to a multiple."""
    return -(-size // multiple) * multiple


def query_order(blocks: int, parts: int) -> np.ndarray:
    """Return the blocks of queries for each part of the mesh axis ``sequence``, int64 [parts, blocks / parts].

    The blocks form 2 * parts runs. Each part computes one run from the front and one from the back, so all parts have
    equal work in a causal stream. The run with the even number comes first: of the two halves of a part's own tokens
    one has an even number, so each half moves as a whole to one part."""
    if parts == 1:
        return np.arange(blocks)[None]
    runs = np.arange(blocks).reshape(2 * parts, -1)
    return np.stack(
        [runs[sorted((part, 2 * parts - 1 - part), key=lambda run: run % 2)] for part in range(parts)]
    ).reshape(parts, -1)


@jax.tree_util.register_dataclass
@dataclass(frozen=True)
class BlockTable:
    """Visible pairs of blocks of S streams of N tokens. int32 arrays."""

    keys: np.ndarray | jax.Array
    """[S, N / BLOCK, N / BLOCK], for each block of queries the indices of the blocks of keys that it sees at least
    partly; first the blocks that all its queries see completely, which need no mask."""
    # [S, N / BLOCK, 2], numbers of completely and of partly visible blocks of keys; 0 for a block of padding
    counts: np.ndarray | jax.Array

    __repr__ = short_repr


def block_table(
    until: np.ndarray, positions: np.ndarray, used: np.ndarray, *, window: int | None
) -> BlockTable:
    """Return the visible pairs of blocks of streams.

    Args:
      until, positions: Arrays of a stream batch, int32 [S, N]; N is a multiple of :data:`BLOCK`.
      used: Number of tokens of each stream.
      window: Window, as in :func:`meeting_blocks`.
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
    """Return the visible pairs of blocks of queries and keys of one stream.

    Token i sees token j if ``j <= i < until[j]`` and ``positions[i] - positions[j] < window``.

    Args:
      until: Array of a stream, int32 [N]; N is a multiple of the block.
      positions: Positions in conversations, int32 [N].
      used: Number of tokens of the stream, without padding.
      block: Tokens of a block of queries, and of a block of keys.
      window: Window of sliding layers; None for no window.

    Returns:
      Two arrays bool [N / block, N / block] over queries and keys: some query sees some key; all queries see all keys.
      A block of padding sees itself or nothing.
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
    """Return two arrays bool [queries, keys]: some visible pair of tokens is within the window; all pairs are."""
    count = len(until) // block
    near, whole = np.zeros((count, count), bool), np.zeros((count, count), bool)
    for query in range(real):
        low, high = query * block, (query + 1) * block
        of_queries, keys = positions[low:high], np.flatnonzero(until[:low] > low)
        # Queries see a key up to its end; the nearest one has the smallest position.
        nearest = np.minimum.accumulate(of_queries)[np.minimum(until[keys] - low, block) - 1]
        near[query, keys[nearest - positions[keys] < window] // block] = True
        near[query, query] = True
        whole[query, : query + 1] = (
            (of_queries.max() - positions[:high] < window).reshape(-1, block).all(axis=1)
        )
    return near, whole
