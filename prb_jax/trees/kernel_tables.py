"""What kernels of attention are told of who sees whom in packed streams, and how streams are shaped for them.

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

from collections.abc import Sequence
from dataclasses import dataclass, field, replace

import jax
import numpy as np

from prb_jax.errors import short_repr
from prb_jax.trees.packing import StreamOptions, coarse_length
from prb_jax.trees.stream_tables import meeting_blocks, query_order, round_up
from prb_jax.trees.tree import Tree

STEP_BLOCK = 512
"""Queries, and keys, of one step of the kernel, at most. One block of scores and what is made of it takes four times
512 x 512 float32 numbers, a quarter of the smallest chip's fast memory."""

LANES = 128  # the least of them: the width of a TPU's vector registers

FIRST, LAST, PARTLY = 1, 2, 4
"""Flags of a step: the first, or last, of its block; some query does not see all keys, so that they are masked."""

KEY_COLUMNS = 64  # keys come in multiples of it: a mask whose rows are not aligned is slow, or refused

QUERIES = (128, 1024)  # of a block, at least and at most


_BALANCE = 64
"""A block of Q queries has L columns for keys before it, and computes about Q / 2 pairs a query in vain. On an H100 a
column of 4 KiB, half of them padding, which is written and not read, takes as long as some 32 pairs of 32 heads: Q is
best about the root of 64 L."""


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


def kernel_table(
    until: np.ndarray,
    positions: np.ndarray,
    used: np.ndarray,
    *,
    options: StreamOptions,
    window: int | None,
) -> StepTable | KeyTable:
    """Return the table of streams that a kernel needs; arguments as of :func:`step_table`."""
    if options.keys is not None:
        return key_table(until, positions, layout=options.keys, window=window)
    sizes = {"block": options.block, "parts": options.parts}
    return step_table(until, positions, used, window=window, **sizes)


def for_table(options: StreamOptions, table: str) -> StreamOptions:
    """Return the options with this kind of tables, "steps" or "keys"; those of keys have room for any conversation."""
    if table == "steps":
        return for_kernel(options)
    return with_key_layout(options, KeyLayout.of(options.tokens, options.tokens))


def for_kernel(options: StreamOptions) -> StreamOptions:
    """Return the options with the kernel that takes steps."""
    large = replace(options, block=STEP_BLOCK)
    return large.of_blocks(STEP_BLOCK if options.tokens >= large.multiple else LANES, kernel=True)


def for_keys(options: StreamOptions, trees: Sequence[Tree], *, whole: bool) -> StreamOptions:
    """Return the options with tables of keys that have room for these trees, which are all there are (``whole``) or
    the first of many of their kind; but for rare ones that are much longer, whose streams get wider tables."""
    prefixes, _, responses = (
        np.asarray(sizes) for sizes in zip(*(tree.shape for tree in trees), strict=True)
    )
    lengths = prefixes + responses
    in_a_stream = options.tokens * len(trees) / sum(tree.tokens for tree in trees)
    # All but a tree in every fourth stream, if those are half as long or less.
    usual = int(np.quantile(lengths, 1 - min(1.0, 1 / in_a_stream) / 4, method="higher"))
    longest = usual if 2 * usual <= lengths.max() else int(lengths.max())
    response = int(responses[lengths <= longest].max())
    if not whole:  # others are a little longer
        longest, response = (coarse_length(length + 1, KEY_COLUMNS) for length in (longest, response))
    return with_key_layout(options, KeyLayout.of(longest, response))


def with_key_layout(options: StreamOptions, layout: KeyLayout) -> StreamOptions:
    """Return the options with this layout."""
    return options.of_blocks(layout.queries, keys=layout)
