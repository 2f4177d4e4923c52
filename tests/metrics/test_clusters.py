"""Two-way clustering, against a sum over all pairs of rows and against statsmodels."""

import math

import numpy as np
import pytest

from prb_jax.metrics.clusters import Clusters, crossed_keys, crossed_variance, equal_users, shared_rows
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


def corrected(variance, keys):
    """A variance with the factor G / (G - 1), and the one for clusters of these sizes in its place."""
    shares = np.unique(keys, return_counts=True, axis=0)[1] / len(keys)
    groups = len(shares)
    bias = 1 - 2 * (shares**3).sum() / (shares**2).sum() + (shares**2).sum()
    return variance * (groups - 1) / groups / bias


def effective(keys):
    """The effective number of clusters."""
    shares = np.unique(keys, return_counts=True)[1] / len(keys)
    return 1 / (shares**2).sum()


@pytest.mark.parametrize("seed", range(5))
def test_equal_to_statsmodels(seed):
    """The variance but for its factor, the interval of a difference, and Wilson's interval from the crossed."""
    sandwich = pytest.importorskip("statsmodels.stats.sandwich_covariance")
    from scipy.stats import t
    from statsmodels.regression.linear_model import OLS

    wins, user, item = cases(seed)
    fitted = OLS(wins, np.ones(len(wins))).fit()
    both, by_user, by_item = (float(part[0, 0]) for part in sandwich.cov_cluster_2groups(fitted, user, item))
    by_both = corrected(by_user + by_item - both, np.stack([user, item], axis=1))
    by_user, by_item = corrected(by_user, user), corrected(by_item, item)
    both = by_user + by_item - by_both
    clusters = clusters_of(user, item[:, None])
    crossed = crossed_variance(wins, clusters)
    assert crossed.by_user == pytest.approx(by_user, rel=1e-10)
    assert crossed.by_responses == pytest.approx(by_item, rel=1e-10)
    assert crossed.variance == pytest.approx(both, rel=1e-10)
    assert crossed.clusters == 25
    assert crossed.effective == pytest.approx(min(effective(user), effective(item)))
    quantile, mean, n = t.ppf(0.975, crossed.effective - 1), wins.mean(), len(wins)
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
    crossed = crossed_variance(wins, clusters)

    def expected(alike, keys):
        groups = len(np.unique(keys, axis=0))
        return corrected(product[alike].sum() / rows**2 * groups / (groups - 1), keys)

    assert crossed.by_user == pytest.approx(expected(same_user, user))
    assert crossed.by_responses == pytest.approx(expected(same_response, pairs.reshape(-1)))
    responses = np.stack([np.repeat(user, 2), pairs.reshape(-1)], axis=1)
    assert crossed.by_both == pytest.approx(expected(same_user & same_response, responses))
    difference = crossed.by_user + crossed.by_responses - crossed.by_both
    assert crossed.variance == pytest.approx(max(difference, crossed.by_user))


@pytest.mark.parametrize("single", [False, True])
def test_every_user_counts_the_same(single):
    """The sum of the products of the influences of all pairs of rows with a user or a response in common."""
    rng = np.random.default_rng(7)
    wins, user, item = cases(7)
    keys = np.sort([rng.choice(30, 2, replace=False) for _ in item], axis=1) if single else item[:, None]
    rows = np.bincount(user)[user]
    users = len(np.unique(user))
    estimate = np.mean([wins[user == one].mean() for one in np.unique(user)])
    influences = (wins - estimate) / (users * rows)
    product = np.outer(influences, influences)
    same_user = user[:, None] == user[None]
    same_response = (keys[:, None, :, None] == keys[None, :, None, :]).any((2, 3))
    clusters = clusters_of(user, keys)
    crossed = crossed_variance(wins, clusters, weights=equal_users(clusters.users))

    def expected(alike, keys):
        shares = np.array(
            [(1 / (users * rows))[(keys == key).all(1)].sum() for key in np.unique(keys, axis=0)]
        )
        shares /= shares.sum()
        return product[alike].sum() / (1 - 2 * (shares**3).sum() / (shares**2).sum() + (shares**2).sum())

    copies = np.repeat(np.arange(len(rows)), keys.shape[1])
    flat, of_user, rows = keys.reshape(-1, 1), user[copies][:, None], rows[copies]
    assert crossed.by_responses == pytest.approx(expected(same_response, flat))
    assert crossed.by_user == pytest.approx(expected(same_user, of_user))
    assert crossed.by_both == pytest.approx(expected(same_user & same_response, np.hstack([of_user, flat])))
    assert (crossed.clusters, crossed.effective) == (25, pytest.approx(25))


def test_few_texts_in_many_pairs_do_not_make_an_accuracy_certain():
    """The variance by single responses can be negative: 57 people chose among pairs of 11 texts."""
    rng = np.random.default_rng(0)
    widths = []
    for _ in range(20):
        user = np.sort(rng.integers(57, size=180))
        pairs = np.sort([rng.choice(11, 2, replace=False) for _ in user], axis=1)
        wins = rng.random(180) < 0.53
        alone = accuracy_interval(wins, Clusters(tuple(map(str, user))))
        low, high = accuracy_interval(wins, clusters_of(user, pairs)).bounds
        widths.append((high - low) / (alone.high - alone.low))
    assert min(widths) > 0.9


def test_the_variance_is_never_negative():
    for seed in range(50):
        wins, user, item = cases(seed, rows=40, users=6, sets=20)
        crossed = crossed_variance(wins, clusters_of(user, item[:, None]))
        assert crossed.variance >= min(crossed.by_user, crossed.by_responses) > 0
    opposite = np.tile([1, 0], 20)  # the two users of each pair choose differently
    crossed = crossed_variance(opposite, clusters_of(np.arange(40) % 5, np.arange(40)[:, None] // 2))
    assert 0 < crossed.variance <= 0.25 / 40**2


def test_what_is_nearly_all_won_has_the_interval_over_users():
    wins = np.ones(80, bool)
    clusters = clusters_of(np.arange(80) % 10, np.arange(80)[:, None] // 4)
    interval = accuracy_interval(wins, clusters)
    assert (interval.method, interval.clusters) == ("score", 10)
    assert interval.bounds == accuracy_interval(wins, Clusters(clusters.users)).bounds


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
    mixed = clusters.take(order.tolist())
    for per_user in (False, True):
        interval = accuracy_interval(wins, clusters, per_user=per_user)
        assert interval == accuracy_interval(wins[order], mixed, per_user=per_user)
        assert interval.method == "two-way"
