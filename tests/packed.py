"""Batches of packed streams for tests, and what a model reads out of them, tree by tree."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import replace
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np

from prb_jax.models.decoder import Params
from prb_jax.models.readouts.score_tree import score_stream
from prb_jax.trees.packing import READS_STEP, pack_together
from prb_jax.trees.streams import (
    PackedStream,
    StreamBatch,
    StreamOptions,
    StreamShape,
    make_stream_batch,
    places_of_trees,
)
from prb_jax.trees.tree import BLOCK, Tree, round_up


def packed_batch(
    trees: Sequence[Tree],
    *,
    window: int | None = None,
    taps: int | None = None,
    rope_switch: int | None = None,
    options: StreamOptions | None = None,
) -> StreamBatch:
    """One batch of all the trees, which says where the rewards of each one are."""
    options = options or StreamOptions(tokens=1024, window=window, taps=taps, rope_switch=rope_switch)
    packed = pack_together(trees, options)
    return replace(make_stream_batch(trees, packed, options), places=places_of_trees(trees, packed))


def batch_alone(trees: Sequence[Tree], *, window: int | None = None, taps: int | None = None) -> StreamBatch:
    """As :func:`packed_batch`, with every conversation in a stream of its own: nothing is packed or shared."""
    single = [
        Tree(tree.prefix, (ids,), (read,)) for tree in trees for ids, read in zip(tree.responses, tree.read)
    ]
    options = StreamOptions(tokens=BLOCK, streams=len(single), window=window, taps=taps, share=False)
    shape = StreamShape(round_up(max(tree.tokens for tree in single), BLOCK), READS_STEP)
    packed = tuple(PackedStream(shape, (member,), (0,), tree.tokens) for member, tree in enumerate(single))
    batch = make_stream_batch(single, packed, options)
    places = np.zeros((len(trees), max(len(tree.responses) for tree in trees)), np.int32)
    read = 0
    for row, tree in enumerate(trees):
        count = len(tree.responses)
        places[row, :count] = READS_STEP * np.arange(read, read + count)
        read += count
    return replace(batch, places=places)


def read_trees(params: Params, batch: StreamBatch, **options: Any) -> jax.Array:
    """What the head reads out of each response, [B, K, n]: options as of `score_stream`."""
    values = score_stream(params, batch, **options)
    return jnp.take(values.reshape(-1, values.shape[-1]), jnp.asarray(batch.places), axis=0)
