"""Outcomes: strict wins, ties and margins of scored rows, and their counts per user.

A row is won if the best score among the responses with the highest label is strictly greater than
the best score among all others. For a pair this is chosen > rejected. A tie (both equal) is not a
win; ties are counted separately. A row with one response contains a grade.
"""

from __future__ import annotations

import math
from collections.abc import Sequence
from dataclasses import dataclass

import numpy as np

from prb_jax.errors import DataError, quote, short_repr
from prb_jax.metrics.rows import ScoredRow


@dataclass(frozen=True)
class Outcomes:
    """Outcomes of n rows, in order."""

    margins: np.ndarray  # [n] float64, best score among the highest labels minus the best of the others

    __repr__ = short_repr

    @property
    def wins(self) -> np.ndarray:
        """[n] bool, the best labelled response scored strictly highest."""
        return self.margins > 0

    @property
    def ties(self) -> np.ndarray:
        """[n] bool, the two compared scores are equal."""
        return self.margins == 0


@dataclass(frozen=True)
class GroupCounts:
    """Wins and rows by group, [G] int64, in order of first appearance; every group has a row."""

    wins: np.ndarray
    rows: np.ndarray

    __repr__ = short_repr

    @property
    def accuracy(self) -> np.ndarray:
        """[G] float64 share of wins in each group."""
        return self.wins / self.rows


def margin(scores: Sequence[float], labels: Sequence[float], *, id: str) -> float:
    """Best score among the highest labels minus the best score among the others (float64).

    Above 0 is a win, 0 a tie.

    Raises:
      DataError: scores are not finite, the numbers of labels and scores differ, or labels are all
        equal; names ``id``.
    """
    if len(scores) == 2 == len(labels) and math.isfinite(labels[0] - labels[1]):
        # fast path for pairs, the common case; the general path below reports any error
        difference = float(scores[0]) - float(scores[1])
        if math.isfinite(difference) and labels[0] != labels[1]:
            return difference if labels[0] > labels[1] else -difference
    values = [float(s) for s in scores]
    if len(values) != len(labels):
        raise DataError(
            f"row {quote(id)}: {len(values)} scores for {len(labels)} labels; expected equal numbers"
        )
    for k, value in enumerate(values):
        if not math.isfinite(value):
            raise DataError(f"row {quote(id)}: scores[{k}] is {value}; expected a finite number")
    if not all(math.isfinite(label) for label in labels):
        raise DataError(f"row {quote(id)}: labels {list(labels)}; expected finite numbers")
    top = max(labels, default=math.nan)
    best = [value for value, label in zip(values, labels) if label == top]
    rest = [value for value, label in zip(values, labels) if label != top]
    if not best or not rest:
        raise DataError(f"row {quote(id)}: labels {list(labels)} prefer no response over another")
    return max(best) - max(rest)


def outcomes(rows: Sequence[ScoredRow]) -> Outcomes:
    """Return wins, ties and margins of rows.

    Raises:
      DataError: same as ``margin``.
    """
    return Outcomes(np.array([margin(row.scores, row.labels, id=row.id) for row in rows], np.float64))


def group_counts(wins: np.ndarray, groups: Sequence[str | None]) -> GroupCounts:
    """Sum ``wins`` [n] by group; every row whose group is None counts as a separate group."""
    index: dict[str | int, int] = {}
    keys = (row if group is None else group for row, group in enumerate(groups))
    of_row = np.fromiter((index.setdefault(key, len(index)) for key in keys), np.int64, len(groups))
    won = np.bincount(of_row, weights=wins, minlength=len(index)).astype(np.int64)
    return GroupCounts(won, np.bincount(of_row, minlength=len(index)).astype(np.int64))
