"""Choose the shapes of streams for all steps of a training run, and pack its steps."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import replace

import numpy as np

from prb_jax.trees.packing import (
    READS_STEP,
    bins_of,
    coarse_length,
    cut_to_fullest,
    in_batches,
    pack_streams,
    sort_trees,
    token_pairs,
    total_reads,
    total_tokens,
)
from prb_jax.trees.streams import PackedBatch, PackedStream, StreamOptions, StreamShape
from prb_jax.trees.tree import Tree, round_up

_STREAM_COST = 256  # cost of one more batch of streams, in tokens of each stream

_ALONE = 0.9
"""Time of one stream on two cores, relative to one core. Measured values are 0.7 to 0.95, because blocks of attention
are too small to share."""

_SEVERAL_CORES = 0.9
"""Weight of machines with two or more cores in the expected time; machines with one core have the rest."""

_SPARE_READS = 2  # room for read places, as a multiple of the number that the sampled steps need


def choose_step_shapes(
    steps: Sequence[Sequence[Tree]],
    options: StreamOptions,
    *,
    most_shapes: int,
    compile_cost: float,
    count: int,
) -> tuple[StreamShape, ...]:
    """Return the cheapest shapes for the steps of a training run, the smallest first.

    Args:
      steps: Trees of a sample of steps.
      options: Options with the maximum tokens of a stream and the streams per batch. Larger trees get separate shapes
        when they occur.
      most_shapes: 1 for one shape; larger numbers allow two.
      compile_cost: Cost of one more shape, in tokens.
      count: Number of steps of the run.
    """
    ordered = [sort_trees(trees, options) for trees in steps]
    most = max(options.tokens // options.multiple, 1) * options.multiple
    tokens = np.concatenate([trees.tokens for trees in ordered])
    largest = int(tokens[tokens <= most].max(initial=1))

    def batches(streams: int) -> int:
        return -(-streams // options.streams)

    # Each device of a mesh, TPU or GPU computes one stream at a time; a single CPU device can compute several.
    one_by_one = options.streams > 1 or options.kernel or options.keys is not None
    time = _one_by_one if one_by_one else _on_one_device

    best: tuple[float, tuple[int, ...]] | None = None
    reads = 1
    for tried in _trained_lengths(largest, most, options.multiple):
        bins_of_steps = [bins_of(trees, tried) for trees in ordered]
        filled = [np.asarray([total_tokens(units) for units in bins], np.int64) for bins in bins_of_steps]
        reads = max(reads, *(total_reads(units) for bins in bins_of_steps for units in bins), 1)
        for small in (0, *_trained_lengths(1, tried, options.multiple)[:-1]) if most_shapes > 1 else (0,):
            # Tried lengths are coarse, so a single shape is cut to the fullest stream.
            length = tried if small else cut_to_fullest(bins_of_steps, tried, options.multiple)
            # Streams that fit the shorter shape use it.
            short = [int((tokens <= small).sum()) for tokens in filled]
            cost = sum(
                time(batches(len(tokens) - few), length + _STREAM_COST, batches(few), small + _STREAM_COST)
                for few, tokens in zip(short, filled, strict=True)
            )
            total = cost / len(ordered) * options.streams * count + compile_cost * (2 if small else 1)
            if best is None or total < best[0]:
                best = total, (small, length) if small else (length,)
        if all(len(tokens) <= options.streams for tokens in filled):
            break  # longer streams would only be emptier
    assert best is not None
    places = round_up(_SPARE_READS * reads, READS_STEP)
    return tuple(StreamShape(length, min(length, places)) for length in best[1])


def pack_step(
    trees: Sequence[Tree], shapes: Sequence[StreamShape], options: StreamOptions
) -> list[PackedBatch]:
    """Pack the trees of a step into streams and batches; the streams of a batch have similar costs.

    Args:
      trees: Trees of the step.
      shapes: Shapes from :func:`choose_step_shapes`; a tree that fits none gets a separate shape.
      options: Options of :func:`choose_step_shapes`.
    """
    alone = replace(options, streams=1, fixed=tuple(shapes))
    packed = [stream for batch in pack_streams(trees, shapes[-1], alone) for stream in batch]
    batches: list[PackedBatch] = []
    for shape in dict.fromkeys(stream.shape for stream in packed):
        streams = [stream for stream in packed if stream.shape == shape]
        # Devices of a mesh wait for each other, and only the time of attention differs between streams.
        streams.sort(key=lambda stream: _pairs(trees, stream), reverse=True)
        batches += in_batches(streams, options)
    return batches


def _trained_lengths(largest: int, most: int, block: int) -> list[int]:
    """Return lengths in coarse steps, from the length of the largest tree to the maximum."""
    length, tried = min(round_up(largest, block), most), []
    while length < most:
        tried.append(length)
        length = max(length + block, coarse_length(length + 1, block))
    return [*tried, most]


def _one_by_one(large: int, length: int, small: int, short: int) -> float:
    """Return the time of ``large`` streams of cost ``length`` and ``small`` of cost ``short`` in sequence."""
    return large * length + small * short


def _on_one_device(large: int, length: int, small: int, short: int) -> float:
    """Return the expected core time over machines with one and two cores, independent of this machine."""
    lanes = [0, 0]
    for cost in (*[length] * large, *[short] * small):
        lanes[lanes.index(min(lanes))] += cost
    two = min(lanes) + _ALONE * (max(lanes) - min(lanes))
    one = _one_by_one(large, length, small, short)
    return (1 - _SEVERAL_CORES) * one + _SEVERAL_CORES * 2 * two


def _pairs(trees: Sequence[Tree], stream: PackedStream) -> float:
    """Return the approximate number of token pairs in the attention of a stream."""
    members = zip(stream.members, stream.shared, strict=True)
    return sum(token_pairs(trees[member]) - shared**2 / 2 for member, shared in members)
