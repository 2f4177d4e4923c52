"""The intervals hold their nominal coverage, and are hardly wider than with known correlations, in every design."""

import math

import numpy as np
import pytest

from tests.metrics.simulation import (
    DESIGNS,
    EFFECTS,
    PAIRS,
    SHARED,
    TASKS,
    USERS,
    cell,
    cells,
    coverage,
    told_apart,
)
from tests.sweeps import sweep


def within(share, low, high, *, repeats):
    """Whether a share of repeats can be one of at least ``low`` and at most ``high``, but for three standard errors."""
    below, above = (3 * math.sqrt(bound * (1 - bound) / repeats) for bound in (low, high))
    return low - below <= share <= high + above


CELLS = [(design, *task, effects) for design in DESIGNS for task in TASKS for effects in EFFECTS]


@pytest.mark.parametrize(
    ("design", "accuracy", "responses", "effects", "repeats"),
    sweep([(DESIGNS[3], 0.65, 2, EFFECTS[1], 60), *((*one, 300) for one in CELLS)], few=(0,)),
)
def test_every_estimand_has_intervals_that_hold_it_and_are_not_wide(
    design, accuracy, responses, effects, repeats
):
    """Accuracy, mean over users, half credit, difference, log-loss and the share of users who are served."""
    for name, (share, width) in cell(design, accuracy, responses, effects, repeats=repeats).items():
        if name == "served":  # nearly everybody, at 0.95: a share near 1 has Wilson's interval over users
            assert accuracy > 0.9 or share > 0.9
            continue
        assert within(share, 0.93, 0.98, repeats=repeats), (name, share)
        assert width < 1.25 * (1 + 3 / math.sqrt(2 * repeats)), (name, width)


EVERYWHERE = list(cells())
UNEQUAL = {users: np.random.default_rng(3).integers(3, 61, users) for users in (6, 20, 60)}
USER_DESIGNS = [  # users, pairs of each, means and standard deviations of their rates, repeats, mean over users
    (6, 10, [(0.65, 0.1)], 200, False),
    (20, 60, [(0.8, 0.2)], 200, False),
    (50, 3, [(0.97, 0.05)], 200, False),
    *((users, pairs, EVERYWHERE, 500, False) for users in USERS for pairs in PAIRS),
    *((users, pairs, EVERYWHERE, 300, mean) for users, pairs in UNEQUAL.items() for mean in (False, True)),
]


@pytest.mark.parametrize(
    ("users", "pairs", "rates", "repeats", "per_user"), sweep(USER_DESIGNS, few=(0, 1, 2))
)
def test_between_93_and_98_of_100_intervals_hold_the_accuracy(users, pairs, rates, repeats, per_user):
    """At most 98 from 20 users on; of users with as many pairs each, and of users with unequal numbers."""
    for mean, spread in rates:
        share = coverage(users, pairs, mean, spread, repeats=repeats, per_user=per_user)
        assert within(share, 0.93, 0.98 if users >= 20 else 1, repeats=repeats), (mean, spread, share)


@pytest.mark.parametrize(
    ("runs", "repeats", "unequal", "shared"),
    sweep(
        [
            (2, 60, False, SHARED[0]),
            (2, 60, True, SHARED[1]),
            (10, 15, True, SHARED[0]),
            *(
                (runs, 150, unequal, shared)
                for runs in (2, 5)
                for unequal in (False, True)
                for shared in SHARED
            ),
        ],
        few=(0, 1),
    ),
)
def test_equally_good_runs_are_seldom_told_apart(runs, repeats, unequal, shared):
    """Some pair in at most 6 of 100 comparisons, whatever the number of runs."""
    share = told_apart(runs, unequal=unequal, repeats=repeats, **shared)
    assert within(share, 0, 0.06, repeats=repeats)
