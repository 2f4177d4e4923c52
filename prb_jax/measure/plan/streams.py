"""Packed streams of a planned batch, with shapes in place of arrays."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
from jax.sharding import Mesh

from prb_jax.errors import MeshError
from prb_jax.models.attention.batched import steps_of_rounds
from prb_jax.models.attention.choice import StreamAttention
from prb_jax.models.config.decoder import DecoderConfig
from prb_jax.models.config.family import ATTENTION
from prb_jax.models.flops import mixing_flops, seen_pairs, stream_flops
from prb_jax.models.named_shapes import QUESTION_TOKENS
from prb_jax.platform.sharding import batch_sharding, mesh_shape
from prb_jax.scoring.batching import stream_options
from prb_jax.training.losses import Extras
from prb_jax.trees.kernel_tables import StepTable
from prb_jax.trees.packing import pack_together
from prb_jax.trees.streams import BlockTable, StreamBatch, make_stream_batch
from prb_jax.trees.tree import Tree


@dataclass(frozen=True, kw_only=True)
class BatchShape:
    """B trees of P prefix tokens and K responses of R tokens."""

    # batch, prefix, responses, response_length: B, P, K, R
    batch: int
    prefix: int
    responses: int
    response_length: int
    # number of consecutive trees with the same profile, each followed by a question of
    # :data:`prb_jax.models.named_shapes.QUESTION_TOKENS`
    questions_per_user: int = 1
    # standard deviation of the logarithm of prefix lengths, with median P; responses have half of it, with
    # median R
    spread: float = 0.0


@dataclass(frozen=True)
class PlannedStreams:
    """Trees of a batch in one stream per batch shard of the mesh, each stream as short as possible."""

    batch: StreamBatch  # ``ShapeDtypeStruct`` with shardings
    trees: int  # capacity of a stream in trees
    responses: int  # most responses of a tree
    # attention steps on the busiest device: for one head of the kernel, its pairs in whole steps; for the XLA program,
    # steps of a round
    steps: float
    kernel_bytes: (
        float  # bytes of keys and values that a kernel reads in all layers of a forward pass, on one device
    )
    flops: float  # analytic, of a forward pass, on all devices together
    mixing_flops: float  # the part in attention and recurrent states
    tokens: int  # of the trees; shared tokens count once
    computed: int  # tokens of all streams with padding
    # share of a kernel's pairs of queries and keys that are computed in vain: they do not see each other, or a device
    # waits for the busiest one; None for the XLA program
    vain_pairs: float | None = None

    def extras(self, mesh: Mesh) -> Extras:
        """Return the loss inputs beside the batch, with shapes in place of arrays."""
        sizes = (len(self.batch.tokens), self.trees, self.responses)
        labels, mask, places = (
            split_rows(mesh, kind, *sizes) for kind in (jnp.float32, jnp.bool_, jnp.int32)
        )
        of_trees = split_rows(mesh, jnp.float32, *sizes[:2])
        return Extras(labels=labels, mask=mask, margin=of_trees, weights=of_trees, places=places)


def split_rows(mesh: Mesh, dtype: Any, *sizes: int) -> Any:
    """Return the shape of an array with rows split by the mesh."""
    return jax.ShapeDtypeStruct(sizes, dtype, sharding=batch_sharding(mesh, len(sizes)))


def drawn_trees(shape: BatchShape, *, longest: int) -> list[Tree]:
    """Return the trees of a planned batch: all of one size, or with log-normal lengths around the medians.

    Conversations longer than ``longest`` tokens lose the end of their prefix.
    """
    rng = np.random.default_rng(0)

    def drawn(median: int, spread: float, *sizes: int) -> np.ndarray:
        lengths = median * np.exp(spread * rng.standard_normal(sizes))
        return np.maximum(np.round(lengths), 2).astype(int)

    trees = []
    for number, (prefix, sizes) in enumerate(
        zip(
            drawn(shape.prefix, shape.spread, shape.batch),
            drawn(shape.response_length, shape.spread / 2, shape.batch, shape.responses),
            strict=True,
        )
    ):
        responses = tuple(
            np.full(min(size, longest // 2), number, np.int32) for number, size in enumerate(sizes)
        )
        ids = np.full(min(prefix, longest - max(map(len, responses))), 1 + number, np.int32)
        if number % shape.questions_per_user:  # starts with the previous tree's profile, which may be shorter
            profile = min(len(ids), len(trees[-1].prefix)) - QUESTION_TOKENS
            ids[: max(profile, 0)] = trees[-1].prefix[: max(profile, 0)]
        trees.append(Tree(ids, responses, tuple(len(response) - 1 for response in responses)))
    return trees


def planned_streams(
    config: DecoderConfig, shape: BatchShape, *, mesh: Mesh, attention: StreamAttention, reads_only: bool
) -> PlannedStreams:
    """Pack the trees of a batch for a mesh; its devices need not exist.

    Args:
      reads_only: If True, the last layer is computed only at the read places.

    Raises:
      MeshError: there are fewer trees than batch shards.
    """
    shards, trees = mesh_shape(mesh).batch_shards, drawn_trees(shape, longest=config.max_position_embeddings)
    if len(trees) < shards:
        raise MeshError(f"a batch of {len(trees)} trees leaves some of the {shards} parts of the mesh empty")
    options = stream_options(config, mesh, attention)
    packed = pack_together(trees, options)
    shorter = stream_options(config, mesh, attention, packed[0].shape.tokens)
    if shorter.block != options.block:  # the stream is so short that smaller blocks suit it
        options, packed = shorter, pack_together(trees, shorter)
    batch = make_stream_batch(trees, packed, options)
    steps, kernel_bytes = _steps(config, batch, mesh)
    return PlannedStreams(
        batch=jax.tree.map(lambda array: split_rows(mesh, array.dtype, *array.shape), batch),
        trees=batch.reads.shape[1],
        responses=shape.responses,
        steps=steps,
        kernel_bytes=kernel_bytes,
        flops=stream_flops(batch, config, reads_only=reads_only),
        mixing_flops=mixing_flops(batch, config),
        tokens=sum(stream.tokens for stream in packed),
        computed=batch.tokens.size,
        vain_pairs=_vain_pairs(batch, config, mesh),
    )


def _vain_pairs(batch: StreamBatch, config: DecoderConfig, mesh: Mesh) -> float | None:
    table = batch.blocks
    if not isinstance(table, StepTable) or (config.sliding_window and all(config.layer_windows)):
        return None
    computed = table.computed_pairs()
    return 1.0 - seen_pairs(batch) / (float(computed.max()) * computed.size)


def _steps(config: DecoderConfig, batch: StreamBatch, mesh: Mesh) -> tuple[float, float]:
    """Return steps and kernel bytes of full-attention layers, or of windowed layers if all layers have a window."""
    table = batch.window_blocks if config.sliding_window and all(config.layer_windows) else batch.blocks
    heads = config.num_attention_heads // mesh.shape["tensor"]
    if isinstance(table, StepTable):
        fetched = float(np.asarray(table.counts)[..., 0].max()) * table.block  # keys, and as many values
        layers = config.layer_mixers.count(ATTENTION)
        steps = float(table.computed_pairs().max()) / table.block**2
        return steps, 2.0 * fetched * 2 * heads * config.head_dim * layers
    assert isinstance(table, BlockTable)
    return steps_of_rounds(np.asarray(table.counts), heads, parts=mesh.shape["sequence"]), 0.0
