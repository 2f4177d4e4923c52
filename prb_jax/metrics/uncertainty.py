"""Uncertainty of figures: intervals over clusters of rows, paired differences.

Rows of one user are not independent, so intervals are over users, never over single rows. If several users judge the
same responses, intervals are over users and responses (`prb_jax.metrics.clusters`). `docs/statistics.md` explains how
the methods were chosen, and which share of the intervals contains the true value.
"""

from __future__ import annotations

import math
from collections.abc import Sequence
from dataclasses import dataclass, replace
from typing import Any, Final

import numpy as np

from prb_jax.errors import DataError, quote
from prb_jax.metrics.accuracy import outcomes
from prb_jax.metrics.clusters import (
    Clusters,
    Factor,
    Sample,
    counted_clusters,
    equal_users,
    fit_correlation,
    mean_variance,
    sample_of,
)
from prb_jax.metrics.rows import ScoredRow

LEAST_CLUSTERS: Final = 6  # for an interval: with fewer, no method reaches its nominal coverage

SCORE, TWO_WAY, PAIRED, MEAN, LOSS = "score", "two-way", "paired t", "t", "log t"
"""Methods of intervals, see `docs/statistics.md`."""

_TOWARDS: Final = 0.6  # share of the way from a factor's mean to the end of its interval
_ROUNDS: Final = 4  # iterations of an end and the correlation there
_FURTHER_ROWS: Final = 2  # rows with a difference, one each way, added to the variance of differences
CROSSED: Final = "users or sets of responses"
_LEAST_RATIO: Final = 1e-3  # for numerical stability
_LEAST_DEGREES: Final = 4.0  # degrees of freedom that the skew of losses leaves
_BETWEEN: Final = 1.5  # multiplier of the degrees of freedom between clusters in a score test


@dataclass(frozen=True)
class Interval:
    """A confidence interval, or the reason why there is none.

    ``method`` is `SCORE`, `TWO_WAY`, `PAIRED`, `MEAN` or `LOSS`, ``clusters`` the number of clusters. If the method has
    one, ``standard_error`` is the standard error of the estimate, with ``degrees`` of freedom.
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
        """Return the two-sided p-value of a t test against a true value of 0; None without an interval."""
        from scipy.special import stdtr  # scipy is slow to import

        if self.low is None or self.standard_error is None or self.degrees is None:
            return None
        if not self.standard_error:
            return float(estimate == 0)
        return float(2 * stdtr(self.degrees, -abs(estimate) / self.standard_error))

    def to_json(self, name: str = "ci95") -> dict[str, Any]:
        """Return the two entries of a summary: the bounds, and the reason if there are none."""
        return {name: self.bounds, f"{name}_reason": self.reason}


def accuracy_interval(
    wins: np.ndarray, clusters: Clusters, *, per_user: bool = False, level: float = 0.95, what: str = ""
) -> Interval:
    """Return the interval of the share of won rows [n], or of the mean over users of their accuracies.

    A score interval: it contains the means m that are at most t standard errors from the observed share, each with the
    standard error that would hold if m were true. The variance of a row is m (1 - m). The correlation within each
    factor's clusters is the most likely one under a beta-binomial distribution, if the factor's mean were towards this
    end of the factor's own interval (`share_correlations`). So the interval stays within [0, 1] and keeps a width if
    everything is won, and nearly independent rows are treated as such.

    ``what`` is the plural name of the clusters in the reason for too few of them.
    """
    return _share_interval(wins, clusters, per_user=per_user, level=level, what=what)


def _share_interval(
    grades: np.ndarray, clusters: Clusters, *, per_user: bool, level: float, what: str = ""
) -> Interval:
    """Return the score interval of the mean of grades [n] from 0 to 1; see `accuracy_interval`, `grade_interval`."""
    weights = equal_users(clusters.users) if per_user else None
    sample = sample_of(np.asarray(grades, np.float64), clusters, weights=weights)
    method, over = (SCORE, clusters.over) if clusters.responses is None else (TWO_WAY, CROSSED)
    if sample.clusters < LEAST_CLUSTERS:
        return too_few(sample.clusters, what or over, method=method)
    total, ratio = math.fsum(sample.values), _variance_ratio(sample.values)
    if not ratio:
        return Interval(sample.mean, sample.mean, None, method, sample.clusters)
    estimate = sample.mean if 0 < total < len(sample.values) else float(total > 0)
    ends = []
    for side, end in enumerate((0.0, 1.0)):
        correlations = share_correlations(sample, end=end, level=level)
        degrees = sample.degrees(correlations, factor=_BETWEEN)
        variance = ratio * sample.variance(correlations)
        ends.append(wilson_ends(estimate, variance, degrees, level=level)[side])
    return Interval(ends[0], ends[1], None, method, sample.clusters)


def _variance_ratio(values: np.ndarray) -> float:
    """Return the variance of values [n] from 0 to 1, relative to values 0 and 1 with the same mean; 1 for these."""
    if ((values == 0) | (values == 1)).all():
        return 1.0
    mean = math.fsum(values) / len(values)
    return math.fsum((values - mean) ** 2) / len(values) / (mean * (1 - mean))


def wilson_ends(
    estimate: float, variance: float, degrees: float, *, level: float = 0.95
) -> tuple[float, float]:
    """Return the ends of Wilson's interval of a share, with a variance in units of a row's variance."""
    rate = _quantile(degrees, level) ** 2 * variance
    centre = (estimate + rate / 2) / (1 + rate)
    half = math.sqrt(rate * estimate * (1 - estimate) + rate**2 / 4) / (1 + rate)
    low = 0.0 if estimate == 0 else max(centre - half, 0.0)
    return low, 1.0 if estimate == 1 else min(centre + half, 1.0)


def share_correlations(sample: Sample, *, end: float | None = None, level: float = 0.95) -> list[float]:
    """Return the correlation within the clusters of each factor of a sample of values from 0 to 1.

    It is computed at the observed mean, or at the end of an interval towards 0 or 1. The mean is the most precise mean
    of the factor's clusters: a few large clusters may shift the share of all rows far, but not the mean of the other
    clusters, which determine the correlation.
    """
    found = [_correlation_at(sample, factor, end=end, level=level) for factor in sample.factors]
    if len(found) > 2:  # for rows with the same user and response, the excess over both correlations
        found[2] = max(found[2] - found[0] - found[1], 0.0)
    if len(found) > 1 and min(found[1:]) == 0:  # a beta-binomial distribution cannot express negative ones
        found = [one or min(other, 0.0) for one, other in zip(found, mean_variance(sample)[1], strict=True)]
    # if nearly all is won, each factor seems to explain everything; together they explain at most all of the variance
    most = max(math.fsum(max(one, 0.0) for one in found), 1.0)
    return [one / most for one in found]


def _correlation_at(sample: Sample, factor: Factor, *, end: float | None, level: float) -> float:
    """Return the correlation of one factor; alternates between the end of the interval and its correlation.

    A row whose variance is r times that of 0 and 1 counts as 1 / r of them.
    """
    ratio = max(_variance_ratio(sample.values), _LEAST_RATIO)
    wins, size = factor.sums(sample.values) / ratio, factor.size / ratio
    likely = fit_correlation(wins, size)
    correlation = likely((wins.sum() + 0.5) / (size.sum() + 1))
    for _ in range(_ROUNDS):
        before = correlation
        weights = 1 / (1 + (size - 1) * correlation)
        rows = float(weights @ size)
        mean = float(weights @ wins) / rows
        if end is not None:
            degrees = _BETWEEN * factor.degrees(correlation)
            mean = wilson_ends(mean, _TOWARDS**2 / rows, degrees, level=level)[int(end)]
        correlation = likely(min(max(mean, 1e-9), 1 - 1e-9))
        if correlation == before:  # every further round finds it, too
            break
    return min(correlation / ratio, 1.0)


def grade_interval(
    grades: np.ndarray, clusters: Clusters, *, per_user: bool = False, level: float = 0.95
) -> Interval:
    """Return the interval of the mean of grades [n], or of the mean over users of their means.

    Grades between 0 and 1, e.g. half credit for ties, have the interval of an accuracy: the variance of a row is r m
    (1 - m), with the observed r, and a row tells as much of its cluster as 1 / r verdicts. Others have a t interval.
    """
    if min(grades) < 0 or max(grades) > 1:
        weights = equal_users(clusters.users) if per_user else None
        return _t_interval(grades, clusters, weights=weights, method=MEAN, level=level)
    return _share_interval(grades, clusters, per_user=per_user, level=level)


def loss_interval(losses: np.ndarray, clusters: Clusters, *, level: float = 0.95) -> Interval:
    """Return the interval of the mean of losses [n] of at least 0, e.g. log-losses.

    A t interval of the logarithm of the mean: losses are skewed, and the standard error of their mean grows with the
    mean. Degrees of freedom are those of clusters whose means have a gamma distribution. Given the mean of G of them,
    the logarithm of their variance has the variance 2 (1 / G + cv^2), where cv is the relative standard error of the
    mean: twice the inverse degrees. Skew leaves at least four degrees, because fewer give absurd ends.
    """
    interval = _t_interval(losses, clusters, method=LOSS, level=level)
    mean = float(np.mean(losses))
    if interval.standard_error is None or interval.degrees is None or mean <= 0 or min(losses) < 0:
        return interval
    relative = interval.standard_error / mean
    degrees = max(1 / (1 / interval.degrees + relative**2), min(interval.degrees, _LEAST_DEGREES))
    half = _quantile(degrees, level) * relative
    return replace(interval, low=mean * math.exp(-half), high=mean * math.exp(half), degrees=degrees)


def difference_interval(gains: np.ndarray, clusters: Clusters, *, level: float = 0.95) -> Interval:
    """Return the interval of the mean of differences [n], from -1 to 1, between two verdicts on the same rows.

    A t interval like `mean_interval`. Two additional rows with a difference, one in either direction, enter the
    variance, which keeps it above 0 if all verdicts are equal.
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

    A t interval with the variance and the degrees of freedom of `prb_jax.metrics.clusters`. If every row is a separate
    user (None), it is the usual t interval. With ``responses``, as in `Clusters`, it is over users and responses. With
    ``per_user`` it is the interval of the mean over users of their means.
    """
    weights = equal_users(users) if per_user else None
    return _t_interval(values, Clusters(tuple(users), responses), weights=weights, method=MEAN, level=level)


def paired_difference(
    rows_a: Sequence[ScoredRow], rows_b: Sequence[ScoredRow], *, clusters: Clusters | None = None
) -> dict[str, Any]:
    """Return accuracy of ``rows_a`` minus accuracy of ``rows_b`` on the same comparisons.

    Rows are matched by id, so their common difficulty cancels out. Clusters belong to ``rows_a``; by default they are
    its users.

    Returns:
      {"difference": float, "ci95": [low, high] or None, "ci95_reason": why there is none, or None}

    Raises:
      DataError: the two differ in their comparisons, contain one twice, or are empty.
    """
    matched = match_rows(rows_a, rows_b)
    clusters = clusters or Clusters(tuple(row.user_id for row in rows_a))
    return difference_of_wins(outcomes(rows_a).wins, outcomes(matched).wins, clusters)


def difference_of_wins(wins_a: np.ndarray, wins_b: np.ndarray, clusters: Clusters) -> dict[str, Any]:
    """Same as :func:`paired_difference`, from wins [n] bool; the clusters belong to the same rows."""
    gains = wins_a.astype(np.int64) - wins_b.astype(np.int64)
    interval = difference_interval(gains, clusters)
    return {"difference": int(gains.sum()) / len(gains), **interval.to_json()}


def match_rows(rows_a: Sequence[ScoredRow], rows_b: Sequence[ScoredRow]) -> Sequence[ScoredRow]:
    """Return ``rows_b`` in the order of ``rows_a``; returns ``rows_b`` itself, without storing its rows, if it already
    has this order.

    Raises:
      DataError: the two differ in their comparisons, contain one twice, or are empty.
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
        raise DataError("the rows to compare contain an id twice; expected each comparison once")
    if ids_a != by_id.keys():
        odd = min(ids_a ^ by_id.keys())
        raise DataError(f"the rows to compare differ: id {quote(odd)} is in only one of the two")
    matched = [by_id[row.id] for row in rows_a]
    for a, b in zip(rows_a, matched):
        if a.user_id != b.user_id or list(a.labels) != list(b.labels):
            raise DataError(f"row {quote(a.id)}: the two sides have different users or labels")
    return matched


def _t_interval(
    values: np.ndarray, clusters: Clusters, *, weights: np.ndarray | None = None, method: str, level: float
) -> Interval:
    """Return the interval of t standard errors on either side of a mean, clipped to the possible range."""
    paired = method == PAIRED
    sample = sample_of(np.asarray(values, np.float64), clusters, weights=weights)
    if sample.clusters < LEAST_CLUSTERS:
        what = clusters.over if clusters.responses is None else CROSSED
        return too_few(sample.clusters, what, method=method)
    variance, correlations = mean_variance(sample)
    estimate, degrees = sample.mean, sample.degrees(correlations)
    error = math.sqrt(variance + (_FURTHER_ROWS / len(values) ** 2 if paired else 0.0))
    half = _quantile(degrees, level) * error
    low, high = estimate - half, estimate + half
    if paired:
        low, high = max(low, -1.0), min(high, 1.0)
    return Interval(low, high, None, method, sample.clusters, error, degrees)


def too_few(clusters: int, what: str, *, method: str) -> Interval:
    """Return an empty interval with its reason."""
    reason = f"{counted_clusters(clusters, what)}; an interval needs at least {LEAST_CLUSTERS}"
    return Interval(None, None, reason, method, clusters)


def _quantile(degrees: float, level: float) -> float:
    from scipy.special import stdtrit  # scipy takes long to import

    return float(stdtrit(degrees, (1 + level) / 2))
