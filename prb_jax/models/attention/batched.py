"""Attention over packed streams by XLA, for accelerators: many blocks of queries at once, with all heads.

Tables and sums are the same as in :mod:`prb_jax.models.attention.streams`, but all blocks of a round walk through keys
together, several blocks of keys per step: accelerators need large products and cannot keep single blocks in caches. A
round groups blocks with similar numbers of keys, so few steps are empty. The number of steps is data: one program
serves all trees, and memory depends on the round, not on the stream's length.

The backward pass recomputes the weights from the logarithms of their sums and walks twice: through the keys of each
block of queries, and through the queries of each block of keys. It therefore needs no scatter-add.

Dimensions: S streams of N tokens including n local queries, G kv heads, g query heads per kv head, H head dim; c
blocks per round with C queries or keys each; Q queries and K keys per step.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from functools import partial
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp
import numpy as np
from jax import lax
from jax.ad_checkpoint import checkpoint_name

from prb_jax.models.attention.streams import (
    ATTENTION_RESULTS,
    LEAST_TOTAL,
    MASKED,
    StreamFacts,
    divisor,
    seen_keys,
)
from prb_jax.models.layers import float32_einsum, soft_capped, without_unit_axes
from prb_jax.trees.streams import StreamBatch, query_order
from prb_jax.trees.tree import BLOCK

WALKED = 4
"""Number of blocks that each block of a round walks through per step."""

SCORE_BYTES = 1 << 28
"""Approximate bytes of the scores of a step. A few arrays of this size exist at once."""


class _Part(NamedTuple):
    """A stream and the options of its attention."""

    facts: StreamFacts
    window: int | None
    softcap: float | None

    def scores(self, query: jax.Array, key: jax.Array) -> jax.Array:
        """Return scores, float32 [c, G, g, Q, K], of queries [c, Q, G, g, H] and keys [c, K, G, H]: soft-capped, not
        masked."""
        return soft_capped(float32_einsum("cqgnh,ckgh->cgnqk", query, key), self.softcap)

    def seen(self, place: jax.Array, key_place: jax.Array) -> jax.Array:
        """Return a mask, bool [c, 1, 1, Q, K]: the queries at places [c, Q] see the keys at places [c, K]."""
        until, positions = self.facts.until, self.facts.positions
        query, key = place[:, :, None], key_place[:, None]
        seen = (key <= query) & (query < until[key])
        if self.window is not None:
            seen &= positions[query] - positions[key] < self.window
        return seen[:, None, None]


@partial(jax.custom_vjp, nondiff_argnums=(0, 1))
def attend_many(
    window: int | None, softcap: float | None, q: jax.Array, k: jax.Array, v: jax.Array, facts: StreamFacts
) -> tuple[jax.Array, jax.Array]:
    """Same as :func:`prb_jax.models.attention.streams.attend_blocks`, for accelerators."""
    return _attend_forward(window, softcap, q, k, v, facts)[0]


def _attend_forward(
    window: int | None, softcap: float | None, q: jax.Array, k: jax.Array, v: jax.Array, facts: StreamFacts
) -> tuple[tuple[jax.Array, jax.Array], tuple[Any, ...]]:
    def stream(args: tuple[Any, ...]) -> tuple[jax.Array, jax.Array]:
        *arrays, facts = args
        return _forward(_Part(facts, window, softcap), *arrays)

    out, log = lax.map(stream, (q, k, v, facts))
    out, log = (checkpoint_name(x, name) for x, name in zip((out, log), ATTENTION_RESULTS, strict=True))
    return (out, log), (q, k, v, facts, out, log)


def _attend_backward(
    window: int | None, softcap: float | None, kept: tuple[Any, ...], cotangents: tuple[jax.Array, jax.Array]
) -> tuple[jax.Array, jax.Array, jax.Array, None]:
    q, k, v, facts, out, log = kept
    cotangent, of_log = cotangents
    # For each row, the derivative of a softmax needs only the sum of weight times derivative by weight. The derivative
    # of the logarithm by a score is the score's weight.
    inner = jnp.sum(cotangent.astype(jnp.float32) * out.astype(jnp.float32), axis=-1) - of_log

    def stream(args: tuple[Any, ...]) -> tuple[jax.Array, ...]:
        *arrays, facts = args
        return _backward(_Part(facts, window, softcap), *arrays)

    return *lax.map(stream, (q, k, v, cotangent, log, inner, facts)), None


attend_many.defvjp(_attend_forward, _attend_backward)


def _forward(part: _Part, q: jax.Array, k: jax.Array, v: jax.Array) -> tuple[jax.Array, jax.Array]:
    """Return the output [n, heads, H], and the logarithms of the softmax denominators, float32 [n, heads]."""
    facts = part.facts
    queries, (keys, values) = _query_blocks(facts, k, q), _key_blocks(k, v)

    def round_(
        lists: jax.Array, counts: jax.Array, query: jax.Array, place: jax.Array
    ) -> tuple[jax.Array, ...]:
        blocks, length, kv_heads, group, head_dim = query.shape

        def step(listed: jax.Array, real: jax.Array, carry: tuple[jax.Array, ...]) -> tuple[jax.Array, ...]:
            top, total, result = carry
            key, value = _taken(keys, listed), _taken(values, listed)
            seen = part.seen(place, _places(listed, real))
            scores = jnp.where(seen, part.scores(query, key), MASKED)
            higher = jnp.maximum(top, scores.max(axis=-1))
            weights, fading = jnp.exp(scores - higher[..., None]), jnp.exp(top - higher)
            result = result * fading[..., None] + float32_einsum(
                "cgnqk,ckgh->cgnqh", weights.astype(v.dtype), value
            )
            return higher, total * fading + weights.sum(axis=-1), result

        rows = (blocks, kv_heads, group, length)
        # Above a masked score, so a row that sees nothing in a step gives the step zero weight.
        first = jnp.full(rows, MASKED / 10, jnp.float32)
        carry = (first, jnp.zeros(rows, jnp.float32), jnp.zeros((*rows, head_dim), jnp.float32))
        top, total, result = _walk(lists, counts, step, carry)
        total = jnp.maximum(total, LEAST_TOTAL)
        out = (result / total[..., None]).astype(q.dtype)
        return jnp.moveaxis(out, 3, 1), jnp.moveaxis(top + jnp.log(total), 3, 1)

    lists, counts = facts.keys, facts.counts.sum(axis=1)
    out, log = _in_rounds(round_, q.shape[1], lists, counts, *queries, facts.places)
    return out.reshape(q.shape), log.reshape(q.shape[:2])


def _backward(
    part: _Part,
    q: jax.Array,
    k: jax.Array,
    v: jax.Array,
    cotangent: jax.Array,
    log: jax.Array,
    inner: jax.Array,
) -> tuple[jax.Array, jax.Array, jax.Array]:
    """Return the gradients by q [n, heads, H], k and v [N, G, H], in their dtypes."""
    facts, heads = part.facts, q.shape[1]
    queries, (keys, values) = _query_blocks(facts, k, q, cotangent, log, inner), _key_blocks(k, v)

    def pulled(
        of_query: Sequence[jax.Array], key: jax.Array, value: jax.Array, seen: jax.Array
    ) -> tuple[jax.Array, jax.Array]:
        """Return weights [c, G, g, Q, K], and the derivatives by their scores, both in q's dtype."""
        query, towards, log, inner = of_query
        of_row = partial(jnp.moveaxis, source=1, destination=3)
        capped = part.scores(query, key)
        weights = jnp.where(seen, jnp.exp(capped - of_row(log)[..., None]), 0.0)
        gradient = weights * (float32_einsum("cqgnh,ckgh->cgnqk", towards, value) - of_row(inner)[..., None])
        if part.softcap is not None:
            gradient = gradient * (1.0 - jnp.square(capped / part.softcap))
        return weights.astype(q.dtype), gradient.astype(q.dtype)

    def by_queries(lists: jax.Array, counts: jax.Array, *of_block: jax.Array) -> jax.Array:
        *query, place = of_block

        def step(listed: jax.Array, real: jax.Array, total: jax.Array) -> jax.Array:
            key, value = _taken(keys, listed), _taken(values, listed)
            _, gradient = pulled(query, key, value, part.seen(place, _places(listed, real)))
            return total + float32_einsum("cgnqk,ckgh->cqgnh", gradient, key)

        nothing = jnp.zeros(query[0].shape, jnp.float32)
        return _walk(lists, counts, step, nothing).astype(q.dtype)

    def by_keys(
        lists: jax.Array, counts: jax.Array, key: jax.Array, value: jax.Array, key_place: jax.Array
    ) -> tuple[jax.Array, ...]:
        def step(listed: jax.Array, real: jax.Array, totals: tuple[jax.Array, ...]) -> tuple[jax.Array, ...]:
            query = [_taken(x, listed) for x in queries]
            # A padding query has no place and sees nothing.
            place = jnp.where(real[:, :, None], facts.places[listed], -1).reshape(len(listed), -1)
            weights, gradient = pulled(query, key, value, part.seen(place, key_place))
            more = zip((gradient, weights), query[:2], strict=True)
            return tuple(
                total + float32_einsum("cgnqk,cqgnh->ckgh", *pair)
                for total, pair in zip(totals, more, strict=True)
            )

        nothing = jnp.zeros(key.shape, jnp.float32)
        to_k, to_v = _walk(lists, counts, step, (nothing, nothing))
        return to_k.astype(k.dtype), to_v.astype(v.dtype)

    lists, counts = facts.keys, facts.counts.sum(axis=1)
    to_q = _in_rounds(by_queries, heads, lists, counts, *queries, facts.places)
    # The same pairs of blocks, transposed.
    blocks = jnp.arange(len(lists))[:, None]
    meets = jnp.zeros((len(lists), len(keys)), jnp.int32)
    meets = meets.at[blocks, lists].max((jnp.arange(lists.shape[1]) < counts[:, None]).astype(jnp.int32))
    key_places = jnp.arange(len(k)).reshape(-1, BLOCK)
    of_keys = (jnp.argsort(-meets, axis=0).T, meets.sum(axis=0), keys, values, key_places)
    to_k, to_v = _in_rounds(by_keys, heads, *of_keys)
    return to_q.reshape(q.shape), to_k.reshape(k.shape), to_v.reshape(v.shape)


def _query_blocks(facts: StreamFacts, k: jax.Array, *arrays: jax.Array) -> list[jax.Array]:
    """[n, heads, ...] -> [blocks, C, G, g, ...]."""
    blocks, length = facts.places.shape
    return [x.reshape(blocks, length, k.shape[1], -1, *x.shape[2:]) for x in arrays]


def _key_blocks(*arrays: jax.Array) -> list[jax.Array]:
    """[N, G, H] -> [blocks, C, G, H]."""
    return [x.reshape(-1, BLOCK, *x.shape[1:]) for x in arrays]


def _taken(blocks: jax.Array, listed: jax.Array) -> jax.Array:
    """Gather blocks [B, C, ...] by index [c, W]: [c, W * C, ...]."""
    taken = jnp.take(blocks, listed, axis=0)
    return taken.reshape(len(listed), -1, *blocks.shape[2:])


def _places(listed: jax.Array, real: jax.Array) -> jax.Array:
    """Return places [c, K] of the keys in the listed blocks [c, W]; padding gets places after all queries."""
    places = listed[:, :, None] * BLOCK + jnp.arange(BLOCK)
    return jnp.where(real[:, :, None], places, jnp.iinfo(jnp.int32).max).reshape(len(listed), -1)


def _walk(lists: jax.Array, counts: jax.Array, step: Callable[..., Any], carry: Any) -> Any:
    """Call step(listed, real, carry) for all listed blocks of a round, :data:`WALKED` per step.

    Args:
        lists: Indices of blocks [c, M]; M is a multiple of :data:`WALKED`.
        counts: Number of listed blocks for each block [c].
    """

    def at(number: jax.Array, carry: Any) -> Any:
        start = number * WALKED
        real = start + jnp.arange(WALKED) < counts[:, None]
        return step(lax.dynamic_slice_in_dim(lists, start, WALKED, axis=1), real, carry)

    return lax.fori_loop(0, (counts.max() + WALKED - 1) // WALKED, at, carry)


def _in_rounds(
    run: Callable[..., Any], heads: int, lists: jax.Array, counts: jax.Array, *arrays: jax.Array
) -> Any:
    """Call run(lists [c, M], counts [c], arrays [c, ...]) for one round of blocks after another, the longest lists
    first; return results [blocks, ...] in block order."""
    blocks, filling = len(counts), -lists.shape[1] % WALKED
    lists = jnp.pad(lists, ((0, 0), (0, filling)))
    rounds, at_once = _rounds(blocks, heads)
    # Padding blocks at the end have empty lists.
    order = jnp.pad(jnp.argsort(-counts), (0, rounds * at_once - blocks), constant_values=blocks)

    def deal(x: jax.Array) -> jax.Array:
        dealt = jnp.take(x, order, axis=0, mode="fill", fill_value=0)
        return dealt.reshape(rounds, at_once, *x.shape[1:])

    results = lax.map(lambda dealt: run(*dealt), jax.tree.map(deal, (lists, counts, *arrays)))
    back = jnp.argsort(order)[:blocks]
    return jax.tree.map(lambda x: jnp.take(x.reshape(-1, *x.shape[2:]), back, axis=0), results)


def _rounds(blocks: int, heads: int) -> tuple[int, int]:
    """Return the number of rounds for these blocks, and the number of blocks per round."""
    rounds = -(-blocks // max(1, SCORE_BYTES // (4 * heads * WALKED * BLOCK**2)))
    return rounds, -(-blocks // rounds)


def steps_of_rounds(counts: np.ndarray, heads: int, *, parts: int = 1) -> float:
    """Return the mean number of steps per round, of the stream and part with the largest mean.

    Args:
        counts: Counts of a table of blocks, int32 [S, blocks, 2].
        heads: Number of heads on one device.
        parts: Number of parts of a stream's queries.
    """
    totals = counts.sum(axis=2)[:, query_order(counts.shape[1], parts)]
    rounds, at_once = _rounds(totals.shape[2], heads)
    longest = -np.sort(-totals, axis=2)[:, :, ::at_once]  # a round takes as many steps as its first block
    return float((-(-longest // WALKED)).sum(axis=2).max()) / rounds


READS = 64  # read places whose scores with all keys of a stream exist at once


def attend_to_all_keys(
    q: jax.Array,
    k: jax.Array,
    v: jax.Array,
    *,
    batch: StreamBatch,
    window: int | None,
    softcap: float | None,
) -> tuple[jax.Array, jax.Array]:
    """Return the attention of the read places, and the logarithms of its softmax denominators, from one product with
    all keys of a stream; see :func:`prb_jax.models.attention.streams.attend_from_stream_reads`."""
    streams, reads, _, head_dim = q.shape
    kv_heads = k.shape[2]
    chunk = divisor(reads, READS)

    def some(args: tuple[jax.Array, jax.Array]) -> tuple[jax.Array, jax.Array]:
        queries, places = args  # [S, c, G, group, H], [S, c]
        scores = soft_capped(float32_einsum("scgnh,stgh->sgnct", queries, k), softcap)
        seen = seen_keys(batch, places, window)[:, None, None]
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
