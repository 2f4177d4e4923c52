"""Measures of prediction are those of scipy and scikit-learn, of brute force and of published examples."""

from __future__ import annotations

import itertools
import math

import numpy as np
import pytest
import scipy.stats

from prb_jax.metrics.prediction import (
    Resampled,
    bca_interval,
    fisher_interval,
    noise_and_spread,
    plan_models,
    without_noise,
)
from prb_jax.metrics.rank_measures import (
    MEASURES,
    extrapolated_overlap,
    kendall,
    ndcg,
    pearson,
    permutation_test,
    rbo,
    spearman,
    tau_error,
    weighted_tau,
)
from tests.sweeps import sweep

SCIPY = {
    pearson: scipy.stats.pearsonr,
    spearman: scipy.stats.spearmanr,
    kendall: scipy.stats.kendalltau,
    weighted_tau: scipy.stats.weightedtau,
}


def lists(count: int, models: int, *, levels: int) -> tuple[np.ndarray, np.ndarray]:
    """Two arrays [count, models] of numbers that go together somewhat; with few levels there are ties."""
    rng = np.random.default_rng(models)
    x = rng.normal(size=(count, models))
    y = x + rng.normal(size=x.shape)
    return (np.round(x * levels) / levels, np.round(y * levels) / levels) if levels else (x, y)


@pytest.mark.parametrize("levels", [0, 1])
@pytest.mark.parametrize("models", [3, 6, 17])
def test_correlations_are_those_of_scipy(models: int, levels: int) -> None:
    x, y = lists(20, models, levels=levels)
    for ours, theirs in SCIPY.items():
        values = ours(x, y)
        assert values.shape == (20,)
        for row in range(20):
            if min(np.ptp(x[row]), np.ptp(y[row])) == 0:
                assert math.isnan(values[row])
            else:
                expected = theirs(x[row], y[row]).statistic
                assert values[row] == pytest.approx(expected, abs=1e-12), ours.__name__


@pytest.mark.parametrize("levels", [0, 1])
def test_ndcg_is_that_of_scikit_learn(levels: int) -> None:
    metrics = pytest.importorskip("sklearn.metrics")
    x, y = lists(20, 7, levels=levels)
    for one, other in zip(x, y, strict=True):
        gain = (other - other.min()) / np.ptp(other)
        assert ndcg(one, other) == pytest.approx(metrics.ndcg_score([gain], [one]), abs=1e-12)


def overlap_by_definition(first: list[int], second: list[int], p: float) -> float:
    """Webber et al. 2010, equation 30, of two lists without ties."""
    size = len(first)
    shared = [len({*first[:d]} & {*second[:d]}) for d in range(1, size + 1)]
    seen = sum(x / d * p**d for d, x in enumerate(shared, start=1))
    return shared[-1] / size * p**size + (1 - p) / p * seen


def test_rank_biased_overlap_is_its_definition_and_the_mean_over_the_orders_of_ties() -> None:
    x, y = np.array([5.0, 3, 3, 3, 1]), np.array([2.0, 2, 4, 1, 0])
    orders = list(map(list, itertools.permutations(range(5))))
    every = [[order for order in orders if np.all(np.diff(values[order]) <= 0)] for values in (x, y)]
    assert [len(orders) for orders in every] == [6, 2]
    expected = np.mean([overlap_by_definition(a, b, 0.9) for a in every[0] for b in every[1]])
    assert rbo(x, y) == pytest.approx(expected, abs=1e-12)
    assert rbo(x, x * 2 + 1, p=0.5) < 1  # ties are drawn for either list on its own
    assert rbo(np.arange(4), np.arange(4) * 3) == pytest.approx(1)


def test_rank_biased_overlap_equals_a_published_example() -> None:
    # Corsi and Urbano (SIGIR 2024): ties, lists of 5 and 7, p = 0.95; their RBO^a is the mean over the orders of ties
    red, blue, green, yellow, pink, white, black, purple = range(8)
    one = [[red], [blue, green], [yellow], [pink]]
    other = [[blue, red], [white], [yellow, black, purple], [green]]

    def orders(groups: list[list[int]]) -> list[list[int]]:
        products = itertools.product(*map(itertools.permutations, groups))
        return [list(itertools.chain(*order)) for order in products]

    rows = []
    for a, b in itertools.product(orders(one), orders(other)):
        shared = [len({*a[:d]} & {*b[:d]}) for d in range(1, 8)]
        # behind the end of the shorter list its agreement is taken to go on: equation 32
        behind = [shared[4] * max(d - 5, 0) / (5 * d) for d in range(1, 8)]
        rows.append([x / d + more for d, (x, more) in enumerate(zip(shared, behind, strict=True), 1)])
    assert extrapolated_overlap(np.array(rows), p=0.95).mean() == pytest.approx(0.6922853, abs=5e-8)


def test_exact_permutation_tests() -> None:
    x, y = lists(1, 6, levels=0)
    for name in MEASURES:
        p, chance = permutation_test(name, x[0], y[0])
        orders = map(list, itertools.permutations(range(6)))
        values = np.array([MEASURES[name](x[0], y[0][order]) for order in orders])
        assert chance == pytest.approx(values.mean())
        value = values[0]
        far = values >= value - 1e-12 if name in ("ndcg", "rbo") else abs(values) >= abs(value) - 1e-12
        assert p == pytest.approx(far.mean())
    theirs = scipy.stats.kendalltau(x[0], y[0], method="exact").pvalue
    assert permutation_test("kendall", x[0], y[0])[0] == pytest.approx(theirs)
    # of more models a random choice of the orders: near the asymptotic p, and the same again
    x, y = lists(1, 30, levels=0)
    p, _ = permutation_test("pearson", x[0], y[0] - x[0])
    assert p == permutation_test("pearson", x[0], y[0] - x[0])[0]
    assert p == pytest.approx(scipy.stats.pearsonr(x[0], y[0] - x[0]).pvalue, abs=0.02)
    assert permutation_test("pearson", np.zeros(4), np.arange(4)) == (None, None)


def test_the_headline_figures_of_the_paper_are_those_of_six_models_in_nearly_any_order() -> None:
    """The worked example of docs/behaviour.md."""
    benchmark = np.array([6, 5, 4, 3, 2, 1])
    for behaviour, rho, expected in (
        ([4, 6, 2, 3, 1, 5], "0.2571", 0.66),
        ([4, 6, 1, 5, 2, 3], "0.3714", 0.50),
    ):
        outcome = np.array(behaviour)
        assert f"{spearman(benchmark, outcome):.4f}" == rho
        p, _ = permutation_test("spearman", benchmark, outcome)
        assert p is not None
        assert round(p, 2) == expected
    values = {round(float(spearman(benchmark, np.array(o))), 4) for o in itertools.permutations(range(6))}
    assert {0.2571, 0.3714} <= values
    for others in (4, 5, 7):  # no other small number of models without ties has both
        top = np.arange(others)
        reached = {round(float(spearman(top, np.array(o))), 4) for o in itertools.permutations(range(others))}
        assert not {0.2571, 0.3714} <= reached


def test_the_error_of_tau_by_chance() -> None:
    assert [round(tau_error(models), 2) for models in (8, 10, 12)] == [0.29, 0.25, 0.22]


@pytest.mark.parametrize(
    ("correlation", "noise"), [(0.3, (0.0, 0.0)), (0.5, (0.0, 0.0)), (0.8, (0.0, 0.0)), (0.8, (0.5, 1.0))]
)
def test_a_plan_asks_for_as_many_models_as_fishers_z(correlation: float, noise: tuple[float, float]) -> None:
    """Without noise the closed form is known; noise makes of a correlation a smaller one."""
    seen = correlation / np.sqrt((1 + noise[0] ** 2) * (1 + noise[1] ** 2))
    expected = ((1.959964 + 0.841621) / np.arctanh(seen)) ** 2 + 3
    needed, power = plan_models(correlation, noise=noise, models=round(expected))
    assert needed == pytest.approx(expected, rel=0.05, abs=1)
    above = np.arctanh(seen) * np.sqrt(round(expected) - 3) - 1.959964
    assert power == pytest.approx(scipy.stats.norm.cdf(above), abs=0.04)


def test_noise_that_all_models_share_is_none_and_is_taken_from_the_spread() -> None:
    rng = np.random.default_rng(0)
    true = rng.normal(size=400)
    draws = true + 0.5 * rng.normal(size=(500, 400)) + 3 * rng.normal(size=(500, 1))
    noise, spread = noise_and_spread(Resampled(draws[0], draws))
    assert noise == pytest.approx(0.5, rel=0.02)
    assert spread == pytest.approx(np.std(true), rel=0.1)
    assert noise_and_spread(Resampled(np.zeros(3), draws[:, :3]))[1] == 0
    assert plan_models(0.3, noise=(3.0, 3.0), models=3)[0] is None


def seen(rng, models, correlation, noise, draws=60):
    """Figures of models with this true correlation, and draws over users that hold their noise."""
    shared = rng.standard_normal(models)
    true = (shared, correlation * shared + np.sqrt(1 - correlation**2) * rng.standard_normal(models))
    return [
        Resampled(values, values + noise * rng.standard_normal((draws, models)))
        for values in (one + noise * rng.standard_normal(models) for one in true)
    ]


@pytest.mark.parametrize(
    ("models", "correlation", "repeats"),
    sweep([(10, 0.9, 150), *((m, r, 1000) for m in (6, 10, 20) for r in (0.0, 0.5, 0.9))], few=(0,)),
)
def test_intervals_hold_the_correlation_with_and_without_noise(models, correlation, repeats):
    """The interval of what is measured holds the attenuated correlation, that without noise the true one."""
    noise, hits, middle, given = 0.4, np.zeros(4), [], 0
    rng = np.random.default_rng((models, int(10 * correlation)))
    attenuated = correlation / (1 + noise**2)
    for _ in range(repeats):
        x, y = seen(rng, models, correlation, noise)
        value = float(pearson(x.values, y.values))
        low, high = fisher_interval("pearson", value, models)
        true = without_noise(x, y, {"value": value, "ci95": [low, high]})
        rank = fisher_interval("spearman", float(spearman(x.values, y.values)), models)
        rank_true = 6 / np.pi * np.arcsin(attenuated / 2)
        hits[0] += low <= attenuated <= high
        given += true is not None  # too much noise has none
        hits[1] += true is not None and true["ci95"][0] <= correlation <= true["ci95"][1]
        hits[2] += rank[0] <= rank_true <= rank[1]
        hits[3] += low > 0
        middle.append((math.atanh(low) + math.atanh(high)) / 2 - math.atanh(value))
    error = math.sqrt(0.05 * 0.95 / repeats)
    assert np.abs(middle).max() < 1e-9  # the interval is about the value
    assert hits[0] / repeats == pytest.approx(0.95, abs=3 * error + 0.01)
    assert given / repeats > 0.95
    assert hits[1] / given > 0.93 - 3 * error
    assert hits[2] / repeats > 0.93 - 3 * error
    if (models, correlation) == (10, 0.9):
        assert hits[3] / repeats > 0.7  # the power: the correlation of what is seen is 0.78


def test_the_bootstrap_over_models_is_that_of_scipy():
    rng = np.random.default_rng(4)
    x = rng.standard_normal(15)
    y = x + 0.5 * rng.standard_normal(15)
    expected = scipy.stats.bootstrap(
        (x, y), lambda a, b, axis: pearson(a, b), paired=True, vectorized=True, n_resamples=20_000, rng=1
    ).confidence_interval
    assert bca_interval(pearson, x, y, seed=0, draws=20_000) == pytest.approx(list(expected), abs=0.02)


def test_a_perfect_order_of_few_models_is_not_certain():
    for name, count in (("spearman", 6), ("kendall", 6)):
        low, high = fisher_interval(name, 1.0, count)
        assert 0.2 < low < 0.95
        assert high == 1
    assert fisher_interval("pearson", 0.5, 3) is None
