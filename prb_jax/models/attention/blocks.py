"""Attention of one tree and one kv head, a block of queries at a time: forward and backward.

The backward pass is written by hand. It keeps the output and, for every query, the logarithm of its
softmax's denominator, and computes a block's weights again from them: memory is that of one block
(left to automatic differentiation it would be every block's weights, P x P numbers a head), and no
product is computed twice but the scores.

Letters: P prefix tokens, K responses of R tokens, T = P + K * R, H head dim; a query row is one token of
one of the ``group`` query heads that share the kv head.
"""

from __future__ import annotations

import functools
from collections.abc import Callable, Sequence
from dataclasses import dataclass

import jax
import jax.numpy as jnp
from jax import lax

from prb_jax.models.attention.walk import MASKED, divisor
from prb_jax.models.layers import product, soft_capped
from prb_jax.trees.batches import Bucket

Arrays = tuple[jax.Array, ...]


@dataclass(frozen=True, kw_only=True)
class BlockPlan:
    """How attention over trees is computed."""

    bucket: Bucket
    window: int | None  # a token sees only this many last tokens, itself included; None for all
    softcap: float | None  # scores s become softcap * tanh(s / softcap); None for no such thing
    forward_rows: int  # query rows of a block
    backward_rows: int

    def low(self, start: int) -> int:
        """The first place that the query at place ``start`` may see."""
        return 0 if self.window is None else max(0, start - self.window + 1)

    # Which keys a block of query rows sees. A number that is always zero, which only a run shows, is added to the
    # places: masks that are known earlier would be computed before all loops and kept, P x P bits in all.

    def sees_own(self, start: int, stop: int, first_real: jax.Array, group: int) -> jax.Array:
        """A block of a response, its own keys: bool [(stop - start) * group, stop - low]."""
        zero = jnp.minimum(first_real, 0)
        place = (zero + start + jnp.arange((stop - start) * group) // group)[:, None]
        key_place = jnp.arange(self.low(start), stop)[None, :]
        visible = key_place <= place
        return visible if self.window is None else visible & (place - key_place < self.window)

    def sees_in_prefix(self, start: int, stop: int, first_real: jax.Array, group: int) -> jax.Array:
        """A block of the prefix, the prefix's keys: bool [(stop - start) * group, stop - low]."""
        return self.sees_own(start, stop, first_real, group) & (
            jnp.arange(self.low(start), stop)[None, :] >= first_real
        )

    def sees_prefix(self, start: int, stop: int, first_real: jax.Array, group: int, count: int) -> jax.Array:
        """A block of ``count`` responses, the prefix's keys: bool [1 or count * (stop - start) * group, P - low]."""
        prefix = self.bucket.prefix
        place = (start + jnp.arange((stop - start) * group) // group)[:, None]
        key_place = jnp.arange(self.low(prefix + start), prefix)[None, :]
        seen = key_place >= first_real
        if self.window is None:
            return seen
        return seen & (prefix + jnp.tile(place, (count, 1)) - key_place < self.window)


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
    prefix, responses, length = plan.bucket.sides
    group, head_dim = q.shape[1:]
    block = max(16, plan.forward_rows // group)
    first_real = prefix - prefix_length

    def attended(
        rows: jax.Array, keys: jax.Array, values: jax.Array, visible: jax.Array, shared: Arrays | None = None
    ) -> Arrays:
        """Output and log of rows [..., M, H], over keys [..., S, H], and over keys [S, H] that all of them share."""
        own = soft_capped(_dot_nt(rows, keys), plan.softcap)
        parts = [(jnp.where(visible, own, MASKED), values)]
        if shared is not None:
            outer = soft_capped(_dot_nt(rows.reshape(-1, head_dim), shared[0]), plan.softcap)
            parts.insert(0, (jnp.where(shared[2], outer, MASKED), shared[1]))
        row = (*rows.shape[:-1], 1)
        top = functools.reduce(
            jnp.maximum, [scores.max(-1, keepdims=True).reshape(row) for scores, _ in parts]
        )
        outs, totals = [], []
        for scores, of_keys in parts:
            weights = jnp.exp(scores - top.reshape(*scores.shape[:-1], 1))
            outs.append(_dot_nn(weights.astype(q.dtype), of_keys).reshape(rows.shape))
            totals.append(weights.sum(-1, keepdims=True).reshape(row))
        out, total = (functools.reduce(jnp.add, summed) for summed in (outs, totals))
        return (out / total).astype(q.dtype), top + jnp.log(total)

    outputs, logs = [], []
    for start, stop in _blocks(prefix, block):
        low, size = plan.low(start), (stop - start, group)
        rows = _after(q[start:stop].reshape(-1, head_dim), *outputs[-1:])
        visible = plan.sees_in_prefix(start, stop, first_real, group)
        out, log = attended(rows, k[low:stop], v[low:stop], visible)
        outputs.append(out.reshape(*size, head_dim))
        logs.append(log.reshape(size))

    prefix_k, prefix_v = k[:prefix], v[:prefix]

    def chunk(own: Arrays) -> Arrays:
        """Some responses: q [c, R, group, H], k and v [c, R, H] -> [c, R, group, H], [c, R, group]."""
        own_q, own_k, own_v = own
        count, parts, part_logs = len(own_q), [], []
        for start, stop in _blocks(length, block):
            low, size = plan.low(start), (count, stop - start, group)
            rows = own_q[:, start:stop].reshape(count, -1, head_dim)
            visible = plan.sees_own(start, stop, first_real, group)
            prefix_low, shared = plan.low(prefix + start), None
            if prefix_low < prefix:
                seen = plan.sees_prefix(start, stop, first_real, group, count)
                shared = (prefix_k[prefix_low:], prefix_v[prefix_low:], seen)
            out, log = attended(rows, own_k[:, low:stop], own_v[:, low:stop], visible, shared)
            parts.append(out.reshape(*size, head_dim))
            part_logs.append(log.reshape(size))
        return _joined(parts, axis=1), _joined(part_logs, axis=1)

    own = tuple(x[prefix:].reshape(responses, length, *x.shape[1:]) for x in (_after(q, *outputs[-1:]), k, v))
    at_once = divisor(responses, block // length)
    if at_once == responses:
        out, log = chunk(own)
    else:
        out, log = lax.map(chunk, tuple(_fold(x, at_once) for x in own))
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
) -> Arrays:
    """Gradients by q [T, group, H], k and v [T, H], in their dtypes; sums run in float32.

    Args:
        q, k, v, prefix_length, plan: as given to :func:`attend_head`.
        out, log: what it returned.
        cotangent: of ``out``.
    """
    prefix, responses, length = plan.bucket.sides
    group, head_dim = q.shape[1:]
    block = max(16, plan.backward_rows // group)
    first_real = prefix - prefix_length
    # The softmax's derivative needs of a row only the sum of weight times derivative by weight.
    inner_product = jnp.sum(cotangent.astype(jnp.float32) * out.astype(jnp.float32), axis=-1)
    stats = jnp.stack([log, inner_product], axis=-1)

    def pull(
        rows: jax.Array,
        pulled: jax.Array,
        stats: jax.Array,
        keys: jax.Array,
        values: jax.Array,
        seen: jax.Array,
    ) -> Arrays:
        """Gradients by rows [..., M, H], keys and values [..., S, H] of their scores; stats [..., M, 2]."""
        capped = soft_capped(_dot_nt(rows, keys), plan.softcap)
        weights = jnp.where(seen, jnp.exp(capped - stats[..., :1]), 0.0)
        gradient = weights * (_dot_nt(pulled, values) - stats[..., 1:])
        if plan.softcap is not None:
            gradient = gradient * (1.0 - jnp.square(capped / plan.softcap))
        weights, gradient = weights.astype(q.dtype), gradient.astype(q.dtype)
        return _dot_nn(gradient, keys), _dot_tn(gradient, rows), _dot_tn(weights, pulled)

    to_k, to_v = (jnp.zeros((prefix, head_dim), jnp.float32) for _ in range(2))
    to_q = []
    for start, stop in _blocks(prefix, block):
        low, done = plan.low(start), ((to_q[-1], to_k, to_v) if to_q else ())
        rows, pulled = (_after(x[start:stop].reshape(-1, head_dim), *done) for x in (q, cotangent))
        seen = plan.sees_in_prefix(start, stop, first_real, group)
        to_rows, to_keys, to_values = pull(
            rows, pulled, stats[start:stop].reshape(-1, 2), k[low:stop], v[low:stop], seen
        )
        to_v = to_v.at[low:stop].add(to_values)
        to_k = to_k.at[low:stop].add(to_keys)
        to_q.append(to_rows.astype(q.dtype).reshape(stop - start, group, head_dim))

    prefix_k, prefix_v = k[:prefix], v[:prefix]

    def chunk(sums: Arrays, own: Arrays) -> tuple[Arrays, Arrays]:
        """Some responses: adds to the gradients by the prefix's keys and values, gives those by their own."""
        to_prefix_k, to_prefix_v = sums
        own_q, own_k, own_v, own_pulled, own_stats = own
        count, to_own_q = len(own_q), []
        to_own_k, to_own_v = (jnp.zeros(x.shape, jnp.float32) for x in (own_k, own_v))
        for start, stop in _blocks(length, block):
            low, prefix_low = plan.low(start), plan.low(prefix + start)
            rows, pulled = (x[:, start:stop].reshape(count, -1, head_dim) for x in (own_q, own_pulled))
            stat = own_stats[:, start:stop].reshape(count, -1, 2)
            seen = plan.sees_own(start, stop, first_real, group)
            to_rows, to_keys, to_values = pull(
                rows, pulled, stat, own_k[:, low:stop], own_v[:, low:stop], seen
            )
            to_own_v = to_own_v.at[:, low:stop].add(to_values)
            to_own_k = to_own_k.at[:, low:stop].add(to_keys)
            if prefix_low < prefix:
                rows, pulled, stat = (x.reshape(-1, x.shape[-1]) for x in (rows, pulled, stat))
                seen = plan.sees_prefix(start, stop, first_real, group, count)
                more, to_keys, to_values = pull(
                    rows, pulled, stat, prefix_k[prefix_low:], prefix_v[prefix_low:], seen
                )
                to_prefix_v = to_prefix_v.at[prefix_low:].add(to_values)
                to_prefix_k = to_prefix_k.at[prefix_low:].add(to_keys)
                to_rows += more.reshape(to_rows.shape)
            to_own_q.append(to_rows.astype(q.dtype).reshape(count, stop - start, group, head_dim))
        gradients = (_joined(to_own_q, axis=1), to_own_k.astype(k.dtype), to_own_v.astype(v.dtype))
        return (to_prefix_k, to_prefix_v), gradients

    own = tuple(
        x[prefix:].reshape(responses, length, *x.shape[1:])
        for x in (_after(q, *to_q[-1:]), k, v, _after(cotangent, *to_q[-1:]), stats)
    )
    at_once = divisor(responses, block // length)
    if at_once == responses:
        (to_k, to_v), of_own = chunk((to_k, to_v), own)
    else:
        (to_k, to_v), of_own = lax.scan(chunk, (to_k, to_v), tuple(_fold(x, at_once) for x in own))
    of_own = [x.reshape(responses * length, *like.shape[1:]) for x, like in zip(of_own, (q, k, v))]
    return (
        _joined([*to_q, of_own[0]]),
        _joined([to_k.astype(k.dtype), of_own[1]]),
        _joined([to_v.astype(v.dtype), of_own[2]]),
    )


def _blocks(length: int, block: int) -> list[tuple[int, int]]:
    """The first place of each block, and the one behind its last."""
    return [(start, min(start + block, length)) for start in range(0, length, block)]


def _after(x: jax.Array, *done: jax.Array) -> jax.Array:
    """x, computed after all of ``done``.

    Nothing else orders the blocks: the compiler would hold all of them at once, and hand them from core
    to core. (It drops an ``optimization_barrier`` before it decides on the order.)
    """
    for other in done:
        x = x + (0 * other.reshape(-1)[0]).astype(x.dtype)
    return x


def _fold(x: jax.Array, size: int) -> jax.Array:
    """[K, ...] -> [K / size, size, ...]."""
    return x.reshape(x.shape[0] // size, size, *x.shape[1:])


def _joined(parts: Sequence[jax.Array], axis: int = 0) -> jax.Array:
    return parts[0] if len(parts) == 1 else jnp.concatenate(parts, axis=axis)


def _matrices(over_a: int, over_b: int) -> Callable[[jax.Array, jax.Array], jax.Array]:
    """Matrix product, or one for each entry of a leading axis, accumulated in float32."""
    return lambda a, b: product(a, b, (over_a, over_b), batch=a.ndim - 2)


_dot_nt = _matrices(-1, -1)  # [M, H] x [S, H] -> [M, S]
_dot_nn = _matrices(-1, -2)  # [M, S] x [S, H] -> [M, H]
_dot_tn = _matrices(-2, -2)  # [M, S] x [M, H] -> [S, H]
