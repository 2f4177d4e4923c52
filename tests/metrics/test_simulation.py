"""The intervals hold their nominal coverage for few users and for many, whatever the accuracy is."""

import math

import numpy as np
import pytest

from tests.metrics.simulation import (
    CROSSED,
    EFFECTS,
    PAIRS,
    SHARED,
    SKEWS,
    USERS,
    cells,
    coverage,
    crossed_coverage,
    difference_coverage,
    shared_coverage,
    told_apart,
)
from tests.sweeps import sweep


def within(share, low, high, *, repeats):
    """Whether a share of repeats can be one of at least ``low`` and at most ``high``, but for three standard errors."""
    below, above = (3 * math.sqrt(bound * (1 - bound) / repeats) for bound in (low, high))
    return low - below <= share <= high + above


EVERYWHERE = list(cells())
UNEQUAL = {users: np.random.default_rng(3).integers(3, 61, users) for users in (6, 20, 60)}
DESIGNS = [  # users, pairs of each, means and standard deviations of their rates, repeats, mean over users
    (6, 10, [(0.65, 0.1)], 200, False),
    (20, 60, [(0.8, 0.2)], 200, False),
    (50, 3, [(0.97, 0.05)], 200, False),
    *((users, pairs, EVERYWHERE, 1000, False) for users in USERS for pairs in PAIRS),
    *((users, pairs, EVERYWHERE, 500, mean) for users, pairs in UNEQUAL.items() for mean in (False, True)),
]


@pytest.mark.parametrize(("users", "pairs", "rates", "repeats", "per_cluster"), sweep(DESIGNS, few=(0, 1, 2)))
def test_between_93_and_98_of_100_intervals_hold_the_accuracy(users, pairs, rates, repeats, per_cluster):
    """At most 98 from 20 users on; of users with as many pairs each, and of users with unequal numbers."""
    for mean, spread in rates:
        share = coverage(users, pairs, mean, spread, repeats=repeats, per_cluster=per_cluster)
        assert within(share, 0.93, 0.98 if users >= 20 else 1, repeats=repeats), (mean, spread, share)


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
    ("users", "sets", "rows", "spreads", "mean", "repeats"),
    sweep(
        [
            (30, 20, 20, (0.3, 1.0), 0.65, 200),
            *(
                (*design, spreads, mean, 400)
                for design in SHARED
                for spreads in EFFECTS
                for mean in (0.5, 0.65, 0.8)
            ),
        ],
        few=(0,),
    ),
)
def test_figures_of_users_who_judge_the_same_responses(users, sets, rows, spreads, mean, repeats):
    of_accuracy, of_served = shared_coverage(users, sets, rows, spreads, mean=mean, repeats=repeats)
    assert within(of_accuracy, 0.93, 0.98, repeats=repeats), of_accuracy
    assert within(of_served, 0.93, 0.99, repeats=repeats), of_served


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
