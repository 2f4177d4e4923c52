"""Packed streams as a kernel for TPUs takes them: what a query sees, in one number, and which blocks meet.

The kernel (:mod:`prb_jax.models.attention.splash`) hands its mask one number for each query, and knows the place
of each key. The trees of a stream share nothing, so a query sees its tree up to itself but for one run of places: the
responses between the prefix and its own. How far back its own response begins, and how long that run is, are packed
into 32 bits beside the place of the query. Where they do not fit, responses begin at multiples of a unit, and only
multiples are written down.
"""

from __future__ import annotations

from collections.abc import Iterable
from dataclasses import dataclass, field
from typing import Any

import jax
import numpy as np

from prb_jax.errors import short_repr
from prb_jax.trees.tree import Tree

BLOCK = 512
"""Queries, and keys, of one step of the kernel, at most. One block of scores and what is made of it takes four times
512 x 512 float32 numbers, a quarter of the smallest chip's fast memory."""

LANES = 128  # the least of them: the width of a TPU's vector registers


@dataclass(frozen=True)
class KernelLayout:
    """The static facts of streams that a kernel reads."""

    # tokens of the trees for which the tables have room; with longer ones they are as wide as can be
    longest: int
    unit: int = 1  # prefixes end, and responses begin, at places that are a multiple of it: a power of two
    block: int = BLOCK  # queries, and keys, of a step of the kernel

    def width(self, tokens: int) -> int:
        """Return the most blocks that meet a block, in a stream of ``tokens`` tokens."""
        return min(tokens // self.block, (self.longest + self.block - 2) // self.block + 1)

    def reach(self, tokens: int) -> int:
        """Return the bound in tokens, exclusive, of a response and of the responses before it in such a stream."""
        return self.unit << _bits(tokens)[1]

    def fits(self, tree: Tree, tokens: int) -> bool:
        """Whether what a query of this tree sees can be encoded in a stream of ``tokens`` tokens."""
        return _needed(tree, self.unit) < self.reach(tokens)

    def tokens_of(self, tree: Tree) -> int:
        """Return the most places that a tree takes: its tokens, and the unused places before and between them."""
        unused = sum(-len(response) % self.unit for response in tree.responses)
        return tree.tokens + unused + self.unit - 1

    def unpack(self, packed: Any, tokens: int) -> tuple[Any, Any, Any]:
        """Return of queries their place, where their own response begins, and how many places before it they do not
        see; of those that see all of their tree up to themselves the latter is 0.

        Args:
          packed: integers of :class:`KernelTable`, of NumPy, JAX, or inside a kernel.
          tokens: N of the stream.
        """
        low, bits = _bits(tokens)
        most = (1 << bits) - 1
        place = packed & ((1 << low) - 1)
        inside = self.unit * ((packed >> low) & most) + (place & (self.unit - 1))
        return place, place - inside, self.unit * ((packed >> (low + bits)) & most)


@jax.tree_util.register_dataclass
@dataclass(frozen=True)
class KernelTable:
    """What a kernel needs to know of S streams of N tokens, in blocks of Q queries or keys. int32 arrays."""

    packed: np.ndarray | jax.Array  # [S, N], what each query sees, see :meth:`KernelLayout.unpack`
    # [S, N], where the tree of each token begins; each token of padding is a tree
    trees: np.ndarray | jax.Array
    keys: np.ndarray | jax.Array
    """[S, N / Q, W], for each block of queries the blocks of keys that it visits, or fetches for later."""
    key_steps: np.ndarray | jax.Array  # the same shape, 1 where a block is visited
    queries: np.ndarray | jax.Array  # [S, W, N / Q], the same seen from the blocks of keys
    query_steps: np.ndarray | jax.Array
    layout: KernelLayout = field(metadata={"static": True})

    __repr__ = short_repr


def choose_unit(trees: Iterable[Tree], tokens: int) -> int:
    """Return the least unit with which these trees can be encoded in streams of up to ``tokens`` tokens."""
    found = list(trees)
    unit = 1
    while any(_needed(tree, unit) >= KernelLayout(1, unit).reach(tokens) for tree in found):
        unit *= 2
    return unit


def kernel_table(
    until: np.ndarray,
    positions: np.ndarray,
    previous: np.ndarray,
    *,
    layout: KernelLayout,
    window: int | None,
) -> KernelTable:
    """Return the table of streams whose trees share nothing: see :class:`prb_jax.trees.streams.StreamBatch`.

    Args:
      until, positions, previous: int32 [S, N], N a multiple of the block.
      layout: static facts; a tree that is too long for its tables makes them as wide as can be.
      window: of sliding layers; None for no window.
    """
    tokens = until.shape[1]
    sights = [_Sight.of(*stream) for stream in zip(positions, previous, strict=True)]
    meets = [_meeting_blocks(sight, layout.block, window) for sight in sights]
    needed = max(int(meet.sum(axis=axis).max()) for meet in meets for axis in (0, 1))
    width = layout.width(tokens)
    width = width if needed <= width else tokens // layout.block
    tables = [(*_by_queries(meet, width), *_by_keys(meet, width)) for meet in meets]
    keys, key_steps, queries, query_steps = (
        np.stack(tables_of_kind) for tables_of_kind in zip(*tables, strict=True)
    )
    packed = np.stack([sight.packed(layout, tokens) for sight in sights])
    trees = np.stack([sight.first for sight in sights]).astype(np.int32)
    return KernelTable(packed, trees, keys, key_steps, queries, query_steps, layout)


@dataclass(frozen=True)
class _Sight:
    """Of every query of a stream, int64 [N]: its tree begins at ``first``; it sees the tree from there to itself but
    for ``hidden`` places before ``own``."""

    first: np.ndarray
    own: np.ndarray
    hidden: np.ndarray

    @staticmethod
    def of(positions: np.ndarray, previous: np.ndarray) -> _Sight:
        place = np.arange(len(positions), dtype=np.int64)
        begins = positions == 0
        jumps = ~begins & (previous != place - 1)
        own = np.maximum.accumulate(np.where(begins | jumps, place, 0))
        before = previous[own]  # of a response that jumps, the last place of its prefix
        return _Sight(
            first=np.where(jumps[own], own[before], own),
            own=own,
            hidden=np.where(jumps[own], own - 1 - before, 0),
        )

    def packed(self, layout: KernelLayout, tokens: int) -> np.ndarray:
        """int32 [N]; raises ValueError where the layout has no room for it."""
        low, bits = _bits(tokens)
        place = np.arange(tokens, dtype=np.int64)
        behind = self.hidden > 0
        inside = np.where(behind, place - self.own, 0)
        if max(inside.max(), self.hidden.max()) >= layout.reach(tokens) or (self.hidden % layout.unit).any():
            raise ValueError(f"responses of this stream of {tokens} tokens do not fit {layout}")
        if (self.own[behind] % layout.unit).any():
            raise ValueError(f"responses of this stream do not begin at multiples of {layout.unit}")
        numbers = place | inside // layout.unit << low | self.hidden // layout.unit << (low + bits)
        return numbers.astype(np.uint32).view(np.int32)


def _bits(tokens: int) -> tuple[int, int]:
    """Bits for the place of a query, and for each of the two other numbers."""
    low = (tokens - 1).bit_length()
    return low, (32 - low) // 2


def _needed(tree: Tree, unit: int) -> int:
    """The largest number that the table has to hold for a tree."""
    lengths = [-(-len(response) // unit) * unit for response in tree.responses]
    return max(sum(lengths[:-1]), *lengths[1:], 0) if len(lengths) > 1 else 0


def _meeting_blocks(sight: _Sight, block: int, window: int | None) -> np.ndarray:
    """bool [N / block, N / block]: some query of a block sees some key of another."""
    tokens = len(sight.own)
    place = np.arange(tokens)
    ends = sight.own - sight.hidden  # of what is seen before the own response
    near = place - window + 1 if window is not None else np.zeros(tokens, np.int64)
    count = tokens // block
    edges = np.zeros((count, count + 1), np.int64)
    for low, high in (
        (np.maximum(sight.first, near - sight.hidden), ends),
        (np.maximum(sight.own, near), place + 1),
    ):
        seen = low < high
        rows, low, high = place[seen] // block, low[seen] // block, (high[seen] - 1) // block + 1
        np.add.at(edges, (rows, low), 1)
        np.add.at(edges, (rows, high), -1)
    return edges.cumsum(axis=1)[:, :-1] > 0


def _by_queries(meets: np.ndarray, width: int) -> tuple[np.ndarray, np.ndarray]:
    """int32 [blocks, width] twice: the blocks of keys of each block of queries, and 1 where one is visited. Behind them
    stands the first one of the next row, which is fetched meanwhile."""
    count = len(meets)
    numbers, steps = np.zeros((2, count, width), np.int32)
    rows = [np.flatnonzero(row) for row in meets]
    for row, seen in enumerate(rows):
        numbers[row] = rows[(row + 1) % count][0]
        numbers[row, : len(seen)], steps[row, : len(seen)] = seen, 1
    return numbers, steps


def _by_keys(meets: np.ndarray, width: int) -> tuple[np.ndarray, np.ndarray]:
    """int32 [width, blocks] twice: the same by blocks of keys."""
    numbers, steps = _by_queries(meets.T, width)
    return np.ascontiguousarray(numbers.T), np.ascontiguousarray(steps.T)
