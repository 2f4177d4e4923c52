"""How sure the numbers are: intervals over clusters of rows, paired differences.

Rows of one user are not independent, so an interval is taken over users, never over single rows. Where several users
judge the same responses, it is taken over users and responses (`prb_jax.metrics.clusters`).
`docs/statistics.md` says how the methods were chosen, and what share of the intervals holds the true value.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import Any, Final

import numpy as np

from prb_jax.errors import DataError, quote
from prb_jax.metrics.accuracy import ScoredRow, group_counts, outcomes
from prb_jax.metrics.clusters import (
    OVER_COMPARISONS,
    Clusters,
    CrossedVariance,
    crossed_variance,
    equal_users,
    fit_correlation,
    one_way_variance,
    user_keys,
)

LEAST_CLUSTERS: Final = 6  # with fewer clusters no interval is given: none holds its nominal coverage

SCORE, TWO_WAY, PAIRED, MEAN = "score", "two-way", "paired t", "t"
"""Methods of intervals, see `docs/statistics.md`."""

_STEPS: Final = 28  # of bisection
_FURTHER_ROWS: Final = 2  # with a difference, one either way, in the variance of differences of verdicts
_CROSSED: Final = "users or sets of responses"
_LEAST_SIDE: Final = 10  # wins, and losses, from which a two-way variance can be estimated


@dataclass(frozen=True)
class Interval:
    """A confidence interval, or the reason why there is none.

    ``method`` is `SCORE`, `TWO_WAY`, `PAIRED` or `MEAN`, ``clusters`` how many clusters it is taken over. The estimate
    has a standard error with so many ``degrees`` of freedom, where the method has one.
    """

    low: float | None
    high: float | None
    reason: str | None
    method: str
    clusters: int
    standard_error: float | None = None
    degrees: float | None = None

    @property
    def bounds(self) -> list[float] | None:
        """[low, high], or None."""
        return None if self.low is None or self.high is None else [self.low, self.high]

    def p_value(self, estimate: float) -> float | None:
        """Return the two-sided p-value of a t test that the true value is 0; None where there is no interval."""
        from scipy.special import stdtr  # scipy takes long to import

        if self.low is None or self.standard_error is None or self.degrees is None:
            return None
        if not self.standard_error:
            return float(estimate == 0)
        return float(2 * stdtr(self.degrees, -abs(estimate) / self.standard_error))

    def to_json(self, name: str = "ci95") -> dict[str, Any]:
        """Return the two entries of a summary: the bounds, and the reason where there are none."""
        return {name: self.bounds, f"{name}_reason": self.reason}


def clustered_interval(
    wins: np.ndarray, rows: np.ndarray, *, per_cluster: bool = False, level: float = 0.95, what: str = "users"
) -> Interval:
    """Return the interval of the accuracy over clusters of rows: a score test, inverted.

    A mean m belongs to the interval if the found accuracy is at most t standard errors from m, where the standard error
    is the one that would hold if m were true: that of a beta-binomial distribution with mean m and its most likely
    correlation within clusters. So the interval stays within [0, 1] and keeps a width where everything is won, and rows
    that are as good as independent are known to be so. t has 1.5 (C - 1) / s^2 degrees of freedom, at most the number
    of rows minus 1, where C is the effective number of clusters and s the share of the variance that comes from
    differences of clusters.

    Args:
      wins, rows: [C] int, of each cluster; a row at least.
      per_cluster: of the mean over clusters of their accuracies, instead of the accuracy of all rows.
      level: nominal coverage.
      what: what a cluster is called in the reason, in the plural.
    """
    wins, rows = np.asarray(wins, np.int64), np.asarray(rows, np.int64)
    clusters = len(rows)
    if clusters < LEAST_CLUSTERS:
        return _too_few(clusters, what, method=SCORE)
    estimate, excess = score_test(wins, rows, per_cluster=per_cluster, level=level)
    return Interval(_end(excess, estimate, 0.0), _end(excess, estimate, 1.0), None, SCORE, clusters)


def score_test(
    wins: np.ndarray, rows: np.ndarray, *, per_cluster: bool = False, level: float = 0.95
) -> tuple[float, Callable[[float], float]]:
    """Return the accuracy, and a function of a mean that is above 0 for a mean outside the interval.

    Arguments as of `clustered_interval`.
    """
    weights = np.full(len(rows), 1 / len(rows)) if per_cluster else rows / rows.sum()
    lost, won = int((rows - wins).sum()), int(wins.sum())
    estimate = math.fsum(weights * (wins / rows)) if lost and won else float(won > 0)
    # the variance is m (1 - m) (single + shared * correlation)
    single = math.fsum(weights**2 / rows)
    parts = weights**2 * (rows - 1) / rows
    shared = math.fsum(parts)
    effective = shared**2 / math.fsum(parts**2) if shared else 0.0
    correlation_at = fit_correlation(wins, rows) if shared else lambda mean: 0.0
    most = float(rows.sum() - 1)

    def excess(mean: float) -> float:
        correlation = correlation_at(mean)
        variance = single + shared * correlation
        share = shared * correlation / variance
        degrees = min(max(1.5 * (effective - 1) / share**2, 1.0), most) if share > 1e-6 else most
        return (estimate - mean) ** 2 - _quantile(degrees, level) ** 2 * mean * (1 - mean) * variance

    return estimate, excess


def accuracy_interval(
    wins: np.ndarray, clusters: Clusters, *, per_user: bool = False, level: float = 0.95
) -> Interval:
    """Return the interval of the share of rows that are won [n], or of the mean over users of their accuracies."""
    counts = group_counts(wins, clusters.users)
    alone = clustered_interval(
        counts.wins, counts.rows, per_cluster=per_user, level=level, what=clusters.over
    )
    if clusters.responses is None or alone.bounds is None:
        return alone
    n, won = len(wins), int(np.sum(wins))
    if min(won, n - won) < _LEAST_SIDE:
        return alone  # nearly everything is won or lost: the wider interval, over users alone
    weights = equal_users(clusters.users) if per_user else None
    crossed = crossed_variance(np.asarray(wins, np.int64), clusters, weights=weights)
    estimate = math.fsum(counts.accuracy) / len(counts.rows) if per_user else won / n
    # the number of independent rows that would give this variance
    return crossed_interval(estimate, crossed, rows=estimate * (1 - estimate) / crossed.variance, level=level)


def crossed_interval(
    estimate: float, crossed: CrossedVariance, *, rows: float, level: float = 0.95
) -> Interval:
    """Return Wilson's interval of a share over users and responses, with this number of independent ``rows``."""
    if crossed.clusters < LEAST_CLUSTERS:
        return _too_few(crossed.clusters, _CROSSED, method=TWO_WAY)
    degrees, single = _degrees(crossed.effective), estimate * (1 - estimate)
    rate = _quantile(degrees, level) ** 2 / rows
    centre = (estimate + rate / 2) / (1 + rate)
    half = math.sqrt(rate * single + rate**2 / 4) / (1 + rate)
    error = math.sqrt(single / rows)
    return Interval(centre - half, centre + half, None, TWO_WAY, crossed.clusters, error, degrees)


def grade_interval(grades: np.ndarray, clusters: Clusters, *, level: float = 0.95) -> Interval:
    """Interval of the mean of grades [n]: that of an accuracy where all are 0 or 1, else a t interval."""
    if np.isin(grades, (0, 1)).all():
        return accuracy_interval(grades > 0, clusters, level=level)
    return mean_interval(grades, clusters.users, responses=clusters.responses, level=level)


def difference_interval(gains: np.ndarray, clusters: Clusters, *, level: float = 0.95) -> Interval:
    """Return the interval of the mean of differences [n], from -1 to 1, between two verdicts on the same rows.

    A t interval on the sums of the residuals by cluster. Two further rows with a difference, one in either direction,
    enter the variance, so that it is not 0 where all verdicts are equal.
    """
    return _t_interval(gains, clusters, method=PAIRED, level=level)


def mean_interval(
    values: np.ndarray,
    users: Sequence[str | None],
    *,
    responses: tuple[tuple[str, ...], ...] | None = None,
    per_user: bool = False,
    level: float = 0.95,
) -> Interval:
    """Return the interval of a mean of numbers [n] over rows that depend on each other within a user.

    A t interval on the sums of the residuals by user; where every row is a user of its own (None), it is the usual t
    interval. With ``responses``, as of `Clusters`, it is over users and responses. With ``per_user`` it is the interval
    of the mean over users of their means.
    """
    weights = equal_users(users) if per_user else None
    return _t_interval(values, Clusters(tuple(users), responses), weights=weights, method=MEAN, level=level)


def paired_difference(
    rows_a: Sequence[ScoredRow], rows_b: Sequence[ScoredRow], *, clusters: Clusters | None = None
) -> dict[str, Any]:
    """Return accuracy of ``rows_a`` minus accuracy of ``rows_b`` on the same comparisons.

    Rows are matched by id, so what is hard for both cancels out. Clusters are those of ``rows_a``; by their users where
    they are not given.

    Returns:
      {"difference": float, "ci95": [low, high] or None, "ci95_reason": why there is none, or None}

    Raises:
      DataError: if the two do not hold the same comparisons, each once, or there are none.
    """
    matched = match_rows(rows_a, rows_b)
    clusters = clusters or Clusters(tuple(row.user_id for row in rows_a))
    return difference_of_wins(outcomes(rows_a).wins, outcomes(matched).wins, clusters)


def difference_of_wins(wins_a: np.ndarray, wins_b: np.ndarray, clusters: Clusters) -> dict[str, Any]:
    """As :func:`paired_difference`, from who won [n] bool; the clusters are of the same rows."""
    gains = wins_a.astype(np.int64) - wins_b.astype(np.int64)
    interval = difference_interval(gains, clusters)
    return {"difference": int(gains.sum()) / len(gains), **interval.to_json()}


def match_rows(rows_a: Sequence[ScoredRow], rows_b: Sequence[ScoredRow]) -> Sequence[ScoredRow]:
    """Return ``rows_b`` in the order of ``rows_a``; ``rows_b`` itself, without holding its rows, where it has this
    order already.

    Raises:
      DataError: if the two do not hold the same comparisons, each once, or there are none.
    """
    ids = set[str]()
    for a, b in zip(rows_a, rows_b):
        if a.id != b.id or a.user_id != b.user_id or list(a.labels) != list(b.labels):
            break
        ids.add(a.id)
    if 0 < len(ids) == len(rows_a) == len(rows_b):
        return rows_b
    by_id = {row.id: row for row in rows_b}
    ids_a = {row.id for row in rows_a}
    if not rows_a:
        raise DataError("no rows to compare")
    if len(ids_a) != len(rows_a) or len(by_id) != len(rows_b):
        raise DataError("the rows to compare hold an id twice; expected each comparison once")
    if ids_a != by_id.keys():
        odd = min(ids_a ^ by_id.keys())
        raise DataError(f"the rows to compare differ: id {quote(odd)} is in one of the two only")
    matched = [by_id[row.id] for row in rows_a]
    for a, b in zip(rows_a, matched):
        if a.user_id != b.user_id or list(a.labels) != list(b.labels):
            raise DataError(f"row {quote(a.id)}: the two sides have different users or labels")
    return matched


def _t_interval(
    values: np.ndarray, clusters: Clusters, *, weights: np.ndarray | None = None, method: str, level: float
) -> Interval:
    """Return the interval of t standard errors on either side of a mean, within what is possible."""
    values, n, paired = np.asarray(values, np.float64), len(values), method == PAIRED
    if clusters.responses is None:
        spread, what = one_way_variance(values, user_keys(clusters.users), weights=weights), clusters.over
    else:
        least = {} if paired else {"least": 0.0}
        spread, what = crossed_variance(values, clusters, weights=weights, **least), _CROSSED
    if spread.clusters < LEAST_CLUSTERS:
        return _too_few(spread.clusters, what, method=method)
    estimate, degrees = float(np.average(values, weights=weights)), _degrees(spread.effective)
    error = math.sqrt(spread.variance + (_FURTHER_ROWS / n**2 if paired else 0.0))
    half = _quantile(degrees, level) * error
    low, high = estimate - half, estimate + half
    if paired:
        low, high = max(low, -1.0), min(high, 1.0)
    return Interval(low, high, None, method, spread.clusters, error, degrees)


def _too_few(clusters: int, what: str, *, method: str) -> Interval:
    if what == OVER_COMPARISONS and clusters == 1:
        what = "comparison"
    reason = f"{clusters} {what}; an interval needs at least {LEAST_CLUSTERS}"
    return Interval(None, None, reason, method, clusters)


def _degrees(effective: float) -> float:
    """Of freedom of t: an effective cluster less than there are, at least one."""
    return max(effective - 1.0, 1.0)


def _quantile(degrees: float, level: float) -> float:
    from scipy.special import stdtrit  # scipy takes long to import

    return float(stdtrit(degrees, (1 + level) / 2))


def _end(excess: Callable[[float], float], inside: float, outside: float) -> float:
    """Return where the interval ends between a mean inside it and the end of what is possible."""
    if inside == outside:
        return inside
    for _ in range(_STEPS):
        middle = (inside + outside) / 2
        if excess(middle) > 0:
            outside = middle
        else:
            inside = middle
    return inside
