"""Attention over packed streams by XLA, for accelerators: many blocks of queries at a time, with all of their heads.

The same table and the same sums as in :mod:`prb_jax.models.attention.walk`, but the blocks of a round walk together,
some blocks of keys at a step: accelerators need large products, and have no caches that a single block would stay in.
Blocks that have as many keys to walk through stand in one round, so that few steps are empty. The number of steps is
data: one program serves any trees, and memory is that of a round, whatever the stream's length.

The backward pass walks twice, with weights computed again from the logarithms of their sums: through the keys of each
block of queries, and through the queries of each block of keys, so that nothing is added up at places that meet.

Letters: S streams of N tokens, n of which are queries here, G kv heads, g query heads of each, H head dim; c blocks
of a round with C queries or keys; Q queries and K keys of a step.
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

from prb_jax.models.attention.walk import ATTENTION_RESULTS, LEAST_TOTAL, MASKED, StreamFacts
from prb_jax.models.layers import float32_einsum, soft_capped
from prb_jax.trees.stream_tables import BLOCK, query_order

WALKED = 4
"""Blocks that each block of a round walks through in a step."""

SCORE_BYTES = 1 << 28
"""About so many bytes have the scores of a step. A few arrays of that size exist at a time."""


class _Part(NamedTuple):
    """What is computed: a stream, and how."""

    facts: StreamFacts
    window: int | None
    softcap: float | None

    def scores(self, query: jax.Array, key: jax.Array) -> jax.Array:
        """float32 [c, G, g, Q, K] of queries [c, Q, G, g, H] and keys [c, K, G, H], soft-capped, not masked."""
        return soft_capped(float32_einsum("cqgnh,ckgh->cgnqk", query, key), self.softcap)

    def seen(self, place: jax.Array, key_place: jax.Array) -> jax.Array:
        """bool [c, 1, 1, Q, K]: which keys at places [c, K] the queries at places [c, Q] see."""
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
    """As :func:`prb_jax.models.attention.walk.attend_blocks`."""
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
    # The softmax's derivative needs of a row only the sum of weight times derivative by weight; the derivative of the
    # logarithm by a score is the score's weight.
    inner = jnp.sum(cotangent.astype(jnp.float32) * out.astype(jnp.float32), axis=-1) - of_log

    def stream(args: tuple[Any, ...]) -> tuple[jax.Array, ...]:
        *arrays, facts = args
        return _backward(_Part(facts, window, softcap), *arrays)

    return *lax.map(stream, (q, k, v, cotangent, log, inner, facts)), None


attend_many.defvjp(_attend_forward, _attend_backward)


def _forward(part: _Part, q: jax.Array, k: jax.Array, v: jax.Array) -> tuple[jax.Array, jax.Array]:
    """Output [n, heads, H], and float32 [n, heads], the logarithm of each softmax's denominator."""
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
        # Above a masked score, so that a row that sees nothing of a step gives it no weight.
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
    """Gradients by q [n, heads, H], k and v [N, G, H], in their dtypes."""
    facts, heads = part.facts, q.shape[1]
    queries, (keys, values) = _query_blocks(facts, k, q, cotangent, log, inner), _key_blocks(k, v)

    def pulled(
        of_query: Sequence[jax.Array], key: jax.Array, value: jax.Array, seen: jax.Array
    ) -> tuple[jax.Array, jax.Array]:
        """Weights [c, G, g, Q, K], and the derivatives by their scores, both in q's dtype."""
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
            # A query at no place sees nothing.
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
    # The same pairs of blocks, the other way round.
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
    """Blocks [B, C, ...] by their numbers [c, W]: [c, W * C, ...]."""
    taken = jnp.take(blocks, listed, axis=0)
    return taken.reshape(len(listed), -1, *blocks.shape[2:])


def _places(listed: jax.Array, real: jax.Array) -> jax.Array:
    """Places [c, K] of the keys of the blocks listed [c, W]; those that are not real stand behind all queries."""
    places = listed[:, :, None] * BLOCK + jnp.arange(BLOCK)
    return jnp.where(real[:, :, None], places, jnp.iinfo(jnp.int32).max).reshape(len(listed), -1)


def _walk(lists: jax.Array, counts: jax.Array, step: Callable[..., Any], carry: Any) -> Any:
    """step(listed, real, carry) for all that the blocks of a round walk through, :data:`WALKED` a step.

    Args:
        lists: [c, M], M a multiple of the walked blocks.
        counts: [c], how many of them each block has.
    """

    def at(number: jax.Array, carry: Any) -> Any:
        start = number * WALKED
        real = start + jnp.arange(WALKED) < counts[:, None]
        return step(lax.dynamic_slice_in_dim(lists, start, WALKED, axis=1), real, carry)

    return lax.fori_loop(0, (counts.max() + WALKED - 1) // WALKED, at, carry)


def _in_rounds(
    run: Callable[..., Any], heads: int, lists: jax.Array, counts: jax.Array, *arrays: jax.Array
) -> Any:
    """run(lists [c, M], counts [c], arrays [c, ...]) for some blocks after others, those with the most to walk through
    first: results [blocks, ...] in the order of the blocks."""
    blocks, filling = len(counts), -lists.shape[1] % WALKED
    lists = jnp.pad(lists, ((0, 0), (0, filling)))
    rounds, at_once = _rounds(blocks, heads)
    # Behind them stand some that are not there, and have nothing to walk through.
    order = jnp.pad(jnp.argsort(-counts), (0, rounds * at_once - blocks), constant_values=blocks)

    def deal(x: jax.Array) -> jax.Array:
        dealt = jnp.take(x, order, axis=0, mode="fill", fill_value=0)
        return dealt.reshape(rounds, at_once, *x.shape[1:])

    results = lax.map(lambda dealt: run(*dealt), jax.tree.map(deal, (lists, counts, *arrays)))
    back = jnp.argsort(order)[:blocks]
    return jax.tree.map(lambda x: jnp.take(x.reshape(-1, *x.shape[2:]), back, axis=0), results)


def _rounds(blocks: int, heads: int) -> tuple[int, int]:
    """In how many rounds so many blocks walk, and how many of them in each."""
    rounds = -(-blocks // max(1, SCORE_BYTES // (4 * heads * WALKED * BLOCK**2)))
    return rounds, -(-blocks // rounds)


def steps_of_rounds(counts: np.ndarray, heads: int, *, parts: int = 1) -> float:
    """Return how many steps a round takes on average, of the stream and the part with the most of them.

    Args:
        counts: int32 [S, blocks, 2], of a table of blocks.
        heads: of one device.
        parts: into which the queries of a stream are split.
    """
    totals = counts.sum(axis=2)[:, query_order(counts.shape[1], parts)]
    rounds, at_once = _rounds(totals.shape[2], heads)
    longest = -np.sort(-totals, axis=2)[:, :, ::at_once]  # a round takes as many steps as its first block
    return float((-(-longest // WALKED)).sum(axis=2).max()) / rounds
