"""Attention from one place of each response: all that a last layer needs of its queries."""

from __future__ import annotations

import jax
import jax.numpy as jnp

from prb_jax.models.attention.blocks import MASKED
from prb_jax.models.layers import matmul_precision
from prb_jax.trees.mask import TreeLayout, TreeMask


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
    """As :func:`prb_jax.models.attention.blockwise.blockwise_attention`, for one query of each response.

    Args:
        q: [B, K, N, H], already scaled.
        k, v: [B, T, G, H].
        places: int32 [B, K], where in T the query of each response stands.
        layout: static shape of the trees.
        prefix_lengths: int32 [B], real tokens of each prefix.
        window: a token sees only the ``window`` last tokens, itself included.
        softcap: scores s become ``softcap * tanh(s / softcap)`` before masking.

    Returns:
        [B, K, N, H] in q's dtype.
    """
    rows, responses, heads, head_dim = q.shape
    kv_heads = k.shape[2]
    prefix, length = layout.prefix, layout.response_length
    grouped = q.reshape(rows, responses, kv_heads, heads // kv_heads, head_dim)
    own_k, own_v = (x[:, prefix:].reshape(rows, responses, length, kv_heads, head_dim) for x in (k, v))

    def product(form: str, a: jax.Array, b: jax.Array) -> jax.Array:
        precision = matmul_precision(q.dtype)
        return jnp.einsum(form, a, b, precision=precision, preferred_element_type=jnp.float32)

    scores = jnp.concatenate(
        [
            product("bkgnh,bpgh->bkgnp", grouped, k[:, :prefix]),
            product("bkgnh,bkrgh->bkgnr", grouped, own_k),
        ],
        axis=-1,
    )
    if softcap is not None:
        scores = softcap * jnp.tanh(scores / softcap)
    # The prefix, and each query's own response.
    first = prefix + length * jnp.arange(responses)
    own = first[:, None] + jnp.arange(length)
    keys = jnp.concatenate([jnp.broadcast_to(jnp.arange(prefix), (responses, prefix)), own], axis=1)
    visible = TreeMask(layout, window).sees(places[:, :, None], keys)
    visible &= keys >= (prefix - prefix_lengths)[:, None, None]
    weights = jax.nn.softmax(jnp.where(visible[:, :, None, None], scores, MASKED), axis=-1).astype(q.dtype)
    out = product("bkgnp,bpgh->bkgnh", weights[..., :prefix], v[:, :prefix])
    out = out + product("bkgnr,bkrgh->bkgnh", weights[..., prefix:], own_v)
    return out.astype(q.dtype).reshape(q.shape)
