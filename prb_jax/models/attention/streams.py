"""Attention over packed streams (:mod:`prb_jax.trees.streams`) for any machine, and its derivative.

:mod:`prb_jax.models.attention.stream_head` walks through the blocks of one head of one stream. Here are all heads, one
after the other, and the attention of the read places alone.
"""

from __future__ import annotations

from collections.abc import Callable
from functools import partial
from typing import Any

import jax
import jax.numpy as jnp
from jax import lax
from jax.ad_checkpoint import checkpoint_name
from jax.sharding import Mesh, PartitionSpec

from prb_jax.models.attention.blocks import MASKED
from prb_jax.models.attention.blockwise import ATTENTION_RESULTS
from prb_jax.models.attention.stream_head import Facts, attend_head, attend_head_backward
from prb_jax.models.layers import float32_einsum, soft_capped
from prb_jax.sharding import RULES
from prb_jax.trees.stream_blocks import BLOCK, BlockTable
from prb_jax.trees.streams import StreamBatch

HEADS = 2
"""Query heads that share their kv head and are computed together, at most: what more of them need falls out of the
caches."""

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
    if not isinstance(table, BlockTable):
        raise ValueError(f"these streams have no table of blocks for a window of {window}")
    given = (table.keys, table.counts, batch.until, batch.positions)
    return over_mesh(partial(_attend, window, softcap), mesh)(q, k, v, Facts(*map(jnp.asarray, given)))


@partial(jax.custom_vjp, nondiff_argnums=(0, 1))
def _attend(
    window: int | None, softcap: float | None, q: jax.Array, k: jax.Array, v: jax.Array, facts: Facts
) -> jax.Array:
    """As :func:`stream_attention`, on one device."""
    return _attend_forward(window, softcap, q, k, v, facts)[0]


def _attend_forward(
    window: int | None, softcap: float | None, q: jax.Array, k: jax.Array, v: jax.Array, facts: Facts
) -> tuple[jax.Array, tuple[Any, ...]]:
    head, parts = partial(attend_head, window=window, softcap=softcap), _parts(q, k)
    keys, values = (jnp.repeat(x, parts, axis=1) for x in (k.transpose(0, 2, 1, 3), v.transpose(0, 2, 3, 1)))
    out, log = _each_head(head, facts, _blocks(q, k.shape[2] * parts), keys, values)
    out = _from_blocks(out, q.shape)
    out, log = (checkpoint_name(x, name) for x, name in zip((out, log), ATTENTION_RESULTS, strict=True))
    return out, (q, k, v, facts, out, log)


def _attend_backward(
    window: int | None, softcap: float | None, kept: tuple[Any, ...], cotangent: jax.Array
) -> tuple[jax.Array, jax.Array, jax.Array, None]:
    q, k, v, facts, out, log = kept
    parts = _parts(q, k)
    runs = k.shape[2] * parts
    # The softmax's derivative needs of a row only the sum of weight times derivative by weight.
    inner = jnp.sum(cotangent.astype(jnp.float32) * out.astype(jnp.float32), axis=-1, keepdims=True)
    to_q, to_k, to_v = _each_head(
        partial(attend_head_backward, window=window, softcap=softcap),
        facts,
        _blocks(q, runs),
        _blocks(cotangent, runs),
        *(jnp.repeat(x.transpose(0, 2, 1, 3), parts, axis=1) for x in (k, v)),
        log,
        _blocks(inner, runs)[..., 0, :],
    )

    def of_keys(x: jax.Array, like: jax.Array) -> jax.Array:
        """[S, runs, N, H] -> [S, N, G, H]: the sum over the runs of a kv head."""
        summed = x.reshape(x.shape[0], -1, parts, *x.shape[2:]).sum(axis=2)
        return summed.transpose(0, 2, 1, 3).astype(like.dtype)

    return _from_blocks(to_q, q.shape), of_keys(to_k, k), of_keys(to_v, v), None


_attend.defvjp(_attend_forward, _attend_backward)


def _parts(q: jax.Array, k: jax.Array) -> int:
    """Into how many runs the query heads of a kv head are parted, of at most :data:`HEADS` each."""
    group = q.shape[2] // k.shape[2]
    return group // max(size for size in range(1, HEADS + 1) if group % size == 0)


def _blocks(x: jax.Array, runs: int) -> jax.Array:
    """[S, N, heads, H] -> [S, runs, blocks, H, BLOCK * heads / runs]: the query heads of a run share their keys."""
    streams, tokens, heads, size = x.shape
    x = x.reshape(streams, tokens // BLOCK, BLOCK, runs, heads // runs, size)
    return x.transpose(0, 3, 1, 5, 2, 4).reshape(streams, runs, tokens // BLOCK, size, -1)


def _from_blocks(x: jax.Array, shape: tuple[int, ...]) -> jax.Array:
    """The way back from :func:`_blocks`."""
    streams, runs, blocks, size, rows = x.shape
    x = x.reshape(streams, runs, blocks, size, BLOCK, rows // BLOCK)
    return x.transpose(0, 2, 4, 1, 5, 3).reshape(shape)


def _each_head(head: Callable[..., Any], facts: Facts, *arrays: jax.Array) -> Any:
    """head(facts, ...) for every stream and run of heads, one after the other: the two leading axes of the arrays."""

    def stream(args: tuple[Facts, tuple[jax.Array, ...]]) -> Any:
        stream_facts, arrays = args
        return lax.map(lambda each: head(stream_facts, *each), arrays)

    return lax.map(stream, (facts, arrays))


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
        scores = soft_capped(float32_einsum("scgnh,stgh->sgnct", queries, k), softcap)
        key, place = jnp.arange(tokens), places[:, :, None]
        seen = (key <= place) & (place < until)
        if window is not None:
            seen &= jnp.take_along_axis(positions, place, axis=2) - positions < window
        weights = jax.nn.softmax(jnp.where(seen[:, None, None], scores, MASKED), axis=-1).astype(q.dtype)
        return float32_einsum("sgnct,stgh->scgnh", weights, v).astype(q.dtype)

    folded = q.reshape(streams, reads // chunk, chunk, kv_heads, heads // kv_heads, head_dim).swapaxes(0, 1)
    places = jnp.asarray(batch.reads).reshape(streams, reads // chunk, chunk).swapaxes(0, 1)
    if chunk == reads:
        out = some((folded[0], places[0]))[None]
    else:  # a backward pass computes each part's weights again: all at once would be reads times tokens
        out = lax.map(jax.checkpoint(some, prevent_cse=False), (folded, places))
    return out.swapaxes(0, 1).reshape(q.shape)


def over_mesh(attend: Callable[..., Any], mesh: Mesh | None) -> Callable[..., Any]:
    """Return attention of one device for a mesh: each device computes its own streams and heads.

    Args:
        attend: of q [S, N, heads, H], k and v [S, N, G, H], and facts, a tree of arrays [S, ...].
        mesh: over which streams and heads are split; None for one device.
    """
    if mesh is None or mesh.size == 1:
        return attend
    states, facts = PartitionSpec(RULES["batch"], None, RULES["heads"]), PartitionSpec(RULES["batch"])
    return jax.shard_map(
        attend,
        mesh=mesh,
        in_specs=(states, states, states, facts),
        out_specs=states,
        check_vma=False,  # kernels do not say over which axes their results vary
    )


def one_by_one(stream: Callable[[Any], jax.Array], arrays: Any) -> jax.Array:
    """Return stream(its arrays) for every stream, one after the other: the leading axis of arrays and result."""
    if len(jax.tree.leaves(arrays)[0]) == 1:
        return stream(jax.tree.map(lambda x: x[0], arrays))[None]
    return lax.map(stream, arrays)
