"""The shapes of the streams that the steps of a training run are packed into: one or two for the whole run."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import replace

import numpy as np

from prb_jax.trees.grouping import divide
from prb_jax.trees.packing import (
    READS_STEP,
    DealtStreams,
    PackedStream,
    StreamOptions,
    StreamShape,
    coarse_length,
    cut_to_fullest,
    deal_streams,
    first_fit,
)
from prb_jax.trees.shapes import round_up
from prb_jax.trees.tree import Tree

_STREAM_COST = 256
"""What starting one more batch of streams costs, in tokens of each."""

_ALONE = 0.9
"""Time that two cores take for a stream together, of the time that one takes: 0.7 to 0.95 were measured, since the
blocks of attention are too small to be shared."""

_SEVERAL_CORES = 0.9
"""Weight of a machine with two cores or more among machines; the rest is that of a machine with one."""

_SPARE_READS = 2
"""Streams have room for so many times the read places that the looked-at steps need."""


def choose_step_shapes(
    steps: Sequence[Sequence[Tree]],
    options: StreamOptions,
    *,
    most_shapes: int,
    compile_cost: float,
    count: int,
) -> tuple[StreamShape, ...]:
    """Return the shapes with which the steps of a run compute least, the smallest first.

    Args:
      steps: the trees of some steps, which speak for all.
      options: with the most tokens of a stream, and how many streams a batch has. Larger trees get streams of their
        own when they come.
      most_shapes: one, or more for two.
      compile_cost: of one more shape, in tokens.
      count: steps of the run.
    """
    found = [options.sort(trees) for trees in steps]
    most = max(options.tokens // options.block, 1) * options.block
    tokens = np.concatenate([each.tokens for each in found])
    largest = int(tokens[tokens <= most].max(initial=1))

    def batches(streams: int) -> int:
        return -(-streams // options.streams)

    # Devices of a mesh, and TPUs, compute one stream each; one CPU device computes one, or several at a time.
    one_by_one = options.streams > 1 or options.kernel is not None
    time = _one_by_one if one_by_one else _on_one_device

    best: tuple[float, tuple[int, ...]] | None = None
    reads = 1
    for tried in _lengths(largest, most, options.block):
        units = [
            [unit for unit in divide(each, most_tokens=tried, most_reads=tried) if unit.tokens <= tried]
            for each in found
        ]
        bins = [first_fit(each, StreamShape(tried, tried)) for each in units]
        filled: list[np.ndarray] = []
        for own, each in zip(units, bins, strict=True):
            filled.append(np.asarray([sum(own[number].tokens for number in one) for one in each], np.int64))
            reads = max(reads, *(sum(own[number].reads for number in one) for one in each), 1)
        for small in (0, *_lengths(1, tried, options.block)[:-1]) if most_shapes > 1 else (0,):
            # Lengths are tried in coarse steps.
            length = tried if small else cut_to_fullest(units, bins, tried, options.block)
            # A stream with little in it is a short one, where there is a shorter shape.
            short = [int((each <= small).sum()) for each in filled]
            cost = sum(
                time(batches(len(each) - few), length + _STREAM_COST, batches(few), small + _STREAM_COST)
                for few, each in zip(short, filled, strict=True)
            )
            total = cost / len(found) * options.streams * count + compile_cost * (2 if small else 1)
            if best is None or total < best[0]:
                best = total, (small, length) if small else (length,)
        if all(len(each) <= options.streams for each in filled):
            break  # longer ones would only be emptier
    assert best is not None
    places = round_up(_SPARE_READS * reads, READS_STEP)
    return tuple(StreamShape(length, min(length, places)) for length in best[1])


def _one_by_one(large: int, length: int, small: int, short: int) -> float:
    """Time of so many streams of two costs, one after the other."""
    return large * length + small * short


def _on_one_device(large: int, length: int, small: int, short: int) -> float:
    """The time of all cores, a mean over machines with one and two: whatever this machine is, it decides nothing."""
    lanes = [0, 0]
    for cost in (*[length] * large, *[short] * small):
        lanes[lanes.index(min(lanes))] += cost
    two = min(lanes) + _ALONE * (max(lanes) - min(lanes))
    one = _one_by_one(large, length, small, short)
    return (1 - _SEVERAL_CORES) * one + _SEVERAL_CORES * 2 * two


def _lengths(largest: int, most: int, block: int) -> list[int]:
    """Lengths from one that holds the largest tree to the longest, in coarse steps."""
    length, found = min(round_up(largest, block), most), []
    while length < most:
        found.append(length)
        length = max(length + block, coarse_length(length + 1, block))
    return [*found, most]


def deal_step(
    trees: Sequence[Tree], shapes: Sequence[StreamShape], options: StreamOptions
) -> list[DealtStreams]:
    """Pack the trees of a step into streams and these into batches, streams that cost alike side by side.

    Args:
      trees: of the step.
      shapes: of :func:`choose_step_shapes`; a tree that fits none gets one of its own.
      options: as given there.
    """
    dealt = deal_streams(trees, shapes[-1], replace(options, streams=1, fixed=tuple(shapes)))
    batches: list[DealtStreams] = []
    for shape in dict.fromkeys(each.shape for each in dealt):
        streams = [each.streams[0] for each in dealt if each.shape == shape]
        # The devices of a mesh wait for each other, and only attention takes longer on some than on others.
        streams.sort(key=lambda stream: _pairs(trees, stream), reverse=True)
        for start in range(0, len(streams), options.streams):
            batches.append(DealtStreams(shape, tuple(streams[start : start + options.streams])))
    return batches


def _pairs(trees: Sequence[Tree], stream: PackedStream) -> float:
    """About how many pairs of tokens meet in the attention of a stream."""
    total = 0.0
    for member, shared in zip(stream.members, stream.shared, strict=True):
        prefix = len(trees[member].prefix)
        total += (prefix**2 - shared**2) / 2
        total += sum(len(ids) * (prefix + len(ids) / 2) for ids in trees[member].responses)
    return total
