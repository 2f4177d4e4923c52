"""How much a question tells about a person, where a person is a vector of weights with a Gaussian prior.

    I(answer; w) = H[E p] - E H[p],  p = sigmoid(v.w),  w ~ N(w_k, S),  S^-1 = precision I + sum_i s'(w_k.v_i) v_i v_i^T

The expected information of an answer in nats (Lindley 1956; Houlsby and others 2011, arXiv 1112.5745), under the
Laplace approximation of the person's weights after k comparisons.
"""

from __future__ import annotations

import jax
import jax.numpy as jnp
import numpy as np

from prb_jax.personal.few_shot.choices import Array


def expected_information(
    rows: Array, mask: Array, pool: Array, weights: Array, precision: Array
) -> jax.Array:
    """Return the expected information of each question of a pool, float32 [Q], in nats, between 0 and log 2.

    Args:
      rows: float32 [k, J], the differences that the person has answered, in the space of the weights.
      mask: bool [k].
      pool: float32 [Q, J], the differences of the two responses of each question.
      weights: float32 [J], the person's most probable weights.
      precision: float32 [], of the prior.
    """
    margin = rows @ weights
    curve = jax.nn.sigmoid(margin) * jax.nn.sigmoid(-margin) * mask
    inverse = precision * jnp.eye(len(weights)) + (rows * curve[:, None]).T @ rows
    variance = jnp.sum(pool * jnp.linalg.solve(inverse, pool.T).T, axis=1)
    # The trapezoid rule: the entropy is a narrow bump where the deviation is large, which Gauss-Hermite misses.
    nodes = np.linspace(-6, 6, 241)
    shares = np.exp(-(nodes**2) / 2)
    drawn = (pool @ weights)[:, None] + jnp.sqrt(jnp.maximum(variance, 0))[:, None] * nodes.astype(np.float32)
    shares = (shares / shares.sum()).astype(np.float32)
    return _entropy(jax.nn.sigmoid(drawn) @ shares) - _entropy(jax.nn.sigmoid(drawn)) @ shares


def _entropy(p: Array) -> jax.Array:
    p = jnp.clip(p, 1e-7, 1 - 1e-7)
    return -p * jnp.log(p) - (1 - p) * jnp.log1p(-p)
