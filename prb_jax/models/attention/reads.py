"""Attention only from the read places, sufficient in the last layer."""

from __future__ import annotations

from typing import Any

import jax
import jax.numpy as jnp
from jax import lax
from jax.sharding import Mesh

from prb_jax.models.attention.streams import on_mesh, walks
from prb_jax.models.attention.walk import MASKED, StreamFacts, attend_blocks, divisor, with_sinks
from prb_jax.models.layers import float32_einsum, soft_capped, without_unit_axes
from prb_jax.trees.stream_tables import BLOCK
from prb_jax.trees.streams import StreamBatch

READS = 64  # read places whose scores with all keys of a stream exist at once
READS_OF_A_BLOCK = 16  # read places that walk through the keys of their trees together

MANY_READS = 8
"""If one in so many tokens or more is read, reads are next to each other, as those of all tokens of responses: a block
of BLOCK reads then sees hardly more keys than each of them, and its products are larger."""


def take_places(x: jax.Array, places: jax.Array) -> jax.Array:
    """Return x [B, T, D] at places int32 [B, K]: [B, K, D]."""
    return jnp.take_along_axis(x, places[:, :, None], axis=1)


def attend_from_stream_reads(
    q: jax.Array,
    k: jax.Array,
    v: jax.Array,
    *,
    batch: StreamBatch,
    window: int | None = None,
    softcap: float | None = None,
    sinks: jax.Array | None = None,
    mesh: Mesh | None = None,
) -> jax.Array:
    """Same as :func:`prb_jax.models.attention.streams.stream_attention`, but only for the tokens at the read places.

    Args:
        q: Scaled queries [S, M, heads, H].
        k, v, batch, window, softcap, sinks, mesh: Same as there.

    Returns:
        [S, M, heads, H] in q's dtype.
    """
    if not walks(batch, mesh):
        return with_sinks(*_attend_to_all_keys(q, k, v, batch=batch, window=window, softcap=softcap), sinks)
    streams, reads, *_ = q.shape
    many = reads >= BLOCK and MANY_READS * reads >= k.shape[1]
    width = BLOCK if many else READS_OF_A_BLOCK
    padding = -reads % width
    places = jnp.pad(jnp.asarray(batch.reads), ((0, 0), (0, padding)))
    seen = _seen(batch, places, window).reshape(streams, -1, width, k.shape[1] // BLOCK, BLOCK)
    some, every = seen.any(axis=(2, 4)), seen.all(axis=(2, 4))
    # Blocks of keys that are seen completely come before blocks seen partly.
    keys = jnp.argsort(2 - some.astype(jnp.int32) - every, axis=2)
    counts = jnp.stack([every.sum(axis=2), (some & ~every).sum(axis=2)], axis=2)
    of_queries = (keys, counts, places.reshape(streams, -1, width))
    q = jnp.pad(q, ((0, 0), (0, padding), (0, 0), (0, 0)))

    def attend(q: jax.Array, k: jax.Array, v: jax.Array, of_queries: Any, of_keys: Any) -> Any:
        return attend_blocks(window, softcap, q, k, v, StreamFacts(*of_queries, *of_keys))

    of_keys = (jnp.asarray(batch.until), jnp.asarray(batch.positions))
    out, log = on_mesh(attend, mesh, split=False)(q, k, v, of_queries, of_keys)
    return with_sinks(out, log, sinks)[:, :reads]


def _attend_to_all_keys(
    q: jax.Array,
    k: jax.Array,
    v: jax.Array,
    *,
    batch: StreamBatch,
    window: int | None,
    softcap: float | None,
) -> tuple[jax.Array, jax.Array]:
    """Compute the same in one product of read places and all keys of a stream, which is fast on accelerators."""
    streams, reads, _, head_dim = q.shape
    kv_heads = k.shape[2]
    chunk = divisor(reads, READS)

    def some(args: tuple[jax.Array, jax.Array]) -> tuple[jax.Array, jax.Array]:
        queries, places = args  # [S, c, G, group, H], [S, c]
        scores = soft_capped(float32_einsum("scgnh,stgh->sgnct", queries, k), softcap)
        seen = _seen(batch, places, window)[:, None, None]
        masked = without_unit_axes(jnp.where(seen, scores, MASKED))
        weights = jax.nn.softmax(masked, axis=-1).astype(q.dtype).reshape(scores.shape)
        log = jax.nn.logsumexp(masked, axis=-1).reshape(scores.shape[:-1])
        return float32_einsum("sgnct,stgh->scgnh", weights, v).astype(q.dtype), log.transpose(0, 3, 1, 2)

    folded = q.reshape(streams, reads // chunk, chunk, kv_heads, -1, head_dim).swapaxes(0, 1)
    places = jnp.asarray(batch.reads).reshape(streams, reads // chunk, chunk).swapaxes(0, 1)
    if chunk == reads:
        out, log = (x[None] for x in some((folded[0], places[0])))
    else:  # the backward pass recomputes the weights of each part: all at once would need reads times tokens
        out, log = lax.map(jax.checkpoint(some, prevent_cse=False), (folded, places))
    return out.swapaxes(0, 1).reshape(q.shape), log.swapaxes(0, 1).reshape(q.shape[:-1])


def _seen(batch: StreamBatch, places: jax.Array, window: int | None) -> jax.Array:
    """Return a mask, bool [S, c, N]: the token at each place, int32 [S, c], sees these keys of its stream."""
    until, positions = (jnp.asarray(x)[:, None] for x in (batch.until, batch.positions))
    place = places[:, :, None]
    seen = (jnp.arange(until.shape[-1]) <= place) & (place < until)
    if window is not None:
        seen &= jnp.take_along_axis(positions, place, axis=2) - positions < window
    return seen
