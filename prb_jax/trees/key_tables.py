"""The tables of keys with which a kernel that knows no trees attends over packed streams.

A block is some hundred tokens of a stream, side by side. What they see before the block is what its first token sees:
tokens lie in the order in which one walks through the forest, so that whatever ends before the block ends for all of
it. So the keys of a block are that path, which the table lists, and the block itself; of these a query sees only some,
which ``until`` tells (:class:`prb_jax.trees.streams.StreamBatch`). A kernel with a mask for each block needs no more:
streams of any forest have one shape, and queries stay where they lie.
"""

from __future__ import annotations

from dataclasses import dataclass

import jax
import numpy as np

from prb_jax.errors import short_repr
from prb_jax.trees.shapes import round_up

COLUMNS = 64  # keys come in multiples of it: a mask whose rows are not aligned is slow, or refused

QUERIES = (128, 1024)  # of a block, at least and at most

_BALANCE = 64
"""A block of Q queries has L columns for keys before it, and computes about Q / 2 pairs a query in vain. On an H100 a
column of 4 KiB, half of them padding, which is written and not read, takes as long as some 32 pairs of 32 heads: Q is
best about the root of 64 L."""


@dataclass(frozen=True)
class KeyLayout:
    """The static facts of tables of keys."""

    longest: int  # tokens of conversations; for longer ones tables are widened
    response: int  # tokens of the longest response, of which the tables of windows have to know
    queries: int  # of a block: a power of two

    @staticmethod
    def of(longest: int, response: int) -> KeyLayout:
        """Return the layout for conversations of so many tokens with responses of so many."""
        best = 1 << round(np.log2(max(_BALANCE * longest, 1)) / 2)
        return KeyLayout(longest, response, int(np.clip(best, *QUERIES)))

    def width(self, tokens: int, window: int | None) -> int:
        """Return for how many keys before a block there is room, in a stream of so many tokens."""
        most = self.longest - 1
        if window is not None:
            # Besides the window of the first query, what it has moved on since the earliest one of a sibling.
            most = min(most, window - 1 + self.response)
        return self._rounded(min(most, tokens - self.queries))

    def wider(self, tokens: int, window: int | None, needed: int) -> int:
        """Return :meth:`width`, doubled until it holds what is needed: few distinct ones arise."""
        width = self.width(tokens, window)
        while width < needed:
            width = min(max(2 * width, COLUMNS), self._rounded(tokens - self.queries))
        return width

    def _rounded(self, keys: int) -> int:
        return round_up(max(keys, 0), COLUMNS)


@jax.tree_util.register_dataclass
@dataclass(frozen=True)
class KeyTable:
    """The keys before each of the C blocks of Q queries of S streams: N = C * Q tokens. int32 arrays."""

    # [S, C, L], the places of the keys that some query of the block sees, the first of the conversation first; behind
    # them any places
    keys: np.ndarray | jax.Array
    counts: np.ndarray | jax.Array  # [S, C], how many they are

    __repr__ = short_repr


def key_table(until: np.ndarray, positions: np.ndarray, *, layout: KeyLayout, window: int | None) -> KeyTable:
    """Return the keys before each block of queries.

    Token i sees token j if ``j <= i < until[j]`` and ``positions[i] - positions[j] < window``.

    Args:
      until, positions: int32 [S, N], N a multiple of the layout's queries.
      layout: static facts; where a conversation is longer than its tables have room for, they are widened.
      window: None for no window.
    """
    streams, tokens = until.shape
    blocks = [
        [_before(*facts, start, layout.queries, window) for start in range(0, tokens, layout.queries)]
        for facts in zip(until, positions, strict=True)
    ]
    needed = max(len(keys) for of_stream in blocks for keys in of_stream)
    table = np.zeros((streams, len(blocks[0]), layout.wider(tokens, window, needed)), np.int32)
    counts = np.asarray([[len(keys) for keys in of_stream] for of_stream in blocks], np.int32)
    for rows, of_stream in zip(table, blocks, strict=True):
        for row, keys in zip(rows, of_stream, strict=True):
            row[: len(keys)] = keys
    return KeyTable(table, counts)


def _before(
    until: np.ndarray, positions: np.ndarray, start: int, queries: int, window: int | None
) -> np.ndarray:
    """Places before ``start`` that some query of the block there sees, in ascending order."""
    path = np.flatnonzero(until[:start] > start)
    if window is None or not len(path):
        return path
    # Of the queries that see a key, which stand from the start on, the one that is nearest to it.
    nearest = np.minimum.accumulate(positions[start : start + queries])
    last = np.minimum(until[path] - start, queries) - 1
    return path[nearest[last] - positions[path] < window]
