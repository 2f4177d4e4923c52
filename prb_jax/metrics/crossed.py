"""The variance of a mean over rows that share users or responses: two-way clustering.

After Cameron, Gelbach and Miller (2011): the variance clustered by user, plus the one clustered by what is judged,
minus the one clustered by both. Where the two responses of a pair occur in other pairs too, two rows belong together
if they share any of their responses (dyadic clustering, Aronow, Samii and Assenova 2015).
"""

from __future__ import annotations

import math
from collections.abc import Hashable, Iterable, Sequence
from dataclasses import dataclass

import numpy as np

from prb_jax.metrics.clusters import Clusters


@dataclass(frozen=True)
class CrossedVariance:
    """The variance of a mean.

    Attributes:
      variance: never below the smaller one of ``by_user`` and ``by_responses``, because the difference that two-way
        clustering takes can be negative by chance; and never below that of half a row.
      by_user, by_responses, by_both: clustered one way, each with the factor G / (G - 1) for G clusters.
      clusters: the smaller one of the numbers of users and of sets of responses.
    """

    variance: float
    by_user: float
    by_responses: float
    by_both: float
    clusters: int


def crossed_variance(values: np.ndarray, clusters: Clusters) -> CrossedVariance:
    """Variance of the mean of ``values`` over users and responses.

    Args:
      values: [n] int.
      clusters: of the same rows, crossed.
    """
    assert clusters.responses is not None
    users = [("row", i) if user is None else ("user", user) for i, user in enumerate(clusters.users)]
    keys = clusters.responses
    by_user = _one_way(values, users)
    by_responses = _by_responses(values, keys)
    by_both = _by_responses(values, [tuple((user, key) for key in pair) for user, pair in zip(users, keys)])
    difference = by_user.variance + by_responses.variance - by_both.variance
    least = min(by_user.variance, by_responses.variance)
    return CrossedVariance(
        variance=max(difference, least, 0.25 / len(values) ** 2),
        by_user=by_user.variance,
        by_responses=by_responses.variance,
        by_both=by_both.variance,
        clusters=min(by_user.clusters, by_responses.clusters),
    )


@dataclass(frozen=True)
class _OneWay:
    variance: float
    clusters: int


def _by_responses(values: np.ndarray, keys: Sequence[tuple[Hashable, ...]]) -> _OneWay:
    """Clustered by the one key of each row, or by either of the two."""
    if len(keys[0]) == 1:
        return _one_way(values, [key[0] for key in keys])
    either = _one_way(
        np.repeat(values, 2), [key for pair in keys for key in pair], mean=values.sum() / len(values)
    )
    both = _one_way(values, keys)  # two rows of one pair share both keys, and count once
    factor = either.clusters / max(either.clusters - 1, 1)
    again = both.variance * max(both.clusters - 1, 1) / both.clusters * factor
    return _OneWay(either.variance * 4 - again, either.clusters)


def _one_way(values: np.ndarray, keys: Iterable[Hashable], *, mean: float | None = None) -> _OneWay:
    """Sum of the squared sums of residuals by cluster, over n squared, times G / (G - 1)."""
    number: dict[Hashable, int] = {}
    of_row = np.fromiter((number.setdefault(key, len(number)) for key in keys), np.int64, len(values))
    sums = np.bincount(of_row, weights=values)  # exact: small whole numbers
    rows = np.bincount(of_row)
    n, groups = len(values), len(number)
    residuals = sums - (values.sum() / n if mean is None else mean) * rows
    # an exact sum: not even the last bit depends on the order of the rows
    return _OneWay(math.fsum(residuals**2) / n**2 * groups / max(groups - 1, 1), groups)
