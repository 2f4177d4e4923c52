import itertools

import numpy as np
import pytest
from scipy.stats import binomtest, false_discovery_control

from prb_jax.metrics.coverage import benjamini_hochberg, chance, coverage, win_tails


def test_p_values_are_scipys():
    for null in (0.5, 0.25, 1 / 3):
        for rows in (1, 2, 4, 5, 6, 10, 37, 400):
            expected = [binomtest(w, rows, null, alternative="greater").pvalue for w in range(rows + 1)]
            assert win_tails(((null, rows),)) == pytest.approx(expected, rel=1e-9)


def test_benjamini_hochberg_is_scipys():
    rng = np.random.default_rng(0)
    for count in (1, 2, 7, 100):
        values = rng.random(count) ** 3
        assert benjamini_hochberg(values) == pytest.approx(false_discovery_control(values))


def test_the_null_is_one_in_k():
    assert chance([1, 0]) == 0.5
    assert chance([1, 0, 0, 0]) == 0.25
    assert chance([0, 2, 2, 1]) == 0.5
    four = coverage(["a"] * 3, [True] * 3, [0.25] * 3)  # 1 in 64
    assert (four["users_testable"], four["coverage"], four["coverage_by_chance"]) == (1, 1.0, 1 / 64)
    two = coverage(["a"] * 3, [True] * 3, [0.5] * 3)  # 1 in 8
    assert (two["users_testable"], two["coverage"], two["coverage_by_chance"]) == (0, None, None)
    assert two["coverage_benjamini_hochberg"] is None
    assert two["coverage_reason"] == "no user has enough comparisons for the test at 0.05 (most: 3)"


def test_rows_of_several_sizes_are_tested_exactly():
    chances = [0.5, 0.5, 0.25, 0.25, 0.1]
    for wins in range(6):
        expected = sum(
            np.prod([c if w else 1 - c for w, c in zip(outcome, chances)])
            for outcome in itertools.product([0, 1], repeat=5)
            if sum(outcome) >= wins
        )
        served = coverage(["u"] * 5, [True] * wins + [False] * (5 - wins), chances)
        assert (served["coverage"] == 1.0) == (expected <= 0.05)


def test_shares_of_many_users():
    rng = np.random.default_rng(0)
    users = np.repeat([f"u{i}" for i in range(400)], 20)
    by_chance = coverage(users.tolist(), (rng.random(8000) < 0.5).tolist(), [0.5] * 8000)
    assert by_chance["users_testable"] == 400
    by_lot, share = by_chance["coverage_by_chance"], by_chance["coverage"]
    assert by_lot == pytest.approx(binomtest(15, 20, 0.5, alternative="greater").pvalue)
    assert share == pytest.approx(by_lot, abs=0.02)
    assert by_chance["coverage_benjamini_hochberg"] == 0
    low, high = by_chance["coverage_ci95"]
    assert 0 < low < share < high < 0.06
    good = coverage(users.tolist(), (rng.random(8000) < 0.8).tolist(), [0.5] * 8000)
    assert 0.6 < good["coverage_benjamini_hochberg"] <= good["coverage"] < 1
