"""Attention over packed streams (:mod:`prb_jax.trees.streams`) by XLA; on CPUs one block after another.

The query heads of a kv head are computed together, one block of queries at a time. Arrays are transposed, keys x
queries: products need no transposition, and the maximum and sum of a softmax run over the leading axis, which
vectorises. A block of queries walks through the blocks of keys in its table and keeps a running maximum, sum and
result. The mask is applied only to blocks that some query does not see completely. The loop bounds are data: one
program serves all trees.

The backward pass is written by hand. It keeps the output and the logarithm of each query's softmax denominator. It
walks through the same blocks and recomputes their weights, so it needs the memory of one block. The last layer needs
attention only from the read places: :func:`attend_from_stream_reads`.

Dimensions: S streams of N tokens including M read tokens, G kv heads, H head dim. A row is one token of a block in one
query head of a kv head.
"""

from __future__ import annotations

from collections.abc import Callable
from functools import partial
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp
from jax import lax
from jax.ad_checkpoint import checkpoint_name
from jax.sharding import Mesh

from prb_jax.models.layers import (
    from_bits,
    in_bits,
    product,
    rounded,
    soft_capped,
    with_sinks,
    without_unit_axes,
)
from prb_jax.platform.sharding import sequence_parts
from prb_jax.seams import get
from prb_jax.trees.streams import BlockTable, StreamBatch, query_order
from prb_jax.trees.tree import BLOCK

MASKED = -1e30
"""Finite substitute for minus infinity: a query with only masked keys (padding) averages over them instead of giving
NaN."""

LEAST_TOTAL = 1e-30
"""Minimum sum of a query's weights: a query that sees nothing (padding) gets zeros, and all other sums are at least
1."""

ATTENTION_RESULTS = ("attention_out", "attention_log")
"""Names of the results of attention that a rematerialisation policy may keep."""

HEADS = 2
"""Maximum number of query heads of one kv head that are computed together: the data of more heads would not fit into
the caches."""

READS_OF_A_BLOCK = 16  # read places that walk through the keys of their trees together

MANY_READS = 8
"""If one in so many tokens or more is read, reads are next to each other, as those of all tokens of responses: a block
of BLOCK reads then sees hardly more keys than each of them, and its products are larger."""

Attention = Callable[..., jax.Array]
"""Function of q, k, v, window, softcap, and sinks if the model has them; see
:func:`prb_jax.models.attention.streams.stream_attention`."""


def walks(batch: StreamBatch, mesh: Mesh | None) -> bool:
    """Return True if streams are computed by the program for CPUs, one block after another."""
    platform = jax.default_backend() if mesh is None else mesh.devices.flat[0].platform
    return isinstance(batch.blocks, BlockTable) and platform == "cpu"


def on_mesh(attend: Callable[..., Any], mesh: Mesh | None, *, split: bool = True) -> Callable[..., Any]:
    """Return attention for a mesh: see :func:`prb_jax.models.attention.mesh.over_mesh`."""
    if mesh is None or mesh.size == 1:
        return attend
    return get("attention", "over mesh").value(attend, mesh, split=split)


def stream_attention(
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
    """Return the attention of every token to the tokens that it sees, [S, N, heads, H] in q's dtype.

    The softmax is float32, and all products accumulate in float32. Results for padding are finite but meaningless.
    Streams that were laid out for a kernel are computed by it.

    Args:
        q: Scaled queries [S, N, heads, H].
        k, v: Keys and values [S, N, G, H].
        batch: Streams with the table for this window.
        window: Number of most recent tokens that a token sees, itself included.
        softcap: Scores s become ``softcap * tanh(s / softcap)`` before masking.
        sinks: Attention sinks [heads]: an additional logit per softmax, without a value.
        mesh: Mesh that splits streams, heads and queries; None for one device.
    """
    if not isinstance(batch.blocks, BlockTable):
        # Imported here because kernels import slowly and only some machines have them.
        kernel = get("attention", type(batch.blocks).__name__).value
        options = {} if sinks is None else {"sinks": sinks}
        return kernel(q, k, v, batch=batch, window=window, softcap=softcap, mesh=mesh, **options)
    table = batch.table(window)
    if not isinstance(table, BlockTable):
        raise ValueError(f"these streams have no table of blocks for a window of {window}")
    places = jnp.broadcast_to(jnp.arange(q.shape[1]).reshape(-1, BLOCK), (*table.keys.shape[:2], BLOCK))
    of_queries = [jnp.asarray(x) for x in (table.keys, table.counts, places)]
    if (parts := sequence_parts(mesh)) > 1:
        order = query_order(table.keys.shape[1], parts).reshape(-1)
        of_queries = [jnp.take(x, order, axis=1) for x in of_queries]
    attend = attend_blocks if walks(batch, mesh) else get("attention", "many blocks").value
    attend = on_mesh(partial(_with_facts, partial(attend, window, softcap)), mesh)
    of_keys = (jnp.asarray(batch.until), jnp.asarray(batch.positions))
    out, log = attend(q, k, v, of_queries, of_keys)
    return with_sinks(out, log, sinks)


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
    """Same as :func:`stream_attention`, but only for queries [S, M, heads, H] of the tokens at the read places."""
    if not walks(batch, mesh):
        attend = get("attention", "all keys").value
        out, log = attend(q, k, v, batch=batch, window=window, softcap=softcap)
        return with_sinks(out, log, sinks)
    streams, reads, *_ = q.shape
    many = reads >= BLOCK and MANY_READS * reads >= k.shape[1]
    width = BLOCK if many else READS_OF_A_BLOCK
    padding = -reads % width
    places = jnp.pad(jnp.asarray(batch.reads), ((0, 0), (0, padding)))
    seen = seen_keys(batch, places, window).reshape(streams, -1, width, k.shape[1] // BLOCK, BLOCK)
    some, every = seen.any(axis=(2, 4)), seen.all(axis=(2, 4))
    # Blocks of keys that are seen completely come before blocks seen partly.
    keys = jnp.argsort(2 - some.astype(jnp.int32) - every, axis=2)
    counts = jnp.stack([every.sum(axis=2), (some & ~every).sum(axis=2)], axis=2)
    of_queries = [keys, counts, places.reshape(streams, -1, width)]
    q = jnp.pad(q, ((0, 0), (0, padding), (0, 0), (0, 0)))
    attend = on_mesh(partial(_with_facts, partial(attend_blocks, window, softcap)), mesh, split=False)
    of_keys = (jnp.asarray(batch.until), jnp.asarray(batch.positions))
    out, log = attend(q, k, v, of_queries, of_keys)
    return with_sinks(out, log, sinks)[:, :reads]


def _with_facts(
    attend: Callable[..., Any], q: jax.Array, k: jax.Array, v: jax.Array, of_queries: Any, of_keys: Any
) -> Any:
    return attend(q, k, v, StreamFacts(*of_queries, *of_keys))


def seen_keys(batch: StreamBatch, places: jax.Array, window: int | None) -> jax.Array:
    """Return a mask, bool [S, c, N]: the token at each place, int32 [S, c], sees these keys of its stream."""
    until, positions = (jnp.asarray(x)[:, None] for x in (batch.until, batch.positions))
    place = places[:, :, None]
    seen = (jnp.arange(until.shape[-1]) <= place) & (place < until)
    if window is not None:
        seen &= jnp.take_along_axis(positions, place, axis=2) - positions < window
    return seen


class StreamFacts(NamedTuple):
    """Visibility between the tokens of a stream, int32."""

    # for blocks of queries: the stream's table; see :class:`prb_jax.trees.streams.BlockTable`
    keys: jax.Array
    counts: jax.Array
    places: jax.Array  # [blocks, C], places of the C queries of each block
    # for all tokens: [N]; see :class:`prb_jax.trees.streams.StreamBatch`
    until: jax.Array
    positions: jax.Array

    @property
    def real(self) -> jax.Array:
        """Number of blocks of queries up to the last block with keys; blocks of padding have no keys."""
        blocks = jnp.arange(1, len(self.counts) + 1)
        return jnp.max(jnp.where(self.counts.sum(axis=1) > 0, blocks, 0))

    def walk(self, number: jax.Array, step: Callable[..., Any], carry: Any) -> Any:
        """Call step(start, masked, carry) for every block of keys of a block of queries."""

        def at(index: jax.Array, carry: Any, *, masked: bool) -> Any:
            return step(self.keys[number, index] * BLOCK, masked, carry)

        whole, partly = self.counts[number, 0], self.counts[number, 1]
        carry = lax.fori_loop(0, whole, partial(at, masked=False), carry)
        return lax.fori_loop(whole, whole + partly, partial(at, masked=True), carry)

    def seen(self, number: jax.Array, rows: int, start: jax.Array, window: int | None) -> jax.Array:
        """Return a mask, bool [BLOCK, rows]: keys in the block at ``start`` that each row of a block of queries
        sees."""
        places = self.places[number]
        place = jnp.repeat(places, rows // len(places))
        key = (start + jnp.arange(BLOCK))[:, None]
        seen = (key <= place) & (place < lax.dynamic_slice_in_dim(self.until, start, BLOCK)[:, None])
        if window is not None:
            back = self.positions[place] - lax.dynamic_slice_in_dim(self.positions, start, BLOCK)[:, None]
            seen &= back < window
        return seen


@partial(jax.custom_vjp, nondiff_argnums=(0, 1))
def attend_blocks(
    window: int | None, softcap: float | None, q: jax.Array, k: jax.Array, v: jax.Array, facts: StreamFacts
) -> tuple[jax.Array, jax.Array]:
    """Return the attention of queries [S, blocks * C, heads, H] to keys and values [S, N, G, H], and the logarithms of
    the softmax denominators, float32 [S, blocks * C, heads]. The facts contain the queries' places and blocks of
    keys."""
    return _attend_forward(window, softcap, q, k, v, facts)[0]


def _attend_forward(
    window: int | None, softcap: float | None, q: jax.Array, k: jax.Array, v: jax.Array, facts: StreamFacts
) -> tuple[tuple[jax.Array, jax.Array], tuple[Any, ...]]:
    head, parts = partial(_attend_head, window=window, softcap=softcap, dtype=q.dtype), _parts(q, k)
    queries, k_bits, v_bits = _blocks(in_bits(q), k.shape[2] * parts, facts), in_bits(k), in_bits(v)
    turned = (k_bits.transpose(0, 2, 1, 3), v_bits.transpose(0, 2, 3, 1))
    out, log = _each_head(head, facts, queries, *(jnp.repeat(x, parts, axis=1) for x in turned))
    out = from_bits(_from_blocks(out, q.shape), q.dtype)
    out, log = (checkpoint_name(x, name) for x, name in zip((out, log), ATTENTION_RESULTS, strict=True))
    return (out, _from_blocks(log[..., None, :], (*q.shape[:-1], 1))[..., 0]), (q, k, v, facts, out, log)


def _attend_backward(
    window: int | None, softcap: float | None, kept: tuple[Any, ...], cotangents: tuple[jax.Array, jax.Array]
) -> tuple[jax.Array, jax.Array, jax.Array, None]:
    q, k, v, facts, out, log = kept
    cotangent, of_log = cotangents
    parts = _parts(q, k)
    runs = k.shape[2] * parts
    # For each row, the derivative of a softmax needs only the sum of weight times derivative by weight. The derivative
    # of the logarithm by a score is the score's weight.
    products = without_unit_axes(cotangent.astype(jnp.float32) * out.astype(jnp.float32))
    inner = products.sum(axis=-1).reshape(of_log.shape) - of_log
    to_q, to_k, to_v = _each_head(
        partial(_attend_head_backward, window=window, softcap=softcap, dtype=q.dtype),
        facts,
        _blocks(in_bits(q), runs, facts),
        _blocks(in_bits(cotangent), runs, facts),
        *(jnp.repeat(in_bits(x).transpose(0, 2, 1, 3), parts, axis=1) for x in (k, v)),
        log,
        _blocks(inner[..., None], runs, facts)[..., 0, :],
    )

    def of_keys(x: jax.Array, like: jax.Array) -> jax.Array:
        """[S, runs, N, H] -> [S, N, G, H]: the sum over the runs of a kv head."""
        summed = x.reshape(x.shape[0], -1, parts, *x.shape[2:]).sum(axis=2)
        return summed.transpose(0, 2, 1, 3).astype(like.dtype)

    to_q = from_bits(_from_blocks(to_q, q.shape), q.dtype)
    return to_q, of_keys(to_k, k), of_keys(to_v, v), None


attend_blocks.defvjp(_attend_forward, _attend_backward)


def _parts(q: jax.Array, k: jax.Array) -> int:
    """Return the number of runs, of at most :data:`HEADS` query heads each, per kv head."""
    group = q.shape[2] // k.shape[2]
    return group // divisor(group, HEADS)


def _blocks(x: jax.Array, runs: int, facts: StreamFacts) -> jax.Array:
    """[S, queries, heads, H] -> [S, runs, blocks, H, C * heads / runs]: the query heads of a run share their keys."""
    streams, _, heads, size = x.shape
    blocks = facts.places.shape[1]
    x = x.reshape(streams, blocks, -1, runs, heads // runs, size)
    return x.transpose(0, 3, 1, 5, 2, 4).reshape(streams, runs, blocks, size, -1)


def _from_blocks(x: jax.Array, shape: tuple[int, ...]) -> jax.Array:
    """Invert :func:`_blocks`."""
    streams, runs, blocks, size, rows = x.shape
    heads = shape[2] // runs
    x = x.reshape(streams, runs, blocks, size, rows // heads, heads)
    return x.transpose(0, 2, 4, 1, 5, 3).reshape(shape)


def _each_head(head: Callable[..., Any], facts: StreamFacts, *arrays: jax.Array) -> Any:
    """Call head(facts, ...) for every stream and run of heads, sequentially: the two leading axes of the arrays."""

    def stream(args: tuple[StreamFacts, tuple[jax.Array, ...]]) -> Any:
        stream_facts, arrays = args
        return lax.map(lambda of_head: head(stream_facts, *of_head), arrays)

    return lax.map(stream, (facts, arrays))


def _attend_head(
    facts: StreamFacts, q: jax.Array, k: jax.Array, v: jax.Array,
    *, window: int | None, softcap: float | None, dtype: jnp.dtype,
) -> tuple[jax.Array, jax.Array]:  # fmt: skip
    """Return output and softmax denominators of the query heads that share a kv head.

    Args:
        facts: Facts of the stream.
        q: Scaled queries [blocks, H, rows], like k and v in bits: see :func:`prb_jax.models.layers.in_bits`.
        k: Keys [N, H].
        v: Values [H, N].
        window, softcap: Same as in :func:`prb_jax.models.attention.streams.stream_attention`.
        dtype: Dtype of the factors.

    Returns:
        Output [blocks, H, rows] in bits, and the logarithms of the softmax denominators, float32 [blocks, rows].
        Blocks of padding contain zeros.
    """
    blocks, head_dim, rows = q.shape
    of_block = partial(_of_block, dtype=dtype)

    def block(number: jax.Array, carry: tuple[jax.Array, jax.Array]) -> tuple[jax.Array, jax.Array]:
        out, log = carry
        query = from_bits(q[number], dtype)

        def step(start: jax.Array, masked: bool, carry: tuple[jax.Array, ...]) -> tuple[jax.Array, ...]:
            top, total, result = carry
            scores = soft_capped(product(of_block(k, start), query), softcap)
            if masked:
                scores = jnp.where(facts.seen(number, rows, start, window), scores, MASKED)
            higher = jnp.maximum(top, scores.max(axis=0))
            weights, fading = jnp.exp(scores - higher), jnp.exp(top - higher)
            result = result * fading + product(of_block(v, start, axis=1), rounded(weights, dtype))
            return higher, total * fading + weights.sum(axis=0), result

        # Above a masked score, so a row that sees nothing in a block gives the block zero weight.
        first = jnp.full(rows, MASKED / 10, jnp.float32)
        nothing = (jnp.zeros(shape, jnp.float32) for shape in (rows, (head_dim, rows)))
        top, total, result = facts.walk(number, step, (first, *nothing))
        total = jnp.maximum(total, LEAST_TOTAL)
        result = in_bits((result / total).astype(dtype))
        out = lax.dynamic_update_index_in_dim(out, result, number, 0)
        return out, lax.dynamic_update_index_in_dim(log, top + jnp.log(total), number, 0)

    empty = jnp.zeros_like(q), jnp.zeros((blocks, rows), jnp.float32)
    return lax.fori_loop(0, facts.real, block, empty)


def _attend_head_backward(
    facts: StreamFacts, q: jax.Array, pulled: jax.Array, k: jax.Array, v: jax.Array, log: jax.Array, inner: jax.Array,
    *, window: int | None, softcap: float | None, dtype: jnp.dtype,
) -> tuple[jax.Array, jax.Array, jax.Array]:  # fmt: skip
    """Return the gradients by q [blocks, H, rows], in bits, and by k and v, float32 [N, H].

    Args:
        facts, q, window, softcap, dtype: Same as in :func:`_attend_head`.
        pulled: Gradient by the output of :func:`_attend_head` [blocks, H, rows], like q in bits.
        k, v: Keys and values [N, H], in bits.
        log: Logarithms from :func:`_attend_head`.
        inner: Inner product of output and ``pulled``, float32 [blocks, rows].
    """
    _, head_dim, rows = q.shape
    # With one block XLA would transpose the product instead of its factor, and CPUs lack this product in bfloat16.
    turned_k = lax.optimization_barrier(k.T)
    of_block = partial(_of_block, dtype=dtype)

    def block(number: jax.Array, carry: tuple[jax.Array, ...]) -> tuple[jax.Array, ...]:
        to_q, to_k, to_v = carry
        query, towards = from_bits(q[number], dtype), from_bits(pulled[number], dtype)
        turned_query, turned_towards = query.T, towards.T
        logs, inners = log[number], inner[number]

        def step(start: jax.Array, masked: bool, carry: tuple[jax.Array, ...]) -> tuple[jax.Array, ...]:
            to_query, to_k, to_v = carry
            capped = soft_capped(product(of_block(k, start), query), softcap)
            weights = jnp.exp(capped - logs)
            if masked:
                weights = jnp.where(facts.seen(number, rows, start, window), weights, 0.0)
            gradient = weights * (product(of_block(v, start), towards) - inners)
            if softcap is not None:
                gradient = gradient * (1.0 - jnp.square(capped / softcap))
            weights, gradient = rounded(weights, dtype), rounded(gradient, dtype)
            to_query = to_query + product(of_block(turned_k, start, axis=1), gradient)
            to_k = _add_rows(to_k, product(gradient, turned_query), start)
            return to_query, to_k, _add_rows(to_v, product(weights, turned_towards), start)

        first = jnp.zeros((head_dim, rows), jnp.float32)
        to_query, to_k, to_v = facts.walk(number, step, (first, to_k, to_v))
        return lax.dynamic_update_index_in_dim(to_q, in_bits(to_query.astype(dtype)), number, 0), to_k, to_v

    nothing = jnp.zeros(k.shape, jnp.float32)
    return lax.fori_loop(0, facts.real, block, (jnp.zeros_like(q), nothing, nothing))


def _of_block(x: jax.Array, start: jax.Array, *, axis: int = 0, dtype: jnp.dtype) -> jax.Array:
    """Return a block of tokens of x, which is in bits."""
    return from_bits(lax.dynamic_slice_in_dim(x, start, BLOCK, axis), dtype)


def _add_rows(total: jax.Array, more: jax.Array, start: jax.Array) -> jax.Array:
    """Return ``total`` [N, H] with ``more`` [size, H] added to the rows starting at ``start``."""
    rows = lax.dynamic_slice_in_dim(total, start, len(more), 0) + more
    return lax.dynamic_update_slice_in_dim(total, rows, start, 0)


def divisor(number: int, most: int) -> int:
    """Return the largest divisor of ``number`` that is at most ``most``, or 1."""
    return max(d for d in range(1, min(max(1, most), number) + 1) if number % d == 0)
