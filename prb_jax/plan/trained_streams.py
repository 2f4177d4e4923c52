"""The packed streams of a planned training step, with shapes in place of arrays, and what padding costs."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, replace
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
from jax.sharding import Mesh

from prb_jax.errors import MeshError
from prb_jax.models.config.decoder import DecoderConfig
from prb_jax.plan.shapes import BatchShape
from prb_jax.scoring.batching import shape_options, stream_options
from prb_jax.sharding import batch_sharding, mesh_shape
from prb_jax.training.objective import Extras
from prb_jax.trees.kernel_tables import KernelTable
from prb_jax.trees.packing import (
    READS_STEP,
    DealtStreams,
    StreamOptions,
    StreamShape,
    deal_streams,
    for_kernel,
)
from prb_jax.trees.shapes import choose_shapes, round_up
from prb_jax.trees.streams import StreamBatch, make_stream_batch
from prb_jax.trees.tree import Tree


@dataclass(frozen=True)
class TrainedStreams:
    """The trees of a step in one stream for each part that the mesh splits it into.

    Attributes:
      batch, extras: ``ShapeDtypeStruct`` with shardings.
      visited: the share of the steps of the attention kernel that compute, in the stream with the most of them.
      computed: tokens of all streams, padding included.
    """

    batch: StreamBatch
    extras: Extras
    visited: float
    computed: int


def drawn_trees(shape: BatchShape, *, longest: int) -> list[Tree]:
    """Return the trees of a planned batch: of one size each, or with a ``spread`` log-normal lengths of which the
    shape's are the medians.

    Args:
      shape: of the batch.
      longest: the most tokens of a conversation; longer ones lose the end of their prefix.
    """
    rng = np.random.default_rng(0)

    def drawn(median: int, spread: float, *sizes: int) -> np.ndarray:
        lengths = median * np.exp(spread * rng.standard_normal(sizes))
        return np.maximum(np.round(lengths), 2).astype(int)

    trees = []
    for prefix, own in zip(
        drawn(shape.prefix, shape.spread, shape.batch),
        drawn(shape.response_length, shape.spread / 2, shape.batch, shape.responses),
        strict=True,
    ):
        responses = tuple(
            np.full(min(size, longest // 2), number, np.int32) for number, size in enumerate(own)
        )
        most = longest - max(map(len, responses))
        reads = tuple(len(response) - 1 for response in responses)
        trees.append(Tree(np.zeros(min(prefix, most), np.int32), responses, reads))
    return trees


def trained_streams(config: DecoderConfig, trees: Sequence[Tree], *, mesh: Mesh) -> TrainedStreams:
    """Pack trees into as many streams as the mesh has parts for a batch, as short as can be.

    Args:
      config: architecture.
      trees: of the step.
      mesh: whose devices need not be there.

    Raises:
      MeshError: fewer trees than parts.
    """
    shards = mesh_shape(mesh).batch_shards
    if len(trees) < shards:
        raise MeshError(
            f"a batch of {len(trees)} trees leaves some of {shards} parts of the mesh without any"
        )
    reads = max(len(tree.responses) for tree in trees) * len(trees)
    tokens = -(-sum(tree.tokens for tree in trees) // shards)
    options, dealt = stream_options(config, mesh), None
    while dealt is None:
        options = for_kernel(replace(options, tokens=max(tokens, *(tree.tokens for tree in trees))), trees)
        dealt = _in_one_batch(trees, options, reads)
        tokens = options.tokens + options.block
    batch = make_stream_batch(
        trees, dealt, streams=shards, window=config.sliding_window, kernel=options.kernel
    )
    table = batch.window_blocks if config.sliding_window and all(config.layer_windows) else batch.blocks
    assert isinstance(table, KernelTable)
    rows, responses = dealt.shape.reads, max(len(tree.responses) for tree in trees)

    def placed(dtype: Any, *sizes: int) -> Any:
        return jax.ShapeDtypeStruct(sizes, dtype, sharding=batch_sharding(mesh, len(sizes)))

    extras = Extras(
        labels=placed(jnp.float32, shards, rows, responses),
        mask=placed(jnp.bool_, shards, rows, responses),
        margin=placed(jnp.float32, shards, rows),
        weights=placed(jnp.float32, shards, rows),
        users=placed(jnp.int32, shards),
        places=placed(jnp.int32, shards, rows, responses),
    )
    return TrainedStreams(
        batch=jax.tree.map(lambda array: placed(array.dtype, *array.shape), batch),
        extras=extras,
        visited=float(np.asarray(table.key_steps).mean(axis=(1, 2)).max()),
        computed=batch.tokens.size,
    )


def _in_one_batch(trees: Sequence[Tree], options: StreamOptions, reads: int) -> DealtStreams | None:
    """The trees in streams of these options, or None where they take more than one batch."""
    dealt = deal_streams(trees, StreamShape(options.tokens, reads), options)
    if len(dealt) > 1:
        return None
    most = max(sum(len(trees[member].responses) for member in each.members) for each in dealt[0].streams)
    return replace(dealt[0], shape=StreamShape(options.tokens, round_up(most, READS_STEP)))


def tokens_in_buckets(config: DecoderConfig, trees: Sequence[Tree], *, mesh: Mesh) -> int:
    """Return how many tokens a step computes where its trees are padded to the shapes that suit them best, however
    long compiling takes."""
    options = replace(shape_options(config, mesh), compile_cost=0)
    options = replace(options, tokens_per_batch=options.tokens_per_batch // 2)
    lengths, members = [tree.shape for tree in trees], range(len(trees))
    shapes = choose_shapes(lengths, options=options, together=[members], fill=True)
    return sum(dealt.rows * dealt.bucket.tokens for dealt in shapes.deal(lengths, members))
