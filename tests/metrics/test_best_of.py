"""Best-of-k against all subsets one by one."""

from __future__ import annotations

from itertools import combinations
from math import comb

import numpy as np
import pytest

from prb_jax.errors import DataError
from prb_jax.metrics.best_of import best_of_first, best_of_k, curve, sizes_up_to, subset_weights


def test_the_unbiased_estimator_is_the_mean_over_all_subsets() -> None:
    rng = np.random.default_rng(0)
    for ties in (False, True):
        rewards = rng.integers(0, 4, 9).astype(float) if ties else rng.standard_normal(9)
        quality = rng.standard_normal(9)
        for size in range(1, 10):
            values = []
            for subset in map(list, combinations(range(9), size)):
                best = rewards[subset] == rewards[subset].max()
                values.append(quality[subset][best].mean())
            assert best_of_k(rewards, quality, size) == pytest.approx(np.mean(values), abs=1e-12)


def test_weights_are_shares_of_subsets_also_for_many_samples() -> None:
    for samples, size in ((16, 4), (128, 64), (300, 1), (300, 300)):
        expected = [comb(rank, size - 1) / comb(samples, size) for rank in range(samples)]
        np.testing.assert_allclose(subset_weights(samples, size), expected, rtol=1e-9)


def test_bounds_first_k_and_bad_k() -> None:
    rewards, quality = np.array([1.0, 3.0, 3.0, 2.0]), np.array([0.1, 0.9, 0.2, 0.5])
    first = [best_of_first(rewards, quality, k) for k in (1, 2, 3, 4)]
    assert first == [0.1, 0.9, 0.9, 0.9]  # the first on ties
    assert best_of_k(quality, quality, 4) == 0.9  # the oracle
    assert best_of_k(np.zeros(4), quality, 3) == pytest.approx(quality.mean())  # it knows nothing
    (point,) = curve([rewards, rewards[:2]], [quality, quality[:2]], [4])
    assert point.quality == pytest.approx((best_of_k(rewards, quality, 4) + 0.9) / 2)
    assert sizes_up_to(16) == [1, 2, 4, 8, 16]
    assert sizes_up_to(12) == [1, 2, 4, 8, 12]
    assert sizes_up_to(1) == [1]
    with pytest.raises(DataError, match="k: expected 1 to 4, found 5"):
        best_of_k(rewards, quality, 5)
