"""Attention over trees (one mask, :mod:`prb_jax.trees.mask`) for any machine, a block of queries at a time.

:mod:`prb_jax.models.attention.splash` is the kernel for TPUs;
:mod:`prb_jax.models.attention.choice` says which one a program gets.
"""

from __future__ import annotations

import math
from collections.abc import Callable
from functools import partial
from typing import Any, cast

import jax
import jax.numpy as jnp
from jax import lax
from jax.ad_checkpoint import checkpoint_name

from prb_jax.models.attention.blocks import MASKED, BlockPlan, attend_head, attend_head_backward
from prb_jax.models.layers import float32_einsum, soft_capped
from prb_jax.trees.mask import TreeLayout, TreeMask

# Query rows (query positions times query heads per kv head) of one block. On CPUs the block of scores
# then stays in the cache: twice the size costs 20 % of attention's speed, half of it costs 10 %.
BLOCK_ROWS = 512
BACKWARD_BLOCK_ROWS = 256

# Names of what a rematerialisation policy may keep of attention.
ATTENTION_RESULTS = ("attention_out", "attention_log")


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
    backward_block_rows: int = BACKWARD_BLOCK_ROWS,
) -> jax.Array:
    """Return the attention of every token to the tokens it may see, [B, T, N, H] in q's dtype.

    Never more than one block of queries is held with the keys it may see. Keys that no query of a block may see
    (later ones, those outside the window, siblings) are left out at trace time. Softmax runs in float32; all
    products accumulate in float32. The backward pass also holds one block at a time: see
    :mod:`prb_jax.models.attention.blocks`.

    Args:
        q: [B, T, N, H], already scaled.
        k, v: [B, T, G, H].
        layout: static shape of the trees.
        prefix_lengths: int32 [B], real tokens of each prefix.
        window: a token sees only the ``window`` last tokens, itself included.
        softcap: scores s become ``softcap * tanh(s / softcap)`` before masking.
        sequential: handle one tree and one kv head after the other, so that a block of scores stays in
            the cache; the default on CPU. Otherwise all trees and heads at once, for accelerators.
        block_rows, backward_block_rows: query rows of a block.
    """
    batch, tokens, heads, head_dim = q.shape
    kv_heads = k.shape[2]
    if sequential is None:
        sequential = jax.default_backend() == "cpu"
    plan = BlockPlan(
        layout=layout,
        window=window,
        softcap=softcap,
        forward_rows=block_rows,
        backward_rows=backward_block_rows,
    )
    # [B, G, T, group, H]: the query heads of one kv head share its keys.
    grouped = q.reshape(batch, tokens, kv_heads, heads // kv_heads, head_dim).transpose(0, 2, 1, 3, 4)
    keys, values = k.transpose(0, 2, 1, 3), v.transpose(0, 2, 1, 3)
    out = cast(jax.Array, _attend(plan, sequential, grouped, keys, values, prefix_lengths))
    return out.transpose(0, 2, 1, 3, 4).reshape(q.shape)


@partial(jax.custom_vjp, nondiff_argnums=(0, 1))
def _attend(
    plan: BlockPlan, sequential: bool, q: jax.Array, k: jax.Array, v: jax.Array, prefix_lengths: jax.Array
) -> jax.Array:
    """q [B, G, T, group, H], k and v [B, G, T, H] -> [B, G, T, group, H]."""
    out, _ = _each_head(partial(attend_head, plan=plan), sequential, prefix_lengths, q, k, v)
    return out


def _attend_forward(
    plan: BlockPlan, sequential: bool, q: jax.Array, k: jax.Array, v: jax.Array, prefix_lengths: jax.Array
) -> tuple[jax.Array, tuple[jax.Array, ...]]:
    out, log = _each_head(partial(attend_head, plan=plan), sequential, prefix_lengths, q, k, v)
    out, log = (checkpoint_name(x, name) for x, name in zip((out, log), ATTENTION_RESULTS, strict=True))
    return out, (q, k, v, prefix_lengths, out, log)


def _attend_backward(
    plan: BlockPlan, sequential: bool, kept: tuple[jax.Array, ...], cotangent: jax.Array
) -> tuple[jax.Array, jax.Array, jax.Array, None]:
    q, k, v, prefix_lengths, out, log = kept
    return *_each_head(
        partial(attend_head_backward, plan=plan),
        sequential,
        prefix_lengths,
        q,
        k,
        v,
        out,
        log,
        cotangent,
    ), None


_attend.defvjp(_attend_forward, _attend_backward)


def _each_head(
    head: Callable[..., Any], sequential: bool, prefix_lengths: jax.Array, *arrays: jax.Array
) -> Any:
    """head(q, k, v, prefix_length, ...) for every tree and kv head: the two leading axes of the arrays."""

    def run(length: jax.Array, q: jax.Array, k: jax.Array, v: jax.Array, *rest: jax.Array) -> Any:
        return head(q, k, v, length, *rest)

    if not sequential:
        over_heads = jax.vmap(run, in_axes=(None, *(0 for _ in arrays)))
        return jax.vmap(over_heads)(prefix_lengths, *arrays)
    batch, kv_heads = arrays[0].shape[:2]
    flat = [x.reshape(batch * kv_heads, *x.shape[2:]) for x in arrays]
    out = lax.map(lambda args: run(*args), (jnp.repeat(prefix_lengths, kv_heads), *flat))
    return jax.tree.map(lambda x: x.reshape(batch, kv_heads, *x.shape[1:]), out)


def attention_flops(layout: TreeLayout, *, heads: int, head_dim: int, window: int | None) -> float:
    """Multiply-adds times two that a tree needs in one layer, padding counted as tokens."""
    prefix, length = layout.prefix, layout.response_length
    span = math.inf if window is None else window

    def seen(place: int) -> float:
        return min(place + 1, span)

    pairs = sum(seen(i) for i in range(prefix))
    pairs += layout.responses * sum(seen(prefix + j) for j in range(length))
    return 4.0 * pairs * heads * head_dim


def take_places(x: jax.Array, places: jax.Array) -> jax.Array:
    """x [B, T, D] at places int32 [B, K]: [B, K, D]."""
    return jnp.take_along_axis(x, places[:, :, None], axis=1)


def attend_from_reads(
    q: jax.Array,
    k: jax.Array,
    v: jax.Array,
    *,
    places: jax.Array,
    layout: TreeLayout,
    prefix_lengths: jax.Array,
    window: int | None = None,
    softcap: float | None = None,
) -> jax.Array:
    """As :func:`blockwise_attention`, for one query of each response.

    Args:
        q: [B, K, N, H], already scaled.
        k, v: [B, T, G, H].
        places: int32 [B, K], where in T the query of each response stands.
        layout, prefix_lengths, window, softcap: as of :func:`blockwise_attention`.

    Returns:
        [B, K, N, H] in q's dtype.
    """
    rows, responses, heads, head_dim = q.shape
    kv_heads = k.shape[2]
    prefix, length = layout.prefix, layout.response_length
    grouped = q.reshape(rows, responses, kv_heads, heads // kv_heads, head_dim)
    own_k, own_v = (x[:, prefix:].reshape(rows, responses, length, kv_heads, head_dim) for x in (k, v))

    scores = jnp.concatenate(
        [
            float32_einsum("bkgnh,bpgh->bkgnp", grouped, k[:, :prefix]),
            float32_einsum("bkgnh,bkrgh->bkgnr", grouped, own_k),
        ],
        axis=-1,
    )
    scores = soft_capped(scores, softcap)
    # The prefix, and each query's own response.
    first = prefix + length * jnp.arange(responses)
    own = first[:, None] + jnp.arange(length)
    keys = jnp.concatenate([jnp.broadcast_to(jnp.arange(prefix), (responses, prefix)), own], axis=1)
    visible = TreeMask(layout, window).sees(places[:, :, None], keys)
    visible &= keys >= (prefix - prefix_lengths)[:, None, None]
    weights = jax.nn.softmax(jnp.where(visible[:, :, None, None], scores, MASKED), axis=-1).astype(q.dtype)
    out = float32_einsum("bkgnp,bpgh->bkgnh", weights[..., :prefix], v[:, :prefix])
    out = out + float32_einsum("bkgnr,bkrgh->bkgnh", weights[..., prefix:], own_v)
    return out.astype(q.dtype).reshape(q.shape)
