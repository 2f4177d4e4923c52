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
from typing import TYPE_CHECKING, Any

import jax
import numpy as np

from prb_jax.errors import short_repr
from prb_jax.seams import get
from prb_jax.trees.packing import PackedBatch, PackedStream, StreamOptions
from prb_jax.trees.stream_tables import BlockTable, block_table
from prb_jax.trees.tree import Tree

if TYPE_CHECKING:
    from prb_jax.trees.chunk_tables import ChunkTable
    from prb_jax.trees.kernel_tables import KeyTable, StepTable


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
    blocks: BlockTable | StepTable | KeyTable
    """Which blocks meet in attention, for a program, as the steps of a kernel, or as the keys that one is given."""
    window_blocks: BlockTable | StepTable | KeyTable | None
    """The same in layers with a sliding window; None for a model without any too."""
    chunks: ChunkTable | None = None  # in which recurrent layers run; None for a model without any
    places: np.ndarray | jax.Array | None = None
    """[B, K], of each response of B trees which of the S * M read places is its own; a response that a tree does not
    have has any. None where scores are wanted of the read places as they lie."""

    __repr__ = short_repr

    def table(self, window: int | None) -> BlockTable | StepTable | KeyTable | None:
        """Which blocks meet in layers with this window, or without any."""
        return self.blocks if window is None else self.window_blocks


def make_stream_batch(trees: Sequence[Tree], packed: PackedBatch, options: StreamOptions) -> StreamBatch:
    """Lay the trees of a batch out.

    Args:
      trees: those that were packed.
      packed: which of them stand in which stream; streams that are missing hold nothing but padding.
      options: with S, the model's window, and whether its attention is a kernel that takes steps.

    Raises:
      ValueError: more streams than S, or trees that do not fit.
    """
    if len(packed) > options.streams:
        raise ValueError(f"{len(packed)} streams do not fit a batch of {options.streams}")
    shape = packed[0].shape
    empty = PackedStream(shape, (), (), 0)
    streams = [*packed, *[empty] * (options.streams - len(packed))]
    laid = [lay_stream(trees, stream) for stream in streams]
    arrays: dict[str, Any] = {name: np.stack([stream[name] for stream, *_ in laid]) for name in laid[0][0]}
    used = np.asarray([tokens for _, tokens, _ in laid])

    def table(window: int | None) -> BlockTable | StepTable | KeyTable:
        until, positions = arrays["until"], arrays["positions"]
        if options.kernel or options.keys is not None:
            make = get("kernel tables", "table").value
            return make(until, positions, used, options=options, window=window)
        return block_table(until, positions, used, window=window)

    in_window = None if options.window is None else table(options.window)
    chunks = None
    if options.taps is not None:
        ends = np.zeros(arrays["tokens"].shape, bool)
        for row, (_, _, conversations) in enumerate(laid):
            ends[row, arrays["ends"][row, :conversations]] = True
        cut = get("recurrent layers", "chunks").value
        chunks = cut(arrays["previous"], ends, used, taps=options.taps)
    return StreamBatch(**arrays, blocks=table(None), window_blocks=in_window, chunks=chunks)


def places_of_trees(trees: Sequence[Tree], packed: PackedBatch) -> np.ndarray:
    """Return :attr:`StreamBatch.places`, int32 [B, K], of the B trees that were packed."""
    places = np.zeros((len(trees), max(len(tree.responses) for tree in trees)), np.int32)
    for row, stream in enumerate(packed):
        read = row * stream.shape.reads
        for member in stream.members:
            count = len(trees[member].responses)
            places[member, :count] = np.arange(read, read + count)
            read += count
    return places


def lay_stream(trees: Sequence[Tree], stream: PackedStream) -> tuple[dict[str, np.ndarray], int, int]:
    """Return the arrays of one stream, without its streams' axis, how many tokens it has,
    kept ones too, and how many conversations.

    Raises:
      ValueError: the trees do not fit.
    """
    shape = stream.shape
    room = shape.tokens + shape.kept
    count = sum(len(trees[index].responses) for index in stream.members)
    if stream.tokens > shape.tokens or count > shape.reads:
        raise ValueError(f"trees of {stream.tokens} tokens do not fit a stream of {shape}")
    tokens, positions = np.zeros((2, room), np.int32)
    until = np.arange(1, room + 1, dtype=np.int32)
    previous = np.full(room, -1, np.int32)
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
        if len(tree.prefix) > shared:
            first = write(tree.prefix[shared:], shared)
            path.append((shared, first))
            length = len(tree.prefix)
        for response, offset in zip(tree.responses, tree.read, strict=True):
            ids = response.tobytes()
            if ids not in known:
                known[ids] = write(response, len(tree.prefix))
                until[known[ids] : at] = at
            reads[read], ends[read] = known[ids] + offset, known[ids] + len(response) - 1
            read += 1
    close(0)
    arrays = {
        "tokens": tokens, "positions": positions, "until": until, "previous": previous, "reads": reads, "ends": ends,
    }  # fmt: skip
    return arrays, at, read
