"""Coverage: which users are served, by testing each user's number of wins against chance."""

from __future__ import annotations

import math
from collections import Counter
from collections.abc import Sequence
from functools import lru_cache
from typing import Any, Final

import numpy as np

from prb_jax.metrics.clusters import RESPONSES, Clusters, equal_users, sample_of
from prb_jax.metrics.uncertainty import (
    CROSSED,
    LEAST_CLUSTERS,
    TWO_WAY,
    Interval,
    accuracy_interval,
    share_correlations,
    too_few,
    wilson_ends,
)

LEVEL: Final = 0.05


def chance(labels: Sequence[float]) -> float:
    """Return the probability that random scores win a row: 1/K if one of K responses is the best."""
    top = max(labels)
    return sum(label == top for label in labels) / len(labels)


def coverage(
    users: Sequence[str],
    wins: Sequence[bool],
    chances: Sequence[float],
    *,
    responses: tuple[tuple[str, ...], ...] | None = None,
) -> dict[str, Any]:
    """Test each user's number of wins against chance, and return the entries of a summary about it.

    Args:
      users, wins, chances: [n] for each row: its user, whether it is won, and the probability of winning by chance.
      responses: Keys [n] of the responses of each row, as in `Clusters`, if several users judge the same ones.

    Returns:
      "users_testable", who would be served if all their rows were won; of these "coverage", the share with a p-value of
      at most 0.05, with its interval, "coverage_by_chance", the mean size of the tests, and
      "coverage_benjamini_hochberg", the share after correction; None with "coverage_reason" if nobody is testable.
    """
    won: Counter[str] = Counter()
    rows: dict[str, Counter[float]] = {}
    for user, win, probability in zip(users, wins, chances, strict=True):
        won[user] += bool(win)
        rows.setdefault(user, Counter())[probability] += 1
    p_values: dict[str, float] = {}  # p-values of the testable users
    sizes, found, expected, most = [], [], [], 0
    for user, counts in rows.items():
        tails, count = win_tails(tuple(sorted(counts.items()))), won[user]
        most = max(most, len(tails) - 1)
        if tails[-1] <= LEVEL:
            p_values[user] = float(tails[count])
            sizes.append(float(tails[tails <= LEVEL].max()))
            total, needed = len(tails) - 1, int(np.argmax(tails <= LEVEL))
            found.append({needed: count, needed - 1: total - count}.get(count, 0))
            expected.append(_pivotal_rows(count, total, needed=needed))
    testable = len(p_values)
    served = np.array([p <= LEVEL for p in p_values.values()], np.int64)
    reason = (
        f"no user has enough comparisons for the test at {LEVEL} (most: {most})"
        if rows
        else "no row has a user"
    )
    interval = accuracy_interval(served, Clusters((None,) * testable), what="testable users")
    if responses is not None and interval.bounds is not None:
        tested = [row for row, user in enumerate(users) if user in p_values]
        clusters = Clusters(tuple(users), responses).take(tested)
        if clusters.responses is not None:
            slope = max(math.fsum(found), math.fsum(expected)) / testable
            interval = _crossed(served, np.asarray(wins, np.int64)[tested], clusters, slope=slope)
    return {
        "users_testable": testable,
        "coverage": float(served.mean()) if testable else None,
        "coverage_reason": None if testable else reason,
        **interval.to_json("coverage_ci95"),
        "coverage_by_chance": math.fsum(sizes) / testable if testable else None,
        "coverage_benjamini_hochberg": float((benjamini_hochberg(list(p_values.values())) <= LEVEL).mean())
        if testable
        else None,
    }


def _crossed(served: np.ndarray, wins: np.ndarray, clusters: Clusters, *, slope: float) -> Interval:
    """Return the interval of the share of served users [U], if users judge the same responses.

    Wilson's interval, with the variance over users plus the variance over responses. The latter is the responses' part
    of the variance of users' mean accuracy, times the squared slope of the coverage in this accuracy. The share in its
    denominator adds half a user on either side, so it is never 0 or 1.
    """
    sample = sample_of(wins, clusters, weights=equal_users(clusters.users))
    if sample.clusters < LEAST_CLUSTERS:
        return too_few(sample.clusters, CROSSED, method=TWO_WAY)
    users, share = len(served), (served.sum() + 0.5) / (len(served) + 1)
    alone, scale = 1 / (users - 1), slope**2 * sample.mean * (1 - sample.mean) / (share * (1 - share))
    correlations = share_correlations(sample)
    ((factor, correlation, shared),) = (
        of_factor
        for of_factor in zip(sample.factors, correlations, sample.shared, strict=True)
        if of_factor[0].by == RESPONSES
    )
    of_responses = scale * correlation * shared
    parts = ((alone, users - 1), (of_responses, factor.degrees(correlation)))
    inverse = sum((part / (alone + of_responses)) ** 2 / degrees for part, degrees in parts)
    ends = wilson_ends(float(served.mean()), alone + of_responses, 1 / inverse)
    return Interval(*ends, None, TWO_WAY, sample.clusters)


def _pivotal_rows(wins: int, rows: int, *, needed: int) -> float:
    """Return the expected number of a user's rows that each decide whether the user is served, if wins are binomial
    with the user's rate.

    The mean over users is the slope of the coverage in the accuracy (Russo's formula). The observed number has the same
    mean and varies more; the larger of the two means is used.
    """
    rate = (wins + 0.5) / (rows + 1)
    ways = math.lgamma(rows + 1) - math.lgamma(needed) - math.lgamma(rows - needed + 1)
    return math.exp(ways + (needed - 1) * math.log(rate) + (rows - needed) * math.log(1 - rate))


def benjamini_hochberg(values: Sequence[float]) -> np.ndarray:
    """Return p-values adjusted to control the share of false discoveries (Benjamini and Hochberg 1995)."""
    p = np.asarray(values, np.float64)
    order = np.argsort(p)[::-1]
    ranks = np.arange(len(p), 0, -1)
    adjusted = np.empty_like(p)
    adjusted[order] = np.minimum(np.minimum.accumulate(p[order] * len(p) / ranks), 1.0)
    return adjusted


@lru_cache(maxsize=4096)
def win_tails(counts: tuple[tuple[float, int], ...]) -> np.ndarray:
    """Return [n + 1] P(X >= k) for k from 0 to n; X is the number of wins, given (probability, rows) pairs."""
    from scipy.special import bdtrc  # scipy is slow to import

    if len(counts) == 1:
        ((probability, rows),) = counts
        return np.concatenate([[1.0], bdtrc(np.arange(rows, dtype=np.float64), rows, probability)])
    mass = np.ones(1)
    for probability, rows in counts:
        tails = np.append(win_tails(((probability, rows),)), 0.0)
        mass = np.convolve(mass, tails[:-1] - tails[1:])
    return np.minimum(np.cumsum(mass[::-1])[::-1], 1.0)
