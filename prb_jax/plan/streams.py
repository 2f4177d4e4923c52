"""The trees of a planned batch, padded or packed into streams, with shapes in place of arrays."""

from __future__ import annotations

import math
from collections.abc import Sequence
from dataclasses import dataclass, replace
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
from jax.sharding import Mesh

from prb_jax.errors import MeshError
from prb_jax.models.config.decoder import DecoderConfig
from prb_jax.models.flops import attention_flops, matrix_flops_per_token
from prb_jax.models.named_shapes import QUESTION_TOKENS
from prb_jax.scoring.batching import shape_options, stream_options
from prb_jax.sharding import batch_sharding, mesh_shape
from prb_jax.training.objective import Extras
from prb_jax.trees.batches import Bucket
from prb_jax.trees.packing import PackedStream, StreamShape, for_kernel, pack_streams
from prb_jax.trees.shapes import choose_shapes, round_up
from prb_jax.trees.stream_shapes import READS_STEP
from prb_jax.trees.stream_tables import StepTable
from prb_jax.trees.streams import StreamBatch, make_stream_batch
from prb_jax.trees.tree import Tree


@dataclass(frozen=True, kw_only=True)
class BatchShape:
    """B trees of P prefix tokens and K responses of R tokens: all of them real in the estimate."""

    # batch, prefix, responses, response_length: B, P, K, R
    batch: int
    prefix: int
    responses: int
    response_length: int
    # so many trees in a row begin with the same profile, which the question of
    # :data:`prb_jax.models.named_shapes.QUESTION_TOKENS` follows in each
    questions_per_user: int = 1
    # of training over packed streams: the standard deviation of the logarithm of the prefixes' lengths, of
    # which P is the median then; half of it is that of the responses
    spread: float = 0.0

    def shared(self, rows: int) -> tuple[int, ...]:
        """Return how many tokens each of the first rows begins with that the row before has too."""
        profile = max(0, self.prefix - QUESTION_TOKENS)
        return tuple(profile if row % self.questions_per_user else 0 for row in range(rows))

    @property
    def tokens(self) -> int:
        """Of one tree."""
        return self.bucket.tokens

    @property
    def bucket(self) -> Bucket:
        """Of one tree."""
        return Bucket(self.prefix, self.responses, self.response_length)


def split_rows(mesh: Mesh, dtype: Any, *sizes: int) -> Any:
    """Return the shape of an array whose rows the mesh splits."""
    return jax.ShapeDtypeStruct(sizes, dtype, sharding=batch_sharding(mesh, len(sizes)))


def extras_of(mesh: Mesh, *sizes: int) -> Extras:
    """Return what the loss takes beside a batch whose labels are of these sizes, with shapes in place of arrays."""
    labels, mask = (split_rows(mesh, kind, *sizes) for kind in (jnp.float32, jnp.bool_))
    trees = split_rows(mesh, jnp.float32, *sizes[:-1])
    users = split_rows(mesh, jnp.int32, sizes[0])
    return Extras(labels=labels, mask=mask, margin=trees, weights=trees, users=users)


def stream_flops(config: DecoderConfig, shape: BatchShape, *, mesh: Mesh, reads_only: bool) -> float:
    """Return what scoring a batch needs over packed streams, on all chips together.

    Profiles are shared within a stream. With ``reads_only`` the head looks at the read places alone, so the last layer
    computes keys and values of all tokens, and queries, attention, its output and the mlp of those.
    """
    shards = mesh_shape(mesh).batch_shards
    shared = [length for length in shape.shared(shape.batch // shards) if length]
    tokens, reads = shape.batch * shape.tokens - shards * sum(shared), shape.batch * shape.responses
    heads, head_dim, layers = config.num_attention_heads, config.head_dim, config.num_hidden_layers
    windows = [config.sliding_window if slides else None for slides in config.layer_windows]

    def attention(window: int | None) -> float:
        sizes: dict[str, Any] = {"heads": heads, "head_dim": head_dim, "window": window}
        again = sum(attention_flops(Bucket(length, 0, 1), **sizes) for length in shared)
        return shape.batch * attention_flops(shape.bucket, **sizes) - shards * again

    whole = layers - 1 if reads_only else layers
    total = matrix_flops_per_token(config) / layers * whole * tokens
    total += sum(attention(window) for window in windows[:whole])
    if reads_only:
        keys = 2 * config.num_key_value_heads * head_dim * tokens
        others = (2 * heads * head_dim + 3 * config.intermediate_size) * reads
        reach = min(shape.prefix + shape.response_length, windows[-1] or math.inf)
        total += 2.0 * config.hidden_size * (keys + others) + 4.0 * heads * head_dim * reads * reach
    return total


def scored_stream(config: DecoderConfig, shape: BatchShape, *, mesh: Mesh) -> tuple[StreamBatch, int, float]:
    """Return the trees of a batch in a stream for each shard, and what the kernel of
    :mod:`prb_jax.models.attention.stream_kernel` does with them.

    Returns:
        ``ShapeDtypeStruct`` with shardings; the steps of the kernel for one head; and the bytes of keys and values that
        one chip reads for them in all layers, in bfloat16.
    """
    shards = mesh_shape(mesh).batch_shards
    rows = shape.batch // shards
    prefix = np.zeros(shape.prefix, np.int32)
    responses = tuple(np.full(shape.response_length, number, np.int32) for number in range(shape.responses))
    trees = [Tree(prefix, responses, (shape.response_length - 1,) * shape.responses)] * rows
    shared = shape.shared(rows)
    used = rows * shape.tokens - sum(shared)
    options = for_kernel(replace(stream_options(config, mesh), tokens=used))
    packed = PackedStream(
        StreamShape(options.tokens, rows * shape.responses), tuple(range(rows)), shared, used
    )
    one = make_stream_batch(trees, (packed,), replace(options, streams=1))
    batch = jax.tree.map(lambda array: split_rows(mesh, array.dtype, shards, *array.shape[1:]), one)
    table = _dearer_table(config, one)
    steps = int(np.asarray(table.count).max())
    numbers = 2 * config.num_attention_heads // mesh.shape["tensor"] * config.head_dim
    return batch, steps, 2.0 * steps * table.block * numbers * config.num_hidden_layers


def _dearer_table(config: DecoderConfig, batch: StreamBatch) -> StepTable:
    """Of layers that see all and layers with a window."""
    table = batch.window_blocks if config.sliding_window and all(config.layer_windows) else batch.blocks
    assert isinstance(table, StepTable)
    return table


@dataclass(frozen=True)
class TrainedStreams:
    """The trees of a step in one stream for each part that the mesh splits it into."""

    # batch, extras: ``ShapeDtypeStruct`` with shardings
    batch: StreamBatch
    extras: Extras
    steps: int  # of the attention kernel for one head, in the stream with the most of them
    computed: int  # tokens of all streams, padding included


def drawn_trees(shape: BatchShape, *, longest: int) -> list[Tree]:
    """Return the trees of a planned batch: of one size each, or with a spread log-normal lengths around the medians.

    Conversations of more than the longest number of tokens lose the end of their prefix.
    """
    rng = np.random.default_rng(0)

    def drawn(median: int, spread: float, *sizes: int) -> np.ndarray:
        lengths = median * np.exp(spread * rng.standard_normal(sizes))
        return np.maximum(np.round(lengths), 2).astype(int)

    trees = []
    for prefix, sizes in zip(
        drawn(shape.prefix, shape.spread, shape.batch),
        drawn(shape.response_length, shape.spread / 2, shape.batch, shape.responses),
        strict=True,
    ):
        responses = tuple(
            np.full(min(size, longest // 2), number, np.int32) for number, size in enumerate(sizes)
        )
        most = longest - max(map(len, responses))
        reads = tuple(len(response) - 1 for response in responses)
        trees.append(Tree(np.zeros(min(prefix, most), np.int32), responses, reads))
    return trees


def trained_streams(config: DecoderConfig, trees: Sequence[Tree], *, mesh: Mesh) -> TrainedStreams:
    """Pack trees into as many streams as the mesh has parts for a batch, as short as can be.

    The devices of the mesh need not be there.

    Raises:
      MeshError: for fewer trees than parts.
    """
    shards = mesh_shape(mesh).batch_shards
    if len(trees) < shards:
        raise MeshError(
            f"a batch of {len(trees)} trees leaves some of {shards} parts of the mesh without any"
        )
    reads = max(len(tree.responses) for tree in trees) * len(trees)
    tokens = -(-sum(tree.tokens for tree in trees) // shards)
    options, batches = replace(stream_options(config, mesh), share=False), []
    while len(batches) != 1:
        options = for_kernel(replace(options, tokens=max(tokens, *(tree.tokens for tree in trees))))
        batches = pack_streams(trees, StreamShape(options.tokens, reads), options)
        tokens = options.tokens + options.block
    rows = max(sum(len(trees[member].responses) for member in stream.members) for stream in batches[0])
    rows = round_up(rows, READS_STEP)
    packed = tuple(replace(stream, shape=StreamShape(options.tokens, rows)) for stream in batches[0])
    batch = make_stream_batch(trees, packed, options)
    responses = max(len(tree.responses) for tree in trees)
    places = split_rows(mesh, jnp.int32, shards, rows, responses)
    return TrainedStreams(
        batch=jax.tree.map(lambda array: split_rows(mesh, array.dtype, *array.shape), batch),
        extras=replace(extras_of(mesh, shards, rows, responses), places=places),
        steps=int(np.asarray(_dearer_table(config, batch).count).max()),
        computed=batch.tokens.size,
    )


def tokens_in_buckets(config: DecoderConfig, trees: Sequence[Tree], *, mesh: Mesh) -> int:
    """Return how many tokens a step computes where its trees are padded to the shapes that suit them best, however
    long compiling takes."""
    options = replace(shape_options(config, mesh), compile_cost=0)
    options = replace(options, tokens_per_batch=options.tokens_per_batch // 2)
    lengths, members = [tree.shape for tree in trees], range(len(trees))
    shapes = choose_shapes(lengths, options=options, together=[members], fill=True)
    return sum(padded.rows * padded.bucket.tokens for padded in shapes.batches(lengths, members))
