"""Best-of-k against all subsets one by one; ROUGE against the published example of rouge-score."""

from __future__ import annotations

from itertools import combinations
from math import comb

import numpy as np
import pytest
from scipy import stats

from prb_jax.errors import DataError
from prb_jax.metrics.best_of import (
    best_of_first,
    best_of_k,
    curve,
    mean_interval,
    sizes_up_to,
    subset_weights,
)
from prb_jax.metrics.overlap import rouge_1, rouge_l


def test_the_unbiased_estimator_is_the_mean_over_all_subsets() -> None:
    rng = np.random.default_rng(0)
    for ties in (False, True):
        rewards = rng.integers(0, 4, 9).astype(float) if ties else rng.standard_normal(9)
        quality = rng.standard_normal(9)
        for size in range(1, 10):
            each = []
            for subset in map(list, combinations(range(9), size)):
                best = rewards[subset] == rewards[subset].max()
                each.append(quality[subset][best].mean())
            assert best_of_k(rewards, quality, size) == pytest.approx(np.mean(each), abs=1e-12)


def test_weights_are_shares_of_subsets_also_for_many_samples() -> None:
    for samples, size in ((16, 4), (128, 64), (300, 1), (300, 300)):
        expected = [comb(rank, size - 1) / comb(samples, size) for rank in range(samples)]
        np.testing.assert_allclose(subset_weights(samples, size), expected, rtol=1e-9)


def test_bounds_first_k_and_bad_k() -> None:
    rewards, quality = np.array([1.0, 3.0, 3.0, 2.0]), np.array([0.1, 0.9, 0.2, 0.5])
    assert [best_of_first(rewards, quality, k) for k in (1, 2, 3, 4)] == [
        0.1,
        0.9,
        0.9,
        0.9,
    ]  # the first on ties
    assert best_of_k(quality, quality, 4) == 0.9  # the oracle
    assert best_of_k(np.zeros(4), quality, 3) == pytest.approx(
        quality.mean()
    )  # a selector that knows nothing
    (point,) = curve([rewards, rewards[:2]], [quality, quality[:2]], [4])
    assert point.quality == pytest.approx((best_of_k(rewards, quality, 4) + 0.9) / 2)
    assert sizes_up_to(16) == [1, 2, 4, 8, 16]
    assert sizes_up_to(12) == [1, 2, 4, 8, 12]
    assert sizes_up_to(1) == [1]
    with pytest.raises(DataError, match="k: expected 1 to 4, found 5"):
        best_of_k(rewards, quality, 5)


def test_the_interval_is_the_t_interval_and_clusters_widen_it() -> None:
    values = np.random.default_rng(2).standard_normal(20)
    expected = stats.t.interval(0.95, 19, loc=values.mean(), scale=stats.sem(values))
    assert mean_interval(values, [None] * 20) == pytest.approx(expected)
    low, high = mean_interval(np.repeat(values, 3), [f"u{k // 3}" for k in range(60)]) or (0, 0)
    assert (low, high) == pytest.approx(expected)  # copies of a user's rows say nothing new
    assert mean_interval(values, ["u"] * 20) is None


def test_rouge_is_that_of_the_published_example() -> None:
    """https://github.com/google-research/google-research/tree/master/rouge: rouge1 0.70588, rougeL 0.58824."""
    reference, text = "The quick brown fox jumps over the lazy dog", "The quick brown dog jumps on the log."
    assert rouge_1(text, reference) == pytest.approx(0.7058823529411765)
    assert rouge_l(text, reference) == pytest.approx(0.5882352941176471)
    assert rouge_l("", reference) == rouge_1("?!", reference) == 0
