"""Dense attention over trees: the mask is written down whole. Every implementation is compared with it."""

import jax
import jax.numpy as jnp

from prb_jax.models.attention.blocks import MASKED
from prb_jax.trees.mask import TreeLayout, TreeMask


def tree_mask(mask: TreeMask, prefix_lengths: jax.Array) -> jax.Array:
    """Return the whole mask, bool [B, T, T]: True where a query may see a key."""
    index = jnp.arange(mask.layout.tokens)
    real = index[None, :] >= mask.layout.prefix - prefix_lengths[:, None]
    return mask.sees(index[:, None], index[None, :])[None] & real[:, None, :]


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
    """Return what `blockwise_attention` does, in float32 and O(T^2) memory."""
    batch, tokens, heads, head_dim = q.shape
    kv_heads = k.shape[2]
    grouped = q.reshape(batch, tokens, kv_heads, heads // kv_heads, head_dim).astype(jnp.float32)
    scores = jnp.einsum("btgrh,bsgh->bgrts", grouped, k.astype(jnp.float32), precision="highest")
    scores = scores if softcap is None else softcap * jnp.tanh(scores / softcap)
    mask = tree_mask(TreeMask(layout, window), prefix_lengths)
    weights = jax.nn.softmax(jnp.where(mask[:, None, None], scores, MASKED), axis=-1)
    out = jnp.einsum("bgrts,bsgh->btgrh", weights, v.astype(jnp.float32), precision="highest")
    return out.reshape(q.shape).astype(q.dtype)
