"""What share of the intervals holds the true value, and how wide they are: the tables of `docs/statistics.md`.

python -m tests.metrics.simulation --repeats 300      # or `make intervals`

The table by numbers of users has many more cells, and a quarter of the repeats.
"""

from __future__ import annotations

import argparse
import itertools
import math
from dataclasses import dataclass

import numpy as np
from scipy.special import ndtri

from prb_jax.metrics.accuracy import ScoredRow
from prb_jax.metrics.clusters import Clusters, crossed_keys
from prb_jax.metrics.coverage import coverage as share_served
from prb_jax.metrics.paired import compare_rows
from prb_jax.metrics.uncertainty import (
    accuracy_interval,
    difference_interval,
    grade_interval,
    loss_interval,
)


@dataclass(frozen=True)
class Design:
    """Rows of users, who judge sets of responses where ``sets`` is not 0.

    Sizes of users and of sets are log-normal; ``skew`` is the standard deviation of their logarithm.
    """

    name: str
    users: int
    rows: int
    sets: int = 0
    skew: float = 0.0

    def draw(self) -> tuple[np.ndarray, np.ndarray | None, Clusters]:
        """The user and the set of each row, the same ones each time."""
        rng = np.random.default_rng([self.users, self.rows, self.sets, int(10 * self.skew)])
        sizes = np.exp(self.skew * rng.standard_normal(self.users))
        counts = np.maximum(np.round(sizes / sizes.sum() * self.rows), 1).astype(int)
        user = np.repeat(np.arange(self.users), counts)
        names = tuple(map(str, user))
        if not self.sets:
            return user, None, Clusters(names)
        chances = np.exp(self.skew * rng.standard_normal(self.sets))
        drawn = [rng.choice(self.sets, count, count > self.sets, chances / chances.sum()) for count in counts]
        item = np.concatenate(drawn)
        return user, item, Clusters(names, tuple((str(one),) for one in item))


DESIGNS = (
    Design("equal", 30, 600),
    Design("skewed", 30, 600, skew=1.5),
    Design("crossed", 30, 600, sets=40),
    Design("skewed and crossed", 30, 600, sets=40, skew=1.0),
    Design("60 users, crossed", 60, 600, sets=60),
)
TASKS = ((0.65, 2), (0.95, 2), (0.65, 4))  # accuracy, K
EFFECTS = ((0.0, 0.0), (0.2, 0.15), (0.0, 0.2), (0.2, 0.0))
"""Shares of the variance of a margin that are those of the user and of the set of responses."""

ESTIMANDS = ("accuracy", "user mean", "half credit", "difference", "log-loss", "served")


def cell(design, accuracy, responses, effects, *, repeats, seed=0, names=ESTIMANDS):
    """The share of the intervals that hold the true value, and their mean width relative to a known correlation.

    The true value is the mean of the estimates; an interval with known correlations has a width of 2 x 1.96 times their
    standard deviation.

    Returns:
      {estimand: (coverage, relative width)}; the width is NaN for estimates that hardly vary, where all are served.
    """
    rng = np.random.default_rng([seed, int(100 * accuracy), responses, int(100 * sum(effects))])
    user, item, clusters = design.draw()
    shares = (effects[0], effects[1] if design.sets else 0.0)
    draws = rng.standard_normal((20_000, responses - 1)).min(axis=1)  # the closest of the K - 1 others
    shift = {k: -np.quantile(draws, 1 - accuracy) if k > 2 else ndtri(accuracy) for k in (2, responses)}
    rest = math.sqrt(1 - sum(shares))

    def margins():
        common = math.sqrt(shares[0]) * rng.standard_normal(design.users)[user]
        if item is not None:
            common = common + math.sqrt(shares[1]) * rng.standard_normal(design.sets)[item]
        noise = rng.standard_normal((len(user), responses - 1)).min(axis=1)
        return shift[responses] + common + rest * noise

    found = {name: [] for name in names}
    for _ in range(repeats):
        one, other = margins(), margins()
        for name in names:
            value, bounds = _estimate(name, one, other, user, clusters, responses)
            found[name].append((value, *bounds))
    return {name: _measured(np.array(values)) for name, values in found.items()}


def _estimate(name, one, other, user, clusters, responses):
    """One of the estimands of rows with the margins ``one``, and its interval; ``other`` are those of another model."""
    wins = one > 0
    if name == "accuracy":
        return wins.mean(), accuracy_interval(wins, clusters).bounds
    if name == "user mean":
        of_users = np.bincount(user, wins) / np.bincount(user)
        return of_users.mean(), accuracy_interval(wins, clusters, per_user=True).bounds
    if name == "half credit":
        half = np.where(np.abs(one) < 0.1, 0.5, wins)
        return half.mean(), grade_interval(half, clusters).bounds
    if name == "difference":
        gains = wins.astype(np.int64) - (other > 0)
        return gains.mean(), difference_interval(gains, clusters).bounds
    if name == "log-loss":
        losses = np.logaddexp(0, -2 * one)
        return losses.mean(), loss_interval(losses, clusters).bounds
    served = share_served(clusters.users, wins, [1 / responses] * len(user), responses=clusters.responses)
    return served["coverage"], served["coverage_ci95"]


def _measured(found):
    values, low, high = found.T
    true = values.mean()
    known = 2 * 1.96 * values.std(ddof=1)
    width = float((high - low).mean() / known) if known > 0.01 else math.nan
    return float(((low <= true) & (true <= high)).mean()), width


def engine_table(repeats):
    """Yield the lines of the table of all designs: coverage and relative width of each estimand."""
    yield "| design | accuracy, K | effects of users, sets | " + " | ".join(ESTIMANDS) + " |"
    yield "|---|---|---|" + "---|" * len(ESTIMANDS)
    for design, (accuracy, responses), effects in itertools.product(DESIGNS, TASKS, EFFECTS):
        if not design.sets and effects[1] and effects != EFFECTS[1]:
            continue
        measured = cell(design, accuracy, responses, effects, repeats=repeats)
        shown = " | ".join("{:.3f}, {:.2f}".format(*measured[name]) for name in ESTIMANDS)
        yield f"| {design.name} | {accuracy}, {responses} | {effects[0]}, {effects[1]} | {shown} |"


USERS = (6, 10, 20, 50, 100)
PAIRS = (3, 10, 60)
MEANS = (0.5, 0.65, 0.8, 0.9, 0.97)
SPREADS = (0.0, 0.05, 0.1, 0.15, 0.2)


def cells():
    """Yield each mean and standard deviation of the users' rates that a beta distribution can have."""
    for mean, spread in itertools.product(MEANS, SPREADS):
        if spread**2 < 0.95 * mean * (1 - mean):
            yield mean, spread


def rates(rng, mean, spread, shape):
    """The users' true rates."""
    if spread == 0:
        return np.full(shape, mean)
    size = mean * (1 - mean) / spread**2 - 1
    return rng.beta(mean * size, (1 - mean) * size, shape)


def coverage(users, pairs, mean, spread, *, repeats, seed=0, per_user=False):
    """The share of ``repeats`` intervals that hold the mean; ``pairs`` is a number, or the numbers of all users."""
    rng = np.random.default_rng([seed, users, int(np.sum(pairs)), int(1000 * mean), int(1000 * spread)])
    user = np.repeat(np.arange(users), pairs)
    clusters, hits = Clusters(tuple(map(str, user))), 0
    for rate in rates(rng, mean, spread, (repeats, users)):
        low, high = accuracy_interval(rng.random(len(user)) < rate[user], clusters, per_user=per_user).bounds
        hits += low <= mean <= high
    return hits / repeats


def told_apart(runs, *, unequal, repeats, crossed=0, texts=0, users=30, rows=50, spread=0.5, seed=0):
    """How often `prb compare` tells some pair of equally good runs apart.

    Each run has its own effect for each user, and for each of ``crossed`` sets of responses, normal on a probit scale.
    With ``texts`` each row is a pair of two of so many texts, and each run has an effect for each text. Rows are
    ``rows`` for each user, or log-normal numbers with this mean.
    """
    rng = np.random.default_rng([seed, runs, int(unequal), crossed, texts])
    often = 0
    for _ in range(repeats):
        counts = np.full(users, rows)
        if unequal:
            counts = 1 + (rows * np.exp(rng.standard_normal(users) - 0.5)).astype(int)
        user = np.repeat(np.arange(users), counts)
        item = rng.integers(crossed, size=len(user)) if crossed else None
        pairs = rng.random((len(user), texts)).argsort(axis=1)[:, :2] if texts else None
        scored = {}
        for run in range(runs):
            effect = spread * rng.standard_normal(users)[user]
            if item is not None:
                effect = effect + spread * rng.standard_normal(crossed)[item]
            if pairs is not None:
                effect = effect + np.subtract(*(spread * rng.standard_normal(texts))[pairs.T])
            won = rng.standard_normal(len(user)) + effect + 0.5 > 0
            scored[f"run {run}"] = [
                ScoredRow(str(place), None, f"u{name}", [float(win), 0.5], [1.0, 0.0])
                for place, (name, win) in enumerate(zip(user, won))
            ]
        responses = None if item is None else tuple((str(one),) for one in item)
        if pairs is not None:
            responses = crossed_keys([tuple(map(str, pair)) for pair in pairs])
        compared = compare_rows(scored, clusters=Clusters(tuple(f"u{one}" for one in user), responses))
        often += any(run["rank_group"] > 1 for run in compared["runs"])
    return often / repeats


SHARED = ({}, {"crossed": 40}, {"texts": 40})
"""What several users judge: nothing, sets of responses, pairs of texts that are in other pairs, too."""


def ranks_table(repeats):
    """Yield the lines of the table of how often equally good runs are told apart; fewer repeats for more runs."""
    yield "| runs | repeats | 30 users of 50 rows | unequal | 40 sets of responses | unequal | 40 texts | unequal |"
    yield "|---|---|---|---|---|---|---|---|"
    for runs in (2, 5, 10):
        often = max(2 * repeats // runs, 1)
        shares = [
            told_apart(runs, unequal=unequal, repeats=often, **shared)
            for shared in SHARED
            for unequal in (False, True)
        ]
        yield f"| {runs} | {often} | " + " | ".join(f"{share:.3f}" for share in shares) + " |"


def users_table(repeats):
    """Yield the lines of the table: the lowest and the highest coverage over all means and spreads."""
    yield "| users | " + " | ".join(f"{pairs} pairs" for pairs in PAIRS) + " |"
    yield "|---|" + "---|" * len(PAIRS)
    for users in USERS:
        bounds = []
        for pairs in PAIRS:
            shares = [
                (coverage(users, pairs, mean, spread, repeats=max(repeats // 4, 1)), mean, spread)
                for mean, spread in cells()
            ]
            (low, *at_low), (high, *at_high) = min(shares), max(shares)
            bounds.append(f"{low:.3f} ({at_low[0]}, {at_low[1]}) to {high:.3f} ({at_high[0]}, {at_high[1]})")
        yield f"| {users} | " + " | ".join(bounds) + " |"


TABLES = {"engine": engine_table, "users": users_table, "ranks": ranks_table}

if __name__ == "__main__":
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--repeats", type=int, default=300)
    parser.add_argument("--tables", nargs="*", choices=TABLES, default=list(TABLES))
    options = parser.parse_args()
    for name in options.tables:
        for line in itertools.chain(TABLES[name](options.repeats), [""]):
            print(line, flush=True)
