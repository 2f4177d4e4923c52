"""Factors for many people: the numbers of NumPy, and no kernel that divides a batch."""

import re

import jax
import numpy as np
import pytest

from prb_jax.personal.few_shot.factors import factorised, half_solved, solved


def matrices(people: int, size: int) -> np.ndarray:
    roots = np.random.default_rng(0).normal(size=(people, size, size)).astype(np.float32)
    return roots @ roots.swapaxes(1, 2) + np.eye(size, dtype=np.float32)


@jax.jit
def of_people(many: np.ndarray, rows: np.ndarray):
    factors = jax.vmap(factorised)(many)
    return factors, jax.vmap(solved)(factors, rows[..., 0]), jax.vmap(half_solved)(factors, rows)


def test_factors_and_solutions_are_those_of_numpy():
    many = matrices(5, 7)
    rows = np.random.default_rng(1).normal(size=(5, 7, 3)).astype(np.float32)
    factors, solutions, halves = of_people(many, rows)
    expected = np.linalg.cholesky(many.astype(np.float64))
    np.testing.assert_allclose(factors, expected, atol=1e-5)
    np.testing.assert_allclose(solutions, np.linalg.solve(many, rows[..., :1])[..., 0], atol=1e-4)
    np.testing.assert_allclose(halves, np.linalg.solve(expected, rows), atol=1e-4)


@pytest.mark.parametrize("nested", [False, True])
def test_no_kernel_gets_a_batch(nested: bool):
    """A kernel that divides its batch among the threads of the pool may wait for itself."""
    map_ = (lambda function: jax.vmap(jax.vmap(function))) if nested else jax.vmap
    shape = (2, 3, 4, 4) if nested else (6, 4, 4)
    program = jax.jit(lambda many: map_(solved)(map_(factorised)(many), many[..., 0]))
    text = program.lower(np.zeros(shape, np.float32)).as_text()
    calls = re.findall(r"custom_call @lapack_\w+\(.*?\) .*: \(tensor<([\dx]+)xf32>", text)
    assert calls
    assert {call.count("x") for call in calls} <= {0, 1}


def test_many_factors_in_one_program_end():
    """Six at once on the threads of this machine: they waited for one another for ever."""
    many = matrices(500, 32)
    six = jax.jit(lambda many: sum(jax.vmap(factorised)(many * scale).sum() for scale in range(1, 7)))
    expected = sum(np.linalg.cholesky(many.astype(np.float64) * scale).sum() for scale in range(1, 7))
    for _ in range(20):
        assert float(six(many)) == pytest.approx(expected, rel=1e-4)
