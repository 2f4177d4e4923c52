"""Trees packed into streams in their order, so that a caller knows which of them comes next."""

from __future__ import annotations

from bisect import bisect
from collections.abc import Iterable, Iterator, Sequence
from itertools import zip_longest

import numpy as np

from prb_jax.trees.packing import PackedBatch, SortedTrees, StreamOptions, StreamShape, packed_stream
from prb_jax.trees.stream_tables import round_up

_STREAM_COST = 64  # what starting one more stream costs, in tokens


def length_step(tokens: int, least: int) -> int:
    """Return the next of about four lengths in each doubling, a multiple of ``least``."""
    return round_up(tokens, least * max(1, (1 << max(tokens.bit_length() - 3, 0)) // least))


def fitting(trees: SortedTrees, places: Iterable[int], tokens: int) -> list[int]:
    """Return the first of these places, as many as fit a stream of so many tokens, in ascending order."""
    taken: list[int] = []
    total = 0
    for place in places:
        at = bisect(taken, place)
        shared = [trees.shared_by(taken[at - 1], place)] if at else []
        shared += [trees.shared_by(place, taken[at])] if at < len(taken) else []
        total += int(trees.tokens[place]) - max(shared, default=0)
        if total > tokens:
            break
        taken.insert(at, place)
    return taken


def pack_in_order(trees: SortedTrees, options: StreamOptions, *, most: int) -> Iterator[PackedBatch]:
    """Pack trees into streams of one length, an equal share for each stream of a batch.

    Args:
      trees: in their order.
      options: how streams are shaped.
      most: tokens of a stream, if no tree has more.
    """
    needed = -(-int(trees.tokens.sum() - trees.shared.sum()) // options.streams)
    tokens = max(int(trees.tokens.max()), min(needed, most))
    shape = StreamShape(length_step(tokens, options.multiple), int(trees.reads.sum()))
    shares = (_cut(trees, share, shape.tokens) for share in _shares(trees, options))
    for streams in zip_longest(*shares, fillvalue=()):
        yield tuple(packed_stream(trees, places, shape) for places in streams)


def choose_length(units: Sequence[SortedTrees], options: StreamOptions, *, largest: int, most: int) -> int:
    """Return the tokens of a stream with which the fewest are computed, padding included.

    Args:
      units: trees that are packed in their order, those of each unit apart.
      options: how streams are shaped.
      largest: tokens of a tree, at most; a stream holds one.
      most: tokens of a stream, if the largest tree does not need more than half of them.
    """
    length = least = length_step(max(largest, 1), options.multiple)
    lengths: list[int] = []
    while length <= max(most, 2 * least):
        lengths.append(length)
        length = length_step(length + 1, options.multiple)
    first_shares = [
        (trees, _shares(trees, options)[0]) for trees in units
    ]  # others are as large, or smaller by one

    def cost(length: int) -> int:
        streams = sum(len(_cut(trees, share, length)) for trees, share in first_shares)
        return streams * (length + _STREAM_COST)

    return min(lengths, key=cost)


def _shares(trees: SortedTrees, options: StreamOptions) -> list[list[int]]:
    """The places of trees, a run for each stream of a batch."""
    return [share.tolist() for share in np.array_split(np.arange(len(trees.order)), options.streams)]


def _cut(trees: SortedTrees, places: Sequence[int], tokens: int) -> list[list[int]]:
    """The places of each stream of so many tokens, in which every tree fits."""
    streams: list[list[int]] = []
    start = 0
    while start < len(places):
        streams.append(fitting(trees, places[start:], tokens))
        start += len(streams[-1])
    return streams
