"""What share of the intervals holds the true value, and how wide they are: the tables of `docs/statistics.md`.

python -m tests.metrics.simulation --repeats 1000 --out build/intervals.jsonl      # or `make intervals`

Each figure is appended to the file, so the same call continues a killed run; `--jobs` processes share the work. The
table by numbers of users has many more cells, and a quarter of the repeats.
"""

from __future__ import annotations

import argparse
import itertools
import json
import math
import os
from collections.abc import Callable, Iterator, Mapping
from concurrent.futures import ProcessPoolExecutor, as_completed
from dataclasses import dataclass
from functools import partial
from pathlib import Path
from typing import Any

import numpy as np
from scipy.special import ndtri

from prb_jax.metrics.clusters import Clusters, crossed_keys
from prb_jax.metrics.coverage import coverage as share_served
from prb_jax.metrics.paired import LEVEL, holm
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

    same = {"user mean"} if "accuracy" in names and not design.skew else set()  # users have as many rows each
    found = {name: [] for name in names if name not in same}
    for _ in range(repeats):
        one, other = margins(), margins()
        for name, values in found.items():
            value, bounds = _estimate(name, one, other, user, clusters, responses)
            values.append((value, *bounds))
    measured = {name: _measured(np.array(values)) for name, values in found.items()}
    return {name: measured["accuracy" if name in same else name] for name in names}


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


def engine_cells() -> Iterator[tuple[str, Callable[..., Any]]]:
    """Yield each row of the table of all designs: its start, and the function of its figures."""
    for design, (accuracy, responses), effects in itertools.product(DESIGNS, TASKS, EFFECTS):
        if design.sets or not effects[1] or effects == EFFECTS[1]:
            start = f"| {design.name} | {accuracy}, {responses} | {effects[0]}, {effects[1]} |"
            yield start, partial(cell, design, accuracy, responses, effects)


def engine_table(found: Mapping[str, Any], repeats: int) -> Iterator[str]:
    """Yield the lines of the table of all designs, coverage and relative width of each estimand, and what they add
    up to."""
    yield f"{repeats:,} repeats: standard errors of {math.sqrt(0.05 * 0.95 / repeats):.3f} for a coverage and of "
    yield f"{100 / math.sqrt(2 * repeats):.0f} % for a width."
    yield ""
    yield "| design | accuracy, K | effects of users, sets | " + " | ".join(ESTIMANDS) + " |"
    yield "|---|---|---|" + "---|" * len(ESTIMANDS)
    shown = {start: found[start] for start, _ in engine_cells() if start in found}
    for start, figures in shown.items():
        cells = (f"{share:.3f}, {_width(width)}" for share, width in map(figures.get, ESTIMANDS))
        yield f"{start} {' | '.join(cells)} |"
    yield ""
    yield "| | mean coverage | lowest | highest | cells of 0.93 to 0.98 | widest | cells of at most 1.25 |"
    yield "|---|---|---|---|---|---|---|"
    for name in ESTIMANDS:
        shares, widths = np.array([figures[name] for figures in shown.values()]).T
        widths = widths[~np.isnan(widths)]
        inside = int(((np.round(shares, 3) >= 0.93) & (np.round(shares, 3) <= 0.98)).sum())
        narrow = int((np.round(widths, 2) <= 1.25).sum())
        yield (
            f"| {name} | {shares.mean():.3f} | {shares.min():.3f} | {shares.max():.3f} | {inside} of {len(shares)} | "
            f"{widths.max():.2f} | {narrow} of {len(widths)} |"
        )


def _width(width: float) -> str:
    return "-" if math.isnan(width) else f"{width:.2f}"


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


def told_apart(runs, *, unequal, repeats, crossed=0, texts=0, users=30, rows=50, spread=0.5, seed=2):
    """How often the test of `prb compare`, adjusted by Holm's method, tells some pair of equally good runs apart.

    Each run has its own effect for each user, and for each of ``crossed`` sets of responses, normal on a probit scale.
    With ``texts`` each row is a pair of two of so many texts, and each run has an effect for each text. Rows are
    ``rows`` for each user, or log-normal numbers with this mean.
    """
    rng = np.random.default_rng([seed, int(unequal), texts, crossed])
    often = 0
    for _ in range(repeats):
        counts = np.full(users, rows)
        if unequal:
            counts = 1 + (rows * np.exp(rng.standard_normal(users) - 0.5)).astype(int)
        user = np.repeat(np.arange(users), counts)
        item = rng.integers(crossed, size=len(user)) if crossed else None
        pairs = rng.random((len(user), texts)).argsort(axis=1)[:, :2] if texts else None
        won = []
        for _ in range(runs):
            effect = spread * rng.standard_normal(users)[user]
            if item is not None:
                effect = effect + spread * rng.standard_normal(crossed)[item]
            if pairs is not None:
                effect = effect + np.subtract(*(spread * rng.standard_normal(texts))[pairs.T])
            won.append(rng.standard_normal(len(user)) + effect + 0.5 > 0)
        responses = None if item is None else tuple((str(one),) for one in item)
        if pairs is not None:
            responses = crossed_keys([tuple(map(str, pair)) for pair in pairs])
        clusters = Clusters(tuple(map(str, user)), responses)
        p_values = []
        for one, other in itertools.combinations(won, 2):
            gains = one.astype(int) - other
            p_values.append(difference_interval(gains, clusters).p_value(gains.mean()))
        often += bool((holm(p_values) <= LEVEL).any())
    return often / repeats


SHARED = ({}, {"crossed": 40}, {"texts": 40})
"""What several users judge: nothing, sets of responses, pairs of texts that are in other pairs, too."""


RUNS = {2: 3, 5: 0.3, 10: 0.1}
"""Numbers of runs, and their repeats as multiples: comparing more runs takes longer."""


def ranks_cells() -> Iterator[tuple[str, Callable[..., Any]]]:
    """Yield the name of each number of runs and design, and the function of its figure."""
    for runs, shared, unequal in itertools.product(RUNS, SHARED, (False, True)):
        yield _ranks_key(runs, shared, unequal), partial(_told_apart, runs, unequal, shared)


def _ranks_key(runs: int, shared: Mapping[str, int], unequal: bool) -> str:
    return f"{runs} runs, {shared}{', unequal' * unequal}"


def _told_apart(runs: int, unequal: bool, shared: Mapping[str, int], *, repeats: int) -> float:
    return told_apart(runs, unequal=unequal, repeats=_often(runs, repeats), **shared)


def _often(runs: int, repeats: int) -> int:
    return max(round(repeats * RUNS[runs]), 1)


def ranks_table(found: Mapping[str, Any], repeats: int) -> Iterator[str]:
    """Yield the lines of the table of how often equally good runs are told apart."""
    designs = ("30 users of 50 rows", "40 sets of responses", "40 texts")
    yield f"| runs | repeats, standard error | {' | '.join(f'{design} | unequal' for design in designs)} |"
    yield "|---|---|---|---|---|---|---|---|"
    for runs in RUNS:
        keys = [_ranks_key(runs, shared, unequal) for shared in SHARED for unequal in (False, True)]
        shares = " | ".join(f"{found[key]:.3f}" if key in found else "" for key in keys)
        often = _often(runs, repeats)
        yield f"| {runs} | {often:,}, {math.sqrt(0.05 * 0.95 / often):.3f} | {shares} |"


def users_cells() -> Iterator[tuple[str, Callable[..., Any]]]:
    """Yield the name of each number of users, of pairs, mean and spread of rates, and the function of its coverage."""
    for users, pairs, (mean, spread) in itertools.product(USERS, PAIRS, cells()):
        yield f"{users} users, {pairs} pairs, {mean}, {spread}", partial(_users, users, pairs, mean, spread)


def _users(users: int, pairs: int, mean: float, spread: float, *, repeats: int) -> float:
    return coverage(users, pairs, mean, spread, repeats=max(repeats // 4, 1))


def users_table(found: Mapping[str, Any], repeats: int) -> Iterator[str]:
    """Yield the lines of the table: the lowest and the highest coverage over all means and spreads."""
    yield f"{max(repeats // 4, 1)} repeats; in brackets mean and standard deviation of the rates."
    yield ""
    yield "| users | " + " | ".join(f"{pairs} pairs" for pairs in PAIRS) + " |"
    yield "|---|" + "---|" * len(PAIRS)
    for users in USERS:
        bounds = []
        for pairs in PAIRS:
            start = f"{users} users, {pairs} pairs, "
            shares = [
                (share, key.removeprefix(start)) for key, share in found.items() if key.startswith(start)
            ]
            ends = [f"{share:.3f} ({rates})" for share, rates in (min(shares), max(shares))] if shares else []
            bounds.append(" to ".join(ends))
        yield f"| {users} | " + " | ".join(bounds) + " |"


TABLES = {
    "engine": (engine_cells, engine_table),
    "users": (users_cells, users_table),
    "ranks": (ranks_cells, ranks_table),
}


def measure(names: list[str], out: Path, *, repeats: int, jobs: int) -> dict[str, Any]:
    """Return the figures of tables by the names of their cells; those that ``out`` lacks are computed and appended."""
    found = {}
    if out.exists():
        rows = [json.loads(line) for line in out.read_text(encoding="utf-8").splitlines()]
        found = {row["cell"]: row["figures"] for row in rows if row["repeats"] == repeats}
    tasks = {key: run for name in names for key, run in TABLES[name][0]() if key not in found}
    out.parent.mkdir(parents=True, exist_ok=True)
    with ProcessPoolExecutor(jobs) as pool, out.open("a", encoding="utf-8") as file:
        running = {pool.submit(run, repeats=repeats): key for key, run in tasks.items()}
        for done in as_completed(running):
            found[running[done]] = done.result()
            row = {"cell": running[done], "repeats": repeats, "figures": done.result()}
            file.write(json.dumps(row) + "\n")
            file.flush()
    return found


if __name__ == "__main__":
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--repeats", type=int, default=1000)
    parser.add_argument("--tables", nargs="*", choices=TABLES, default=list(TABLES))
    parser.add_argument("--out", type=Path, default=Path("build/intervals.jsonl"))
    parser.add_argument("--jobs", type=int, default=len(os.sched_getaffinity(0)))
    options = parser.parse_args()
    figures = measure(options.tables, options.out, repeats=options.repeats, jobs=options.jobs)
    for name in options.tables:
        for line in itertools.chain(TABLES[name][1](figures, options.repeats), [""]):
            print(line, flush=True)
