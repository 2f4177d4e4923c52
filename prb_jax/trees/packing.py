"""Assign trees to streams.

Comparisons with a common prefix are packed next to each other, so the prefix is computed once. Common prefixes are
found only from token ids. Sorting trees by prefix makes neighbours share the longest prefixes. The lengths of these
shared prefixes then give the tokens that a run of neighbours needs, and the best places to cut it. First fit, largest
run first, determines the number of streams; then the streams are balanced.

All choices depend only on the lengths, the ids of the prefixes and the options. So a continued run forms the same
streams and gives the same bytes. Streams do not depend on the number of streams per batch: they are the same on every
mesh.
"""

from __future__ import annotations

import itertools
from collections.abc import Sequence
from dataclasses import dataclass, field, replace

import numpy as np

from prb_jax.errors import short_repr
from prb_jax.seams import get
from prb_jax.trees.streams import PackedBatch, PackedStream, StreamOptions, StreamShape
from prb_jax.trees.tree import LEAST_SHARED, Tree, common_run, round_up

READS_STEP = 16  # read places of a stream are a multiple of this
_FEW = 8  # maximum number of streams for which a shorter shape is tried; more streams are about equally full


def pack_streams(
    trees: Sequence[Tree], shape: StreamShape, options: StreamOptions, kept: Sequence[int] = ()
) -> list[PackedBatch]:
    """Pack trees into streams and these into batches, the longest first.

    A tree that does not fit this shape gets a separate stream with a rounded size, so few distinct sizes occur.

    Args:
      trees: Trees in any order.
      shape: Shape of the streams.
      options: Options, as in :func:`prb_jax.scoring.batching.choose_stream_shape`.
      kept: Cached tokens, as in :func:`sort_trees`; at most `shape.kept` per tree.
    """
    ordered = sort_trees(trees, options, kept)
    fitting: list[Unit] = []
    by_shape: dict[StreamShape, list[list[Unit]]] = {}
    for unit in divide(ordered, most_tokens=shape.tokens, most_reads=shape.reads, most_kept=shape.kept):
        if _fit([unit], shape):
            fitting.append(unit)
            continue
        larger = StreamShape(
            coarse_length(max(unit.tokens, shape.tokens), options.multiple),
            max(shape.reads, 1 << (unit.reads - 1).bit_length()),
            shape.kept,
        )
        by_shape.setdefault(larger, []).append([unit])
    bins = first_fit(fitting, shape)
    if len(options.fixed) <= 1:  # with several shapes, a nearly empty stream can get a shorter shape
        bins = balanced(bins, shape)
        if options.kernel:
            bins = get("kernel tables", "even pairs").value(bins, shape, ordered.pairs_of)
    lengths = options.fixed or _short(bins, shape, options)
    for units in bins:
        least = next((known for known in lengths if _fit(units, known)), shape)
        by_shape.setdefault(least, []).append(units)
    batches: list[PackedBatch] = []
    for used in sorted(by_shape, reverse=True):
        # Adjacent units that were cut apart share their prefix again.
        places = [[range(unit.start, unit.stop) for unit in units] for units in by_shape[used]]
        streams = [packed_stream(ordered, sorted(itertools.chain(*runs)), used) for runs in places]
        batches += in_batches(streams, options)
    return batches


def in_batches(streams: Sequence[PackedStream], options: StreamOptions) -> list[PackedBatch]:
    """Group streams of one shape into batches, in order."""
    return [
        tuple(streams[start : start + options.streams]) for start in range(0, len(streams), options.streams)
    ]


def coarse_length(tokens: int, block: int) -> int:
    """Round up to a step of about a sixteenth to an eighth of the length, and to whole blocks."""
    return round_up(tokens, block * max(1, (1 << max(tokens.bit_length() - 4, 0)) // block))


@dataclass(frozen=True, eq=False)
class SortedTrees:
    """Trees in the order of their prefixes. int64 [n] arrays."""

    order: np.ndarray  # index of the tree at each place
    tokens: np.ndarray
    """Tokens of each tree by itself; equal responses count once."""
    reads: np.ndarray  # number of responses of each tree
    shared: np.ndarray
    """Length of the prefix shared with the tree at the place before; 0 at place 0, and 0 below :data:`LEAST_SHARED`
    unless both whole prefixes are equal."""
    kept: np.ndarray
    """Number of first tokens with cached keys and values, which are not computed."""
    repeated: np.ndarray = field(default_factory=lambda: np.zeros((3, 0), np.int64))
    """[3, n], responses that occur in several trees with the same prefix, one column per occurrence: the tree's place,
    in ascending order, the number of the response, and its tokens. A stream computes each such response once."""

    pairs: np.ndarray = field(default_factory=lambda: np.zeros(0))
    """About the number of pairs of tokens of each tree by itself that see each other, for kernels."""

    __repr__ = short_repr

    def saved(self, which: slice | np.ndarray) -> int:
        """Return the number of tokens saved by computing the responses in these columns of `repeated` once."""
        _, numbers, tokens = self.repeated[:, which]
        first = np.unique(numbers, return_index=True)[1]
        return int(tokens.sum() - tokens[first].sum())

    def pairs_of(self, unit: Unit) -> float:
        """Return about the number of pairs of tokens of a unit that see each other."""
        twice = self.shared[unit.start + 1 : unit.stop]
        return float(self.pairs[unit.start : unit.stop].sum() - (twice**2).sum() / 2)

    def shared_by(self, place: int, later: int) -> int:
        """Return the length of the prefix that the trees at two places share: the minimum of `shared` between them."""
        return int(self.shared[place + 1 : later + 1].min())


@dataclass(frozen=True)
class Unit:
    """Trees that go into one stream together: a run of places of :class:`SortedTrees`."""

    start: int
    stop: int
    tokens: int  # computed tokens; shared prefixes count once
    reads: int  # number of responses
    kept: int = 0  # number of cached tokens


def sort_trees(trees: Sequence[Tree], options: StreamOptions, kept: Sequence[int] = ()) -> SortedTrees:
    """Sort trees by prefix; the sort is stable. Without sharing, trees keep their order.

    Args:
      trees: Trees in any order.
      options: Options of streams; `share` turns sorting on.
      kept: Number of first tokens of each tree with cached keys and values; 0 if not given.
    """
    order = list(range(len(trees)))
    groups = [len(tree.groups(options.rope_switch)) for tree in trees]
    # 0 for conversations of the usual rotary angles, 1 for longer ones, 2 for both.
    kinds = [
        2 if count > 1 else int(_is_long(tree, options)) for tree, count in zip(trees, groups, strict=True)
    ]
    if options.share:
        # Big-endian bytes sort in the order of the ids.
        keys = [tree.prefix.astype(">i4").tobytes() for tree in trees]
        order.sort(key=lambda index: (kinds[index], keys[index]))
    shared = np.zeros(len(order), np.int64)
    for place in range(1, len(order) if options.share else 0):
        one, other = order[place - 1], order[place]
        if kinds[one] != kinds[other] or kinds[one] == 2:
            continue
        before, prefix = trees[one].prefix, trees[other].prefix
        run = common_run([before, prefix])
        # Equal prefixes are always shared, so equal conversations have bitwise equal scores.
        shared[place] = run if run >= LEAST_SHARED or run == len(before) == len(prefix) else 0

    def tokens_of(index: int) -> int:
        tree = trees[index]
        distinct = {response.tobytes() for response in tree.responses}
        return groups[index] * len(tree.prefix) + sum(len(ids) // tree.prefix.itemsize for ids in distinct)

    repeated: list[tuple[int, int, int]] = []
    known: dict[bytes, int] = {}  # number of each response to the prefix
    numbers = itertools.count()
    for place, index in enumerate(order):
        tree = trees[index]
        equal = place and shared[place] == len(tree.prefix) == len(trees[order[place - 1]].prefix) > 0
        known = known if equal else {}
        for ids in {response.tobytes() for response in tree.responses}:
            number = known[ids] if ids in known else known.setdefault(ids, next(numbers))
            repeated.append((place, number, len(ids) // tree.prefix.itemsize))
    rows = np.asarray(repeated, np.int64).reshape(-1, 3).T
    several = np.bincount(rows[1], minlength=1)[rows[1]] > 1
    return SortedTrees(
        order=np.asarray(order, np.int64),
        tokens=np.asarray([tokens_of(index) for index in order], np.int64),
        reads=np.asarray([len(trees[index].responses) for index in order], np.int64),
        pairs=np.asarray([token_pairs(trees[index]) for index in order], np.int64),
        shared=shared,
        kept=np.asarray([kept[index] for index in order] if kept else np.zeros(len(order)), np.int64),
        repeated=rows[:, several],
    )


def _is_long(tree: Tree, options: StreamOptions) -> bool:
    tokens = len(tree.prefix) + sum(map(len, tree.responses[:1]))
    return options.rope_switch is not None and tokens > options.rope_switch


def token_pairs(tree: Tree) -> int:
    """Return about the number of pairs of tokens of a tree that see each other."""
    prefix = len(tree.prefix)
    return prefix**2 // 2 + sum(len(ids) * (prefix + len(ids) // 2) for ids in tree.responses)


def divide(trees: SortedTrees, *, most_tokens: int, most_reads: int, most_kept: int = 0) -> list[Unit]:
    """Cut the sorted trees into units that fit a stream, with as few tokens as possible computed twice.

    Trees without a common prefix are never in one unit. Only a prefix whose trees do not fit together is repeated. A
    single tree that does not fit is still a unit.
    """
    tokens_before, reads_before, shared_before, kept_before, both_before = (
        np.concatenate([[0], np.cumsum(counts)])
        for counts in (
            trees.tokens, trees.reads, trees.shared, trees.kept, np.minimum(trees.shared, trees.kept)
        )
    )  # fmt: skip
    most = StreamShape(most_tokens, most_reads, most_kept)

    def unit(start: int, stop: int) -> Unit:
        tokens = tokens_before[stop] - tokens_before[start] - (shared_before[stop] - shared_before[start + 1])
        kept = kept_before[stop] - kept_before[start] - (both_before[stop] - both_before[start + 1])
        again = trees.saved(slice(*np.searchsorted(trees.repeated[0], (start, stop))))
        reads = int(reads_before[stop] - reads_before[start])
        return Unit(start, stop, int(tokens - kept) - again, reads, int(kept))

    units: list[Unit] = []
    starts = np.flatnonzero(trees.shared == 0)
    waiting = [(int(a), int(b)) for a, b in zip(starts, [*starts, len(trees.order)][1:], strict=True)]
    while waiting:
        start, stop = waiting.pop()
        whole = unit(start, stop)
        if _fit([whole], most) or stop - start == 1:
            units.append(whole)
            continue
        inner = trees.shared[start + 1 : stop]
        least = int(inner.min())
        cuts = [start, *(start + 1 + np.flatnonzero(inner == least)).tolist(), stop]
        current: Unit | None = None
        for low, high in itertools.pairwise(cuts):
            child = unit(low, high)
            if not _fit([child], most) and high - low > 1:
                waiting.append((low, high))
                child = None
            if current is not None and child is not None and 4 * least > child.tokens:
                joined = unit(current.start, high)
                if _fit([joined], most):
                    current = joined
                    continue
            if current is not None:
                units.append(current)
            current = child
        if current is not None:
            units.append(current)
    return sorted(units, key=lambda unit: unit.start)


def first_fit(units: Sequence[Unit], shape: StreamShape) -> list[list[Unit]]:
    """Pack units into bins: the largest unit first, into the first bin with room for its tokens and reads."""
    room = np.empty((len(units), 3), np.int64)
    bins: list[list[Unit]] = []
    for unit in _largest_first(units):
        need = unit.tokens, unit.reads, unit.kept
        open_ = (room[: len(bins)] >= need).all(axis=1)
        place = int(open_.argmax()) if open_.any() else len(bins)
        if place == len(bins):
            bins.append([])
            room[place] = shape.tokens, shape.reads, shape.kept
        bins[place].append(unit)
        room[place] -= need
    return bins


def balanced(bins: list[list[Unit]], shape: StreamShape) -> list[list[Unit]]:
    """Return the same number of bins, about equally full: the largest unit first, into the bin with the most room.

    If a unit then fits no bin, the given bins are returned.
    """
    room = np.tile(np.asarray([shape.tokens, shape.reads, shape.kept], np.int64), (len(bins), 1))
    even: list[list[Unit]] = [[] for _ in bins]
    for unit in _largest_first([unit for units in bins for unit in units]):
        need = unit.tokens, unit.reads, unit.kept
        fits = (room >= need).all(axis=1)
        if not fits.any():
            return bins
        place = int(np.where(fits, room[:, 0], -1).argmax())
        even[place].append(unit)
        room[place] -= need
    return even


def _short(bins: list[list[Unit]], shape: StreamShape, options: StreamOptions) -> tuple[StreamShape, ...]:
    """Return a shorter shape for less full streams, if it saves more tokens than its program costs; else nothing."""
    if options.program_cost is None or not 1 < len(bins) <= _FEW:
        return ()
    filled = [round_up(total_tokens(units), options.multiple) for units in bins]
    saved = {
        short: sum(shape.tokens - short for tokens in filled if tokens <= short) for short in sorted(filled)
    }
    short = max(saved, key=saved.__getitem__)
    return (StreamShape(short, min(short, shape.reads)),) if saved[short] > options.program_cost else ()


def _largest_first(units: Sequence[Unit]) -> list[Unit]:
    return sorted(units, key=lambda unit: (-unit.tokens, unit.start))


def total_tokens(units: Sequence[Unit]) -> int:
    """Return the total tokens of units."""
    return sum(unit.tokens for unit in units)


def total_reads(units: Sequence[Unit]) -> int:
    """Return the total read places of units."""
    return sum(unit.reads for unit in units)


def _fit(units: Sequence[Unit], shape: StreamShape) -> bool:
    kept = sum(unit.kept for unit in units)
    return total_tokens(units) <= shape.tokens and total_reads(units) <= shape.reads and kept <= shape.kept


def packed_stream(trees: SortedTrees, places: Sequence[int], shape: StreamShape) -> PackedStream:
    """Return a stream of the trees at these places, which are in ascending order and may be empty."""
    shared = [trees.shared_by(*pair) for pair in itertools.pairwise(places)]
    chosen, begun = np.asarray(places, np.int64), np.asarray([0, *shared][: len(places)], np.int64)
    kept = np.maximum(trees.kept[chosen] - begun, 0)
    return PackedStream(
        shape,
        members=tuple(trees.order[chosen].tolist()),
        shared=tuple(begun.tolist()),
        tokens=int((trees.tokens[chosen] - begun - kept).sum())
        - trees.saved(np.isin(trees.repeated[0], chosen)),
    )


def pack_together(trees: Sequence[Tree], options: StreamOptions) -> PackedBatch:
    """Pack trees into one batch of at most `options.streams` streams, about as short as possible."""
    ordered = sort_trees(trees, options)
    needed = -(-int((ordered.tokens - ordered.shared).sum()) // options.streams)
    length, reads = max(needed, int(ordered.tokens.max())), int(ordered.reads.sum())
    length, batches = round_up(length, options.multiple), []
    while len(batches) != 1:
        batches = pack_streams(trees, StreamShape(length, reads), options)
        length += options.multiple
    (packed,) = batches
    most = max(sum(len(trees[member].responses) for member in stream.members) for stream in packed)
    shape = StreamShape(packed[0].shape.tokens, round_up(most, READS_STEP))
    return tuple(replace(stream, shape=shape) for stream in packed)


def bins_of(trees: SortedTrees, length: int) -> list[list[Unit]]:
    """Return the units of each stream of this length; longer trees are left out."""
    units = divide(trees, most_tokens=length, most_reads=length)
    return first_fit([unit for unit in units if unit.tokens <= length], StreamShape(length, length))


def cut_to_fullest(bins_of_steps: Sequence[list[list[Unit]]], length: int, block: int) -> int:
    """Return the length of streams cut to the fullest balanced stream, a multiple of ``block``.

    The length stays if cutting it would need more streams. Each list of bins is the result of :func:`first_fit` with
    this length.
    """
    shape = StreamShape(length, length)
    fullest = max(
        (total_tokens(units) for bins in bins_of_steps for units in balanced(bins, shape)),
        default=1,
    )
    cut = min(length, round_up(fullest, block))
    as_few = cut == length or all(
        len(first_fit([unit for units in bins for unit in units], StreamShape(cut, length))) == len(bins)
        for bins in bins_of_steps
    )
    return cut if as_few else length
