"""The solvers against scipy, and the information of a question against an integral in higher precision."""

import jax
import numpy as np
from scipy.integrate import quad
from scipy.optimize import minimize

from prb_jax.personal.few_shot.asking import expected_information
from prb_jax.personal.few_shot.fitting import Pairs, fit_direction, most_probable


def losses(margins: np.ndarray) -> float:
    return float(np.logaddexp(0, -margins).sum())


def test_the_most_probable_weights_are_those_of_scipy():
    rng = np.random.default_rng(0)
    rows = rng.normal(size=(6, 5, 9)).astype(np.float32)
    offset = rng.normal(size=(6, 5)).astype(np.float32)
    mask = rng.random((6, 5)) < 0.7
    mask[0] = False
    rows[1] *= 30  # large and separable: a plain Newton step overshoots
    precision = np.float32(0.3)
    found = jax.jit(jax.vmap(most_probable, in_axes=(0, 0, 0, None)))(rows, mask, offset, precision)
    assert not np.asarray(found[0]).any()
    for row, known, start, weights in zip(rows, mask, offset, found, strict=True):
        row, start = row[known].astype(np.float64), start[known].astype(np.float64)

        def objective(w: np.ndarray, row: np.ndarray = row, start: np.ndarray = start) -> float:
            return losses(start + row @ w) + 0.15 * w @ w

        best = minimize(objective, np.zeros(9), tol=1e-12)
        assert objective(np.asarray(weights, np.float64)) <= best.fun + 1e-5 * (1 + abs(best.fun))


def test_the_pooled_direction_is_that_of_scipy():
    rng = np.random.default_rng(0)
    deltas = rng.normal(size=(80, 4)).astype(np.float32)
    deltas *= np.where(rng.random(80) < 1 / (1 + np.exp(-deltas @ [1, -1, 0.5, 0])), 1, -1)[:, None]
    weights = np.ones(80, np.float32)
    weights[70:] = 0  # padding
    found = fit_direction(
        Pairs(deltas, np.zeros(80, np.int32), weights), np.float32(0.02), np.zeros(4, np.float32), steps=50
    )
    kept = deltas[:70].astype(np.float64)
    best = minimize(lambda v: losses(kept @ v) / 70 + 0.01 * v @ v, np.zeros(4), tol=1e-12)
    np.testing.assert_allclose(found, best.x, atol=1e-3)


def test_the_information_of_a_question_is_its_integral():
    pool = np.array([[2.0, 0.0], [0.0, 0.5], [0.0, 0.0], [3.0, 3.0]], np.float32)
    rows = np.array([[1.0, 0.5], [9.0, 9.0]], np.float32)
    mask, weights, precision = np.array([True, False]), np.array([0.3, -0.2], np.float32), np.float32(0.7)
    found = np.asarray(jax.jit(expected_information)(rows, mask, pool, weights, precision))

    def entropy(p: float) -> float:
        return -p * np.log(p) - (1 - p) * np.log1p(-p)

    margin = float(rows[0] @ weights)
    curve = 1 / (1 + np.exp(-margin)) / (1 + np.exp(margin))
    covariance = np.linalg.inv(0.7 * np.eye(2) + curve * np.outer(rows[0], rows[0]))
    for question, information in zip(pool.astype(np.float64), found, strict=True):
        mean, deviation = question @ weights, np.sqrt(question @ covariance @ question)

        def expected(value, mean: float = mean, deviation: float = deviation) -> float:
            def density(t: float) -> float:
                return float(value(1 / (1 + np.exp(-(mean + deviation * t)))) * np.exp(-t * t / 2))

            return quad(density, -8, 8)[0] / np.sqrt(2 * np.pi)

        assert abs(information - (entropy(expected(lambda p: p)) - expected(entropy))) < 2e-5
    assert found[2] == 0
    assert found[3] == found.max()
