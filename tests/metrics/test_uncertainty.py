import time

import numpy as np
import pytest
from scipy.stats import binomtest

from prb_jax.errors import DataError
from prb_jax.metrics.accuracy import ScoredRow
from prb_jax.metrics.uncertainty import binomial_p_values, bootstrap_interval, paired_difference


def brute_force(sums, sizes, *, resamples=20_000):
    """Clusters drawn one by one, as the bootstrap is defined."""
    rng = np.random.default_rng(123)
    index = rng.integers(len(sums), size=(resamples, len(sums)))
    values = np.asarray(sums)[index].sum(1) / np.asarray(sizes)[index].sum(1)
    return np.quantile(values, [0.025, 0.975])


@pytest.mark.parametrize("users", [5, 40, 300])
def test_interval_equals_resampling_users_one_by_one(users):
    rng = np.random.default_rng(users)
    sizes = rng.integers(1, 9, users)
    sums = rng.binomial(sizes, rng.beta(2, 1, users))
    found = bootstrap_interval(sums, sizes, resamples=20_000)
    assert found is not None
    expected = brute_force(sums, sizes)
    assert np.abs(found - expected).max() < 0.1 * (expected[1] - expected[0]) / 2


def test_interval_of_a_mean_over_users_with_distinct_values():
    values = np.random.default_rng(0).normal(size=200)
    found = bootstrap_interval(values, np.ones(200), resamples=20_000)
    assert found is not None
    half = 1.96 * values.std() / np.sqrt(200)
    assert found == pytest.approx([values.mean() - half, values.mean() + half], abs=0.1 * half)


def test_coverage_of_the_interval():
    """About 95 of 100 intervals hold the true value, with users who differ."""
    rng = np.random.default_rng(1)
    hits = 0
    for _ in range(200):
        sizes = rng.integers(3, 7, 150)
        sums = rng.binomial(sizes, rng.beta(6, 4, 150))
        low, high = bootstrap_interval(sums, sizes, resamples=500) or (0, 0)
        hits += low <= 0.6 <= high
    assert 0.88 <= hits / 200 <= 0.99


def test_clusters_widen_the_interval():
    wins = np.repeat([1, 0], 50)
    alone = bootstrap_interval(wins, np.ones(100))
    clustered = bootstrap_interval(np.repeat([10, 0], 5), np.full(10, 10))
    assert alone is not None
    assert clustered is not None
    assert clustered[1] - clustered[0] > 2.5 * (alone[1] - alone[0])


def test_interval_does_not_depend_on_the_order_of_clusters():
    rng = np.random.default_rng(0)
    sizes = rng.integers(1, 9, 100)
    sums = rng.binomial(sizes, 0.6)
    order = rng.permutation(100)
    assert bootstrap_interval(sums, sizes) == bootstrap_interval(sums[order], sizes[order])
    assert bootstrap_interval(sums, sizes) != bootstrap_interval(sums, sizes, seed=1)


def test_degenerate_intervals():
    assert bootstrap_interval(np.array([3]), np.array([5])) is None
    assert bootstrap_interval(np.array([]), np.array([])) is None
    assert bootstrap_interval(np.array([2, 3]), np.array([2, 3])) == [1.0, 1.0]


def test_many_users_are_fast():
    rng = np.random.default_rng(0)
    sizes = rng.integers(3, 7, 3_229)
    start = time.process_time()
    bootstrap_interval(rng.binomial(sizes, 0.6), sizes)
    bootstrap_interval(rng.random(3_229), np.ones(3_229), resamples=500)  # no two alike
    assert time.process_time() - start < 4


def test_binomial_p_values_are_scipys():
    cases = [(wins, rows) for rows in (1, 2, 4, 5, 6, 10, 37, 400) for wins in range(rows + 1)]
    wins, rows = np.array(cases).T
    expected = [binomtest(w, r, 0.5, alternative="greater").pvalue for w, r in cases]
    assert binomial_p_values(wins, rows) == pytest.approx(expected, rel=1e-9)


def test_five_rights_of_five_are_needed_at_least():
    p = binomial_p_values(np.array([4, 5, 5]), np.array([4, 5, 6]))
    assert p.tolist() == pytest.approx([1 / 16, 1 / 32, 7 / 64])


def rows(wins, *, users=None):
    return [
        ScoredRow(str(i), None, users[i] if users else None, [1.0, 0.0] if w else [0.0, 1.0], [1, 0])
        for i, w in enumerate(wins)
    ]


def test_paired_difference():
    a, b = rows([1, 1, 1, 0, 1]), rows([1, 0, 0, 1, 1])
    result = paired_difference(a, b)
    assert result["difference"] == pytest.approx(0.2)
    assert paired_difference(a, b[::-1]) == result  # matched by id
    low, high = result["ci95"]
    assert low < 0.2 < high
    assert paired_difference(b, a)["difference"] == pytest.approx(-0.2)


def test_what_is_hard_for_both_cancels_out():
    rng = np.random.default_rng(0)
    easy = rng.random(400) < 0.7
    better = easy | (rng.random(400) < 0.1)
    low, high = paired_difference(rows(better), rows(easy))["ci95"]
    alone = bootstrap_interval(better, np.ones(400))
    assert alone is not None
    assert low > 0
    assert high - low < 0.6 * (alone[1] - alone[0])


def test_paired_difference_is_clustered_by_user():
    rng = np.random.default_rng(0)
    users = [f"u{i // 20}" for i in range(400)]
    gain = np.repeat(rng.random(20) < 0.5, 20)
    narrow = paired_difference(rows(gain), rows([0] * 400))["ci95"]
    wide = paired_difference(rows(gain, users=users), rows([0] * 400, users=users))["ci95"]
    assert wide[1] - wide[0] > 3 * (narrow[1] - narrow[0])


def test_rows_that_cannot_be_paired():
    a = rows([1, 0, 1])
    with pytest.raises(DataError, match="id '2' is in one of the two only"):
        paired_difference(a, a[:2])
    with pytest.raises(DataError, match="an id twice"):
        paired_difference([*a, a[0]], a)
    with pytest.raises(DataError, match="no rows"):
        paired_difference([], [])
    with pytest.raises(DataError, match="row '0': the two sides have different users or labels"):
        paired_difference(a, rows([1, 0, 1], users=["u", "v", "w"]))
