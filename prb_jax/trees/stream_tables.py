"""What each kind of attention over packed streams is told of who sees whom: a table for each stream.

- :class:`BlockTable`: which blocks meet, for a program that walks through them (CPUs).
- :class:`StepTable`: the steps of the kernel for TPUs (:mod:`prb_jax.models.attention.stream_kernel`). A step takes a
  block of queries and a block of keys of which one query sees something. Those of one block of queries follow each
  other, and in the other order, for derivatives by keys, those of one block of keys. There are as many steps as pairs
  of such blocks, whatever room the table has.
- :class:`KeyTable`: the keys of each block, for a kernel that knows no trees (cuDNN). A block is some hundred tokens
  of a stream, side by side. What they see before the block is what its first token sees: tokens lie in the order in
  which one walks through the forest, so that whatever ends before the block ends for all of it. So the keys of a
  block are that path, which the table lists, and the block itself; of these a query sees only some, which ``until``
  tells (:class:`prb_jax.trees.streams.StreamBatch`). A kernel with a mask for each block needs no more: streams of
  any forest have one shape, and queries stay where they lie.
"""

from __future__ import annotations

from dataclasses import dataclass, field

import jax
import numpy as np

from prb_jax.errors import short_repr

BLOCK = 128
"""Tokens of a block of queries, and of a block of keys: what two such blocks need fits the caches of a core."""

STEP_BLOCK = 512
"""Queries, and keys, of one step of the kernel, at most. One block of scores and what is made of it takes four times
512 x 512 float32 numbers, a quarter of the smallest chip's fast memory."""

LANES = 128  # the least of them: the width of a TPU's vector registers

FIRST, LAST, PARTLY = 1, 2, 4
"""Flags of a step: the first, or last, of its block; some query does not see all keys, so that they are masked."""

KEY_COLUMNS = 64  # keys come in multiples of it: a mask whose rows are not aligned is slow, or refused

QUERIES = (128, 1024)  # of a block, at least and at most


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


_BALANCE = 64
"""A block of Q queries has L columns for keys before it, and computes about Q / 2 pairs a query in vain. On an H100 a
column of 4 KiB, half of them padding, which is written and not read, takes as long as some 32 pairs of 32 heads: Q is
best about the root of 64 L."""


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


@jax.tree_util.register_dataclass
@dataclass(frozen=True)
class StepTable:
    """The steps of S streams of N tokens, in blocks of Q queries or keys, for each of P parts of the queries, with room
    for C of them: as many as there are where every token sees all before it. int32 arrays."""

    by_query: np.ndarray | jax.Array
    """[S, P, 4, C], of each step the number of its block of queries among those of its part (:func:`query_order`),
    that of its block of keys, its flags, and the number of its block of queries among all; 0 behind the last."""
    by_key: np.ndarray | jax.Array
    """The same steps, those of one block of keys together; and a step for each block of keys of which no query of the
    part sees anything, so that its derivatives are written down."""
    counts: np.ndarray | jax.Array  # [S, P, 2], how many there are by query, and by key
    block: int = field(metadata={"static": True})  # Q

    __repr__ = short_repr


def step_table(
    until: np.ndarray,
    positions: np.ndarray,
    used: np.ndarray,
    *,
    block: int,
    window: int | None,
    parts: int = 1,
) -> StepTable:
    """Return the steps of streams.

    Args:
      until, positions: int32 [S, N], see :class:`prb_jax.trees.streams.StreamBatch`; N is a multiple of the block.
      used: of each stream how many tokens it has; what follows is padding.
      block: queries, and keys, of a step.
      window: of sliding layers; None for no window.
      parts: into which the queries of a stream are split; N is a multiple of twice as many blocks, if there are
          several.
    """
    order = query_order(until.shape[1] // block, parts)
    blocks = order.size
    room = int((order + 1).sum(axis=1).max()) + (blocks if parts > 1 else 0)
    by_query, by_key = np.zeros((2, len(until), parts, 4, room), np.int32)
    counts = np.zeros((len(until), parts, 2), np.int32)
    for row, stream in enumerate(zip(until, positions, used, strict=True)):
        some, every = meeting_blocks(*stream, block=block, window=window)
        some |= np.eye(blocks, dtype=bool)  # padding sees itself
        for part, numbers in enumerate(order):
            meets = some[numbers]
            for steps, outer in ((by_query[row, part], 0), (by_key[row, part], 1)):
                if outer:
                    meets = meets.copy()
                    meets[0] |= ~meets.any(axis=0)
                pairs = np.nonzero(meets if outer == 0 else meets.T)
                count = counts[row, part, outer] = len(pairs[0])
                new = np.diff(pairs[0], prepend=-1) != 0
                steps[outer, :count], steps[1 - outer, :count] = pairs
                steps[3, :count] = numbers[steps[0, :count]]
                last = np.append(new[1:], True)
                partly = ~every[steps[3, :count], steps[1, :count]]
                steps[2, :count] = FIRST * new + LAST * last + PARTLY * partly
    return StepTable(by_query, by_key, counts, block)


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
            width = min(max(2 * width, KEY_COLUMNS), self._rounded(tokens - self.queries))
        return width

    def _rounded(self, keys: int) -> int:
        return round_up(max(keys, 0), KEY_COLUMNS)


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
