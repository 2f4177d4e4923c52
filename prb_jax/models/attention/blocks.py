"""Attention of one tree and one kv head, a block of queries at a time: forward and backward.

The backward pass is written by hand. It keeps the output and, for every query, the logarithm of its
softmax's denominator, and computes a block's weights again from them: memory is that of one block
(left to automatic differentiation it would be every block's weights, P x P numbers a head), and no
product is computed twice but the scores.

Letters: P prefix tokens, K responses of R tokens, T = P + K * R, H head dim; a query row is one token of
one of the ``group`` query heads that share the kv head.
"""

from __future__ import annotations

import dataclasses
from collections.abc import Callable

import jax
import jax.numpy as jnp
from jax import lax

from prb_jax.models.layers import matmul_precision, soft_capped
from prb_jax.trees.mask import TreeLayout

# A finite stand-in for minus infinity: a query whose keys are all masked (padding) then averages over
# them instead of giving NaN.
MASKED = -1e30


@dataclasses.dataclass(frozen=True, kw_only=True)
class BlockPlan:
    """How attention over trees is computed.

    Attributes:
        layout: static shape of the trees.
        window: a token sees only this many last tokens, itself included; None for all.
        softcap: scores s become softcap * tanh(s / softcap); None for no such thing.
        forward_rows, backward_rows: query rows of a block.
    """

    layout: TreeLayout
    window: int | None
    softcap: float | None
    forward_rows: int
    backward_rows: int

    def low(self, start: int) -> int:
        """The first place that the query at place ``start`` may see."""
        return 0 if self.window is None else max(0, start - self.window + 1)


def attend_head(
    q: jax.Array, k: jax.Array, v: jax.Array, prefix_length: jax.Array, plan: BlockPlan
) -> tuple[jax.Array, jax.Array]:
    """Output and softmax denominators of one kv head.

    Args:
        q: [T, group, H], already scaled.
        k, v: [T, H].
        prefix_length: int32 [].
        plan: how.

    Returns:
        Output [T, group, H] in q's dtype; float32 [T, group], the logarithm of each softmax's
        denominator.
    """
    prefix, responses, length = plan.layout.prefix, plan.layout.responses, plan.layout.response_length
    group, head_dim = q.shape[1:]
    block = max(16, plan.forward_rows // group)
    first_real = prefix - prefix_length
    outputs, logs = [], []

    for start in range(0, prefix, block):
        stop = min(start + block, prefix)
        low = plan.low(start)
        rows = _after(q[start:stop].reshape((stop - start) * group, head_dim), *outputs[-1:])
        visible = _visible_prefix(start, stop, first_real, group, plan)
        scores = jnp.where(visible, soft_capped(_dot_nt(rows, k[low:stop]), plan.softcap), MASKED)
        top = scores.max(-1, keepdims=True)
        weights, total = _softmax_parts(scores, top)
        out = _dot_nn(weights.astype(q.dtype), v[low:stop]) / total
        outputs.append(out.astype(q.dtype).reshape(stop - start, group, head_dim))
        logs.append((top + jnp.log(total)).reshape(stop - start, group))

    prefix_keys, prefix_values = k[:prefix], v[:prefix]
    own = tuple(x[prefix:].reshape(responses, length, *x.shape[1:]) for x in (_after(q, *outputs[-1:]), k, v))

    def chunk(args: tuple[jax.Array, ...]) -> tuple[jax.Array, jax.Array]:
        """Some responses: q [c, R, group, H], k and v [c, R, H] -> [c, R, group, H], [c, R, group]."""
        q_, k_, v_ = args
        count = q_.shape[0]
        parts, part_logs = [], []
        for start in range(0, length, block):
            stop = min(start + block, length)
            rows_each = (stop - start) * group
            low = plan.low(start)
            rows = q_[:, start:stop].reshape(count * rows_each, head_dim)
            visible = _visible_own(start, stop, first_real, group, plan)
            inner = soft_capped(
                _dot_nt(rows.reshape(count, rows_each, head_dim), k_[:, low:stop]), plan.softcap
            )
            inner = jnp.where(visible, inner, MASKED)
            top = inner.max(-1, keepdims=True)
            prefix_low = plan.low(prefix + start)
            if prefix_low < prefix:
                seen = _visible_from_own(start, stop, first_real, group, count, plan)
                outer = soft_capped(_dot_nt(rows, prefix_keys[prefix_low:]), plan.softcap)
                outer = jnp.where(seen, outer, MASKED)
                top = jnp.maximum(top, outer.max(-1, keepdims=True).reshape(count, rows_each, 1))
                outer_weights, outer_total = _softmax_parts(outer, top.reshape(count * rows_each, 1))
                out = _dot_nn(outer_weights.astype(q.dtype), prefix_values[prefix_low:])
                out, total = out.reshape(count, rows_each, head_dim), outer_total.reshape(count, rows_each, 1)
            else:
                out, total = jnp.float32(0), jnp.float32(0)
            inner_weights, inner_total = _softmax_parts(inner, top)
            out = out + _dot_nn(inner_weights.astype(q.dtype), v_[:, low:stop])
            total = total + inner_total
            out = out / total
            parts.append(out.astype(q.dtype).reshape(count, stop - start, group, head_dim))
            part_logs.append((top + jnp.log(total)).reshape(count, stop - start, group))
        return _joined(parts, axis=1), _joined(part_logs, axis=1)

    per_chunk = _responses_per_chunk(responses, max(1, block // length))
    if per_chunk == responses:
        out, log = chunk(own)
    else:
        out, log = lax.map(chunk, tuple(_fold(x, per_chunk) for x in own))
    outputs.append(out.reshape(-1, group, head_dim))
    logs.append(log.reshape(-1, group))
    return _joined(outputs), _joined(logs)


def attend_head_backward(
    q: jax.Array,
    k: jax.Array,
    v: jax.Array,
    prefix_length: jax.Array,
    out: jax.Array,
    log: jax.Array,
    cotangent: jax.Array,
    plan: BlockPlan,
) -> tuple[jax.Array, jax.Array, jax.Array]:
    """Gradients by q [T, group, H], k and v [T, H], in their dtypes; sums run in float32.

    Args:
        q, k, v, prefix_length, plan: as given to :func:`attend_head`.
        out, log: what it returned.
        cotangent: of ``out``.
    """
    prefix, responses, length = plan.layout.prefix, plan.layout.responses, plan.layout.response_length
    group, head_dim = q.shape[1:]
    block = max(16, plan.backward_rows // group)
    first_real = prefix - prefix_length
    # The softmax's derivative needs of a row only the sum of weight times derivative by weight.
    inner_product = jnp.sum(cotangent.astype(jnp.float32) * out.astype(jnp.float32), axis=-1)

    def score_gradient(
        rows: jax.Array,
        keys: jax.Array,
        values: jax.Array,
        pulled: jax.Array,
        visible: jax.Array,
        stats: jax.Array,
    ) -> tuple[jax.Array, jax.Array]:
        """Weights [..., M, S] and the gradient by scores, in q's dtype; stats [..., M, 2] = (log, inner)."""
        capped = soft_capped(_dot_nt(rows, keys), plan.softcap)
        weights = jnp.where(visible, jnp.exp(capped - stats[..., :1]), 0.0)
        gradient = weights * (_dot_nt(pulled, values) - stats[..., 1:])
        if plan.softcap is not None:
            gradient = gradient * (1.0 - jnp.square(capped / plan.softcap))
        return weights.astype(q.dtype), gradient.astype(q.dtype)

    stats = jnp.stack([log, inner_product], axis=-1)
    to_k = jnp.zeros((prefix, head_dim), jnp.float32)
    to_v = jnp.zeros((prefix, head_dim), jnp.float32)
    to_q = []
    for start in range(0, prefix, block):
        stop = min(start + block, prefix)
        low, count = plan.low(start), (stop - start) * group
        done = (to_q[-1], to_k, to_v) if to_q else ()
        rows = _after(q[start:stop].reshape(count, head_dim), *done)
        pulled = _after(cotangent[start:stop].reshape(count, head_dim), *done)
        visible = _visible_prefix(start, stop, first_real, group, plan)
        weights, gradient = score_gradient(
            rows, k[low:stop], v[low:stop], pulled, visible, stats[start:stop].reshape(count, 2)
        )
        to_v = to_v.at[low:stop].add(_dot_tn(weights, pulled))
        to_k = to_k.at[low:stop].add(_dot_tn(gradient, rows))
        to_q.append(_dot_nn(gradient, k[low:stop]).astype(q.dtype).reshape(stop - start, group, head_dim))

    prefix_keys, prefix_values = k[:prefix], v[:prefix]
    own = tuple(
        x[prefix:].reshape(responses, length, *x.shape[1:])
        for x in (_after(q, *to_q[-1:]), k, v, _after(cotangent, *to_q[-1:]), stats)
    )

    def chunk(
        sums: tuple[jax.Array, jax.Array], args: tuple[jax.Array, ...]
    ) -> tuple[tuple[jax.Array, jax.Array], tuple[jax.Array, ...]]:
        """Some responses: adds to the gradients by the prefix's keys and values, gives those by their own."""
        to_prefix_k, to_prefix_v = sums
        q_, k_, v_, pulled_, stats_ = args
        count = q_.shape[0]
        to_q_, to_k_, to_v_ = [], jnp.zeros(k_.shape, jnp.float32), jnp.zeros(v_.shape, jnp.float32)
        for start in range(0, length, block):
            stop = min(start + block, length)
            each, low, prefix_low = (stop - start) * group, plan.low(start), plan.low(prefix + start)
            rows, pulled = (x[:, start:stop].reshape(count, each, head_dim) for x in (q_, pulled_))
            stat = stats_[:, start:stop].reshape(count, each, 2)
            weights, gradient = score_gradient(
                rows,
                k_[:, low:stop],
                v_[:, low:stop],
                pulled,
                _visible_own(start, stop, first_real, group, plan),
                stat,
            )
            to_v_ = to_v_.at[:, low:stop].add(_dot_tn(weights, pulled))
            to_k_ = to_k_.at[:, low:stop].add(_dot_tn(gradient, rows))
            to_rows = _dot_nn(gradient, k_[:, low:stop])
            if prefix_low < prefix:
                rows, pulled, stat = (x.reshape(count * each, -1) for x in (rows, pulled, stat))
                seen = _visible_from_own(start, stop, first_real, group, count, plan)
                weights, gradient = score_gradient(
                    rows, prefix_keys[prefix_low:], prefix_values[prefix_low:], pulled, seen, stat
                )
                to_prefix_v = to_prefix_v.at[prefix_low:].add(_dot_tn(weights, pulled))
                to_prefix_k = to_prefix_k.at[prefix_low:].add(_dot_tn(gradient, rows))
                to_rows += _dot_nn(gradient, prefix_keys[prefix_low:]).reshape(to_rows.shape)
            to_q_.append(to_rows.astype(q.dtype).reshape(count, stop - start, group, head_dim))
        gradients = (_joined(to_q_, axis=1), to_k_.astype(k.dtype), to_v_.astype(v.dtype))
        return (to_prefix_k, to_prefix_v), gradients

    per_chunk = _responses_per_chunk(responses, max(1, block // length))
    if per_chunk == responses:
        (to_k, to_v), of_own = chunk((to_k, to_v), own)
    else:
        (to_k, to_v), of_own = lax.scan(chunk, (to_k, to_v), tuple(_fold(x, per_chunk) for x in own))
    of_own = [x.reshape(responses * length, *shape.shape[1:]) for x, shape in zip(of_own, (q, k, v))]
    return (
        _joined([*to_q, of_own[0]]),
        _joined([to_k.astype(k.dtype), of_own[1]]),
        _joined([to_v.astype(v.dtype), of_own[2]]),
    )


def _after(x: jax.Array, *done: jax.Array) -> jax.Array:
    """x, computed after all of ``done``.

    Nothing else orders the blocks: the compiler would hold all of them at once, and hand them from core
    to core. (It drops an ``optimization_barrier`` before it decides on the order.)
    """
    for other in done:
        x = x + (0 * other.reshape(-1)[0]).astype(x.dtype)
    return x


# Which keys a block of query rows sees. A number that is always zero, which only a run shows, is added to the
# places: masks that are known earlier would be computed before all loops and kept, P x P bits in all.


def _visible_prefix(start: int, stop: int, first_real: jax.Array, group: int, plan: BlockPlan) -> jax.Array:
    """Of the prefix's keys, for a block of the prefix: bool [(stop - start) * group, stop - low]."""
    return _visible_own(start, stop, first_real, group, plan) & (_key_places(start, stop, plan) >= first_real)


def _visible_own(start: int, stop: int, first_real: jax.Array, group: int, plan: BlockPlan) -> jax.Array:
    """Of a response's own keys, for a block of it: bool [(stop - start) * group, stop - low]."""
    zero = jnp.minimum(first_real, 0)
    place = (zero + start + jnp.arange((stop - start) * group) // group)[:, None]
    key_place = _key_places(start, stop, plan)
    visible = key_place <= place
    if plan.window is not None:
        visible &= place - key_place < plan.window
    return visible


def _key_places(start: int, stop: int, plan: BlockPlan) -> jax.Array:
    """int32 [1, stop - low]."""
    low = plan.low(start)
    return (low + jnp.arange(stop - low))[None, :]


def _visible_from_own(
    start: int, stop: int, first_real: jax.Array, group: int, count: int, plan: BlockPlan
) -> jax.Array:
    """Of the prefix's keys, for a block of ``count`` responses: bool [1 or count * (stop - start) * group, ...]."""
    prefix = plan.layout.prefix
    low = plan.low(prefix + start)
    place = (start + jnp.arange((stop - start) * group) // group)[:, None]
    key_place = (low + jnp.arange(prefix - low))[None, :]
    seen = key_place >= first_real
    if plan.window is not None:
        seen = seen & (prefix + jnp.tile(place, (count, 1)) - key_place < plan.window)
    return seen


def _responses_per_chunk(responses: int, wanted: int) -> int:
    """The largest divisor of ``responses`` that is at most ``wanted``."""
    return max(d for d in range(1, min(wanted, responses) + 1) if responses % d == 0)


def _fold(x: jax.Array, size: int) -> jax.Array:
    """[K, ...] -> [K / size, size, ...]."""
    return x.reshape(x.shape[0] // size, size, *x.shape[1:])


def _joined(parts: list[jax.Array], axis: int = 0) -> jax.Array:
    return parts[0] if len(parts) == 1 else jnp.concatenate(parts, axis=axis)


def _softmax_parts(scores: jax.Array, top: jax.Array) -> tuple[jax.Array, jax.Array]:
    """Unnormalised weights exp(s - top) and their sums, float32."""
    weights = jnp.exp(scores - top)
    return weights, weights.sum(-1, keepdims=True)


def _product(over_a: int, over_b: int) -> Callable[[jax.Array, jax.Array], jax.Array]:
    """Matrix product, or one for each entry of a leading axis, accumulated in float32."""

    def product(a: jax.Array, b: jax.Array) -> jax.Array:
        batch = tuple(range(a.ndim - 2))
        return lax.dot_general(
            a,
            b,
            (((a.ndim + over_a,), (b.ndim + over_b,)), (batch, batch)),
            precision=matmul_precision(a.dtype),
            preferred_element_type=jnp.float32,
        )

    return product


_dot_nt = _product(-1, -1)  # [M, H] x [S, H] -> [M, S]
_dot_nn = _product(-1, -2)  # [M, S] x [S, H] -> [M, H]
_dot_tn = _product(-2, -2)  # [M, S] x [M, H] -> [S, H]
