"""Visibility tables of packed streams for attention kernels, and stream options for these kernels.

- :class:`StepTable`: steps of the TPU kernel (:mod:`prb_jax.models.attention.stream_kernel`). A step is a block of
  queries and a block of keys of which a query sees at least one, and the area of the two that is computed. Steps of
  one block of queries are consecutive; in `by_key`, for derivatives by keys, steps of one block of keys. The number
  of steps is the number of such pairs, independent of the size of the table.
- :class:`KeyTable`: keys of each block, for a kernel without trees (cuDNN). A block is some hundred consecutive tokens
  of a stream. Tokens are in depth-first order, so a branch that ends before the block ends for the whole block: before
  the block, its tokens see what its first token sees. The keys of a block are this path, which the table lists, and
  the block itself. A mask from ``until`` (:class:`prb_jax.trees.streams.StreamBatch`) selects the keys of each query.
  A kernel with one mask per block needs nothing else: all forests have one stream shape, and queries stay in place.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, field, replace

import jax
import numpy as np

from prb_jax.errors import short_repr
from prb_jax.trees.packing import coarse_length
from prb_jax.trees.step_areas import TILE, area_tiles, smallest_areas
from prb_jax.trees.streams import StreamOptions, meeting_blocks, query_order
from prb_jax.trees.tree import Tree, round_up

STEP_BLOCK = 512
"""Maximum queries, and keys, of one step of the kernel. A block of scores with its intermediate results needs four
arrays of 512 x 512 float32 numbers, a quarter of the smallest chip's fast memory."""

FIRST, LAST, AREA, OFFSET = 1, 2, 4, 256
"""Flags of a step: first of its block; last of its block. The units of two numbers beside the flags: the area that is
computed (:mod:`prb_jax.trees.step_areas`), and its first tile of keys."""

KEY_COLUMNS = 64  # numbers of keys are multiples of this: cuDNN is slow with, or rejects, unaligned masks

QUERIES = (128, 1024)  # minimum and maximum queries of a block


_BALANCE = 64
"""Constant of the best block size Q = sqrt(64 L), for L columns of keys before a block. A block computes about Q / 2
masked pairs per query. On an H100 a column of 4 KiB, half of it padding that is written and not read, takes as long as
about 32 pairs of 32 heads."""


@jax.tree_util.register_dataclass
@dataclass(frozen=True)
class StepTable:
    """Steps of S streams of N tokens, in blocks of Q queries or keys, for P parts of the queries. int32 arrays.

    C is the number of steps of a causal stream, in which every token sees all tokens before it.
    """

    by_query: np.ndarray | jax.Array
    """[S, P, 4, C], four numbers per step: the block of queries within its part (:func:`query_order`), the block of
    keys, the flags with area and offset, and the block of queries within the stream; 0 after the last step."""
    by_key: np.ndarray | jax.Array
    """The same steps, grouped by block of keys. A block of keys that no query of the part sees also has a step, which
    writes its zero derivatives."""
    counts: np.ndarray | jax.Array  # [S, P, 2], number of steps by query, and by key
    block: int = field(metadata={"static": True})  # Q

    __repr__ = short_repr

    def computed_pairs(self) -> np.ndarray:
        """Return the pairs of a query and a key that the forward pass of one head computes, float64 [S, P]."""
        steps, counts = np.asarray(self.by_query), np.asarray(self.counts)
        tiles = area_tiles(self.block // TILE)[steps[:, :, 2] % OFFSET // AREA]
        real = np.arange(steps.shape[-1]) < counts[:, :, :1]
        return (tiles * real).sum(axis=-1) * float(TILE**2)


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
      until, positions: Arrays of :class:`prb_jax.trees.streams.StreamBatch`, int32 [S, N]; N is a multiple of `block`.
      used: Number of tokens of each stream, without padding.
      block: Queries, and keys, of a step.
      window: Window of sliding layers; None for no window.
      parts: Number of parts that split the queries of a stream; if several, N is a multiple of 2 * parts * block.
    """
    order = query_order(until.shape[1] // block, parts)
    blocks, tiles = order.size, block // TILE
    room = int((order + 1).sum(axis=1).max()) + (blocks if parts > 1 else 0)
    by_query, by_key = np.zeros((2, len(until), parts, 4, room), np.int32)
    counts = np.zeros((len(until), parts, 2), np.int32)
    for row, stream in enumerate(zip(until, positions, used, strict=True)):
        fine, seen = meeting_blocks(*stream, block=TILE, window=window)
        fine |= np.eye(len(fine), dtype=bool)  # padding sees itself
        meeting, seen = (x.reshape(blocks, tiles, blocks, tiles).swapaxes(1, 2) for x in (fine, seen))
        some, every = np.asarray(meeting.any(axis=(2, 3))), np.asarray(seen.all(axis=(2, 3)))
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
                step = steps[3, :count], steps[1, :count]
                areas, offsets = smallest_areas(meeting[step], every[step])
                steps[2, :count] = FIRST * new + LAST * last + AREA * areas + OFFSET * offsets
    return StepTable(by_query, by_key, counts, block)


@dataclass(frozen=True)
class KeyLayout:
    """Static sizes of key tables."""

    longest: int  # tokens of the longest usual conversation; longer ones get wider tables
    response: int  # tokens of the longest response, for tables with a window
    queries: int  # queries of a block, a power of two

    @staticmethod
    def of(longest: int, response: int) -> KeyLayout:
        """Return the layout for conversations and responses of these maximum lengths."""
        best = 1 << round(np.log2(max(_BALANCE * longest, 1)) / 2)
        return KeyLayout(longest, response, int(np.clip(best, *QUERIES)))

    def width(self, tokens: int, window: int | None) -> int:
        """Return the number of columns for keys before a block, in a stream of `tokens` tokens."""
        most = self.longest - 1
        if window is not None:
            # The window of the first query, plus the distance to the earliest query of a sibling response.
            most = min(most, window - 1 + self.response)
        return self._rounded(min(most, tokens - self.queries))

    def wider(self, tokens: int, window: int | None, needed: int) -> int:
        """Return :meth:`width`, doubled until it is at least `needed`, to get few distinct widths."""
        width = self.width(tokens, window)
        while width < needed:
            width = min(max(2 * width, KEY_COLUMNS), self._rounded(tokens - self.queries))
        return width

    def _rounded(self, keys: int) -> int:
        return round_up(max(keys, 0), KEY_COLUMNS)


@jax.tree_util.register_dataclass
@dataclass(frozen=True)
class KeyTable:
    """Keys before each of the C blocks of Q queries of S streams: N = C * Q tokens. int32 arrays."""

    # [S, C, L], places of the keys that some query of the block sees, in the order of the conversation, followed by
    # arbitrary places
    keys: np.ndarray | jax.Array
    counts: np.ndarray | jax.Array  # [S, C], number of these keys

    __repr__ = short_repr


def key_table(until: np.ndarray, positions: np.ndarray, *, layout: KeyLayout, window: int | None) -> KeyTable:
    """Return the keys before each block of queries.

    Token i sees token j if ``j <= i < until[j]`` and ``positions[i] - positions[j] < window``.

    Args:
      until, positions: Arrays of a :class:`prb_jax.trees.streams.StreamBatch`, int32 [S, N]; N is a multiple of the
        layout's queries.
      layout: Static sizes; longer conversations widen the table.
      window: Window of sliding layers; None for no window.
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
    """Return the places before ``start`` that some query of the block at ``start`` sees, in ascending order."""
    path = np.flatnonzero(until[:start] > start)
    if window is None or not len(path):
        return path
    # Smallest position among the block's queries up to each one: the query nearest to a key.
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
    """Return the table of streams that a kernel needs; arguments as in :func:`step_table`."""
    if options.keys is not None:
        return key_table(until, positions, layout=options.keys, window=window)
    sizes = {"block": options.block, "parts": options.parts}
    return step_table(until, positions, used, window=window, **sizes)


def for_table(options: StreamOptions, table: str) -> StreamOptions:
    """Return the options for tables of "steps" or "keys"; tables of keys have room for any conversation."""
    if table == "steps":
        return for_kernel(options)
    return with_key_layout(options, KeyLayout.of(options.tokens, options.tokens))


def for_kernel(options: StreamOptions) -> StreamOptions:
    """Return the options for the kernel with step tables."""
    large = replace(options, block=STEP_BLOCK)
    return large.of_blocks(STEP_BLOCK if options.tokens >= large.multiple else TILE, kernel=True)


def for_keys(options: StreamOptions, trees: Sequence[Tree], *, whole: bool) -> StreamOptions:
    """Return the options with key tables that fit these trees: all trees (``whole``), or the first of many.

    Rare, much longer trees do not count; their streams get wider tables.
    """
    prefixes, _, responses = (
        np.asarray(sizes) for sizes in zip(*(tree.shape for tree in trees), strict=True)
    )
    lengths = prefixes + responses
    in_a_stream = options.tokens * len(trees) / sum(tree.tokens for tree in trees)
    # Leave out one tree in every fourth stream if the rest is half as long or less.
    usual = int(np.quantile(lengths, 1 - min(1.0, 1 / in_a_stream) / 4, method="higher"))
    longest = usual if 2 * usual <= lengths.max() else int(lengths.max())
    response = int(responses[lengths <= longest].max())
    if not whole:  # leave room for slightly longer trees
        longest, response = (coarse_length(length + 1, KEY_COLUMNS) for length in (longest, response))
    return with_key_layout(options, KeyLayout.of(longest, response))


def with_key_layout(options: StreamOptions, layout: KeyLayout) -> StreamOptions:
    """Return the options with this layout."""
    return options.of_blocks(layout.queries, keys=layout)


def for_lengths(options: StreamOptions, *, longest: int, response: int) -> StreamOptions:
    """Return the options with the layout for conversations and responses of these maximum lengths."""
    return with_key_layout(options, KeyLayout.of(longest, response))
