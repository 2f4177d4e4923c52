"""How many users a model serves: whose accuracy is above chance, by an exact test for each user."""

from __future__ import annotations

import math
from collections import Counter
from collections.abc import Sequence
from functools import lru_cache
from typing import Any, Final

import numpy as np

from prb_jax.metrics.uncertainty import clustered_interval

LEVEL: Final = 0.05


def chance(labels: Sequence[float]) -> float:
    """Return the probability that scores without meaning win a row: 1/K where one of K responses is the best."""
    top = max(labels)
    return sum(label == top for label in labels) / len(labels)


def coverage(users: Sequence[str], wins: Sequence[bool], chances: Sequence[float]) -> dict[str, Any]:
    """Test each user's number of wins against chance, and return the entries of a summary about it.

    Args:
      users, wins, chances: [n] of each row: its user, whether it is won, and the probability that it is by chance.

    Returns:
      "users_testable", who would be served if all their rows were won; of these "coverage", the share with a p-value of
      at most 0.05, with its interval, "coverage_by_chance", the mean size of the tests, and
      "coverage_benjamini_hochberg", the share after correction; None with "coverage_reason" where nobody is testable.
    """
    won: Counter[str] = Counter()
    rows: dict[str, Counter[float]] = {}
    for user, win, probability in zip(users, wins, chances, strict=True):
        won[user] += bool(win)
        rows.setdefault(user, Counter())[probability] += 1
    p_values, sizes, most = [], [], 0
    for user, counts in rows.items():
        tails = win_tails(tuple(sorted(counts.items())))
        most = max(most, len(tails) - 1)
        if tails[-1] <= LEVEL:
            p_values.append(float(tails[won[user]]))
            sizes.append(float(tails[tails <= LEVEL].max()))
    testable = len(p_values)
    served = np.array([p <= LEVEL for p in p_values], np.int64)
    reason = (
        f"no user has enough comparisons for the test at {LEVEL} (most: {most})"
        if rows
        else "no row has a user"
    )
    return {
        "users_testable": testable,
        "coverage": float(served.mean()) if testable else None,
        "coverage_reason": None if testable else reason,
        **clustered_interval(served, np.ones(testable, np.int64), what="testable users").to_json(
            "coverage_ci95"
        ),
        "coverage_by_chance": math.fsum(sizes) / testable if testable else None,
        "coverage_benjamini_hochberg": float((benjamini_hochberg(p_values) <= LEVEL).mean())
        if testable
        else None,
    }


def benjamini_hochberg(values: Sequence[float]) -> np.ndarray:
    """Return p-values adjusted so that the share of false discoveries is controlled (Benjamini and Hochberg 1995)."""
    p = np.asarray(values, np.float64)
    order = np.argsort(p)[::-1]
    ranks = np.arange(len(p), 0, -1)
    adjusted = np.empty_like(p)
    adjusted[order] = np.minimum(np.minimum.accumulate(p[order] * len(p) / ranks), 1.0)
    return adjusted


@lru_cache(maxsize=4096)
def win_tails(counts: tuple[tuple[float, int], ...]) -> np.ndarray:
    """Return [n + 1] P(X >= k) for k of 0 to n, X the number of wins in so many rows of each probability."""
    from scipy.special import bdtrc  # scipy takes long to import

    if len(counts) == 1:
        ((probability, rows),) = counts
        return np.concatenate([[1.0], bdtrc(np.arange(rows, dtype=np.float64), rows, probability)])
    mass = np.ones(1)
    for probability, rows in counts:
        tails = np.append(win_tails(((probability, rows),)), 0.0)
        mass = np.convolve(mass, tails[:-1] - tails[1:])
    return np.minimum(np.cumsum(mass[::-1])[::-1], 1.0)
