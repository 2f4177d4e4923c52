"""The intervals hold their nominal coverage for few users and for many, whatever the accuracy is."""

import math

import numpy as np
import pytest

from tests.metrics.simulation import (
    CROSSED,
    EFFECTS,
    PAIRS,
    SKEWS,
    USERS,
    cells,
    coverage,
    crossed_coverage,
    difference_coverage,
    told_apart,
)
from tests.sweeps import sweep

REPEATS = 1000


def within(share, low, high, *, repeats=REPEATS):
    """Whether a share of repeats can be one of at least ``low`` and at most ``high``, but for three standard errors."""
    below, above = (3 * math.sqrt(bound * (1 - bound) / repeats) for bound in (low, high))
    return low - below <= share <= high + above


@pytest.mark.parametrize(
    ("users", "pairs", "mean", "spread"), [(6, 10, 0.65, 0.1), (20, 60, 0.8, 0.2), (50, 3, 0.97, 0.05)]
)
def test_about_95_of_100_intervals_hold_the_accuracy(users, pairs, mean, spread):
    """A few cells; the next test has all of them."""
    share = coverage(users, pairs, mean, spread, repeats=200)
    assert within(share, 0.93, 0.98 if users >= 20 else 1, repeats=200)


@pytest.mark.slow
@pytest.mark.parametrize("users", USERS)
@pytest.mark.parametrize("pairs", PAIRS)
def test_between_93_and_98_of_100_intervals_hold_the_accuracy(users, pairs):
    """At most 98 from 20 users on."""
    for mean, spread in cells():
        share = coverage(users, pairs, mean, spread, repeats=REPEATS)
        assert within(share, 0.93, 0.98 if users >= 20 else 1), (mean, spread, share)


@pytest.mark.slow
@pytest.mark.parametrize("users", [6, 20, 60])
@pytest.mark.parametrize("per_cluster", [False, True])
def test_users_with_unequal_numbers_of_pairs(users, per_cluster):
    pairs = np.random.default_rng(3).integers(3, 61, users)
    for mean, spread in cells():
        share = coverage(users, pairs, mean, spread, repeats=500, per_cluster=per_cluster)
        assert within(share, 0.93, 0.98 if users >= 20 else 1, repeats=500), (mean, spread, share)


@pytest.mark.slow
@pytest.mark.parametrize(("users", "pairs"), [(6, 10), (20, 30), (100, 3)])
def test_intervals_of_differences(users, pairs):
    for better, spread in ((0, 0), (0.05, 0), (0.1, 0.05)):
        share = difference_coverage(users, pairs, better, spread, repeats=600)
        assert within(share, 0.93, 0.98, repeats=600), (better, spread, share)


@pytest.mark.slow
@pytest.mark.parametrize("design", CROSSED)
@pytest.mark.parametrize("skew", SKEWS)
def test_two_way_intervals_of_users_and_responses_of_unequal_sizes(design, skew):
    for spreads in EFFECTS:
        for better in (None, 0.0):
            share = crossed_coverage(*design, skew, spreads, repeats=400, better=better)
            assert within(share, 0.93, 0.99, repeats=400), (spreads, better, share)


@pytest.mark.parametrize(
    ("runs", "repeats", "unequal"),
    sweep(
        [(2, 60, False), (10, 15, True), (2, 60, True), (5, 30, False), (5, 30, True), (10, 15, False)],
        few=(0,),
    ),
)
def test_equally_good_runs_are_seldom_told_apart(runs, repeats, unequal):
    """Some pair in at most 5 of 100 comparisons, whatever the number of runs."""
    assert within(told_apart(runs, unequal=unequal, repeats=repeats), 0, 0.05, repeats=repeats)
