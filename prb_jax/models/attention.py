"""Attention over trees: one mask, two implementations that agree.

The tokens of a tree lie as ``[prefix | response 1 | ... | response K]`` in ``T = P + K * R`` places:
the prefix right-aligned in P, every response left-aligned in its R. A token sees itself and what comes
before it in the prefix and in its own response, never a sibling. Because prefix and responses meet at a
fixed place, the distance between two tokens that see each other is static, and so are causality and
sliding windows. Only the padding on the left of the prefix is dynamic; padding on the right of a
response is hidden from real tokens by causality.

``reference_attention`` writes the mask down whole and is the oracle of the tests.
``blockwise_attention`` never holds more than one block of queries times the keys it may see.
"""

from __future__ import annotations

import dataclasses
import math
from collections.abc import Callable

import jax
import jax.numpy as jnp
from jax import lax

from prb_jax.models.layers import matmul_precision

# A finite stand-in for minus infinity: a query whose keys are all masked (padding) then averages over
# them instead of giving NaN, forward and backward.
MASKED = -1e30

# Query rows (query positions times query heads per kv head) of one block. On CPUs the block of scores
# then stays in the cache: twice the size costs 20 % of attention's speed, half of it costs 10 %.
BLOCK_ROWS = 512


# Names of what a rematerialisation policy may keep of attention.
ATTENTION_RESULTS = ("attention_out", "attention_lse")


@dataclasses.dataclass(frozen=True)
class TreeLayout:
    """The static shape of a batch of trees: P prefix tokens, K responses, R tokens each."""

    prefix: int
    responses: int
    response_length: int

    @property
    def tokens(self) -> int:
        """T = P + K * R."""
        return self.prefix + self.responses * self.response_length


def tree_mask(layout: TreeLayout, prefix_lengths: jax.Array, window: int | None) -> jax.Array:
    """The whole mask, for the oracle: bool [B, T, T], True where a query may see a key."""
    index = jnp.arange(layout.tokens)
    branch = jnp.where(index < layout.prefix, -1, (index - layout.prefix) // layout.response_length)
    # The place in the sequence that a token would have alone, up to a constant per tree.
    place = jnp.where(
        index < layout.prefix, index, layout.prefix + (index - layout.prefix) % layout.response_length
    )
    same_line = (branch[None, :] == -1) | (branch[:, None] == branch[None, :])
    visible = same_line & (place[None, :] <= place[:, None])
    if window is not None:
        visible &= place[:, None] - place[None, :] < window
    real = index[None, :] >= layout.prefix - prefix_lengths[:, None]
    return visible[None] & real[:, None, :]


def reference_attention(
    q: jax.Array,
    k: jax.Array,
    v: jax.Array,
    *,
    layout: TreeLayout,
    prefix_lengths: jax.Array,
    window: int | None = None,
    softcap: float | None = None,
) -> jax.Array:
    """Dense attention in float32 with the mask written out: O(T^2) memory, the oracle.

    Args:
        q: [B, T, N, H], already scaled.
        k: [B, T, G, H].
        v: [B, T, G, H].
        layout: static shape of the trees.
        prefix_lengths: int32 [B], real tokens of each prefix.
        window: a token sees only the ``window`` last tokens, itself included.
        softcap: scores s become ``softcap * tanh(s / softcap)`` before masking.

    Returns:
        [B, T, N, H] in q's dtype.
    """
    batch, tokens, heads, head_dim = q.shape
    kv_heads = k.shape[2]
    grouped = q.reshape(batch, tokens, kv_heads, heads // kv_heads, head_dim).astype(jnp.float32)
    scores = jnp.einsum("btgrh,bsgh->bgrts", grouped, k.astype(jnp.float32), precision="highest")
    scores = _soft_capped(scores, softcap)
    mask = tree_mask(layout, prefix_lengths, window)
    weights = jax.nn.softmax(jnp.where(mask[:, None, None], scores, MASKED), axis=-1)
    out = jnp.einsum("bgrts,bsgh->btgrh", weights, v.astype(jnp.float32), precision="highest")
    return out.reshape(q.shape).astype(q.dtype)


def blockwise_attention(
    q: jax.Array,
    k: jax.Array,
    v: jax.Array,
    *,
    layout: TreeLayout,
    prefix_lengths: jax.Array,
    window: int | None = None,
    softcap: float | None = None,
    sequential: bool | None = None,
    block_rows: int = BLOCK_ROWS,
) -> jax.Array:
    """The same as :func:`reference_attention`, a block of queries at a time.

    Keys that no query of a block may see (later ones, those outside the window, siblings) are left out
    at trace time. Softmax runs in float32; both products accumulate in float32.

    Args:
        sequential: handle one tree and one kv head after the other, so that a block of scores stays in
            the cache; the default on CPU. Otherwise all trees and heads at once, for accelerators.
        block_rows: query rows of a block.
    """
    batch, tokens, heads, head_dim = q.shape
    kv_heads = k.shape[2]
    group = heads // kv_heads
    if sequential is None:
        sequential = jax.default_backend() == "cpu"
    # [B, G, T, group, H]: the query heads of one kv head share its keys.
    grouped = q.reshape(batch, tokens, kv_heads, group, head_dim).transpose(0, 2, 1, 3, 4)
    keys, values = k.transpose(0, 2, 1, 3), v.transpose(0, 2, 1, 3)

    def head(q_: jax.Array, k_: jax.Array, v_: jax.Array, length: jax.Array) -> jax.Array:
        return _attend_head(
            q_, k_, v_, length, layout=layout, window=window, softcap=softcap, block_rows=block_rows
        )

    if sequential:
        lengths = jnp.repeat(prefix_lengths, kv_heads)
        flat = [x.reshape(batch * kv_heads, *x.shape[2:]) for x in (grouped, keys, values)]
        out = lax.map(lambda args: head(*args), (*flat, lengths))
        out = out.reshape(batch, kv_heads, tokens, group, head_dim)
    else:
        out = jax.vmap(jax.vmap(head, in_axes=(0, 0, 0, None)))(grouped, keys, values, prefix_lengths)
    return out.transpose(0, 2, 1, 3, 4).reshape(q.shape)


def _attend_head(
    q: jax.Array,
    k: jax.Array,
    v: jax.Array,
    prefix_length: jax.Array,
    *,
    layout: TreeLayout,
    window: int | None,
    softcap: float | None,
    block_rows: int,
) -> jax.Array:
    """One tree, one kv head: q [T, group, H], k and v [T, H], prefix_length int32 [] -> [T, group, H]."""
    prefix, responses, length = layout.prefix, layout.responses, layout.response_length
    group, head_dim = q.shape[1:]
    block = max(16, block_rows // group)
    first_real = prefix - prefix_length
    outputs = []

    for start in range(0, prefix, block):
        stop = min(start + block, prefix)
        low = 0 if window is None else max(0, start - window + 1)
        rows = q[start:stop].reshape((stop - start) * group, head_dim)
        place = (start + jnp.arange((stop - start) * group) // group)[:, None]
        key_place = (low + jnp.arange(stop - low))[None, :]
        visible = (key_place <= place) & (key_place >= first_real)
        if window is not None:
            visible &= place - key_place < window
        scores = jnp.where(visible, _soft_capped(_scores(rows, k[low:stop]), softcap), MASKED)
        weights, total = _softmax_parts(scores, scores.max(-1, keepdims=True))
        out = _weighted(weights, v[low:stop], q.dtype) / total
        outputs.append(out.astype(q.dtype).reshape(stop - start, group, head_dim))

    prefix_keys, prefix_values = k[:prefix], v[:prefix]
    own = tuple(x[prefix:].reshape(responses, length, *x.shape[1:]) for x in (q, k, v))

    def chunk(args: tuple[jax.Array, jax.Array, jax.Array]) -> jax.Array:
        """Some responses: q [c, R, group, H], k and v [c, R, H] -> [c, R, group, H]."""
        q_, k_, v_ = args
        count = q_.shape[0]
        parts = []
        for start in range(0, length, block):
            stop = min(start + block, length)
            rows_each = (stop - start) * group
            low = 0 if window is None else max(0, start - window + 1)
            rows = q_[:, start:stop].reshape(count * rows_each, head_dim)
            place = (start + jnp.arange(rows_each) // group)[:, None]
            key_place = (low + jnp.arange(stop - low))[None, :]
            visible = key_place <= place
            if window is not None:
                visible &= place - key_place < window
            inner = _batched_scores(rows.reshape(count, rows_each, head_dim), k_[:, low:stop])
            inner = jnp.where(visible, _soft_capped(inner, softcap), MASKED)
            top = inner.max(-1, keepdims=True)
            prefix_low = 0 if window is None else max(0, prefix + start - window + 1)
            if prefix_low < prefix:
                place_all = prefix + jnp.tile(place, (count, 1))
                prefix_place = (prefix_low + jnp.arange(prefix - prefix_low))[None, :]
                seen = prefix_place >= first_real
                if window is not None:
                    seen = seen & (place_all - prefix_place < window)
                outer = _soft_capped(_scores(rows, prefix_keys[prefix_low:]), softcap)
                outer = jnp.where(seen, outer, MASKED)
                top = jnp.maximum(top, outer.max(-1, keepdims=True).reshape(count, rows_each, 1))
                outer_weights, outer_total = _softmax_parts(outer, top.reshape(count * rows_each, 1))
                out = _weighted(outer_weights, prefix_values[prefix_low:], q.dtype)
                out, total = out.reshape(count, rows_each, head_dim), outer_total.reshape(count, rows_each, 1)
            else:
                out, total = jnp.float32(0), jnp.float32(0)
            inner_weights, inner_total = _softmax_parts(inner, top)
            out = out + _batched_weighted(inner_weights, v_[:, low:stop], q.dtype)
            out = out / (total + inner_total)
            parts.append(out.astype(q.dtype).reshape(count, stop - start, group, head_dim))
        return parts[0] if len(parts) == 1 else jnp.concatenate(parts, axis=1)

    per_chunk = _responses_per_chunk(responses, max(1, block // length))
    outputs.append(_in_chunks(chunk, own, responses, per_chunk).reshape(-1, group, head_dim))
    return jnp.concatenate(outputs, axis=0)


def _responses_per_chunk(responses: int, wanted: int) -> int:
    """The largest divisor of ``responses`` that is at most ``wanted``."""
    return max(d for d in range(1, min(wanted, responses) + 1) if responses % d == 0)


def _in_chunks(
    chunk: Callable[[tuple[jax.Array, jax.Array, jax.Array]], jax.Array],
    own: tuple[jax.Array, ...],
    responses: int,
    per_chunk: int,
) -> jax.Array:
    q, k, v = own
    if per_chunk == responses:
        return chunk((q, k, v))
    folded = tuple(x.reshape(responses // per_chunk, per_chunk, *x.shape[1:]) for x in (q, k, v))
    out = lax.map(chunk, folded)
    return out.reshape(responses, *out.shape[2:])


def _soft_capped(scores: jax.Array, softcap: float | None) -> jax.Array:
    return scores if softcap is None else softcap * jnp.tanh(scores / softcap)


def _scores(rows: jax.Array, keys: jax.Array) -> jax.Array:
    """[M, H] x [S, H] -> float32 [M, S]."""
    return lax.dot_general(
        rows,
        keys,
        (((1,), (1,)), ((), ())),
        precision=matmul_precision(rows.dtype),
        preferred_element_type=jnp.float32,
    )


def _batched_scores(rows: jax.Array, keys: jax.Array) -> jax.Array:
    """[c, M, H] x [c, S, H] -> float32 [c, M, S]."""
    return lax.dot_general(
        rows,
        keys,
        (((2,), (2,)), ((0,), (0,))),
        precision=matmul_precision(rows.dtype),
        preferred_element_type=jnp.float32,
    )


def _softmax_parts(scores: jax.Array, top: jax.Array) -> tuple[jax.Array, jax.Array]:
    """Unnormalised weights exp(s - top) and their sums, float32."""
    weights = jnp.exp(scores - top)
    return weights, weights.sum(-1, keepdims=True)


def _weighted(weights: jax.Array, values: jax.Array, dtype: jnp.dtype) -> jax.Array:
    """[M, S] x [S, H] -> float32 [M, H]."""
    return lax.dot_general(
        weights.astype(dtype),
        values,
        (((1,), (0,)), ((), ())),
        precision=matmul_precision(dtype),
        preferred_element_type=jnp.float32,
    )


def _batched_weighted(weights: jax.Array, values: jax.Array, dtype: jnp.dtype) -> jax.Array:
    """[c, M, S] x [c, S, H] -> float32 [c, M, H]."""
    return lax.dot_general(
        weights.astype(dtype),
        values,
        (((2,), (1,)), ((0,), (0,))),
        precision=matmul_precision(dtype),
        preferred_element_type=jnp.float32,
    )


def attention_flops(layout: TreeLayout, *, heads: int, head_dim: int, window: int | None) -> float:
    """Multiply-adds times two that a tree needs in one layer, padding counted as tokens."""
    prefix, length = layout.prefix, layout.response_length
    span = math.inf if window is None else window

    def seen(place: int) -> float:
        return min(place + 1, span)

    pairs = sum(seen(i) for i in range(prefix))
    pairs += layout.responses * sum(seen(prefix + j) for j in range(length))
    return 4.0 * pairs * heads * head_dim
