"""How many users a model serves: whose accuracy is above chance, by an exact test for each user."""

from __future__ import annotations

import math
from collections import Counter
from collections.abc import Sequence
from dataclasses import dataclass
from functools import lru_cache
from typing import Any, Final

import numpy as np

from prb_jax.metrics.uncertainty import Interval, clustered_interval

LEVEL: Final = 0.05


@dataclass(frozen=True)
class Coverage:
    """The share of testable users who are served.

    Attributes:
      testable: users who would be served if all their rows were won.
      share: of the testable users, with a p-value of at most 0.05; None where nobody is testable.
      reason: why there is no share; None where there is one.
      expected: the share that a model would reach by chance: the mean size of the tests.
      corrected: the share served after the correction of Benjamini and Hochberg over the testable users.
      interval: of the share, over testable users.
    """

    testable: int
    share: float | None
    reason: str | None
    expected: float | None
    corrected: float | None
    interval: Interval

    def to_json(self) -> dict[str, Any]:
        """Return the entries of a summary."""
        return {
            "users_testable": self.testable,
            "coverage": self.share,
            "coverage_reason": self.reason,
            **self.interval.to_json("coverage_ci95"),
            "coverage_by_chance": self.expected,
            "coverage_benjamini_hochberg": self.corrected,
        }


def chance(labels: Sequence[float]) -> float:
    """Return the probability that scores without meaning win a row: 1/K where one of K responses is the best."""
    top = max(labels)
    return sum(label == top for label in labels) / len(labels)


def coverage(users: Sequence[str], wins: Sequence[bool], chances: Sequence[float]) -> Coverage:
    """Test each user's number of wins against chance.

    Args:
      users: [n] the user of each row.
      wins: [n] whether it is won.
      chances: [n] the probability that it is won by chance.
    """
    won: Counter[str] = Counter()
    rows: dict[str, Counter[float]] = {}
    for user, win, probability in zip(users, wins, chances, strict=True):
        won[user] += bool(win)
        rows.setdefault(user, Counter())[probability] += 1
    p_values, sizes = [], []
    most = 0
    for user, counts in rows.items():
        tails = _tails(tuple(sorted(counts.items())))
        most = max(most, len(tails) - 1)
        if tails[-1] > LEVEL:
            continue
        p_values.append(float(tails[won[user]]))
        sizes.append(float(tails[tails <= LEVEL].max()))
    testable = len(p_values)
    served = np.array([p <= LEVEL for p in p_values], np.int64)
    interval = clustered_interval(served, np.ones(testable, np.int64), what="testable users")
    if not rows:
        return Coverage(0, None, "no row has a user", None, None, interval)
    if not testable:
        reason = f"no user has enough comparisons for the test at {LEVEL} (most: {most})"
        return Coverage(0, None, reason, None, None, interval)
    corrected = (benjamini_hochberg(p_values) <= LEVEL).mean()
    return Coverage(
        testable,
        float(served.mean()),
        None,
        math.fsum(sizes) / testable,
        float(corrected),
        interval,
    )


def p_values(wins: Sequence[int], rows: Sequence[int], probability: float = 0.5) -> np.ndarray:
    """[U] one-sided exact p-values: P(X >= wins) for X ~ Binomial(rows, probability)."""
    return np.array([_tails(((probability, n),))[w] for w, n in zip(wins, rows, strict=True)])


def benjamini_hochberg(values: Sequence[float]) -> np.ndarray:
    """Return p-values adjusted so that the share of false discoveries is controlled (Benjamini and Hochberg 1995)."""
    found = np.asarray(values, np.float64)
    order = np.argsort(found)[::-1]
    ranks = np.arange(len(found), 0, -1)
    adjusted = np.empty_like(found)
    adjusted[order] = np.minimum(np.minimum.accumulate(found[order] * len(found) / ranks), 1.0)
    return adjusted


@lru_cache(maxsize=4096)
def _tails(counts: tuple[tuple[float, int], ...]) -> np.ndarray:
    """[n + 1] P(X >= k) for k of 0 to n, X the number of wins in ``counts`` rows of each probability."""
    from scipy.special import bdtrc  # scipy takes long to import

    if len(counts) == 1:
        ((probability, rows),) = counts
        return np.concatenate([[1.0], bdtrc(np.arange(rows, dtype=np.float64), rows, probability)])
    mass = np.ones(1)
    for probability, rows in counts:
        tails = np.append(_tails(((probability, rows),)), 0.0)
        mass = np.convolve(mass, tails[:-1] - tails[1:])
    return np.minimum(np.cumsum(mass[::-1])[::-1], 1.0)
