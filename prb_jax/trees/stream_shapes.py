"""The shapes of streams: one for scoring, one or two for all steps of a training run."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import replace

import numpy as np

from prb_jax.trees.packing import (
    PackedBatch,
    PackedStream,
    SortedTrees,
    StreamOptions,
    StreamShape,
    Unit,
    balanced,
    coarse_length,
    divide,
    first_fit,
    in_batches,
    pack_streams,
    sort_trees,
    total_reads,
    total_tokens,
)
from prb_jax.trees.stream_tables import round_up
from prb_jax.trees.tree import Tree

READS_STEP = 16  # read places of a stream are a multiple of this
LARGEST = 4  # a stream is made at most this many times as long as usual so that a large tree stays whole
_STREAM_COST = 256  # what starting one more batch of streams costs, in tokens of each

_ALONE = 0.9
"""Time that two cores take for a stream together, of the time that one takes: 0.7 to 0.95 were measured, since the
blocks of attention are too small to be shared."""

_SEVERAL_CORES = 0.9
"""Weight of a machine with two cores or more among machines; the rest is that of a machine with one."""

_SPARE_READS = 2  # streams have room for so many times the read places that the looked-at steps need


def choose_stream_shape(trees: Sequence[Tree], options: StreamOptions, *, whole: bool) -> StreamShape:
    """Return the shape of streams that costs least for these trees.

    Args:
      trees: all trees, or the first of many.
      options: how long streams are, about.
      whole: these trees are all there are; otherwise more of their kind follow.
    """
    if options.fixed:
        return options.fixed[-1]
    ordered = sort_trees(trees, options)
    usual = ordered.tokens[ordered.tokens <= LARGEST * options.tokens]  # others get streams of their own
    largest, needed = (
        int(usual.max(initial=1)),
        int((ordered.tokens - ordered.shared).sum()) - ordered.saved(slice(None)),
    )
    lengths = _scored_lengths(largest, options)
    least = options.tokens
    if whole:  # few trees fill shorter streams, and two of them where two cores compute one each
        least = max(min(options.tokens // 2, -(-needed // 2)), largest)
    lengths = [length for length in lengths if length >= least] or lengths[-1:]

    def cost(streams: int, length: int) -> int:
        # Tokens computed by a machine that computes one stream at a time, and in pairs by one that computes two. Both
        # count, whatever this machine is, so that it decides nothing about the streams.
        return (streams + round_up(streams, 2)) * length

    best: tuple[int, int, int] | None = None
    for length in lengths:
        if best is not None and cost(-(-needed // length), length) >= best[0]:
            continue  # not even without a gap
        bins = _bins(ordered, length)
        if whole and length >= options.tokens // 2:  # lengths are tried in steps of two blocks there
            length = _cut_to_fullest([bins], length, options.multiple)
        total = cost(len(bins), length)
        # Also those of the balanced streams, by which the length was cut: some have more places than any before.
        even = balanced(bins, StreamShape(length, length))
        reads = max((total_reads(units) for units in [*bins, *even]), default=1)
        if bins and (best is None or total < best[0]):
            best = total, length, reads
    if best is None:  # nothing is usual
        best = 0, options.tokens, 1
    spare = 1 if whole else 2
    return StreamShape(best[1], min(best[1], round_up(spare * best[2], READS_STEP)))


def choose_step_shapes(
    steps: Sequence[Sequence[Tree]],
    options: StreamOptions,
    *,
    most_shapes: int,
    compile_cost: float,
    count: int,
) -> tuple[StreamShape, ...]:
    """Return the shapes with which the steps of a training run compute least, the smallest first.

    Args:
      steps: the trees of some steps, which speak for all.
      options: with the most tokens of a stream, and how many streams a batch has. Larger trees get streams of their
        own when they come.
      most_shapes: one, or more for two.
      compile_cost: of one more shape, in tokens.
      count: steps of the run.
    """
    ordered = [sort_trees(trees, options) for trees in steps]
    most = max(options.tokens // options.multiple, 1) * options.multiple
    tokens = np.concatenate([trees.tokens for trees in ordered])
    largest = int(tokens[tokens <= most].max(initial=1))

    def batches(streams: int) -> int:
        return -(-streams // options.streams)

    # Devices of a mesh, TPUs and GPUs compute one stream each; one CPU device computes one, or several at a time.
    one_by_one = options.streams > 1 or options.kernel or options.keys is not None
    time = _one_by_one if one_by_one else _on_one_device

    best: tuple[float, tuple[int, ...]] | None = None
    reads = 1
    for tried in _trained_lengths(largest, most, options.multiple):
        bins_of_steps = [_bins(trees, tried) for trees in ordered]
        filled = [np.asarray([total_tokens(units) for units in bins], np.int64) for bins in bins_of_steps]
        reads = max(reads, *(total_reads(units) for bins in bins_of_steps for units in bins), 1)
        for small in (0, *_trained_lengths(1, tried, options.multiple)[:-1]) if most_shapes > 1 else (0,):
            # Lengths are tried in coarse steps.
            length = tried if small else _cut_to_fullest(bins_of_steps, tried, options.multiple)
            # A stream with little in it is a short one, where there is a shorter shape.
            short = [int((tokens <= small).sum()) for tokens in filled]
            cost = sum(
                time(batches(len(tokens) - few), length + _STREAM_COST, batches(few), small + _STREAM_COST)
                for few, tokens in zip(short, filled, strict=True)
            )
            total = cost / len(ordered) * options.streams * count + compile_cost * (2 if small else 1)
            if best is None or total < best[0]:
                best = total, (small, length) if small else (length,)
        if all(len(tokens) <= options.streams for tokens in filled):
            break  # longer ones would only be emptier
    assert best is not None
    places = round_up(_SPARE_READS * reads, READS_STEP)
    return tuple(StreamShape(length, min(length, places)) for length in best[1])


def pack_together(trees: Sequence[Tree], options: StreamOptions) -> PackedBatch:
    """Pack trees into one batch, of as many streams as the options say or fewer, about as short as can be."""
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


def pack_step(
    trees: Sequence[Tree], shapes: Sequence[StreamShape], options: StreamOptions
) -> list[PackedBatch]:
    """Pack the trees of a step into streams and these into batches, streams that cost alike side by side.

    Args:
      trees: of the step.
      shapes: of :func:`choose_step_shapes`; a tree that fits none gets one of its own.
      options: as given there.
    """
    alone = replace(options, streams=1, fixed=tuple(shapes))
    packed = [stream for batch in pack_streams(trees, shapes[-1], alone) for stream in batch]
    batches: list[PackedBatch] = []
    for shape in dict.fromkeys(stream.shape for stream in packed):
        streams = [stream for stream in packed if stream.shape == shape]
        # The devices of a mesh wait for each other, and only attention takes longer on some than on others.
        streams.sort(key=lambda stream: _pairs(trees, stream), reverse=True)
        batches += in_batches(streams, options)
    return batches


def _bins(trees: SortedTrees, length: int) -> list[list[Unit]]:
    """The units of streams of this length; trees that are longer are left out."""
    units = divide(trees, most_tokens=length, most_reads=length)
    return first_fit([unit for unit in units if unit.tokens <= length], StreamShape(length, length))


def _scored_lengths(largest: int, options: StreamOptions) -> list[int]:
    """The lengths of streams that are tried: about the usual one, and longer for larger trees."""
    top = 2 * options.tokens
    if largest > options.tokens:  # two or three of the large ones fill a stream better than one does
        top = LARGEST * options.tokens
    length, tried = options.multiple, []
    while length < top:
        tried.append(length)
        # Coarse while a single stream holds all, so that calls with little data compile few programs.
        fine = length >= options.tokens // 2
        length = length + 2 * options.multiple if fine else coarse_length(length + 1, options.multiple)
    return [*tried, round_up(top, options.multiple)]


def _trained_lengths(largest: int, most: int, block: int) -> list[int]:
    """Lengths from one that holds the largest tree to the longest, in coarse steps."""
    length, tried = min(round_up(largest, block), most), []
    while length < most:
        tried.append(length)
        length = max(length + block, coarse_length(length + 1, block))
    return [*tried, most]


def _cut_to_fullest(bins_of_steps: Sequence[list[list[Unit]]], length: int, block: int) -> int:
    """The length of streams, a multiple of ``block``, cut to the fullest of them once they are balanced, if they are
    not more of them then. The bins are of :func:`first_fit` with this length, of what is packed together, once or
    several times."""
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


def _one_by_one(large: int, length: int, small: int, short: int) -> float:
    """Time of ``large`` streams of cost ``length`` and ``small`` of cost ``short``, one after the other."""
    return large * length + small * short


def _on_one_device(large: int, length: int, small: int, short: int) -> float:
    """The time of all cores, a mean over machines with one and two: whatever this machine is, it decides nothing."""
    lanes = [0, 0]
    for cost in (*[length] * large, *[short] * small):
        lanes[lanes.index(min(lanes))] += cost
    two = min(lanes) + _ALONE * (max(lanes) - min(lanes))
    one = _one_by_one(large, length, small, short)
    return (1 - _SEVERAL_CORES) * one + _SEVERAL_CORES * 2 * two


def _pairs(trees: Sequence[Tree], stream: PackedStream) -> float:
    """About how many pairs of tokens meet in the attention of a stream."""
    total = 0.0
    for member, shared in zip(stream.members, stream.shared, strict=True):
        prefix = len(trees[member].prefix)
        total += (prefix**2 - shared**2) / 2
        total += sum(len(ids) * (prefix + len(ids) / 2) for ids in trees[member].responses)
    return total
