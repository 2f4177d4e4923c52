"""Attention of one kv head over one packed stream, a block of queries at a time: forward and backward.

Everything is held the other way round, keys by queries, so that the products are plain ones and the maximum and the
sum of a softmax run over the leading axis, which machines do many at a time. A block of queries walks through the
blocks of keys that its table lists (:mod:`prb_jax.trees.stream_blocks`) and keeps a running maximum, sum and result;
only blocks that some query does not see wholly are compared with the mask. The loops' bounds are data: one program
serves any trees.

The backward pass is written by hand. It keeps the output and, for every query, the logarithm of its softmax's
denominator, walks through the same blocks, and computes the weights of each again: memory is that of one block.

Letters: N tokens of the stream, H head dim; a row is one token of a block of one of the query heads of the kv head.
"""

from __future__ import annotations

from collections.abc import Callable
from functools import partial
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp
from jax import lax

from prb_jax.models.attention.blocks import MASKED
from prb_jax.models.layers import matmul_precision, soft_capped
from prb_jax.trees.stream_blocks import BLOCK


class Facts(NamedTuple):
    """Which token of a stream sees which, int32.

    Attributes:
        keys, counts: the stream's table, of :class:`prb_jax.trees.streams.BlockTable`.
        until, positions: [N], of :class:`prb_jax.trees.streams.StreamBatch`.
    """

    keys: jax.Array
    counts: jax.Array
    until: jax.Array
    positions: jax.Array

    @property
    def real(self) -> jax.Array:
        """How many blocks of queries there are; those of padding, behind all others, have no keys."""
        return (self.counts.sum(axis=1) > 0).sum()

    def walk(self, number: jax.Array, step: Callable[..., Any], carry: Any) -> Any:
        """step(start, masked, carry) for every block of keys of a block of queries."""

        def at(index: jax.Array, carry: Any, *, masked: bool) -> Any:
            return step(self.keys[number, index] * BLOCK, masked, carry)

        whole, partly = self.counts[number, 0], self.counts[number, 1]
        carry = lax.fori_loop(0, whole, partial(at, masked=False), carry)
        return lax.fori_loop(whole, whole + partly, partial(at, masked=True), carry)

    def seen(self, number: jax.Array, rows: int, start: jax.Array, window: int | None) -> jax.Array:
        """bool [BLOCK, rows]: which keys of the block at ``start`` each row of a block of queries sees."""
        place = number * BLOCK + jnp.arange(rows) // (rows // BLOCK)
        key = (start + jnp.arange(BLOCK))[:, None]
        seen = (key <= place) & (place < lax.dynamic_slice_in_dim(self.until, start, BLOCK)[:, None])
        if window is not None:
            back = self.positions[place] - lax.dynamic_slice_in_dim(self.positions, start, BLOCK)[:, None]
            seen &= back < window
        return seen


def attend_head(
    facts: Facts,
    q: jax.Array,
    k: jax.Array,
    v: jax.Array,
    *,
    window: int | None,
    softcap: float | None,
) -> tuple[jax.Array, jax.Array]:
    """Output and softmax denominators.

    Args:
        facts: of the stream.
        q: [blocks, H, rows], already scaled.
        k: [N, H].
        v: [H, N].
        window, softcap: as of :func:`prb_jax.models.attention.streams.stream_attention`.

    Returns:
        [blocks, H, rows] in q's dtype; float32 [blocks, rows], the logarithm of each softmax's denominator. Blocks of
        padding hold zeros.
    """
    blocks, head_dim, rows = q.shape

    def block(number: jax.Array, carry: tuple[jax.Array, jax.Array]) -> tuple[jax.Array, jax.Array]:
        out, log = carry
        query = q[number]

        def step(start: jax.Array, masked: bool, carry: tuple[jax.Array, ...]) -> tuple[jax.Array, ...]:
            top, total, result = carry
            scores = soft_capped(_dot(lax.dynamic_slice_in_dim(k, start, BLOCK, 0), query), softcap)
            if masked:
                scores = jnp.where(facts.seen(number, rows, start, window), scores, MASKED)
            higher = jnp.maximum(top, scores.max(axis=0))
            weights, fading = jnp.exp(scores - higher), jnp.exp(top - higher)
            values = lax.dynamic_slice_in_dim(v, start, BLOCK, 1)
            return (
                higher,
                total * fading + weights.sum(axis=0),
                result * fading + _dot(values, weights.astype(v.dtype)),
            )

        # Above a masked score, so that a row that sees nothing of a block gives it no weight.
        first = (
            jnp.full(rows, MASKED / 10, jnp.float32),
            *(jnp.zeros(shape, jnp.float32) for shape in (rows, (head_dim, rows))),
        )
        top, total, result = facts.walk(number, step, first)
        out = lax.dynamic_update_index_in_dim(out, (result / total).astype(q.dtype), number, 0)
        return out, lax.dynamic_update_index_in_dim(log, top + jnp.log(total), number, 0)

    empty = jnp.zeros_like(q), jnp.zeros((blocks, rows), jnp.float32)
    return lax.fori_loop(0, facts.real, block, empty)


def attend_head_backward(
    facts: Facts,
    q: jax.Array,
    pulled: jax.Array,
    k: jax.Array,
    v: jax.Array,
    log: jax.Array,
    inner: jax.Array,
    *,
    window: int | None,
    softcap: float | None,
) -> tuple[jax.Array, jax.Array, jax.Array]:
    """Gradients by q [blocks, H, rows] in its dtype, and by k and v, float32 [N, H].

    Args:
        facts, q, window, softcap: as of :func:`attend_head`.
        pulled: [blocks, H, rows], the gradient by its output.
        k, v: [N, H].
        log: what it returned.
        inner: float32 [blocks, rows], the inner product of output and ``pulled``.
    """
    _, head_dim, rows = q.shape
    turned_k = k.T

    def block(number: jax.Array, carry: tuple[jax.Array, ...]) -> tuple[jax.Array, ...]:
        to_q, to_k, to_v = carry
        query, towards = q[number], pulled[number]
        turned_query, turned_towards = query.T, towards.T
        logs, inners = log[number], inner[number]

        def step(start: jax.Array, masked: bool, carry: tuple[jax.Array, ...]) -> tuple[jax.Array, ...]:
            to_query, to_k, to_v = carry
            capped = soft_capped(_dot(lax.dynamic_slice_in_dim(k, start, BLOCK, 0), query), softcap)
            weights = jnp.exp(capped - logs)
            if masked:
                weights = jnp.where(facts.seen(number, rows, start, window), weights, 0.0)
            gradient = weights * (_dot(lax.dynamic_slice_in_dim(v, start, BLOCK, 0), towards) - inners)
            if softcap is not None:
                gradient = gradient * (1.0 - jnp.square(capped / softcap))
            weights, gradient = weights.astype(q.dtype), gradient.astype(q.dtype)
            to_query = to_query + _dot(lax.dynamic_slice_in_dim(turned_k, start, BLOCK, 1), gradient)
            to_k = _add_rows(to_k, _dot(gradient, turned_query), start)
            return to_query, to_k, _add_rows(to_v, _dot(weights, turned_towards), start)

        first = jnp.zeros((head_dim, rows), jnp.float32)
        to_query, to_k, to_v = facts.walk(number, step, (first, to_k, to_v))
        return lax.dynamic_update_index_in_dim(to_q, to_query.astype(q.dtype), number, 0), to_k, to_v

    nothing = jnp.zeros(k.shape, jnp.float32)
    return lax.fori_loop(0, facts.real, block, (jnp.zeros_like(q), nothing, nothing))


def _add_rows(total: jax.Array, more: jax.Array, start: jax.Array) -> jax.Array:
    """``total`` [N, H] with ``more`` [size, H] added to the rows from ``start`` on."""
    rows = lax.dynamic_slice_in_dim(total, start, len(more), 0) + more
    return lax.dynamic_update_slice_in_dim(total, rows, start, 0)


def _dot(a: jax.Array, b: jax.Array) -> jax.Array:
    """[A, I] x [I, B] -> float32 [A, B]."""
    return lax.dot(a, b, precision=matmul_precision(a.dtype), preferred_element_type=jnp.float32)
