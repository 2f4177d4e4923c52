"""The gated delta rule (Yang et al., arXiv 2412.06464, equation 10) over chunks of a forest, and one token further.

A head keeps a state S [dk, dv]. For a token with query q and key k, both of length one and q also divided by sqrt(dk), value
v, log-decay g <= 0 and strength beta in (0, 1):

    S_t = exp(g_t) S_{t-1} + k_t d_t^T      d_t = beta_t (v_t - exp(g_t) S_{t-1}^T k_t)      o_t = S_t^T q_t

Within a chunk that starts from the state S_0, with G the running sum of g:

    (I + A) d = beta (v - exp(G) k S_0)     A_ts = beta_t exp(G_t - G_s) (k_t . k_s) for s < t

A does not depend on S_0, so everything but a few products is computed for all chunks at once, and one scan over the chunks
carries the states.

Letters: n chunks of C tokens, J heads of keys, H heads of values, dk and dv channels of each; all arrays are float32.
"""

from __future__ import annotations

import jax
import jax.numpy as jnp
from jax import lax

from prb_jax.models.layers import float32_einsum, product

LENGTH_EPSILON = 1e-6
"""Added to the squared length of a query or key, as in the published models."""


def unit(x: jax.Array) -> jax.Array:
    """x [..., dk] divided by its length."""
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
    """Run a forest that is cut into chunks.

    Args:
        q, k: [n, J, C, dk], of length one; q is also scaled.
        v: [n, H, C, dv].
        g, beta: [n, H, C], 0 for padding, which then changes no state.
        read, write: int32 [n], slots of :class:`prb_jax.trees.chunk_tables.ChunkTable`.
        slots: how many there are; slot 0 holds zeros.
        keep: return the state after every chunk.

    Returns:
        [n, H, C, dv], and the states [n, H, dk, dv] or None.
    """
    heads, size = v.shape[1], v.shape[2]
    shared = heads // q.shape[1]  # heads of values for each head of keys
    total = jnp.cumsum(g, axis=-1)
    lower = jnp.tril(jnp.ones((size, size), bool))
    # Masked before the exponential: above the diagonal it may overflow, and its gradient would not be a number.
    decay = jnp.where(lower, jnp.exp(jnp.where(lower, total[..., :, None] - total[..., None, :], 0.0)), 0.0)

    def by_value_head(x: jax.Array) -> jax.Array:
        return jnp.repeat(x, shared, axis=1)

    alike = by_value_head(float32_einsum("njtd,njsd->njts", k, k))
    inside = decay * by_value_head(float32_einsum("njtd,njsd->njts", q, k))
    q, k = by_value_head(q), by_value_head(k)
    system = beta[..., None] * decay * alike * (1.0 - jnp.eye(size))
    passed, last = jnp.exp(total)[..., None], total[..., -1:]
    sides = jnp.concatenate([beta[..., None] * v, beta[..., None] * passed * k], axis=-1)
    solved = lax.linalg.triangular_solve(
        system + jnp.eye(size), sides, left_side=True, lower=True, unit_diagonal=True
    )
    from_values, from_state = solved[..., : v.shape[-1]], solved[..., v.shape[-1] :]
    from_state = jnp.concatenate([from_state, passed * q], axis=-2)  # both are multiplied by the state
    towards = jnp.exp(last - total)[..., None] * k
    kept = jnp.exp(last)[..., None]

    def step(stack: jax.Array, chunk: tuple[jax.Array, ...]) -> tuple[jax.Array, tuple[jax.Array, jax.Array | None]]:
        from_values, from_state, inside, towards, kept, read, write = chunk
        state = stack[read]
        seen = product(from_state, state, (2, 1), batch=1)
        d = from_values - seen[:, :size]
        out = seen[:, size:] + product(inside, d, (2, 1), batch=1)
        state = kept * state + product(towards, d, (1, 1), batch=1)
        return stack.at[write].set(state), (out, state if keep else None)

    stack = jnp.zeros((slots, heads, k.shape[-1], v.shape[-1]), jnp.float32)
    _, (out, states) = lax.scan(step, stack, (from_values, from_state, inside, towards, kept, read, write))
    return out, states
