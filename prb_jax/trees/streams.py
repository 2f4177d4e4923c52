"""The arrays of packed streams: trees back to back without a gap, in a fixed number of tokens.

A stream is a forest in which every conversation is a path. Its tokens stand in the order in which one walks
through the trees (a common beginning, then each of what follows it, one after the other), so that whatever follows
a token in any conversation lies in one run of places behind it, which ends at ``until``. This one number says who
sees whom:

    the token at place i sees the token at place j   if and only if   j <= i < until[j]

(and, in layers with a sliding window, if ``positions[i] - positions[j] < window``). It holds for any depth: a
profile, its questions, and the responses to each.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

import jax
import numpy as np
from jax.sharding import Mesh

from prb_jax.errors import short_repr
from prb_jax.sharding import batch_sharding
from prb_jax.trees.kernel_tables import KernelTable, kernel_table
from prb_jax.trees.key_tables import KeyTable, key_table
from prb_jax.trees.packing import PackedBatch, PackedStream, StreamOptions
from prb_jax.trees.shapes import round_up
from prb_jax.trees.stream_tables import BlockTable, PageTable, block_table, page_table
from prb_jax.trees.tree import Tree


@jax.tree_util.register_dataclass
@dataclass(frozen=True)
class StreamBatch:
    """S streams of N tokens with M read places each. A JAX pytree of int32 arrays.

    Padding stands at the end of a stream: token 0 at position 0, which only sees itself. Unused read places are 0.
    """

    tokens: np.ndarray | jax.Array  # [S, N] token ids
    positions: np.ndarray | jax.Array  # [S, N], of each token in its conversation
    until: np.ndarray | jax.Array  # [S, N]: a token is seen from its own place up to this one, exclusive
    # [S, N], the place of the token before it in its conversation; -1 for a first one
    previous: np.ndarray | jax.Array
    reads: np.ndarray | jax.Array  # [S, M], places of the tokens whose states give the scores
    ends: np.ndarray | jax.Array  # [S, M], places of the last tokens of the same conversations
    blocks: BlockTable | KernelTable | KeyTable | None
    """Which blocks meet in attention, for a program or a kernel; None where it reads pages."""
    window_blocks: BlockTable | KernelTable | KeyTable | None
    """The same in layers with a sliding window; None for a model without any too."""
    pages: PageTable | None = None  # the pages that a kernel reads; None where attention goes block by block

    __repr__ = short_repr

    def table(self, window: int | None) -> BlockTable | KernelTable | KeyTable | None:
        """Which blocks meet in layers with this window, or without any."""
        return self.blocks if window is None else self.window_blocks


def stream_batch_shardings(
    mesh: Mesh, *, windows: bool, paged: bool = False, keys: bool = False
) -> StreamBatch:
    """The sharding of each array of a batch whose streams are dealt over the mesh, as :func:`jax.jit` takes them."""
    flat, table = batch_sharding(mesh, 2), batch_sharding(mesh, 3)
    arrays: Any = (flat,) * 6
    of_blocks: Any = KeyTable(table, flat) if keys else BlockTable(table, table)  # pyright: ignore[reportArgumentType]
    blocks: Any = (of_blocks, of_blocks if windows else None)
    if paged:
        blocks = (None, None, PageTable(table, table, flat, flat, flat))  # pyright: ignore[reportArgumentType]
    return StreamBatch(*arrays, *blocks)


def make_stream_batch(trees: Sequence[Tree], packed: PackedBatch, options: StreamOptions) -> StreamBatch:
    """Lay the trees of a batch out.

    Args:
      trees: those that were packed.
      packed: which of them stand in which stream; streams that are missing hold nothing but padding.
      options: with S, the model's window, and the tables that its attention reads: of blocks, pages or a kernel.

    Raises:
      ValueError: more streams than S, or trees that do not fit.
    """
    if len(packed) > options.streams:
        raise ValueError(f"{len(packed)} streams do not fit a batch of {options.streams}")
    kernel, shape = options.kernel, packed[0].shape
    empty = PackedStream(shape, (), (), 0)
    streams = [*packed, *[empty] * (options.streams - len(packed))]
    laid = [_lay(trees, stream, 1 if kernel is None else kernel.unit) for stream in streams]
    arrays: dict[str, Any] = {name: np.stack([stream[name] for stream, _ in laid]) for name in laid[0][0]}
    if options.paged:
        pages = [
            page_table(stream["previous"], stream["positions"], used, runs=shape.reads)
            for stream, used in laid
        ]
        stacked = {name: np.stack([table[name] for table in pages]) for name in pages[0]}
        return StreamBatch(**arrays, blocks=None, window_blocks=None, pages=PageTable(**stacked))

    def table(window: int | None) -> BlockTable | KernelTable | KeyTable:
        if options.keys is not None:
            return key_table(arrays["until"], arrays["positions"], layout=options.keys, window=window)
        if kernel is not None:
            names = ("until", "positions", "previous")
            return kernel_table(*(arrays[name] for name in names), layout=kernel, window=window)
        tables = [
            block_table(stream["until"], stream["positions"], used, window=window) for stream, used in laid
        ]
        return BlockTable(*(np.stack(part) for part in zip(*tables, strict=True)))

    in_window = None if options.window is None else table(options.window)
    return StreamBatch(**arrays, blocks=table(None), window_blocks=in_window)


def _lay(trees: Sequence[Tree], stream: PackedStream, unit: int) -> tuple[dict[str, np.ndarray], int]:
    """The arrays of one stream, and how many tokens it has. With a ``unit`` beyond 1, prefixes end and responses begin
    at its multiples."""
    shape = stream.shape
    count = sum(len(trees[index].responses) for index in stream.members)
    if stream.tokens > shape.tokens or count > shape.reads:
        raise ValueError(f"trees of {stream.tokens} tokens do not fit a stream of {shape}")
    tokens, positions = np.zeros((2, shape.tokens), np.int32)
    until = np.arange(1, shape.tokens + 1, dtype=np.int32)
    previous = np.full(shape.tokens, -1, np.int32)
    reads, ends = np.zeros((2, shape.reads), np.int32)
    at = read = 0
    path: list[tuple[int, int]] = []  # runs of the open beginning: (first position, place of it)
    length = 0  # tokens of the open beginning
    # the place of each response to the open prefix: equal ones are computed once
    known: dict[bytes, int] = {}

    def place_of(position: int) -> int:
        """Where the token at this position of the open beginning stands."""
        start, place = next(run for run in reversed(path) if run[0] <= position)
        return place + position - start

    def close(keep: int) -> None:
        """Nothing that follows continues the open beginning behind its first ``keep`` tokens."""
        nonlocal length
        while length > keep:
            start, place = path[-1]
            low = max(start, keep)
            until[place + low - start : place + length - start] = at
            length = low
            if low == start:
                path.pop()

    def write(ids: np.ndarray, position: int) -> int:
        """Append a run of tokens that continues the open beginning at ``position``; returns its first place."""
        nonlocal at
        first, at = at, at + len(ids)
        tokens[first:at] = ids
        positions[first:at] = np.arange(position, position + len(ids))
        previous[first:at] = np.arange(first - 1, at - 1)
        previous[first] = place_of(position - 1) if position else -1
        return first

    for index, shared in zip(stream.members, stream.shared, strict=True):
        tree = trees[index]
        if shared != length or len(tree.prefix) != length or not shared:
            known.clear()
        close(shared)
        if unit > 1:
            at += -(at + len(tree.prefix)) % unit
        if len(tree.prefix) > shared:
            first = write(tree.prefix[shared:], shared)
            path.append((shared, first))
            length = len(tree.prefix)
        for response, offset in zip(tree.responses, tree.read, strict=True):
            ids = response.tobytes()
            if ids not in known:
                at = round_up(at, unit)
                known[ids] = write(response, len(tree.prefix))
                until[known[ids] : at] = at
            reads[read], ends[read] = known[ids] + offset, known[ids] + len(response) - 1
            read += 1
    close(0)
    arrays = {
        "tokens": tokens, "positions": positions, "until": until, "previous": previous, "reads": reads, "ends": ends,
    }  # fmt: skip
    return arrays, at
