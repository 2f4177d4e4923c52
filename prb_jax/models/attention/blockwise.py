"""Attention over padded trees (:mod:`prb_jax.trees.batches`) for any machine, a block of queries at a time."""

from __future__ import annotations

from collections.abc import Callable
from functools import partial
from typing import Any, cast

import jax
import jax.numpy as jnp
from jax import lax
from jax.ad_checkpoint import checkpoint_name

from prb_jax.models.attention.blocks import BlockPlan, attend_head, attend_head_backward
from prb_jax.models.attention.walk import ATTENTION_RESULTS
from prb_jax.trees.batches import Bucket

# Query rows (query positions times query heads per kv head) of one block. On CPUs the block of scores
# then stays in the cache: twice the size costs 20 % of attention's speed, half of it costs 10 %.
BLOCK_ROWS = 512
BACKWARD_BLOCK_ROWS = 256
# Accelerators have no such caches, and take a third of a second to compile each product of a block.
ACCELERATOR_BLOCK_ROWS = 1024


def blockwise_attention(
    q: jax.Array,
    k: jax.Array,
    v: jax.Array,
    *,
    bucket: Bucket,
    prefix_lengths: jax.Array,
    window: int | None = None,
    softcap: float | None = None,
    sequential: bool = True,
    block_rows: int | None = None,
    backward_block_rows: int | None = None,
) -> jax.Array:
    """Return the attention of every token to the tokens it may see, [B, T, N, H] in q's dtype.

    Never more than one block of queries is held with the keys it may see. Keys that no query of a block may see
    (later ones, those outside the window, siblings) are left out at trace time. Softmax runs in float32; all
    products accumulate in float32. The backward pass also holds one block at a time: see
    :mod:`prb_jax.models.attention.blocks`.

    Args:
        q: [B, T, N, H], already scaled.
        k, v: [B, T, G, H].
        bucket: static shape of the trees.
        prefix_lengths: int32 [B], real tokens of each prefix.
        window: a token sees only the ``window`` last tokens, itself included.
        softcap: scores s become ``softcap * tanh(s / softcap)`` before masking.
        sequential: handle one tree and one kv head after the other, so that a block of scores stays in
            the cache of a CPU. Otherwise all trees and heads at once, for accelerators.
        block_rows, backward_block_rows: query rows of a block, in the place of those for this machine.
    """
    batch, tokens, _, head_dim = q.shape
    kv_heads = k.shape[2]
    plan = BlockPlan(
        bucket=bucket,
        window=window,
        softcap=softcap,
        forward_rows=block_rows or (BLOCK_ROWS if sequential else ACCELERATOR_BLOCK_ROWS),
        backward_rows=backward_block_rows or (BACKWARD_BLOCK_ROWS if sequential else ACCELERATOR_BLOCK_ROWS),
    )
    # [B, G, T, group, H]: the query heads of one kv head share its keys.
    grouped = q.reshape(batch, tokens, kv_heads, -1, head_dim).transpose(0, 2, 1, 3, 4)
    keys, values = (x.transpose(0, 2, 1, 3) for x in (k, v))
    out = cast(jax.Array, _attend(plan, sequential, grouped, keys, values, prefix_lengths))
    return out.transpose(0, 2, 1, 3, 4).reshape(q.shape)


@partial(jax.custom_vjp, nondiff_argnums=(0, 1))
def _attend(
    plan: BlockPlan, sequential: bool, q: jax.Array, k: jax.Array, v: jax.Array, prefix_lengths: jax.Array
) -> jax.Array:
    """q [B, G, T, group, H], k and v [B, G, T, H] -> [B, G, T, group, H]."""
    return _each_head(partial(attend_head, plan=plan), sequential, prefix_lengths, q, k, v)[0]


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
    head = partial(attend_head_backward, plan=plan)
    return *_each_head(head, sequential, prefix_lengths, q, k, v, out, log, cotangent), None


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
