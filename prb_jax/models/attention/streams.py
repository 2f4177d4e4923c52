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

HEADS = 2  # query heads of a kv head that are computed together, at most: data of more would not fit into the caches

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

    def seen(self, place: jax.Array, start: jax.Array, window: int | None) -> jax.Array:
        """Return a mask, bool [BLOCK, rows]: keys in the block at ``start`` that the rows at these places see."""
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
    """Return attention of queries [S, blocks * C, heads, H] to keys and values [S, N, G, H], and logarithms of the
    softmax denominators, float32 [S, blocks * C, heads]; the facts have the queries' places and blocks of keys."""
    return _attend_forward(window, softcap, q, k, v, facts)[0]


def _attend_forward(
    window: int | None, softcap: float | None, q: jax.Array, k: jax.Array, v: jax.Array, facts: StreamFacts
) -> tuple[tuple[jax.Array, jax.Array], tuple[Any, ...]]:
    attend = partial(_attend_stream, window=window, softcap=softcap, dtype=q.dtype)
    of_streams = facts, turned(q), in_bits(k).swapaxes(1, 2), turned(v)
    out, log = lax.map(lambda args: attend(*args), of_streams)
    out, log = turned_back(out, q.dtype), log.swapaxes(1, 2)
    out, log = (checkpoint_name(x, name) for x, name in zip((out, log), ATTENTION_RESULTS, strict=True))
    return (out, log), (q, k, v, facts, out, log)


def _attend_backward(
    window: int | None, softcap: float | None, kept: tuple[Any, ...], cotangents: tuple[jax.Array, jax.Array]
) -> tuple[jax.Array, jax.Array, jax.Array, None]:
    (q, k, v, facts, out, log), (cotangent, of_log) = kept, cotangents
    # For each row, the derivative of a softmax needs only the sum of weight times derivative by weight. The derivative
    # of the logarithm by a score is the score's weight.
    products = without_unit_axes(cotangent.astype(jnp.float32) * out.astype(jnp.float32))
    inner = products.sum(axis=-1).reshape(of_log.shape) - of_log
    attend = partial(_attend_stream_backward, window=window, softcap=softcap, dtype=q.dtype)
    of_tokens = (x.swapaxes(1, 2) for x in (in_bits(k), in_bits(v), log, inner))
    of_streams = facts, turned(q), turned(cotangent), turned(k), *of_tokens
    to_q, to_k, to_v = lax.map(lambda args: attend(*args), of_streams)
    return turned_back(to_q, q.dtype), *(x.swapaxes(1, 2).astype(k.dtype) for x in (to_k, to_v)), None


attend_blocks.defvjp(_attend_forward, _attend_backward)


def turned(x: jax.Array) -> jax.Array:
    """[S, N, heads, H] -> [S, heads, H, N], in bits: see :func:`prb_jax.models.layers.in_bits`.

    XLA for CPUs transposes two neighbouring groups of axes at the rate of the memory, and takes ten times as long if it
    splits axes or converts numbers on the way. It does not convert halves that are joined.
    """
    if x.dtype == jnp.bfloat16:
        x = jnp.concatenate([in_bits(half) for half in jnp.split(x, [x.shape[-1] // 2], axis=-1)], axis=-1)
    return x.transpose(0, 2, 3, 1)


def turned_back(x: jax.Array, dtype: jnp.dtype) -> jax.Array:
    """Invert :func:`turned`."""
    if dtype != jnp.bfloat16:
        return x.transpose(0, 3, 1, 2)
    halves = (half.transpose(0, 3, 1, 2) for half in jnp.split(x, [x.shape[1] // 2], axis=1))
    return from_bits(jnp.concatenate([*halves], axis=2), dtype)


class Runs(NamedTuple):
    """Query heads of a kv head that are computed together, and blocks of their queries."""

    group: int  # query heads of a kv head
    tokens: int  # of a block

    @property
    def heads(self) -> int:
        """Number of query heads of a run."""
        return divisor(self.group, HEADS)

    def cut(self, x: jax.Array, run: jax.Array, number: jax.Array) -> jax.Array:
        """Return the rows of a block: [heads, ..., N] -> [..., rows], the tokens of a head next to each other."""
        sizes = 1, *x.shape[1:-1], self.tokens
        heads = (lax.dynamic_slice(x, place, sizes)[0] for place in self._places(x, run, number))
        return jnp.concatenate([*heads], axis=-1)

    def put(self, x: jax.Array, rows: jax.Array, run: jax.Array, number: jax.Array) -> jax.Array:
        """Return x [heads, ..., N] with the rows of a block."""
        for head, place in zip(jnp.split(rows, self.heads, -1), self._places(x, run, number), strict=True):
            x = lax.dynamic_update_slice(x, head[None], place)
        return x

    def _places(self, x: jax.Array, run: jax.Array, number: jax.Array) -> list[tuple[Any, ...]]:
        between = [0] * (x.ndim - 2)
        return [(run * self.heads + head, *between, number * self.tokens) for head in range(self.heads)]

    def each(self, kv_heads: int, blocks: jax.Array | int, block: Callable[..., Any], carry: Any) -> Any:
        """Call block(run, kv head, number, carry) for each block of each run."""

        def at(index: jax.Array, carry: Any) -> Any:
            run = index // blocks
            return block(run, run * self.heads // self.group, index % blocks, carry)

        return lax.fori_loop(0, kv_heads * self.group // self.heads * blocks, at, carry)


def _attend_stream(
    facts: StreamFacts, q: jax.Array, k: jax.Array, v: jax.Array,
    *, window: int | None, softcap: float | None, dtype: jnp.dtype,
) -> tuple[jax.Array, jax.Array]:  # fmt: skip
    """Return output and softmax denominators of the queries of a stream, zeros for blocks of padding.

    Args:
        q: Scaled queries [heads, H, queries], like k and v in bits: see :func:`prb_jax.models.layers.in_bits`.
        k, v: Keys [G, N, H] and values [G, H, N].
        window, softcap: Same as in :func:`prb_jax.models.attention.streams.stream_attention`.

    Returns:
        Output [heads, H, queries] in bits, and logarithms of the softmax denominators, float32 [heads, queries].
    """
    runs, head_dim = Runs(len(q) // len(k), facts.places.shape[1]), q.shape[1]
    rows = runs.heads * runs.tokens

    def block(run: jax.Array, kv_head: jax.Array, number: jax.Array, carry: Any) -> Any:
        places = jnp.tile(facts.places[number], runs.heads)
        out, log = carry
        query = from_bits(runs.cut(q, run, number), dtype)

        def step(start: jax.Array, masked: bool, carry: tuple[jax.Array, ...]) -> tuple[jax.Array, ...]:
            top, total, result = carry
            scores = soft_capped(product(_of_block(k, kv_head, start, dtype), query), softcap)
            if masked:
                scores = jnp.where(facts.seen(places, start, window), scores, MASKED)
            higher = jnp.maximum(top, scores.max(axis=0))
            weights, fading = jnp.exp(scores - higher), jnp.exp(top - higher)
            value = _of_block(v, kv_head, start, dtype, 2)
            result = result * fading + product(value, rounded(weights, dtype))
            return higher, total * fading + weights.sum(axis=0), result

        # Above a masked score, so a row that sees nothing in a block gives the block zero weight.
        first = jnp.full(rows, MASKED / 10), jnp.zeros(rows), jnp.zeros((head_dim, rows))
        top, total, result = facts.walk(number, step, first)
        total = jnp.maximum(total, LEAST_TOTAL)
        out = runs.put(out, in_bits((result / total).astype(dtype)), run, number)
        return out, runs.put(log, top + jnp.log(total), run, number)

    empty = jnp.zeros_like(q), jnp.zeros((len(q), q.shape[2]), jnp.float32)
    return runs.each(len(k), facts.real, block, empty)


def _attend_stream_backward(
    facts: StreamFacts, q: jax.Array, pulled: jax.Array, turned_k: jax.Array, k: jax.Array, v: jax.Array,
    log: jax.Array, inner: jax.Array, *, window: int | None, softcap: float | None, dtype: jnp.dtype,
) -> tuple[jax.Array, jax.Array, jax.Array]:  # fmt: skip
    """Return the gradients by q [heads, H, queries], in bits, and by k and v, float32 [G, N, H].

    Args:
        q, window, softcap: Same as in :func:`_attend_stream`.
        pulled: Gradient by the output of :func:`_attend_stream` [heads, H, queries], like q in bits.
        turned_k, k, v: Keys [G, H, N], keys and values [G, N, H], in bits.
        log, inner: Logarithms, and inner products of output and ``pulled``, float32 [heads, queries].
    """
    runs, head_dim = Runs(len(q) // len(k), facts.places.shape[1]), q.shape[1]
    # With one block XLA would transpose the product instead of its factor, and CPUs lack this product in bfloat16.
    turned_k = lax.optimization_barrier(turned_k)

    def block(run: jax.Array, kv_head: jax.Array, number: jax.Array, carry: Any) -> Any:
        places = jnp.tile(facts.places[number], runs.heads)
        to_q, to_k, to_v = carry
        query, towards = (from_bits(runs.cut(x, run, number), dtype) for x in (q, pulled))
        turned_query, turned_towards = query.T, towards.T
        logs, inners = (runs.cut(x, run, number) for x in (log, inner))

        def step(start: jax.Array, masked: bool, carry: tuple[jax.Array, ...]) -> tuple[jax.Array, ...]:
            to_query, to_k, to_v = carry
            key, value = (_of_block(x, kv_head, start, dtype) for x in (k, v))
            turned_key = _of_block(turned_k, kv_head, start, dtype, 2)
            capped = soft_capped(product(key, query), softcap)
            weights = jnp.exp(capped - logs)
            if masked:
                weights = jnp.where(facts.seen(places, start, window), weights, 0.0)
            gradient = weights * (product(value, towards) - inners)
            if softcap is not None:
                gradient = gradient * (1.0 - jnp.square(capped / softcap))
            weights, gradient = rounded(weights, dtype), rounded(gradient, dtype)
            to_query = to_query + product(turned_key, gradient)
            to_k = _add_rows(to_k, product(gradient, turned_query), kv_head, start)
            return to_query, to_k, _add_rows(to_v, product(weights, turned_towards), kv_head, start)

        first = jnp.zeros((head_dim, runs.heads * runs.tokens), jnp.float32)
        to_query, to_k, to_v = facts.walk(number, step, (first, to_k, to_v))
        return runs.put(to_q, in_bits(to_query.astype(dtype)), run, number), to_k, to_v

    nothing = jnp.zeros(k.shape, jnp.float32)
    return runs.each(len(k), facts.real, block, (jnp.zeros_like(q), nothing, nothing))


def _of_block(x: jax.Array, head: jax.Array, start: jax.Array, dtype: jnp.dtype, axis: int = 1) -> jax.Array:
    """Return a block of tokens of a head of x [G, ...], which is in bits and has its tokens on an axis."""
    place, sizes = [head, 0, 0], [1, *x.shape[1:]]
    place[axis], sizes[axis] = start, BLOCK
    return from_bits(lax.dynamic_slice(x, place, sizes)[0], dtype)


def _add_rows(total: jax.Array, more: jax.Array, head: jax.Array, start: jax.Array) -> jax.Array:
    """Return ``total`` [G, N, H] with ``more`` [size, H] added to the rows of a head starting at ``start``."""
    place = head, start, 0
    rows = lax.dynamic_slice(total, place, (1, *more.shape)) + more
    return lax.dynamic_update_slice(total, rows, place)


def divisor(number: int, most: int) -> int:
    """Return the largest divisor of ``number`` that is at most ``most``, or 1."""
    return max(d for d in range(1, min(max(1, most), number) + 1) if number % d == 0)
