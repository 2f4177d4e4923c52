"""The gated delta rule (Yang et al., arXiv 2412.06464, equation 10) over chunks of a forest.

A head keeps a state S [dk, dv]. A token has a query q and a key k of unit length, q also divided by sqrt(dk). It has a
value v, a log-decay g <= 0 and a strength beta in (0, 1):

    S_t = exp(g_t) S_{t-1} + k_t d_t^T      d_t = beta_t (v_t - exp(g_t) S_{t-1}^T k_t)      o_t = S_t^T q_t

Within a chunk that starts from the state S_0, with G the running sum of g:

    (I + A) d = beta (v - exp(G) k S_0)     A_ts = beta_t exp(G_t - G_s) (k_t . k_s) for s < t

A does not depend on S_0. Everything except a few products is therefore computed for all chunks at once, and one scan
over the chunks carries the states.

Dimensions: n chunks of C tokens, J key heads, H value heads, with dk and dv channels. All arrays are float32.
"""

from __future__ import annotations

import jax
import jax.numpy as jnp
from jax import lax

from prb_jax.models.layers import float32_einsum, product

LENGTH_EPSILON = 1e-6
"""Epsilon added to the squared length of a query or key, as in the published models."""


def unit(x: jax.Array) -> jax.Array:
    """Divide x [..., dk] by its length."""
    return x * lax.rsqrt(jnp.sum(jnp.square(x), axis=-1, keepdims=True) + LENGTH_EPSILON)


def delta_over_chunks(
    q: jax.Array,
    k: jax.Array,
    v: jax.Array,
    g: jax.Array,
    beta: jax.Array,
    *,
    read: jax.Array,
    write: jax.Array,
    slots: int,
    keep: bool = False,
) -> tuple[jax.Array, jax.Array | None]:
    """Run the rule over a forest that is cut into chunks.

    Args:
        q, k: Queries and keys [n, J, C, dk] of unit length; q is also scaled.
        v: Values [n, H, C, dv].
        g, beta: Log-decays and strengths [n, H, C]; 0 for padding, which then leaves states unchanged.
        read, write: Slots of :class:`prb_jax.trees.chunk_tables.ChunkTable`, int32 [n].
        slots: Number of slots; slot 0 contains zeros.
        keep: If True, return the state after every chunk.

    Returns:
        Outputs [n, H, C, dv], and the states [n, H, dk, dv] or None.
    """
    heads, size = v.shape[1], v.shape[2]
    shared = heads // q.shape[1]  # value heads per key head
    total = jnp.cumsum(g, axis=-1)
    lower = jnp.tril(jnp.ones((size, size), bool))
    # Mask before the exponential: above the diagonal it may overflow and give a NaN gradient.
    decay = jnp.where(lower, jnp.exp(jnp.where(lower, total[..., :, None] - total[..., None, :], 0.0)), 0.0)

    def by_value_head(x: jax.Array) -> jax.Array:
        return x if shared == 1 else jnp.repeat(x, shared, axis=1)

    alike = by_value_head(float32_einsum("njtd,njsd->njts", k, k))
    inside = decay * by_value_head(float32_einsum("njtd,njsd->njts", q, k))
    q, k = by_value_head(q), by_value_head(k)
    inverse = unit_lower_inverse(beta[..., None] * decay * alike) * beta[..., None, :]
    passed, last = jnp.exp(total)[..., None], total[..., -1:]
    from_values = product(inverse, v, (3, 2), batch=2)
    from_state = product(inverse, passed * k, (3, 2), batch=2)
    from_state = jnp.concatenate([from_state, passed * q], axis=-2)  # both are multiplied by the state
    towards = jnp.exp(last - total)[..., None] * k
    kept = jnp.exp(last)[..., None]

    def step(
        stack: jax.Array, chunk: tuple[jax.Array, ...]
    ) -> tuple[jax.Array, tuple[jax.Array, jax.Array | None]]:
        from_values, from_state, inside, towards, kept, read, write = chunk
        state = lax.dynamic_index_in_dim(stack, read, keepdims=False)
        seen = product(from_state, state, (2, 1), batch=1)
        d = from_values - seen[:, :size]
        out = seen[:, size:] + product(inside, d, (2, 1), batch=1)
        state = kept * state + product(towards, d, (1, 1), batch=1)
        return lax.dynamic_update_index_in_dim(stack, state, write, 0), (out, state if keep else None)

    stack = jnp.zeros((slots, heads, k.shape[-1], v.shape[-1]), jnp.float32)
    _, (out, states) = lax.scan(step, stack, (from_values, from_state, inside, towards, kept, read, write))
    return out, states


_BLOCK = 16  # rows of a matrix that are solved sequentially


@jax.custom_vjp
def unit_lower_inverse(a: jax.Array) -> jax.Array:
    """Invert I + the part of a [..., C, C] below the diagonal; C is 16 times a power of 2.

    Solvers of small triangular systems are slow on CPUs, and a power series loses all precision if keys are similar.
    Rows are substituted within diagonal blocks, for all matrices at once, and blocks are combined by products.
    """
    size, matrices = a.shape[-1], a.reshape(-1, *a.shape[-2:])

    def blocks(width: int, below: int) -> jax.Array:
        """Return diagonal blocks, or for each pair the block below the first: [count, matrices, width, width]."""
        starts = range(0, size, width * (1 + below))
        return jnp.stack(
            [matrices[:, n + below * width : n + below * width + width, n : n + width] for n in starts]
        )

    last = jnp.moveaxis(blocks(_BLOCK, 0), (2, 3), (0, 1))  # [16, 16, count, matrices]

    def substitute(row: jax.Array, rows: jax.Array) -> jax.Array:
        start = (jnp.arange(_BLOCK) == row).astype(a.dtype)[:, None, None]
        return rows.at[row].set(start - (last[row][:, None] * rows).sum(axis=0))

    rows = lax.fori_loop(0, _BLOCK, substitute, jnp.zeros_like(last))
    inverse, width = jnp.moveaxis(rows, (0, 1), (2, 3)), _BLOCK
    while width < size:
        upper, lower = inverse[::2], inverse[1::2]
        inner = product(blocks(width, 1), upper, (3, 2), batch=2)
        left = jnp.concatenate([upper, -product(lower, inner, (3, 2), batch=2)], axis=2)
        right = jnp.concatenate([jnp.zeros_like(upper), lower], axis=2)
        inverse, width = jnp.concatenate([left, right], axis=3), 2 * width
    return inverse[0].reshape(a.shape)


def _inverse_forward(a: jax.Array) -> tuple[jax.Array, jax.Array]:
    inverse = unit_lower_inverse(a)
    return inverse, inverse


def _inverse_backward(inverse: jax.Array, gradient: jax.Array) -> tuple[jax.Array]:
    batch = inverse.ndim - 2
    inner = product(gradient, inverse, (-1, -1), batch=batch)  # gradient times the transpose
    return (-jnp.tril(product(inverse, inner, (-2, -2), batch=batch), -1),)


unit_lower_inverse.defvjp(_inverse_forward, _inverse_backward)
