"""Cholesky factors and triangular solutions, for many people one after another.

LAPACK's kernels of jaxlib divide a batch of matrices among the threads of XLA's pool, and wait for them on a thread of
this pool. If a program has as many such kernels at once as the pool has threads, all wait for one another and never end
(jaxlib 0.10.2). A single matrix is not divided, so `jax.vmap` of these functions is a loop.
"""

from __future__ import annotations

import jax
from jax.custom_batching import sequential_vmap

from prb_jax.personal.few_shot.choices import Array


@sequential_vmap
def factorised(matrix: Array) -> jax.Array:
    """Return the lower Cholesky factor of a positive definite matrix [k, k]."""
    return jax.scipy.linalg.cholesky(matrix, lower=True)


@sequential_vmap
def solved(factor: Array, values: Array) -> jax.Array:
    """Return the solution x [k] of (L L^T) x = values, for a lower factor L [k, k]."""
    return jax.scipy.linalg.cho_solve((factor, True), values)


@sequential_vmap
def half_solved(factor: Array, rows: Array) -> jax.Array:
    """Return the solution x [k, J] of L x = rows, for a lower factor L [k, k]."""
    return jax.scipy.linalg.solve_triangular(factor, rows, lower=True)
