"""Attention over trees by cuDNN's flash kernels: forward only, bfloat16 or float16, NVIDIA GPUs.

A tree falls into three dense problems, none of which needs a mask in memory: the prefix attends to itself
causally; responses attend to the whole prefix; each response attends to itself causally. The last two
are joined by their log-sum-exps. For the kernels' sake the prefix is shifted to the left within its
columns here and back afterwards, so that its padding lies on the right, hidden by causality or by a
length.
"""

from __future__ import annotations

import functools

import jax
import jax.numpy as jnp

from prb_jax.models.attention import TreeLayout

MAX_HEAD_DIM = 256


def cudnn_attention(
    q: jax.Array,
    k: jax.Array,
    v: jax.Array,
    *,
    layout: TreeLayout,
    prefix_lengths: jax.Array,
    window: int | None = None,
    softcap: float | None = None,
) -> jax.Array:
    """As :func:`prb_jax.models.attention.reference_attention`, without windows and soft-caps.

    Args:
        q: [B, T, N, H], already scaled.
        k: [B, T, G, H].
        v: [B, T, G, H].
        layout: static shape of the trees.
        prefix_lengths: int32 [B].
        window, softcap: must be None.

    Raises:
        ValueError: a window or a soft-cap, which these kernels do not have in this form.
    """
    if window is not None or softcap is not None:
        raise ValueError("cuDNN attention has neither windows nor soft-caps over trees")
    attend = functools.partial(jax.nn.dot_product_attention, scale=1.0, implementation="cudnn")
    rows, prefix, responses, length = q.shape[0], layout.prefix, layout.responses, layout.response_length
    shift = layout.prefix - prefix_lengths
    q_prefix, k_prefix, v_prefix = (_shifted(x[:, :prefix], shift) for x in (q, k, v))
    out_prefix = _shifted(attend(q_prefix, k_prefix, v_prefix, is_causal=True), -shift)

    def own(x: jax.Array) -> jax.Array:
        return x[:, prefix:].reshape(rows * responses, length, *x.shape[2:])

    outer, outer_log_sum = attend(
        q[:, prefix:],
        k_prefix,
        v_prefix,
        key_value_seq_lengths=jnp.maximum(prefix_lengths, 1),
        query_seq_lengths=jnp.full((rows,), responses * length, jnp.int32),
        return_residual=True,
    )
    inner, inner_log_sum = attend(own(q), own(k), own(v), is_causal=True, return_residual=True)
    inner = inner.reshape(outer.shape)
    inner_log_sum = inner_log_sum.reshape(outer_log_sum.shape)
    # An empty prefix has no weight; its one unmasked column only keeps the kernel's sums finite.
    outer_log_sum = jnp.where(prefix_lengths[:, None, None] > 0, outer_log_sum, -jnp.inf)
    share = jax.nn.sigmoid(outer_log_sum - inner_log_sum)[..., None]
    out = outer.astype(jnp.float32) * share + inner.astype(jnp.float32) * (1 - share)
    return jnp.concatenate([out_prefix, out.astype(q.dtype)], axis=1)


def _shifted(x: jax.Array, shift: jax.Array) -> jax.Array:
    """Rows of x [B, P, ...] rotated to the left by ``shift`` int32 [B] places."""
    places = (jnp.arange(x.shape[1])[None] + shift[:, None]) % x.shape[1]
    return jnp.take_along_axis(x, places[:, :, None, None], axis=1)
