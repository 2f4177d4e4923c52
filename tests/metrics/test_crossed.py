"""Two-way clustering, against a sum over all pairs of rows and against statsmodels."""

import math

import numpy as np
import pytest

from prb_jax.metrics.clusters import Clusters, crossed_keys, shared_rows
from prb_jax.metrics.crossed import crossed_variance
from prb_jax.metrics.uncertainty import accuracy_interval, difference_interval


def cases(seed, *, rows=300, users=25, sets=40):
    rng = np.random.default_rng(seed)
    user = rng.integers(users, size=rows)
    item = rng.integers(sets, size=rows)
    hard, able = rng.normal(size=sets), rng.normal(size=users)
    wins = (hard[item] + able[user] + rng.normal(size=rows) > -0.5).astype(np.int64)
    return wins, user, item


def clusters_of(user, keys):
    return Clusters(tuple(f"u{u}" for u in user), tuple(tuple(map(str, key)) for key in keys))


@pytest.mark.parametrize("seed", range(5))
def test_equal_to_statsmodels(seed):
    """The variance, the interval of a difference, and Wilson's interval from the variance."""
    sandwich = pytest.importorskip("statsmodels.stats.sandwich_covariance")
    from scipy.stats import t
    from statsmodels.regression.linear_model import OLS

    wins, user, item = cases(seed)
    fitted = OLS(wins, np.ones(len(wins))).fit()
    both, by_user, by_item = (float(part[0, 0]) for part in sandwich.cov_cluster_2groups(fitted, user, item))
    clusters = clusters_of(user, item[:, None])
    found = crossed_variance(wins, clusters)
    assert found.by_user == pytest.approx(by_user, rel=1e-10)
    assert found.by_responses == pytest.approx(by_item, rel=1e-10)
    assert found.variance == pytest.approx(both, rel=1e-10)
    assert found.clusters == 25
    quantile, mean, n = t.ppf(0.975, 24), wins.mean(), len(wins)
    low, high = difference_interval(wins, clusters).bounds or (0, 0)
    half = quantile * math.sqrt(both + 2 / n**2)
    assert (low, high) == pytest.approx((mean - half, mean + half))
    interval = accuracy_interval(wins.astype(bool), clusters)
    assert interval.method == "two-way"
    for end in interval.bounds or ():  # Wilson: the end is t standard errors away, by its own standard error
        error = math.sqrt(both * end * (1 - end) / (mean * (1 - mean)))
        assert abs(end - mean) == pytest.approx(quantile * error)


@pytest.mark.parametrize("seed", range(3))
def test_pairs_that_share_one_response_belong_together(seed):
    """Dyadic: the sum of the products of the residuals of all pairs of rows with a user or a response in common."""
    rng = np.random.default_rng(seed)
    rows, users = 200, 15
    user = rng.integers(users, size=rows)
    pairs = np.array([rng.choice(30, 2, replace=False) for _ in range(rows)])
    quality = rng.normal(size=30)
    wins = (quality[pairs[:, 0]] - quality[pairs[:, 1]] + rng.normal(size=rows) > -1).astype(np.int64)
    residuals = wins - wins.mean()
    product = np.outer(residuals, residuals)
    same_user = user[:, None] == user[None]
    same_response = (pairs[:, None, :, None] == pairs[None, :, None, :]).any((2, 3))
    clusters = clusters_of(user, np.sort(pairs, axis=1))
    found = crossed_variance(wins, clusters)
    assert found.by_user == pytest.approx(product[same_user].sum() / rows**2 * users / (users - 1))
    assert found.by_responses == pytest.approx(product[same_response].sum() / rows**2 * 30 / 29)
    responses = len({(u, r) for u, pair in zip(user, pairs) for r in pair})
    both = product[same_user & same_response].sum() / rows**2 * responses / (responses - 1)
    assert found.by_both == pytest.approx(both)
    assert found.variance == pytest.approx(found.by_user + found.by_responses - both)


def test_the_variance_is_never_negative():
    for seed in range(50):
        wins, user, item = cases(seed, rows=40, users=6, sets=20)
        found = crossed_variance(wins, clusters_of(user, item[:, None]))
        assert found.variance >= min(found.by_user, found.by_responses) > 0
    opposite = np.tile([1, 0], 20)  # the two users of each pair choose differently
    found = crossed_variance(opposite, clusters_of(np.arange(40) % 5, np.arange(40)[:, None] // 2))
    assert 0 < found.variance <= 0.25 / 40**2


def test_what_is_nearly_all_won_has_the_interval_over_users():
    wins = np.ones(80, bool)
    clusters = clusters_of(np.arange(80) % 10, np.arange(80)[:, None] // 4)
    found = accuracy_interval(wins, clusters)
    assert (found.method, found.clusters) == ("score", 10)
    assert found.bounds == accuracy_interval(wins, Clusters(clusters.users)).bounds


def test_which_rows_are_shared():
    users = ("a", "b", "b", "c", None)
    assert shared_rows(users, [("x",), ("x",), ("y",), ("z",), ("x",)]) == 2
    assert shared_rows(users, [("x",), ("w",), ("y",), ("z",), ("x",)]) == 0
    clusters = Clusters(users, (("x",), ("x",), ("y",), ("z",), ("x",)))
    assert clusters.take([0, 1]).responses == (("x",), ("x",))
    assert clusters.take([1, 2, 3]).responses is None


def test_responses_that_always_come_together_are_one_cluster():
    assert crossed_keys([("b", "a"), ("a", "b"), ("c", "d")]) == (("a\nb",), ("a\nb",), ("c\nd",))
    assert crossed_keys([("b", "a"), ("a", "c")]) == (("a", "b"), ("a", "c"))
    assert crossed_keys([("b", "a", "c"), ("a", "c", "d")]) == (("a\nb\nc",), ("a\nc\nd",))


def test_the_order_of_rows_leaves_no_trace():
    wins, user, item = cases(0)
    order = np.random.default_rng(1).permutation(len(wins))
    clusters = clusters_of(user, item[:, None])
    assert accuracy_interval(wins, clusters) == accuracy_interval(wins[order], clusters.take(order.tolist()))
