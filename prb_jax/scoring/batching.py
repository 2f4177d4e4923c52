"""How trees become batches: packed streams, or buckets of fixed shapes, and how large on the devices at hand."""

from __future__ import annotations

import math
import os
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass
from functools import cache, partial
from pathlib import Path
from typing import TYPE_CHECKING

import numpy as np
from jax.sharding import Mesh

from prb_jax.errors import short_repr
from prb_jax.models.flops import matrix_flops_per_token
from prb_jax.sharding import mesh_shape
from prb_jax.trees.batches import TreeBatch, make_batch
from prb_jax.trees.packing import PackedBatch, StreamOptions, StreamShape, pack_streams
from prb_jax.trees.shapes import ShapeOptions, Shapes, choose_shapes, round_up
from prb_jax.trees.stream_blocks import BLOCK
from prb_jax.trees.stream_shapes import choose_stream_shape
from prb_jax.trees.streams import StreamBatch, make_stream_batch
from prb_jax.trees.tree import Tree

if TYPE_CHECKING:
    from prb_jax.models.config.decoder import DecoderConfig
    from prb_jax.models.config.encoder import EncoderConfig

Batch = TreeBatch | StreamBatch

SAMPLE = 512
"""Comparisons whose lengths decide the shapes of buckets."""

# Padded tokens of a batch for each part that the mesh splits it into. On CPUs larger batches only fall
# out of the cache; accelerators need some thousand tokens to be busy.
TOKENS_PER_SHARD = {"cpu": 8_192, "gpu": 65_536, "tpu": 32_768}
MULTIPLE = {"cpu": 16, "gpu": 64, "tpu": 128}

_PROGRAM_FLOPS = 5e11
"""What two cores compute while they compile a program, five seconds."""

MOST_LANES = 8
"""Batches side by side; each holds activations of its own."""


@dataclass(frozen=True)
class PlannedBatch:
    """One batch before it is made.

    Attributes:
      members: the index of each comparison in it.
      computed: tokens that are computed for them, without padding.
      make: gives the arrays.
      take: gives the scores of each member, from those of the batch.
    """

    members: tuple[int, ...]
    computed: int
    make: Callable[[], Batch]
    take: Callable[[np.ndarray], list[np.ndarray]]

    __repr__ = short_repr


Batcher = Callable[[Sequence[Tree], Sequence[int]], Iterator[PlannedBatch]]
"""Gives the batches of a window of trees at these indices, the largest first."""


def batch_sizes(batch: Batch) -> tuple[tuple[int, ...], tuple[int, ...]]:
    """Return the shapes by which the programs of batches are told apart."""
    if isinstance(batch, TreeBatch):
        return np.shape(batch.prefix), np.shape(batch.responses)
    return np.shape(batch.tokens), np.shape(batch.reads)


def choose_batcher(
    sample: Sequence[Tree], options: ShapeOptions | StreamOptions, *, count: int, whole: bool
) -> Batcher:
    """Return a batcher of the shapes that cost least.

    Args:
      sample: trees that speak for ``count`` of them.
      options: streams or buckets.
      count: of a window.
      whole: a window may be all there is.
    """
    if isinstance(options, StreamOptions):
        return partial(
            _stream_batches, shape=choose_stream_shape(sample, options, whole=whole), options=options
        )
    # A sample speaks for the whole, so the number of compiles is weighed against all rows.
    repeat = max(1, count // len(sample))
    shapes = choose_shapes(
        [tree.shape for tree in sample] * repeat,
        options=options,
        together=[range(len(sample))] if whole else (),
    )
    return partial(_bucket_batches, shapes=shapes)


def fixed_batcher(options: StreamOptions | Shapes) -> Batcher:
    """Return a batcher that needs no sample: into the `fixed` shapes of the options, or into these buckets."""
    if isinstance(options, Shapes):
        return partial(_bucket_batches, shapes=options)
    return partial(_stream_batches, shape=options.fixed[-1], options=options)


def _stream_batches(
    trees: Sequence[Tree], indices: Sequence[int], *, shape: StreamShape, options: StreamOptions
) -> Iterator[PlannedBatch]:
    """Pack trees into streams; those that begin alike share their beginning."""

    def take(packed: PackedBatch, scores: np.ndarray) -> list[np.ndarray]:
        rows = []
        for row, stream in zip(scores, packed, strict=False):
            counts = [len(trees[member].responses) for member in stream.members]
            rows += [part.copy() for part in np.split(row[: sum(counts)], np.cumsum(counts)[:-1])]
        return rows

    for packed in pack_streams(trees, shape, options):
        yield PlannedBatch(
            members=tuple(indices[member] for stream in packed for member in stream.members),
            computed=sum(stream.tokens for stream in packed),
            make=partial(make_stream_batch, trees, packed, options),
            take=partial(take, packed),
        )


def _bucket_batches(
    trees: Sequence[Tree], indices: Sequence[int], *, shapes: Shapes
) -> Iterator[PlannedBatch]:
    """Pad trees to a few fixed shapes."""

    def take(rows: Sequence[Tree], scores: np.ndarray) -> list[np.ndarray]:
        return [scores[row, : len(tree.responses)].copy() for row, tree in enumerate(rows)]

    for padded in shapes.batches([tree.shape for tree in trees], range(len(trees))):
        rows = [trees[member] for member in padded.members]
        yield PlannedBatch(
            members=tuple(indices[member] for member in padded.members),
            computed=sum(tree.tokens for tree in rows),
            make=partial(make_batch, rows, padded.bucket, batch=padded.rows),
            take=partial(take, rows),
        )


def sample_indices(count: int) -> list[int]:
    """Evenly spaced members of the input, at most :data:`SAMPLE`."""
    return sorted({int(i) for i in np.linspace(0, count - 1, min(count, SAMPLE)).round()})


def shape_options(
    config: DecoderConfig | EncoderConfig, mesh: Mesh, batch_tokens: int | None = None
) -> ShapeOptions:
    """Return how batches are shaped for a model on these devices; `batch_tokens` takes the place of their own."""
    platform, shards = mesh.devices.flat[0].platform, mesh_shape(mesh).batch_shards
    return ShapeOptions(
        tokens_per_batch=batch_tokens or shards * TOKENS_PER_SHARD.get(platform, 8_192),
        divisor=shards,
        multiple=MULTIPLE.get(platform, 16),
        attention_length=config.attention_length,
    )


def stream_options(
    config: DecoderConfig, mesh: Mesh, batch_tokens: int | None = None, *, paged: bool = False
) -> StreamOptions:
    """Return how streams are shaped for a decoder on these devices; `batch_tokens` is about the length of a stream, of
    which each part that the mesh splits batches into computes one at a time; with `paged` a kernel reads pages."""
    platform, shards = mesh.devices.flat[0].platform, mesh_shape(mesh).batch_shards
    tokens = batch_tokens or TOKENS_PER_SHARD.get(platform, 8_192)
    return StreamOptions(
        tokens=round_up(tokens, BLOCK),
        streams=shards,
        window=config.sliding_window,
        paged=paged,
        program_cost=None if paged else round(_PROGRAM_FLOPS / matrix_flops_per_token(config)),
    )


def lanes(mesh: Mesh, *, held: float = 0.0) -> int:
    """Return how many batches are computed side by side: on one CPU device one for each core.

    Attention walks through blocks that are too small to be shared among threads, which leaves cores idle between the
    large products of a single batch. Programs of several devices meet in collectives and must keep one order.

    Args:
      mesh: devices.
      held: bytes that each of them holds; all together hold at most half of the machine's memory.
    """
    if mesh.size > 1 or mesh.devices.flat[0].platform != "cpu":
        return 1
    cores = len(os.sched_getaffinity(0)) if hasattr(os, "sched_getaffinity") else os.cpu_count() or 1
    fitting = MOST_LANES if held * MOST_LANES <= _memory() / 2 else int(_memory() / 2 / held)
    return max(1, min(cores, MOST_LANES, fitting))


@cache
def _memory() -> float:
    """Bytes of the machine, or of the container where it has less; without a bound where they are not known."""
    try:
        memory = float(os.sysconf("SC_PHYS_PAGES") * os.sysconf("SC_PAGE_SIZE"))
    except (AttributeError, OSError, ValueError):
        return math.inf
    for file in ("/sys/fs/cgroup/memory.max", "/sys/fs/cgroup/memory/memory.limit_in_bytes"):
        try:
            text = Path(file).read_text().strip()
        except OSError:
            continue
        if text.isdigit():
            memory = min(memory, float(text))
    return memory
