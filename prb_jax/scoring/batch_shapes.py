"""How batches are shaped for a model on the devices at hand."""

from __future__ import annotations

import functools
import math
import os
from pathlib import Path
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


@functools.cache
def _memory() -> float:
    """Bytes of the machine, or of the container where it has less; without a bound where they are not known."""
    try:
        found = float(os.sysconf("SC_PHYS_PAGES") * os.sysconf("SC_PAGE_SIZE"))
    except (AttributeError, OSError, ValueError):
        return math.inf
    for file in ("/sys/fs/cgroup/memory.max", "/sys/fs/cgroup/memory/memory.limit_in_bytes"):
        try:
            text = Path(file).read_text().strip()
        except OSError:
            continue
        if text.isdigit():
            found = min(found, float(text))
    return found
