"""Floating-point operations of a forward, counted on paper, and the most that a device reaches."""

from __future__ import annotations

import functools
import time
from collections.abc import Callable, Sequence

import jax
import jax.numpy as jnp
import numpy as np

from prb_jax.models.config.decoder import DecoderConfig
from prb_jax.models.layers import product
from prb_jax.trees.batches import Bucket
from prb_jax.trees.streams import StreamBatch
from prb_jax.trees.tree import Tree


def matrix_flops_per_token(config: DecoderConfig) -> float:
    """Twice the weights of all layers' matrices; the embedding and the score head count for nothing."""
    width, queries = config.hidden_size, config.num_attention_heads * config.head_dim
    keys = config.num_key_value_heads * config.head_dim
    return 2.0 * config.num_hidden_layers * width * (2 * queries + 2 * keys + 3 * config.intermediate_size)


def tree_flops(trees: Sequence[Tree], config: DecoderConfig) -> float:
    """What scoring these trees needs without any padding: matrices, and attention over visible pairs."""
    total = matrix_flops_per_token(config) * sum(tree.tokens for tree in trees)
    for tree in trees:
        prefix = len(tree.prefix)
        for response in tree.responses:
            total += attention_flops_of_layers(config, Bucket(prefix, 1, len(response)))
        shared = attention_flops_of_layers(config, Bucket(prefix, 0, 1))
        total -= (len(tree.responses) - 1) * shared
    return total


def stream_flops(batch: StreamBatch, config: DecoderConfig) -> float:
    """What scoring these streams needs without their padding; all places of the last layer count."""
    until, positions = np.asarray(batch.until), np.asarray(batch.positions, np.float64)
    real = (until[:, :-1] > np.arange(1, until.shape[1])) | (positions[:, :-1] > 0)
    tokens = int(real.sum()) + int((positions[:, -1] > 0).sum())
    total = matrix_flops_per_token(config) * tokens
    padding = until.size - tokens
    for slides in config.layer_windows:
        span = config.sliding_window if slides and config.sliding_window is not None else np.inf
        pairs = float(np.minimum(positions + 1, span).sum()) - padding
        total += 4.0 * pairs * config.num_attention_heads * config.head_dim
    return total


def attention_flops(bucket: Bucket, *, heads: int, head_dim: int, window: int | None) -> float:
    """Multiply-adds times two that a tree needs in one layer, padding counted as tokens."""
    prefix, responses, length = bucket.sides
    seen = np.minimum(np.arange(1.0, prefix + length + 1), np.inf if window is None else window)
    return 4.0 * float(seen[:prefix].sum() + responses * seen[prefix:].sum()) * heads * head_dim


def attention_flops_of_layers(config: DecoderConfig, bucket: Bucket) -> float:
    """Attention of all layers over the visible pairs of one tree."""
    heads = {"heads": config.num_attention_heads, "head_dim": config.head_dim}
    windows = (config.sliding_window if slides else None for slides in config.layer_windows)
    return sum(attention_flops(bucket, window=window, **heads) for window in windows)


# Dense bfloat16 FLOP/s of a device, from the vendors' data sheets.
_PEAKS = {
    "TPU v4": 275e12, "TPU v5 lite": 197e12, "TPU v5e": 197e12, "TPU v5": 459e12, "TPU v5p": 459e12,
    "TPU v6 lite": 918e12, "TPU v6e": 918e12,
    "NVIDIA A100": 312e12, "NVIDIA H100": 989e12, "NVIDIA H200": 989e12,
}  # fmt: skip


@functools.cache
def device_peak(dtype: str) -> float:
    """FLOP/s of one device: of its data sheet where it is known, else the best of some matrix products."""
    kind = jax.devices()[0].device_kind
    if dtype == "bfloat16":
        for name in sorted(_PEAKS, key=len, reverse=True):
            if kind.startswith(name):
                return _PEAKS[name]
    return measured_peak(dtype, seconds=0.2)


def measured_peak(dtype: str, *, seconds: float = 1.0) -> float:
    """FLOP/s of the best of some large matrix products in ``dtype``, accumulated in float32, on one device."""
    best, multiply = 0.0, jax.jit(product)
    for size in (1024, 2048) if jax.default_backend() == "cpu" else (4096, 8192):
        x = jax.random.normal(jax.random.key(size), (size, size), jnp.dtype(dtype))
        best = max(best, 2.0 * size**3 / best_time(lambda x=x: multiply(x, x), seconds=seconds))
    return best


def best_time(run: Callable[[], jax.Array], *, seconds: float) -> float:
    """Shortest wall time of ``run`` over about ``seconds``, after one call that compiles it."""
    jax.block_until_ready(run())
    best, spent = float("inf"), 0.0
    while spent < seconds:
        start = time.perf_counter()
        jax.block_until_ready(run())
        took = time.perf_counter() - start
        best, spent = min(best, took), spent + took
    return best
