"""The solvers find the minima that scipy finds."""

import jax
import numpy as np
from scipy.optimize import minimize

from prb_jax.personal.few_shot.fitting import ChoicePairs, fit_direction, most_probable


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
    solved = jax.jit(jax.vmap(most_probable, in_axes=(0, 0, 0, None)))(rows, mask, offset, precision)
    assert not np.asarray(solved[0]).any()
    for row, known, start, weights in zip(rows, mask, offset, solved, strict=True):
        row, start = row[known].astype(np.float64), start[known].astype(np.float64)

        def objective(w: np.ndarray, row: np.ndarray = row, start: np.ndarray = start) -> float:
            return losses(start + row @ w) + 0.15 * float(w @ w)

        best = minimize(objective, np.zeros(9), tol=1e-12)
        assert objective(np.asarray(weights, np.float64)) <= best.fun + 1e-5 * (1 + abs(best.fun))


def test_the_pooled_direction_is_that_of_scipy():
    rng = np.random.default_rng(0)
    deltas = rng.normal(size=(80, 4)).astype(np.float32)
    deltas *= np.where(rng.random(80) < 1 / (1 + np.exp(-deltas @ [1, -1, 0.5, 0])), 1, -1)[:, None]
    weights = np.ones(80, np.float32)
    weights[70:] = 0  # padding
    pairs = ChoicePairs(deltas, np.zeros(80, np.int32), weights)
    direction = fit_direction(pairs, np.float32(0.02), np.zeros(4, np.float32), steps=50)
    kept = deltas[:70].astype(np.float64)
    best = minimize(lambda v: losses(kept @ v) / 70 + 0.01 * v @ v, np.zeros(4), tol=1e-12)
    np.testing.assert_allclose(direction, best.x, atol=1e-3)
