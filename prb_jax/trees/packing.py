"""Which trees go into which stream: how many streams there are says first fit, the largest tree first; then all are
made about as full as each other.

All choices are functions of the lengths, the ids of the prefixes and the options alone. So a continued run forms
the same streams and gives the same bytes. How many streams a batch has decides nothing about them: they are the same on
every mesh.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, replace

import numpy as np

from prb_jax.errors import short_repr
from prb_jax.trees.grouping import SortedTrees, Unit, divide, sort_trees
from prb_jax.trees.kernel_tables import BLOCK as KERNEL_BLOCK
from prb_jax.trees.kernel_tables import LANES, KernelLayout, choose_unit
from prb_jax.trees.shapes import round_up
from prb_jax.trees.stream_blocks import BLOCK
from prb_jax.trees.tree import Tree

READS_STEP = 16
"""Read places of a stream are a multiple of this."""

LARGEST = 4
"""A stream is made at most this many times as long as usual so that a large tree stays whole."""


@dataclass(frozen=True)
class StreamOptions:
    """How streams are shaped.

    Attributes:
      tokens: of a stream, about.
      streams: of a batch: one for each part that the mesh splits it into.
      block: a stream's length is a multiple of this.
      window: of the model's sliding layers, if it has any.
      paged: attention is a kernel's that reads pages, see :mod:`prb_jax.trees.stream_pages`.
      kernel: attention is the splash kernel's, see :mod:`prb_jax.trees.kernel_tables`: nothing is shared.
      share: beginnings that comparisons have in common are computed once.
      fixed: the shapes to be used, the smallest first, and no others but for trees that fit none: what a server
        has compiled before its first request.
    """

    tokens: int
    streams: int = 1
    block: int = BLOCK
    window: int | None = None
    paged: bool = False
    kernel: KernelLayout | None = None
    share: bool = True
    fixed: tuple[StreamShape, ...] = ()

    def sort(self, trees: Sequence[Tree]) -> SortedTrees:
        """Put trees in the order in which they are packed."""
        if self.kernel is not None:
            return sort_trees(trees, share=False, size=self.kernel.tokens_of)
        return sort_trees(trees, share=self.share)


def for_kernel(options: StreamOptions, trees: Sequence[Tree]) -> StreamOptions:
    """Return the options with the splash kernel's layout, which has room for these trees; for those of them that are
    longer than a stream, they say nothing."""
    block = KERNEL_BLOCK if options.tokens >= KERNEL_BLOCK else LANES
    most = round_up(options.tokens, block)
    usual = [tree for tree in trees if tree.tokens <= most]
    longest = max((tree.tokens for tree in usual), default=most)
    kernel = KernelLayout(longest=longest, unit=choose_unit(usual, most), block=block)
    return replace(options, tokens=most, block=block, kernel=kernel)


@dataclass(frozen=True, order=True)
class StreamShape:
    """The static shape of a stream: N tokens and M places where heads read."""

    tokens: int
    reads: int


@dataclass(frozen=True)
class PackedStream:
    """The trees of one stream, in the order in which they stand there.

    Attributes:
      members: positions in the list of trees that was packed, in the order of their prefixes.
      shared: how many tokens each one begins with that the one before has computed already.
      tokens: of all, shared ones once.
    """

    members: tuple[int, ...]
    shared: tuple[int, ...]
    tokens: int

    __repr__ = short_repr


@dataclass(frozen=True)
class DealtStreams:
    """A batch: its shape, and its streams, at most as many as the options say."""

    shape: StreamShape
    streams: tuple[PackedStream, ...]

    __repr__ = short_repr


def choose_stream_shape(trees: Sequence[Tree], options: StreamOptions, *, whole: bool) -> StreamShape:
    """Return the shape of streams that costs least for these trees, by :func:`_cost`.

    Args:
      trees: all trees, or the first of many.
      options: how long streams are, about.
      whole: these trees are all there are; otherwise more of their kind follow.
    """
    if options.fixed:
        return options.fixed[-1]
    found = options.sort(trees)
    usual = found.tokens[found.tokens <= LARGEST * options.tokens]  # others get streams of their own
    largest, needed = int(usual.max(initial=1)), int((found.tokens - found.shared).sum())
    lengths = _lengths(largest, options)
    least = options.tokens
    if whole:  # few trees fill shorter streams, and two of them where two cores compute one each
        least = max(min(options.tokens // 2, -(-needed // 2)), largest)
    lengths = [length for length in lengths if length >= least] or lengths[-1:]
    best: tuple[int, int, int] | None = None
    for length in lengths:
        if best is not None and _cost(-(-needed // length), length) >= best[0]:
            continue  # not even without a gap
        units = divide(found, most_tokens=length, most_reads=length)
        units = [unit for unit in units if unit.tokens <= length]
        bins = first_fit(units, StreamShape(length, length))
        if whole and length >= options.tokens // 2:  # lengths are tried in steps of two blocks there
            length = cut_to_fullest([units], [bins], length, options.block)
        cost = _cost(len(bins), length)
        reads = max((sum(units[number].reads for number in each) for each in bins), default=1)
        if bins and (best is None or cost < best[0]):
            best = cost, length, reads
    if best is None:  # nothing is usual
        best = 0, options.tokens, 1
    spare = 1 if whole else 2
    return StreamShape(best[1], min(best[1], round_up(spare * best[2], READS_STEP)))


def deal_streams(trees: Sequence[Tree], shape: StreamShape, options: StreamOptions) -> list[DealtStreams]:
    """Pack trees into streams and these into batches, the longest first.

    A tree that fits no stream of this shape gets one of its own, of a coarse size: few distinct ones arise.

    Args:
      trees: in any order.
      shape: of the streams.
      options: as for :func:`choose_stream_shape`.
    """
    found = options.sort(trees)
    units = divide(found, most_tokens=shape.tokens, most_reads=shape.reads)
    fitting = [unit for unit in units if unit.tokens <= shape.tokens and unit.reads <= shape.reads]
    by_shape: dict[StreamShape, list[PackedStream]] = {}
    for unit in units:
        if unit.tokens > shape.tokens or unit.reads > shape.reads:
            own = StreamShape(
                coarse_length(max(unit.tokens, shape.tokens), options.block),
                max(shape.reads, 1 << (unit.reads - 1).bit_length()),
            )
            by_shape.setdefault(own, []).append(_packed(found, [unit]))
    bins = first_fit(fitting, shape)
    if len(options.fixed) <= 1:  # otherwise one that is left nearly empty may be a shorter one
        bins = evened(fitting, bins, shape)
    for numbers in bins:
        used = [fitting[number] for number in numbers]
        least = next(
            (
                each
                for each in options.fixed
                if sum(unit.tokens for unit in used) <= each.tokens
                and sum(unit.reads for unit in used) <= each.reads
            ),
            shape,
        )
        by_shape.setdefault(least, []).append(_packed(found, used))
    dealt: list[DealtStreams] = []
    for each in sorted(by_shape, reverse=True):
        streams = by_shape[each]
        for start in range(0, len(streams), options.streams):
            dealt.append(DealtStreams(each, tuple(streams[start : start + options.streams])))
    return dealt


def coarse_length(tokens: int, block: int) -> int:
    """Round up to a step of a sixteenth to an eighth of the length, and to whole blocks."""
    return round_up(tokens, max(block, 1 << max(tokens.bit_length() - 4, 0)))


def _cost(streams: int, length: int) -> int:
    """Tokens computed by a machine that computes one stream at a time, and in pairs by one that computes two.

    Both count, whatever this machine is, so that it decides nothing about the streams.
    """
    return (streams + round_up(streams, 2)) * length


def _lengths(largest: int, options: StreamOptions) -> list[int]:
    """The lengths of streams that are tried: about the usual one, and longer for larger trees."""
    top = 2 * options.tokens
    if largest > options.tokens:  # two or three of the large ones fill a stream better than one does
        top = LARGEST * options.tokens
    length, tried = options.block, []
    while length < top:
        tried.append(length)
        # Coarse while a single stream holds all, so that calls with little data compile few programs.
        fine = length >= options.tokens // 2
        length = length + 2 * options.block if fine else coarse_length(length + 1, options.block)
    return [*tried, round_up(top, options.block)]


def first_fit(units: Sequence[Unit], shape: StreamShape) -> list[list[int]]:
    """Bins of units: the largest unit first, into the first bin with room for its tokens and its reads."""
    order = sorted(range(len(units)), key=lambda number: (-units[number].tokens, number))
    room = np.empty((len(units), 2), np.int64)
    bins: list[list[int]] = []
    for number in order:
        need = units[number].tokens, units[number].reads
        open_ = (room[: len(bins)] >= need).all(axis=1)
        place = int(open_.argmax()) if open_.any() else len(bins)
        if place == len(bins):
            bins.append([])
            room[place] = shape.tokens, shape.reads
        bins[place].append(number)
        room[place] -= need
    return bins


def evened(units: Sequence[Unit], bins: list[list[int]], shape: StreamShape) -> list[list[int]]:
    """As many bins, none much fuller than another: the largest unit first, into the bin with the most room for its
    tokens; the given bins where this finds no place for a unit."""
    room = np.tile(np.asarray([shape.tokens, shape.reads], np.int64), (len(bins), 1))
    found: list[list[int]] = [[] for _ in bins]
    for number in sorted(range(len(units)), key=lambda number: (-units[number].tokens, number)):
        need = units[number].tokens, units[number].reads
        fits = (room >= need).all(axis=1)
        if not fits.any():
            return bins
        place = int(np.where(fits, room[:, 0], -1).argmax())
        found[place].append(number)
        room[place] -= need
    return found


def cut_to_fullest(
    units: Sequence[Sequence[Unit]], bins: Sequence[list[list[int]]], length: int, block: int
) -> int:
    """The length of streams, cut to the fullest of them once they are evened, if they are not more of them then.

    Args:
      units: what is packed together, once or several times.
      bins: of each, by :func:`first_fit` with this length.
      length: tokens of a stream.
      block: a length is a multiple of this.
    """
    shape = StreamShape(length, length)
    fullest = max(
        (
            sum(each[number].tokens for number in one)
            for each, found in zip(units, bins, strict=True)
            for one in evened(each, found, shape)
        ),
        default=1,
    )
    cut = min(length, round_up(fullest, block))
    kept = cut == length or all(
        len(first_fit(each, StreamShape(cut, length))) == len(found)
        for each, found in zip(units, bins, strict=True)
    )
    return cut if kept else length


def _packed(trees: SortedTrees, units: Sequence[Unit]) -> PackedStream:
    """A stream of these units; units that were cut apart share their beginning again where they meet."""
    members: list[int] = []
    shared: list[int] = []
    last = -1
    for unit in sorted(units, key=lambda each: each.start):
        for place in range(unit.start, unit.stop):
            # What two trees share is the least of what neighbours between them share.
            run = 0 if last < 0 else int(trees.shared[last + 1 : place + 1].min())
            members.append(int(trees.order[place]))
            shared.append(run)
            last = place
    tokens = int(sum(trees.tokens[place] for unit in units for place in range(unit.start, unit.stop)))
    return PackedStream(tuple(members), tuple(shared), tokens - sum(shared))
