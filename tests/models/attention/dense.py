"""Dense attention over trees: the mask is written down whole. Every implementation is compared with it.

NumPy computes it from arrays of NumPy, and nothing is compiled; JAX from its own, with gradients.
"""

from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
import scipy.special

from prb_jax.models.attention.walk import MASKED
from prb_jax.trees.batches import Bucket, TreeMask


def tree_mask(mask: TreeMask, prefix_lengths: Any) -> Any:
    """Return the whole mask, bool [B, T, T]: True where a query may see a key."""
    index = (np if isinstance(prefix_lengths, np.ndarray) else jnp).arange(mask.bucket.tokens)
    real = index[None, :] >= mask.bucket.prefix - prefix_lengths[:, None]
    return mask.sees(index[:, None], index[None, :])[None] & real[:, None, :]


def reference_attention(
    q: Any,
    k: Any,
    v: Any,
    *,
    bucket: Bucket,
    prefix_lengths: Any,
    window: int | None = None,
    softcap: float | None = None,
) -> Any:
    """Return what `blockwise_attention` does, in float32 and O(T^2) memory."""
    xp: Any = np if isinstance(q, np.ndarray) else jnp
    softmax: Any = scipy.special.softmax if xp is np else jax.nn.softmax
    exact = {} if xp is np else {"precision": "highest"}
    batch, tokens, heads, head_dim = q.shape
    kv_heads = k.shape[2]
    grouped = q.reshape(batch, tokens, kv_heads, heads // kv_heads, head_dim).astype(np.float32)
    grouped = grouped.transpose(0, 2, 3, 1, 4)  # [B, G, heads of a group, T, H]
    k, v = (x.astype(np.float32).transpose(0, 2, 1, 3)[:, :, None] for x in (k, v))
    scores = xp.matmul(grouped, k.swapaxes(-1, -2), **exact)
    scores = scores if softcap is None else softcap * xp.tanh(scores / softcap)
    mask = tree_mask(TreeMask(bucket, window), prefix_lengths)
    weights = softmax(xp.where(mask[:, None, None], scores, MASKED), axis=-1)
    out = xp.matmul(weights, v, **exact)
    return out.transpose(0, 3, 1, 2, 4).reshape(q.shape).astype(q.dtype)
