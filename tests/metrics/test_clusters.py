"""The variance of means over users and responses, against statsmodels and against simulated truth."""

import numpy as np
import pytest

from prb_jax.metrics.clusters import (
    Clusters,
    counted_clusters,
    crossed_keys,
    equal_users,
    mean_variance,
    sample_of,
    shared_rows,
)
from prb_jax.metrics.uncertainty import accuracy_interval


def cases(seed, *, rows=300, users=25, sets=40):
    rng = np.random.default_rng(seed)
    user = rng.integers(users, size=rows)
    item = rng.integers(sets, size=rows)
    hard, able = rng.normal(size=sets), rng.normal(size=users)
    wins = (hard[item] + able[user] + rng.normal(size=rows) > -0.5).astype(np.int64)
    return wins, user, item


def clusters_of(user, keys):
    return Clusters(tuple(f"u{u}" for u in user), tuple(tuple(map(str, key)) for key in keys))


def test_balanced_data_have_the_mean_squares_of_statsmodels():
    """Each user judges each set of responses once: the variance is that of a random two-way analysis of variance."""
    pandas, anova = pytest.importorskip("pandas"), pytest.importorskip("statsmodels.stats.anova")
    from statsmodels.formula.api import ols

    rng = np.random.default_rng(0)
    user, item = np.divmod(np.arange(240), 20)
    values = rng.normal(size=12)[user] + rng.normal(size=20)[item] + rng.normal(size=240)
    fitted = ols("x ~ C(u) + C(i)", pandas.DataFrame({"x": values, "u": user, "i": item})).fit()
    squares = anova.anova_lm(fitted)["mean_sq"]
    sample = sample_of(values, clusters_of(user, item[:, None]))
    variance, correlations = mean_variance(sample)
    within, of_users, of_items = squares["Residual"], squares["C(u)"], squares["C(i)"]
    assert variance == pytest.approx((of_users + of_items - within) / 240)
    total = within + (of_users - within) / 20 + (of_items - within) / 12
    expected = [(of_users - within) / 20 / total, (of_items - within) / 12 / total]
    assert [factor.by for factor in sample.factors] == ["users", "responses"]
    assert correlations == pytest.approx(expected)


@pytest.mark.parametrize("single", [False, True])
@pytest.mark.parametrize("per_user", [False, True])
def test_the_variance_of_unequal_data_is_unbiased(single, per_user):
    """Of a mean over rows or over users; of sets of responses, or of pairs that share single ones."""
    rng = np.random.default_rng(7)
    user = np.repeat(np.arange(15), rng.integers(1, 30, 15))
    keys = np.sort([rng.choice(20, 2, replace=False) for _ in user], axis=1)
    keys = keys if single else keys[:, :1]
    clusters = clusters_of(user, keys)
    weights = equal_users(clusters.users) if per_user else np.ones(len(user))
    estimates, variances = [], []
    for _ in range(400):
        values = (
            rng.normal(size=15)[user] + rng.normal(size=20)[keys].sum(axis=1) + rng.normal(size=len(user))
        )
        sample = sample_of(values, clusters, weights=weights)
        estimates.append(sample.mean)
        variances.append(mean_variance(sample)[0])
    assert estimates[0] != estimates[1]
    # 400 squares of normal values have a relative standard error of 0.07
    assert np.mean(variances) == pytest.approx(np.var(estimates), rel=0.21)


def test_rows_of_one_user_with_the_same_responses_are_one_observation():
    """A model gives the same verdict each time: copies of all rows say nothing new."""
    rng = np.random.default_rng(3)
    user, item = np.divmod(rng.choice(12 * 15, 120, replace=False), 15)
    values = rng.normal(size=12)[user] + rng.normal(size=15)[item] + rng.normal(size=120)
    once, again = ([np.repeat(one, times) for one in (values, user, item)] for times in (1, 4))
    variances, widths = [], []
    for numbers, users, items in (once, again):
        clusters = clusters_of(users, items[:, None])
        sample = sample_of(numbers, clusters)
        variances.append(mean_variance(sample)[0])
        interval = accuracy_interval(numbers > -1, clusters)
        widths.append(interval.high - interval.low)
    assert [factor.by for factor in sample.factors] == ["users", "responses", "both"]
    assert variances[1] == pytest.approx(variances[0], rel=0.1)
    assert 0.95 < widths[1] / widths[0] < 1.25


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
        variance, correlations = mean_variance(sample_of(wins, clusters_of(user, item[:, None])))
        assert variance > 0
        assert all(-1 <= correlation <= 1 for correlation in correlations)
    opposite = np.tile([1, 0], 20)  # the two users of each pair choose differently
    clusters = clusters_of(np.arange(40) % 5, np.arange(40)[:, None] // 2)
    variance, correlations = mean_variance(sample_of(opposite, clusters))
    assert 0 < variance < 0.02 * np.var(opposite) / 40
    assert correlations[1] < -0.95
    assert mean_variance(sample_of(np.ones(40), clusters)) == (0, [0, 0])


def test_what_is_nearly_all_won_has_an_interval_with_a_width():
    clusters = clusters_of(np.arange(80) % 10, np.arange(80)[:, None] // 4)
    for lost in (0, 1, 3):
        interval = accuracy_interval(np.arange(80) >= lost, clusters)
        alone = accuracy_interval(np.arange(80) >= lost, Clusters(clusters.users))
        assert (interval.method, interval.clusters) == ("two-way", 10)
        assert 0.55 < interval.low < 1 - lost / 80 <= interval.high <= 1
        assert interval.high - interval.low > 0.7 * (alone.high - alone.low)
        assert (interval.high == 1) == (lost == 0)


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


def test_a_pair_of_rows_with_the_same_user_and_response_leaves_the_degrees_to_all_others():
    """One text that one user judges twice tells nothing of 70 other rows."""
    rng = np.random.default_rng(3)
    user = np.repeat(np.arange(12), 6)
    keys = np.arange(144).reshape(72, 2)
    keys[1, 0] = keys[0, 0]
    keys[::6, 1] = rng.integers(200, 203, 12)  # three texts that all judge
    gains = rng.choice([-1, 0, 1], 72, p=[0.15, 0.45, 0.4])
    gains[:2] = 1
    sample = sample_of(gains, clusters_of(user, np.sort(keys, axis=1)))
    assert [factor.by for factor in sample.factors] == ["users", "responses", "both"]
    assert sample.degrees([0.0, 0.0, 0.7]) > 15
    assert sample.degrees([0.5, 0.0, 0.0]) < 30


@pytest.mark.parametrize(
    ("over", "one"),
    [
        ("users", "1 user"),
        ("testable users", "1 testable user"),
        ("users or sets of responses", "1 user or set of responses"),
        ("users derived from shared profile posts", "1 user derived from shared profile posts"),
    ],
)
def test_a_single_cluster_is_named_in_the_singular(over: str, one: str):
    assert counted_clusters(1, over) == one
    assert counted_clusters(2000, over) == f"2,000 {over}"
