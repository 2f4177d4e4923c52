"""Pack trees into streams in order, for callers that need to know which tree comes next."""

from __future__ import annotations

import math
from bisect import bisect
from collections.abc import Iterable, Iterator, Sequence
from itertools import zip_longest

import numpy as np

from prb_jax.trees.packing import SortedTrees, coarse_length, divide, first_fit, packed_stream
from prb_jax.trees.streams import PackedBatch, StreamOptions, StreamShape
from prb_jax.trees.tree import round_up

_STREAM_COST = 64  # cost of one more stream, in tokens


def length_step(tokens: int, least: int) -> int:
    """Round up to one of about four lengths per doubling, a multiple of ``least``."""
    return round_up(tokens, least * max(1, (1 << max(tokens.bit_length() - 3, 0)) // least))


def fitting(trees: SortedTrees, places: Iterable[int], tokens: int) -> list[int]:
    """Return the longest start of `places` that fits a stream of `tokens` tokens, in ascending order."""
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
    """Pack trees into streams of one length; each stream of a batch gets an equal share of the trees.

    Args:
      trees: Trees in order.
      options: Options of streams.
      most: Maximum tokens of a stream, unless a single tree has more.
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
    """Return the length of streams that minimises computed tokens, including padding.

    Args:
      units: Groups of trees; each group is packed separately.
      options: Options of streams.
      largest: Maximum tokens of a tree; a stream has room for one.
      most: Maximum tokens of a stream, unless the largest tree needs more than half of them.
    """
    needed = [int(trees.tokens.sum() - trees.shared.sum()) for trees in units]
    length = least = coarse_length(max(largest, 1), options.multiple)
    best, chosen = math.inf, length
    while length <= max(most, 2 * least):
        cost = (length + _STREAM_COST) / options.streams
        if cost * sum(tokens / length for tokens in needed) < best:  # lower bound: streams without gaps
            cost *= sum(round_up(len(full_streams(trees, length)), options.streams) for trees in units)
            best, chosen = min((best, chosen), (cost, length))
        length = coarse_length(length + 1, options.multiple)
    return chosen


def full_streams(trees: SortedTrees, tokens: int) -> list[list[int]]:
    """Return the places of the trees of each stream, packed densely into streams of `tokens` tokens."""
    units = divide(trees, most_tokens=tokens, most_reads=tokens)
    streams = first_fit(units, StreamShape(tokens, tokens))
    return [[place for unit in units for place in range(unit.start, unit.stop)] for units in streams]
