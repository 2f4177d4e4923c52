"""Analytic FLOPs of a forward pass, and the peak FLOP/s of a device."""

from __future__ import annotations

import functools
import time
from collections.abc import Callable

import jax
import jax.numpy as jnp
import numpy as np

from prb_jax.models.config.decoder import DecoderConfig
from prb_jax.models.config.family import ATTENTION
from prb_jax.models.layers import product
from prb_jax.models.model import matrix_flops
from prb_jax.trees.streams import StreamBatch


def recurrent_flops_per_token(config: DecoderConfig) -> float:
    """Return the FLOPs per token of one recurrent layer's recurrence: three products with the state (predict the
    value, write, read) and the taps of the convolution."""
    sizes = config.recurrence
    if sizes is None:
        return 0.0
    of_states = 6.0 * sizes.value_heads * sizes.key_dim * sizes.value_dim
    return of_states + 2.0 * sizes.taps * sum(sizes.widths.values())


def stream_flops(batch: StreamBatch, config: DecoderConfig, *, reads_only: bool = False) -> float:
    """Return the FLOPs to score these streams without padding: matrices, attention over visible pairs of tokens, and
    the states of recurrent layers.

    Args:
      reads_only: If True, the last layer computes keys and values, or the state, for all tokens, and everything else
        only at the read places.
    """
    per_token, tokens = matrix_flops(config), int(_real_tokens(batch).sum())
    mixing = mixing_flops(batch, config, reads_only=reads_only)
    if not reads_only:
        return sum(per_token) * tokens + mixing
    if config.layer_mixers[-1] == ATTENTION:
        of_all = 4.0 * config.hidden_size * config.num_key_value_heads * config.head_dim
    else:
        assert config.recurrence is not None
        channels = sum(config.recurrence.widths.values()) + 2 * config.recurrence.value_heads
        of_all = 2.0 * config.hidden_size * channels
    read = len(_read_positions(batch))
    return sum(per_token[:-1]) * tokens + of_all * tokens + (per_token[-1] - of_all) * read + mixing


def mixing_flops(batch: StreamBatch, config: DecoderConfig, *, reads_only: bool = False) -> float:
    """Return the part of :func:`stream_flops` in attention and in the states of recurrent layers."""
    flops = _mixing_flops(np.asarray(batch.positions)[_real_tokens(batch)], config)
    if reads_only and config.layer_mixers[-1] == ATTENTION:
        flops[-1] = _mixing_flops(_read_positions(batch), config)[-1]
    return sum(flops)


def _read_positions(batch: StreamBatch) -> np.ndarray:
    """Return the positions of the read places, each place once, int32 [n]."""
    reads, positions = np.asarray(batch.reads), np.asarray(batch.positions)
    # Unused read places are 0, a place that only a conversation of one token can read.
    alone = _real_tokens(batch)[:, :1] & (np.asarray(batch.until)[:, :1] == 1)
    places = [np.unique(row[used]) for row, used in zip(reads, (reads > 0) | alone, strict=True)]
    return np.concatenate([row[at] for row, at in zip(positions, places, strict=True)])


def seen_pairs(batch: StreamBatch) -> float:
    """Return the number of pairs of tokens that see each other, without a window."""
    return float((np.asarray(batch.positions)[_real_tokens(batch)].astype(np.float64) + 1).sum())


def _real_tokens(batch: StreamBatch) -> np.ndarray:
    """Return the mask of tokens that are not padding, bool [S, N]."""
    until, positions = np.asarray(batch.until), np.asarray(batch.positions)
    real = positions > 0
    real[:, :-1] |= until[:, :-1] > np.arange(1, until.shape[1])
    # A conversation of one token looks like padding but has an end. Unused ends are 0.
    np.put_along_axis(real, np.asarray(batch.ends), values=True, axis=1)
    real[:, 0] = real[:, 1:].any(axis=1)
    return real


def _mixing_flops(positions: np.ndarray, config: DecoderConfig) -> list[float]:
    """Return the mixing FLOPs of each layer for tokens at these positions of their conversations."""
    seen, flops = positions.astype(np.float64) + 1, []
    for slides, mixer in zip(config.layer_windows, config.layer_mixers, strict=True):
        if mixer != ATTENTION:
            flops.append(recurrent_flops_per_token(config) * len(positions))
            continue
        span = config.sliding_window if slides and config.sliding_window is not None else np.inf
        pairs = float(np.minimum(seen, span).sum())
        flops.append(4.0 * pairs * config.num_attention_heads * config.head_dim)
    return flops


# Dense bfloat16 FLOP/s of a device, from the vendors' data sheets.
_PEAKS = {
    "TPU v4": 275e12, "TPU v5 lite": 197e12, "TPU v5e": 197e12, "TPU v5": 459e12, "TPU v5p": 459e12,
    "TPU v6 lite": 918e12, "TPU v6e": 918e12,
    "NVIDIA A100": 312e12, "NVIDIA H100": 989e12, "NVIDIA H200": 989e12,
}  # fmt: skip


@functools.cache
def device_peak(dtype: str) -> float:
    """Return the FLOP/s of one device: from its data sheet if known, else the best of several matrix products."""
    kind = jax.devices()[0].device_kind
    if dtype == "bfloat16":
        for name in sorted(_PEAKS, key=len, reverse=True):
            if kind.startswith(name):
                return _PEAKS[name]
    return measured_peak(dtype, seconds=0.2)


def measured_peak(dtype: str, *, seconds: float = 1.0) -> float:
    """Return the best FLOP/s of several large matrix products in ``dtype``, accumulated in float32, on one device."""
    best, multiply = 0.0, jax.jit(product)
    for size in (1024, 2048) if jax.default_backend() == "cpu" else (4096, 8192):
        x = jax.random.normal(jax.random.key(size), (size, size), jnp.dtype(dtype))
        best = max(best, 2.0 * size**3 / best_time(lambda x=x: multiply(x, x), seconds=seconds))
    return best


def best_time(run: Callable[[], jax.Array], *, seconds: float) -> float:
    """Return the shortest wall time of ``run`` in seconds, over about ``seconds``, after one call that compiles it."""
    jax.block_until_ready(run())
    best, spent = float("inf"), 0.0
    while spent < seconds:
        start = time.perf_counter()
        jax.block_until_ready(run())
        took = time.perf_counter() - start
        best, spent = min(best, took), spent + took
    return best
