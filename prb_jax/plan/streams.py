"""The packed streams of a planned batch, with shapes in place of arrays."""

from __future__ import annotations

from typing import Any

import jax
import numpy as np
from jax.sharding import Mesh

from prb_jax.models.attention.blockwise import attention_flops
from prb_jax.models.attention.paged import KEYS, LANES, QUERIES, visited_blocks
from prb_jax.models.config.decoder import DecoderConfig
from prb_jax.plan.shapes import BatchShape
from prb_jax.sharding import mesh_shape
from prb_jax.trees.packing import DealtStreams, PackedStream, StreamShape
from prb_jax.trees.shapes import round_up
from prb_jax.trees.stream_blocks import BLOCK
from prb_jax.trees.streams import StreamBatch, make_stream_batch, stream_batch_shardings
from prb_jax.trees.tree import Tree


def spared_flops(config: DecoderConfig, shape: BatchShape) -> float:
    """Return what the last layer does not compute where only the read places are looked at: queries, attention, its
    output and the mlp of all other tokens."""
    heads, head_dim = config.num_attention_heads, config.head_dim
    window = config.sliding_window if config.layer_windows[-1] else None
    matrices = 2.0 * config.hidden_size * (2 * heads * head_dim + 3 * config.intermediate_size)
    reach = shape.prefix + shape.response_length
    read = 4.0 * heads * head_dim * shape.responses * (reach if window is None else min(reach, window))
    pairs = attention_flops(shape.layout, heads=heads, head_dim=head_dim, window=window) - read
    return shape.batch * (matrices * (shape.tokens - shape.responses) + pairs)


def paged_stream(config: DecoderConfig, shape: BatchShape, *, mesh: Mesh) -> tuple[StreamBatch, float, float]:
    """Return the trees of a batch in a stream for each shard, and what the kernel of
    :mod:`prb_jax.models.attention.paged` does with them.

    Returns:
        ``ShapeDtypeStruct`` with shardings; the blocks of keys that a block of queries visits, on average; and the
        bytes of keys and values that one chip reads for them in all layers, in bfloat16.
    """
    shards = mesh_shape(mesh).batch_shards
    rows = shape.batch // shards
    prefix, response = np.zeros(shape.prefix, np.int32), np.zeros(shape.response_length, np.int32)
    ends = (shape.response_length - 1,) * shape.responses
    trees = [Tree(prefix, (response,) * shape.responses, ends)] * rows
    tokens = round_up(rows * shape.tokens, BLOCK)
    packed = PackedStream(tuple(range(rows)), (0,) * rows, rows * shape.tokens)
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
