"""Attention over packed streams (:mod:`prb_jax.trees.streams`) for any machine, a block of queries at a time.

Everything is held the other way round, keys by queries, so that both products are plain ones and the maximum and the
sum of a softmax run over the leading axis, which machines do many at a time. A block of queries walks through the
blocks of keys that its table lists and keeps a running maximum, sum and result; only blocks that some query does not
see wholly are compared with the mask. The loops' bounds are data: one program serves any trees.
"""

from __future__ import annotations

from functools import partial

import jax
import jax.numpy as jnp
from jax import lax
from jax.sharding import Mesh, PartitionSpec

from prb_jax.models.attention.blocks import MASKED
from prb_jax.models.layers import matmul_precision
from prb_jax.sharding import RULES
from prb_jax.trees.stream_blocks import BLOCK, WIDE
from prb_jax.trees.streams import BlockTable, StreamBatch

READS = 64
"""Read places whose scores with all keys of a stream are held at a time."""


def stream_attention(
    q: jax.Array,
    k: jax.Array,
    v: jax.Array,
    *,
    batch: StreamBatch,
    window: int | None = None,
    softcap: float | None = None,
    mesh: Mesh | None = None,
) -> jax.Array:
    """Return the attention of every token to the tokens that it may see, [S, N, heads, H] in q's dtype.

    Softmax runs in float32; all products accumulate in float32. What it gives for padding is meaningless, and finite.

    Args:
        q: [S, N, heads, H], already scaled.
        k, v: [S, N, G, H].
        batch: the streams, with the table of blocks of this window.
        window: a token sees only the ``window`` last tokens, itself included.
        softcap: scores s become ``softcap * tanh(s / softcap)`` before masking.
        mesh: over which streams and heads are split; None for one device.
    """
    table = batch.blocks if window is None else batch.window_blocks
    if table is None:
        raise ValueError("these streams have no table of blocks for a sliding window")
    attend = partial(_attend, window=window, softcap=softcap)
    if mesh is not None and mesh.size > 1:
        rows, heads = RULES["batch"], RULES["heads"]
        states, facts = PartitionSpec(rows, None, heads), PartitionSpec(rows)
        attend = jax.shard_map(
            attend,
            mesh=mesh,
            in_specs=(states, states, states, BlockTable(facts, facts), facts, facts),  # pyright: ignore[reportArgumentType]
            out_specs=states,
            check_vma=False,
        )
    return attend(q, k, v, table, jnp.asarray(batch.until), jnp.asarray(batch.positions))


def _attend(
    q: jax.Array,
    k: jax.Array,
    v: jax.Array,
    table: BlockTable,
    until: jax.Array,
    positions: jax.Array,
    *,
    window: int | None,
    softcap: float | None,
) -> jax.Array:
    """As :func:`stream_attention`, on one device."""
    streams, tokens, heads, head_dim = q.shape
    kv_heads = k.shape[2]
    group, blocks = heads // kv_heads, tokens // BLOCK
    # [S, G, blocks, H, BLOCK * group]: the query heads of one kv head share its keys.
    queries = q.reshape(streams, blocks, BLOCK, kv_heads, group, head_dim).transpose(0, 3, 1, 5, 2, 4)
    queries = queries.reshape(streams, kv_heads, blocks, head_dim, BLOCK * group)
    keys, values = k.transpose(0, 2, 1, 3), v.transpose(0, 2, 3, 1)

    def stream(args: tuple[jax.Array, ...]) -> jax.Array:
        queries, keys, values, listed, counts, until, positions = args
        head = partial(
            _attend_head,
            listed=listed,
            counts=counts,
            until=until,
            positions=positions,
            window=window,
            softcap=softcap,
        )
        return lax.map(lambda qkv: head(*qkv), (queries, keys, values))

    of_tables = jnp.asarray(table.keys), jnp.asarray(table.counts)
    out = lax.map(stream, (queries, keys, values, *of_tables, until, positions))
    out = out.reshape(streams, kv_heads, blocks, head_dim, BLOCK, group).transpose(0, 2, 4, 1, 5, 3)
    return out.reshape(q.shape)


def _attend_head(
    q: jax.Array,
    k: jax.Array,
    v: jax.Array,
    *,
    listed: jax.Array,
    counts: jax.Array,
    until: jax.Array,
    positions: jax.Array,
    window: int | None,
    softcap: float | None,
) -> jax.Array:
    """One kv head of one stream.

    Args:
        q: [blocks, H, rows], a row being one token of one of the query heads.
        k: [N, H].
        v: [H, N].
        listed, counts: the stream's table.
        until, positions: int32 [N].
        window, softcap: as of :func:`stream_attention`.

    Returns:
        [blocks, H, rows] in q's dtype.
    """
    _, head_dim, rows = q.shape
    group = rows // BLOCK
    within = jnp.arange(rows) // group

    def block(number: jax.Array, out: jax.Array) -> jax.Array:
        query = q[number]
        place = number * BLOCK + within
        position = positions[place]

        def step(index: jax.Array, carry: tuple[jax.Array, ...], *, wide: bool) -> tuple[jax.Array, ...]:
            top, total, result = carry
            start, size = listed[number, index] * BLOCK, BLOCK * (WIDE if wide else 1)
            scores = _dot(lax.dynamic_slice_in_dim(k, start, size, 0), query)
            if softcap is not None:
                scores = softcap * jnp.tanh(scores / softcap)
            if not wide:
                key = (start + jnp.arange(size))[:, None]
                seen = (key <= place) & (place < lax.dynamic_slice_in_dim(until, start, size)[:, None])
                if window is not None:
                    back = position - lax.dynamic_slice_in_dim(positions, start, size)[:, None]
                    seen &= back < window
                scores = jnp.where(seen, scores, MASKED)
            higher = jnp.maximum(top, scores.max(axis=0))
            weights, fading = jnp.exp(scores - higher), jnp.exp(top - higher)
            values = lax.dynamic_slice_in_dim(v, start, size, 1)
            return (
                higher,
                total * fading + weights.sum(axis=0),
                result * fading + _dot(values, weights.astype(v.dtype)),
            )

        wides, smalls = counts[number, 0], counts[number, 1]
        # Above a masked score, so that a row that sees nothing of a block gives it no weight.
        carry = (
            jnp.full(rows, MASKED / 10, jnp.float32),
            *(jnp.zeros(s, jnp.float32) for s in (rows, (head_dim, rows))),
        )
        if len(until) >= WIDE * BLOCK:
            carry = lax.fori_loop(0, wides, partial(step, wide=True), carry)
        _, total, result = lax.fori_loop(wides, wides + smalls, partial(step, wide=False), carry)
        return lax.dynamic_update_index_in_dim(out, (result / total).astype(q.dtype), number, 0)

    # Blocks of padding, behind all others, have no keys.
    real = (counts.sum(axis=1) > 0).sum()
    return lax.fori_loop(0, real, block, jnp.zeros_like(q))


def attend_from_stream_reads(
    q: jax.Array,
    k: jax.Array,
    v: jax.Array,
    *,
    batch: StreamBatch,
    window: int | None = None,
    softcap: float | None = None,
) -> jax.Array:
    """As :func:`stream_attention`, for the tokens at the read places alone.

    Args:
        q: [S, M, heads, H], already scaled.
        k, v: [S, N, G, H].
        batch: the streams.
        window, softcap: as of :func:`stream_attention`.

    Returns:
        [S, M, heads, H] in q's dtype.
    """
    streams, reads, heads, head_dim = q.shape
    tokens, kv_heads = k.shape[1:3]
    chunk = next(size for size in range(min(READS, reads), 0, -1) if reads % size == 0)
    until, positions = (jnp.asarray(x)[:, None] for x in (batch.until, batch.positions))

    def some(args: tuple[jax.Array, jax.Array]) -> jax.Array:
        queries, places = args  # [S, c, G, group, H], [S, c]
        scores = _product("scgnh,stgh->sgnct", queries, k)
        if softcap is not None:
            scores = softcap * jnp.tanh(scores / softcap)
        key, place = jnp.arange(tokens), places[:, :, None]
        seen = (key <= place) & (place < until)
        if window is not None:
            seen &= jnp.take_along_axis(positions, place, axis=2) - positions < window
        weights = jax.nn.softmax(jnp.where(seen[:, None, None], scores, MASKED), axis=-1).astype(q.dtype)
        return _product("sgnct,stgh->scgnh", weights, v).astype(q.dtype)

    folded = q.reshape(streams, reads // chunk, chunk, kv_heads, heads // kv_heads, head_dim).swapaxes(0, 1)
    places = jnp.asarray(batch.reads).reshape(streams, reads // chunk, chunk).swapaxes(0, 1)
    out = some((folded[0], places[0]))[None] if chunk == reads else lax.map(some, (folded, places))
    return out.swapaxes(0, 1).reshape(q.shape)


def _product(form: str, a: jax.Array, b: jax.Array) -> jax.Array:
    return jnp.einsum(form, a, b, precision=matmul_precision(a.dtype), preferred_element_type=jnp.float32)


def _dot(a: jax.Array, b: jax.Array) -> jax.Array:
    """[A, I] x [I, B] -> float32 [A, B]."""
    return lax.dot(a, b, precision=matmul_precision(a.dtype), preferred_element_type=jnp.float32)
