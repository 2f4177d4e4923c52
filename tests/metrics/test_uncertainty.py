import math

import numpy as np
import pytest
from scipy.optimize import minimize_scalar
from scipy.stats import betabinom, sem
from scipy.stats import t as student

from prb_jax.errors import DataError, counted
from prb_jax.metrics.clusters import Clusters, fit_correlation
from prb_jax.metrics.rows import ScoredRow
from prb_jax.metrics.uncertainty import (
    accuracy_interval,
    difference_interval,
    grade_interval,
    loss_interval,
    mean_interval,
    paired_difference,
)


def clustered_interval(wins, rows, **options):
    """The interval of clusters that have won so many of their rows."""
    users = tuple(f"u{u}" for u in np.repeat(np.arange(len(rows)), rows))
    won = np.concatenate([np.arange(n) < w for w, n in zip(wins, rows)]) if len(rows) else np.zeros(0, bool)
    return accuracy_interval(won, Clusters(users), **options)


def test_the_correlation_is_the_most_likely_one_of_scipys_beta_binomial():
    rng = np.random.default_rng(0)
    rows = rng.integers(3, 40, 60)
    wins = rng.binomial(rows, rng.beta(4, 2, 60))
    for mean in (0.3, 0.6, 0.7):

        def lost(r, mean=mean):
            return -betabinom.logpmf(wins, rows, mean * (1 - r) / r, (1 - mean) * (1 - r) / r).sum()

        expected = minimize_scalar(lost, bounds=(1e-6, 0.999), method="bounded", options={"xatol": 1e-9})
        correlation = fit_correlation(wins, rows)(mean)
        assert correlation == pytest.approx(expected.x, rel=0.02)
        assert lost(correlation) == pytest.approx(expected.fun, abs=0.01)
    assert fit_correlation(np.full(20, 6), np.full(20, 10))(0.6) == 0  # all rates are equal


def test_independent_rows_have_wilsons_interval():
    """With a t quantile of n - 1 degrees of freedom."""
    wins = np.repeat([1, 0], [70, 30])
    interval = clustered_interval(wins, np.ones(100, np.int64))
    t = student.ppf(0.975, 99)
    centre = (0.7 + t**2 / 200) / (1 + t**2 / 100)
    half = t / (1 + t**2 / 100) * math.sqrt(0.7 * 0.3 / 100 + t**2 / 40_000)
    assert interval.bounds == pytest.approx([centre - half, centre + half], abs=1e-7)
    assert (interval.method, interval.clusters, interval.reason) == ("score", 100, None)


@pytest.mark.parametrize(("users", "pairs"), [(6, 3), (6, 60), (30, 30), (100, 3)])
def test_an_interval_has_a_width_where_all_is_won_or_all_users_are_equal(users, pairs):
    rows = np.full(users, pairs)
    low, high = clustered_interval(rows, rows).bounds or (0, 0)
    assert high == 1.0
    assert 0.5 < low < 1 - 1 / (users * pairs)
    assert clustered_interval(0 * rows, rows).bounds == pytest.approx([0, 1 - low])
    low, high = clustered_interval(rows - 1, rows).bounds or (0, 0)
    assert low < 1 - 1 / pairs < high
    if users == 100:
        assert high - low > 3 * math.sqrt(1 / pairs * (1 - 1 / pairs) / (users * pairs))


def test_many_alike_users_give_the_normal_interval():
    rng = np.random.default_rng(0)
    rows = rng.integers(5, 15, 3000)
    wins = rng.binomial(rows, rng.beta(6, 4, 3000))
    low, high = clustered_interval(wins, rows).bounds or (0, 0)
    rate = wins.sum() / rows.sum()
    error = math.sqrt(((wins - rate * rows) ** 2).sum()) / rows.sum()
    assert (low, high) == pytest.approx((rate - 1.96 * error, rate + 1.96 * error), abs=0.05 * error)


def test_the_mean_over_users_weighs_users_equally():
    wins, rows = np.array([100, *[5] * 9]), np.array([100, *[10] * 9])
    pooled = clustered_interval(wins, rows).bounds or (0, 0)
    means = clustered_interval(wins, rows, per_user=True).bounds or (0, 0)
    assert pooled[0] < 145 / 190 < pooled[1]
    assert means[0] < 0.55 < means[1]
    assert means[1] < 145 / 190


def test_too_few_clusters_give_the_reason():
    for users in range(1, 7):
        interval = clustered_interval(np.ones(users, np.int64), np.full(users, 2))
        assert interval.reason == (
            f"{counted(users, 'user')}; an interval needs at least 6" if users < 6 else None
        )
        assert (interval.bounds is None) == (users < 6)
    one_user = Clusters(("u",) * 50)
    assert accuracy_interval(np.ones(50, bool), one_user).reason == "1 user; an interval needs at least 6"
    alone = accuracy_interval(np.ones(3, bool), Clusters((None,) * 3))
    assert alone.reason == "3 comparisons; an interval needs at least 6"


def test_one_user_with_most_rows():
    bounds = clustered_interval(np.array([600, 3, 2, 1, 2, 3]), np.array([1000, 5, 5, 5, 5, 5])).bounds
    assert bounds is not None
    assert bounds[1] - bounds[0] > 0.5  # what one user says of all is little


def rows(wins, *, users=None):
    return [
        ScoredRow(str(i), None, users[i] if users else None, [1.0, 0.0] if w else [0.0, 1.0], [1, 0])
        for i, w in enumerate(wins)
    ]


def test_paired_difference():
    a, b = rows([1, 1, 1, 0, 1] * 2), rows([1, 0, 0, 1, 1] * 2)
    result = paired_difference(a, b)
    assert result["difference"] == pytest.approx(0.2)
    assert paired_difference(a, b[::-1]) == result  # matched by id
    low, high = result["ci95"]
    assert low < 0.2 < high
    assert paired_difference(b, a)["difference"] == pytest.approx(-0.2)
    assert paired_difference(a[:5], b[:5]) == {
        "difference": pytest.approx(0.2),
        "ci95": None,
        "ci95_reason": "5 comparisons; an interval needs at least 6",
    }


@pytest.mark.parametrize("counts", [(30, 150, 20), (0, 200, 0)])  # equal verdicts do not prove equal models
def test_a_difference_without_clusters_is_the_t_interval_with_two_more_rows(counts):
    gains = np.repeat([1, 0, -1], counts)
    interval = difference_interval(gains, Clusters((None,) * 200))
    error = math.sqrt(gains.var(ddof=1) / 200 + 2 / 200**2)
    assert interval.standard_error == pytest.approx(error)
    assert interval.bounds == pytest.approx(student.interval(0.95, 199, gains.mean(), error))


def test_paired_difference_is_clustered_by_user():
    rng = np.random.default_rng(0)
    users = [f"u{i // 20}" for i in range(400)]
    gain = np.repeat(rng.random(20) < 0.5, 20)
    narrow = paired_difference(rows(gain), rows([0] * 400))["ci95"]
    wide = paired_difference(rows(gain, users=users), rows([0] * 400, users=users))["ci95"]
    assert wide[1] - wide[0] > 3 * (narrow[1] - narrow[0])


def test_rows_that_cannot_be_paired():
    a = rows([1, 0, 1])
    with pytest.raises(DataError, match="id '2' is in only one of the two"):
        paired_difference(a, a[:2])
    with pytest.raises(DataError, match="an id twice"):
        paired_difference([*a, a[0]], a)
    with pytest.raises(DataError, match="no rows"):
        paired_difference([], [])
    with pytest.raises(DataError, match="row '0': the two sides have different users or labels"):
        paired_difference(a, rows([1, 0, 1], users=["u", "v", "w"]))


def test_the_interval_of_a_mean_is_the_t_interval_and_clusters_widen_it():
    values = np.random.default_rng(2).standard_normal(20)
    expected = student.interval(0.95, 19, loc=values.mean(), scale=sem(values))
    assert mean_interval(values, [None] * 20).bounds == pytest.approx(expected)
    copies = mean_interval(np.repeat(values, 3), [f"u{k // 3}" for k in range(60)])
    assert copies.bounds == pytest.approx(expected)  # copies of a user's rows say nothing new
    few = mean_interval(values, [f"u{k % 5}" for k in range(20)])
    assert (few.bounds, few.reason) == (None, "5 users; an interval needs at least 6")


def test_the_mean_over_users_of_their_means():
    rng = np.random.default_rng(3)
    users = [f"u{k}" for k in np.repeat(np.arange(40), rng.integers(1, 9, 40))]
    values = rng.standard_normal(40)[[int(user[1:]) for user in users]] + 0.1 * rng.standard_normal(
        len(users)
    )
    means = [values[[user == one for user in users]].mean() for one in dict.fromkeys(users)]
    interval = mean_interval(values, users, per_user=True)
    expected = student.interval(0.95, 39, loc=np.mean(means), scale=sem(means))
    assert interval.bounds == pytest.approx(expected, abs=0.02)


def test_half_credit_stays_between_0_and_1():
    rng = np.random.default_rng(5)
    users = tuple(f"u{k % 12}" for k in range(240))
    high = np.where(np.arange(240) < 6, 0.5, 1.0)
    low, top = grade_interval(high, Clusters(users)).bounds
    assert 0.95 < low < high.mean() < top < 1
    grades = rng.choice([0, 0.5, 1], 240, p=[0.3, 0.2, 0.5])
    for per_user in (False, True):
        interval = grade_interval(grades, Clusters(users), per_user=per_user)
        plain = mean_interval(grades, users, per_user=per_user)
        assert interval.bounds == pytest.approx(plain.bounds, abs=0.012)
    same = grade_interval(np.full(240, 0.5), Clusters(users))
    assert same.bounds == [0.5, 0.5]


def test_grades_between_0_and_1_tell_as_much_of_users_as_more_verdicts():
    """Means of two verdicts of one user have half of the variance, and the interval of twice as many verdicts."""
    rng = np.random.default_rng(8)
    user = np.repeat(np.arange(25), 60)
    verdicts = rng.random((1500, 2)) < rng.beta(9, 3, 25)[user, None]
    grades = verdicts.mean(axis=1)
    for crossed in (False, True):
        sets = rng.integers(40, size=1500)
        alone, twice = (
            Clusters(tuple(map(str, people)), tuple((str(key),) for key in keys) if crossed else None)
            for people, keys in ((user, sets), (np.repeat(user, 2), np.repeat(sets, 2)))
        )
        expected = accuracy_interval(verdicts.reshape(-1), twice).bounds
        assert grade_interval(grades, alone).bounds == pytest.approx(expected, abs=0.006)
    values = rng.choice([0.2, 0.25, 0.3], 120)  # nearly no variance
    low, high = grade_interval(values, Clusters(tuple(str(k % 12) for k in range(120)))).bounds
    assert low < values.mean() < high < low + 0.03


def test_losses_have_a_t_interval_of_their_logarithm_with_fewer_degrees():
    values = np.random.default_rng(4).exponential(size=40)
    alone = Clusters((None,) * 40)
    relative = sem(values) / values.mean()
    degrees = 1 / (1 / 39 + relative**2)
    half = student.ppf(0.975, degrees) * relative
    expected = [values.mean() * math.exp(-half), values.mean() * math.exp(half)]
    interval = loss_interval(values, alone)
    assert interval.bounds == pytest.approx(expected)
    assert interval.degrees == pytest.approx(degrees)
    assert loss_interval(1000 * values, alone).bounds == pytest.approx([1000 * end for end in expected])
    assert loss_interval(np.zeros(40), alone).bounds == [0, 0]
    skewed = np.append(np.full(39, 0.01), 30.0)  # few degrees would give an upper end of millions
    interval = loss_interval(skewed, alone)
    assert interval.degrees == 4
    assert interval.bounds[1] < 16 * skewed.mean()
    few = loss_interval(values, Clusters(tuple(f"u{k % 5}" for k in range(40))))
    assert (few.bounds, few.reason) == (None, "5 users; an interval needs at least 6")


def test_skewed_losses_of_users_have_intervals_that_hold_their_mean():
    """People whose mean losses have a gamma distribution: a t interval lies too low where the sample does."""
    rng = np.random.default_rng(0)
    user = np.repeat(np.arange(20), 5)
    names = tuple(map(str, user))
    ours, plain = [], []
    for _ in range(600):
        losses = rng.gamma(0.7, 1 / 0.7, 20)[user] * rng.exponential(size=100)
        ours.append(loss_interval(losses, Clusters(names)).bounds)
        plain.append(mean_interval(losses, names).bounds)
    holds, without = (np.mean([low <= 1 <= high for low, high in each]) for each in (ours, plain))
    error = math.sqrt(0.05 * 0.95 / 600)
    assert 0.93 - 3 * error < holds < 0.98
    assert without < holds - 3 * error
