"""How batches are shaped for a model on the devices at hand."""

from __future__ import annotations

import os
from typing import TYPE_CHECKING

from jax.sharding import Mesh

from prb_jax.sharding import mesh_shape
from prb_jax.trees.packing import StreamOptions
from prb_jax.trees.shapes import ShapeOptions, round_up
from prb_jax.trees.stream_blocks import BLOCK

if TYPE_CHECKING:
    from prb_jax.models.config.decoder import DecoderConfig
    from prb_jax.models.config.encoder import EncoderConfig

# Padded tokens of a batch for each part that the mesh splits it into. On CPUs larger batches only fall
# out of the cache; accelerators need some thousand tokens to be busy.
TOKENS_PER_SHARD = {"cpu": 8_192, "gpu": 65_536, "tpu": 32_768}
MOST_LANES = 8
"""Batches side by side; each holds activations of its own."""

MULTIPLE = {"cpu": 16, "gpu": 64, "tpu": 128}


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
        tokens=round_up(tokens, BLOCK), streams=shards, window=config.sliding_window, paged=paged
    )


def lanes(mesh: Mesh) -> int:
    """Return how many batches are computed side by side: on one CPU device one for each core.

    Attention walks through blocks that are too small to be shared among threads, which leaves cores idle between the
    large products of a single batch. Programs of several devices meet in collectives and must keep one order.
    """
    if mesh.size > 1 or mesh.devices.flat[0].platform != "cpu":
        return 1
    cores = len(os.sched_getaffinity(0)) if hasattr(os, "sched_getaffinity") else os.cpu_count() or 1
    return min(cores, MOST_LANES)
