"""The packed streams of a planned batch, with shapes in place of arrays."""

from __future__ import annotations

import math
from typing import Any

import jax
import numpy as np
from jax.sharding import Mesh

from prb_jax.models.attention.blockwise import attention_flops
from prb_jax.models.attention.paged import KEYS, LANES, QUERIES, visited_blocks
from prb_jax.models.config.decoder import DecoderConfig
from prb_jax.models.flops import matrix_flops_per_token
from prb_jax.plan.shapes import BatchShape
from prb_jax.sharding import mesh_shape
from prb_jax.trees.mask import TreeLayout
from prb_jax.trees.packing import DealtStreams, PackedStream, StreamShape
from prb_jax.trees.shapes import round_up
from prb_jax.trees.stream_blocks import BLOCK
from prb_jax.trees.streams import StreamBatch, make_stream_batch, stream_batch_shardings
from prb_jax.trees.tree import Tree


def stream_flops(config: DecoderConfig, shape: BatchShape, *, mesh: Mesh, reads_only: bool) -> float:
    """Return what scoring a batch needs over packed streams, on all chips together.

    Args:
        config: architecture.
        shape: of the trees.
        mesh: over which they are dealt; profiles are shared within a stream.
        reads_only: the head looks at the read places alone, so the last layer computes keys and values of all tokens,
            and queries, attention, its output and the mlp of those.
    """
    shards = mesh_shape(mesh).batch_shards
    shared = [length for length in shape.shared(shape.batch // shards) if length]
    tokens, reads = shape.batch * shape.tokens - shards * sum(shared), shape.batch * shape.responses
    heads, head_dim, layers = config.num_attention_heads, config.head_dim, config.num_hidden_layers
    windows = [config.sliding_window if slides else None for slides in config.layer_windows]

    def attention(window: int | None) -> float:
        sizes: dict[str, Any] = {"heads": heads, "head_dim": head_dim, "window": window}
        again = sum(attention_flops(TreeLayout(length, 0, 1), **sizes) for length in shared)
        return shape.batch * attention_flops(shape.layout, **sizes) - shards * again

    whole = layers - 1 if reads_only else layers
    total = matrix_flops_per_token(config) / layers * whole * tokens
    total += sum(attention(window) for window in windows[:whole])
    if reads_only:
        keys = 2 * config.num_key_value_heads * head_dim * tokens
        others = (2 * heads * head_dim + 3 * config.intermediate_size) * reads
        reach = min(shape.prefix + shape.response_length, windows[-1] or math.inf)
        total += 2.0 * config.hidden_size * (keys + others) + 4.0 * heads * head_dim * reads * reach
    return total


def paged_stream(config: DecoderConfig, shape: BatchShape, *, mesh: Mesh) -> tuple[StreamBatch, float, float]:
    """Return the trees of a batch in a stream for each shard, and what the kernel of
    :mod:`prb_jax.models.attention.paged` does with them.

    Returns:
        ``ShapeDtypeStruct`` with shardings; the blocks of keys that a block of queries visits, on average; and the
        bytes of keys and values that one chip reads for them in all layers, in bfloat16.
    """
    shards = mesh_shape(mesh).batch_shards
    rows = shape.batch // shards
    prefix = np.zeros(shape.prefix, np.int32)
    responses = tuple(np.full(shape.response_length, number, np.int32) for number in range(shape.responses))
    trees = [Tree(prefix, responses, (shape.response_length - 1,) * shape.responses)] * rows
    shared = shape.shared(rows)
    used = rows * shape.tokens - sum(shared)
    tokens = round_up(used, BLOCK)
    packed = PackedStream(tuple(range(rows)), shared, used)
    dealt = DealtStreams(StreamShape(tokens, rows * shape.responses), (packed,))
    one = make_stream_batch(trees, dealt, streams=1, window=config.sliding_window, paged=True)
    assert one.pages is not None

    def placed(array: Any, sharding: Any) -> jax.ShapeDtypeStruct:
        return jax.ShapeDtypeStruct((shards, *array.shape[1:]), array.dtype, sharding=sharding)

    batch = jax.tree.map(placed, one, stream_batch_shardings(mesh, windows=False, paged=True))
    visits = visited_blocks(one.pages)
    numbers = 2 * config.num_key_value_heads // mesh.shape["tensor"] * round_up(config.head_dim, LANES)
    read = 2.0 * visits * KEYS * numbers * config.num_hidden_layers
    return batch, visits / -(-tokens // QUERIES), read
