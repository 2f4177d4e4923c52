"""Trees packed into streams in their order, so that a caller knows which of them comes next."""

from __future__ import annotations

import math
from bisect import bisect
from collections.abc import Iterable, Iterator, Sequence
from itertools import zip_longest

import numpy as np

from prb_jax.trees.packing import (
    PackedBatch,
    SortedTrees,
    StreamOptions,
    StreamShape,
    coarse_length,
    divide,
    first_fit,
    packed_stream,
)
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
    streams: list[list[list[int]]] = [[] for _ in range(options.streams)]
    for part, share in zip(
        streams, np.array_split(np.arange(len(trees.order)), options.streams), strict=True
    ):
        places = share.tolist()
        while places:
            part.append(fitting(trees, places, shape.tokens))
            places = places[len(part[-1]) :]
    for batch in zip_longest(*streams, fillvalue=()):
        yield tuple(packed_stream(trees, places, shape) for places in batch)


def choose_length(units: Sequence[SortedTrees], options: StreamOptions, *, largest: int, most: int) -> int:
    """Return the tokens of a stream with which the fewest are computed, padding included.

    Args:
      units: trees; those of each unit are packed apart from others.
      options: how streams are shaped.
      largest: tokens of a tree, at most; a stream holds one.
      most: tokens of a stream, if the largest tree does not need more than half of them.
    """
    needed = [int(trees.tokens.sum() - trees.shared.sum()) for trees in units]
    length = least = coarse_length(max(largest, 1), options.multiple)
    best, chosen = math.inf, length
    while length <= max(most, 2 * least):
        cost = (length + _STREAM_COST) / options.streams
        if cost * sum(tokens / length for tokens in needed) < best:  # as it would be without a gap
            cost *= sum(round_up(len(full_streams(trees, length)), options.streams) for trees in units)
            best, chosen = min((best, chosen), (cost, length))
        length = coarse_length(length + 1, options.multiple)
    return chosen


def full_streams(trees: SortedTrees, tokens: int) -> list[list[int]]:
    """Return the places of trees that go together into streams of so many tokens, which are about full."""
    units = divide(trees, most_tokens=tokens, most_reads=tokens)
    streams = first_fit(units, StreamShape(tokens, tokens))
    return [[place for unit in units for place in range(unit.start, unit.stop)] for units in streams]
