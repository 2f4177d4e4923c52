"""Agreement of annotators is that of published examples and of other packages; intervals and TOST are what they say."""

from __future__ import annotations

import math
from fractions import Fraction
from itertools import permutations

import numpy as np
import pytest
import scipy.stats

from prb_jax.metrics.annotators import (
    MISSING,
    ORDINAL,
    agreement,
    agreement_with_intervals,
    cohen,
    cohen_with_interval,
)
from prb_jax.metrics.paired import tost

_ = MISSING
# Krippendorff (2011), "Computing Krippendorff's Alpha-Reliability", part C: four observers, twelve units.
KRIPPENDORFF = np.array(
    [
        [1, 2, 3, 3, 2, 1, 4, 1, 2, _, _, _],
        [1, 2, 3, 3, 2, 2, 4, 1, 2, 5, _, 3],
        [_, 3, 3, 3, 2, 3, 4, 2, 2, 5, 1, _],
        [1, 2, 3, 3, 2, 4, 4, 1, 2, 5, 1, _],
    ]
).T
# Fleiss (1971) as in Gwet and in many textbooks: 14 raters, ten subjects, counts of five categories.
FLEISS = [
    [0, 0, 0, 0, 14], [0, 2, 6, 4, 2], [0, 0, 3, 5, 6], [0, 3, 9, 2, 0], [2, 2, 8, 1, 1], [7, 7, 0, 0, 0],
    [3, 2, 6, 3, 0], [2, 5, 3, 2, 2], [6, 5, 2, 1, 0], [0, 2, 2, 3, 7],
]  # fmt: skip

# Of the first random tables, nominal and ordinal, as the package krippendorff 0.9.0 gives them.
STORED_ALPHAS = [14 / 27, 14 / 27, 0.6095890410958904, 0.5674796747967479, 4 / 11, -0.3355263157894737]


def table_of(counts: list[list[int]]) -> np.ndarray:
    return np.array([np.repeat(np.arange(len(row)), row) for row in counts])


def random_table(rng: np.random.Generator) -> tuple[np.ndarray, int]:
    """Ratings of some annotators, with missing cells, that agree somewhat."""
    units, annotators, categories = rng.integers(2, 15), rng.integers(2, 7), int(rng.integers(2, 6))
    shape = (units, annotators)
    own, common = rng.integers(0, categories, shape), rng.integers(0, categories, (units, 1))
    table = np.where(rng.random(shape) < rng.random(), common, own)
    return np.where(rng.random(shape) < 0.4 * rng.random(), MISSING, table), categories


def test_published_examples() -> None:
    table = np.where(KRIPPENDORFF == MISSING, MISSING, KRIPPENDORFF - 1)
    assert agreement(table, categories=5)["alpha"][0] == pytest.approx(0.743, abs=5e-4)
    assert agreement(table, categories=5, level=ORDINAL)["alpha"][0] == pytest.approx(0.815, abs=5e-4)
    # Gwet's handbook has the same table: AC1 0.775, Fleiss' kappa 0.761
    assert agreement(table, categories=5)["ac1"][0] == pytest.approx(0.775, abs=5e-4)
    assert agreement(table, categories=5)["fleiss"][0] == pytest.approx(0.761, abs=5e-4)
    fleiss = agreement(table_of(FLEISS), categories=5)
    assert fleiss["fleiss"][0] == pytest.approx(0.210, abs=5e-4)
    assert fleiss["observed"][0] == pytest.approx(0.378, abs=5e-4)
    # Cohen (1960), table 1: 0.492; Gwet's paradox: 118 of 125 equal, kappa 0.234 and AC1 0.940
    first, second = np.nonzero(np.ones((3, 3)))
    counts = np.array([88, 14, 18, 10, 40, 10, 2, 6, 12])
    kappa = cohen(np.repeat(first, counts), np.repeat(second, counts), categories=3)
    assert kappa[0] == pytest.approx(0.492, abs=5e-4)
    pairs = np.array([[0, 0]] * 118 + [[0, 1]] * 5 + [[1, 0]] * 2)
    both = agreement(pairs, categories=2)
    assert both["observed"][0] == pytest.approx(118 / 125)
    assert both["ac1"][0] > 0.93 > 0.1 > cohen(pairs[:, 0], pairs[:, 1], categories=2)[0]


def alpha_by_pairs(table: np.ndarray, categories: int, level: str) -> float:
    """Krippendorff's definition, one minus observed over expected disagreement, as sums over pairs of ratings.

    Observed are the pairs within a unit of m ratings, each with weight 1 / (m - 1); expected are those of all n
    ratings of such units, whoever gave them (Content Analysis, 4th edition, section 12.3).
    """
    rated = ([rating for rating in row if rating != MISSING] for row in table.tolist())
    units = [unit for unit in rated if len(unit) > 1]
    ratings = np.array([rating for unit in units for rating in unit], np.int64)
    counts = np.bincount(ratings, minlength=categories)

    def distance(a: int, b: int) -> Fraction:
        if level == "nominal":
            return Fraction(int(a != b))
        low, high = min(a, b), max(a, b)
        return (Fraction(int(counts[low : high + 1].sum())) - Fraction(int(counts[a] + counts[b]), 2)) ** 2

    within = (distance(a, b) / (len(unit) - 1) for unit in units for a, b in permutations(unit, 2))
    between = (distance(a, b) * int(counts[a] * counts[b]) for a, b in permutations(range(categories), 2))
    observed, expected = sum(within, Fraction(0)), sum(between, Fraction(0))
    return float(1 - (len(ratings) - 1) * observed / expected) if expected else math.nan


@pytest.mark.parametrize("tables", [100, pytest.param(1000, marks=pytest.mark.slow)])
def test_random_tables_with_missing_cells_equal_krippendorff_s_definition(tables: int) -> None:
    rng = np.random.default_rng(tables)
    values = []
    for _number in range(tables):
        table, categories = random_table(rng)
        for level in ("nominal", "ordinal"):
            alpha = agreement(table, categories=categories, level=level)["alpha"][0]
            assert alpha == pytest.approx(alpha_by_pairs(table, categories, level), abs=1e-12, nan_ok=True)
            values += [alpha] * (not math.isnan(alpha))
    assert len(values) > tables
    if tables == 100:
        assert values[:6] == pytest.approx(STORED_ALPHAS, abs=1e-12)


def test_whole_tables_equal_statsmodels_and_scikit_learn() -> None:
    rater = pytest.importorskip("statsmodels.stats.inter_rater")
    rng = np.random.default_rng(5)
    for _number in range(20):
        table = rng.integers(0, 3, (12, 4))
        counts, _categories = rater.aggregate_raters(table, n_cat=3)
        expected = rater.fleiss_kappa(counts)
        assert agreement(table, categories=3)["fleiss"][0] == pytest.approx(expected, abs=1e-12)
        crossed = np.zeros((3, 3))
        np.add.at(crossed, (table[:, 0], table[:, 1]), 1)
        expected = rater.cohens_kappa(crossed, return_results=False)
        assert cohen(table[:, 0], table[:, 1], categories=3)[0] == pytest.approx(expected, abs=1e-12)


def test_weights_are_repetitions_of_units_and_nobody_agrees_with_himself() -> None:
    rng = np.random.default_rng(1)
    table, categories = random_table(rng)
    drawn = rng.integers(0, 3, (2, len(table)))
    weighted = agreement(table, categories=categories, units=drawn)
    for place, times in enumerate(drawn):
        repeated = agreement(np.repeat(table, times, axis=0), categories=categories)
        for name, values in repeated.items():
            assert weighted[name][place] == pytest.approx(values[0], abs=1e-12), name
    # an annotator who is drawn twice adds the pairs with others, none with himself
    apart = np.array([[0, 1], [1, 0], [0, 1]])
    twice = agreement(apart, categories=2, annotators=np.array([[2, 1]]))
    assert twice["observed"][0] == 0
    # all on one annotator: nothing is known
    alone = agreement(apart, categories=2, annotators=np.array([[2, 0]]))
    assert np.isnan([values[0] for values in alone.values()]).all()


def test_figures_that_there_are_not_have_reasons() -> None:
    nobody = agreement_with_intervals(np.full((8, 3), MISSING), categories=2, draws=50)
    assert nobody["alpha"].reasons == {"value": "no two annotators judged the same item"}
    assert agreement_with_intervals(np.zeros((0, 0), int), categories=2, draws=50)["ac1"].value is None
    same = agreement_with_intervals(np.zeros((8, 3), int), categories=2, draws=50)
    assert (same["alpha"].value, same["alpha"].reasons) == (None, {"value": "all judgements are equal"})
    assert same["ac1"].value == 1
    few = agreement_with_intervals(np.array([[0, 0], [1, 1], [0, 1]]), categories=2, draws=50)["alpha"]
    assert few.ci95 is None
    assert few.reasons["ci95"] == "3 items; an interval needs at least 6"
    three = agreement_with_intervals(np.tile([[0, 0, 1], [1, 1, 1]], (6, 1)), categories=2, draws=50)["alpha"]
    assert three.ci95 is not None
    assert "3 annotators" in three.reasons["ci95_annotators"]


def simulated(rng: np.random.Generator, *, items: int, annotators: int) -> np.ndarray:
    """Two categories; annotators err at rates of their own, items differ in how hard they are, a third is missing."""
    truth = rng.integers(0, 2, (items, 1))
    odds = 1.5 + rng.normal(0, 0.7, (items, 1)) + rng.normal(0, 0.7, (1, annotators))
    right = rng.random((items, annotators)) < 1 / (1 + np.exp(-odds))
    table = np.where(right, truth, 1 - truth)
    return np.where(rng.random(table.shape) < 1 / 3, MISSING, table)


@pytest.mark.slow
def test_intervals_hold_the_value_of_many_items_and_annotators() -> None:
    rng = np.random.default_rng(0)
    large = agreement(simulated(rng, items=3000, annotators=300), categories=2)
    held = {"alpha": 0, "fleiss": 0, "ac1": 0, "observed": 0}
    repeats = 300
    for seed in range(repeats):
        table = simulated(rng, items=60, annotators=10)
        estimates = agreement_with_intervals(table, categories=2, draws=400, seed=seed)
        for name in held:
            bounds = estimates[name].ci95_annotators
            assert bounds is not None
            held[name] += bounds[0] <= large[name][0] <= bounds[1]
    for name, count in held.items():
        assert 0.9 <= count / repeats <= 1, (name, count / repeats)


def test_equivalence_is_two_one_sided_t_tests() -> None:
    weightstats = pytest.importorskip("statsmodels.stats.weightstats")
    rng = np.random.default_rng(2)
    for size, shift, margin in ((8, 0.1, 0.5), (40, 0.2, 0.25), (200, 0.0, 0.2)):
        values = rng.normal(shift, 0.6, size)
        error = values.std(ddof=1) / math.sqrt(size)
        test = tost(values.mean(), standard_error=error, degrees=size - 1, margin=margin)
        expected, *_tests = weightstats.DescrStatsW(values).ttost_mean(-margin, margin)
        assert test.p == pytest.approx(expected, abs=1e-12)
        assert test.equivalent == (-margin < test.ci90[0] and test.ci90[1] < margin)
        assert test.ci90 == pytest.approx(scipy.stats.t.interval(0.9, size - 1, values.mean(), error))
    assert tost(0.1, standard_error=0, degrees=5, margin=0.2).equivalent
    assert not tost(0.3, standard_error=0, degrees=5, margin=0.2).equivalent


def test_kappa_of_two_has_an_interval_over_their_common_items() -> None:
    rng = np.random.default_rng(3)
    first = rng.integers(0, 2, 40)
    second = np.where(rng.random(40) < 0.8, first, 1 - first)
    second[:5] = MISSING
    estimate = cohen_with_interval(first, second, categories=2, draws=200)
    assert estimate.value == pytest.approx(cohen(first[5:], second[5:], categories=2)[0])
    assert estimate.ci95 is not None
    assert estimate.ci95[0] < estimate.value < estimate.ci95[1]
    assert dict(estimate.reasons) == {}
