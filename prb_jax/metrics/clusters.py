"""Clusters of rows, by user or by judged responses, and how strongly they correlate rows.

Rows that share a user or responses are correlated. If the two responses of a pair also occur in other pairs, rows that
share any of their responses are correlated. These correlations give the variance of a mean of rows, and its degrees of
freedom; `prb_jax.metrics.uncertainty` computes intervals from them.
"""

from __future__ import annotations

import math
import re
from collections import Counter
from collections.abc import Callable, Hashable, Sequence
from dataclasses import dataclass
from functools import cached_property
from typing import Final

import numpy as np

from prb_jax.errors import short_repr

USERS, RESPONSES, BOTH = "users", "responses", "both"
"""Factors of a sample: users, responses, and rows of one user with the same response."""

OVER_USERS: Final = "users"
OVER_DERIVED_USERS: Final = "users derived from shared profile posts"
OVER_COMPARISONS: Final = "comparisons"

_COARSE = np.concatenate([[0.0], np.geomspace(1e-5, 0.9, 40), [0.95, 0.99, 1 - 1e-9]])
_FINE_STEPS = 16
_SURELY: Final = 2.5  # standard errors below 0 at which a covariance counts as negative
_LEAST: Final = 1e-3  # minimum variance of a mean, relative to independent rows


@dataclass(frozen=True)
class Clusters:
    """Dependence of n rows, in order."""

    users: tuple[str | None, ...]  # [n] the user of each row; None for a row that is a separate cluster
    # [n] keys of the responses judged in each row, if several users judge the same ones (crossed data): one key
    # for the whole set of responses, or two for a pair whose responses also occur in other pairs. None if the
    # data are not crossed
    responses: tuple[tuple[str, ...], ...] | None = None
    derived: bool = False  # whether the users were derived from shared posts, because the data name no users

    __repr__ = short_repr

    @property
    def over(self) -> str:
        """Units of an interval: "users", "users derived from ...", or "comparisons"."""
        if all(user is None for user in self.users):
            return OVER_COMPARISONS
        return OVER_DERIVED_USERS if self.derived else OVER_USERS

    def take(self, index: Sequence[int]) -> Clusters:
        """Return the clusters of some of the rows; crossed only if these rows are."""
        users = tuple(self.users[i] for i in index)
        responses = None if self.responses is None else tuple(self.responses[i] for i in index)
        if responses is not None and not shared_rows(users, responses):
            responses = None
        return Clusters(users, responses, self.derived)


def counted_clusters(number: int, over: str) -> str:
    """Return a number of clusters with their name, whose plural is ``over``, e.g. "1 user or set of responses"."""
    if number != 1:
        return f"{number:,} {over}"
    first = re.sub(r"(\w+)s\b", r"\1", over, count=1)
    return "1 " + re.sub(r"\bor (\w+)s\b", r"or \1", first)


def shared_rows(users: Sequence[str | None], responses: Sequence[Sequence[str]]) -> int:
    """Return the number of rows with a response that another user judges too, given user and keys of each row [n]."""
    first: dict[str, str | None] = {}
    shared: set[str] = set()
    for user, keys in zip(users, responses, strict=True):
        if user is not None:
            shared.update(key for key in keys if first.setdefault(key, user) != user)
    return sum(
        user is not None and any(key in shared for key in keys)
        for user, keys in zip(users, responses, strict=True)
    )


def crossed_keys(sets: Sequence[Sequence[str]]) -> tuple[tuple[str, ...], ...]:
    """Return the keys by which rows are clustered, from the keys of all responses of each row.

    A response that always occurs in the same set is covered by the key of its set. The two responses of a pair keep
    separate keys if one of them also occurs in another pair.
    """
    whole = [tuple(sorted(keys)) for keys in sets]
    of_response: dict[str, set[tuple[str, ...]]] = {}
    for keys in whole:
        for key in keys:
            of_response.setdefault(key, set()).add(keys)
    mixed = any(len(sets_of_response) > 1 for sets_of_response in of_response.values())
    if mixed and all(len(keys) == 2 for keys in whole):
        return tuple(whole)
    return tuple(("\n".join(keys),) for keys in whole)


class Components:
    """Connected components: disjoint sets of nodes, each identified by its root; unknown nodes are separate sets."""

    def __init__(self) -> None:
        self._parent: dict[Hashable, Hashable] = {}

    def root(self, node: Hashable) -> Hashable:
        """Return the current representative of the set that contains this node."""
        parent = self._parent
        while parent.setdefault(node, node) != node:
            parent[node] = parent[parent[node]]  # halve the path
            node = parent[node]
        return node

    def join(self, node: Hashable, other: Hashable) -> None:
        """Merge the sets of two nodes; the root of the second one remains."""
        self._parent[self.root(node)] = self.root(other)


@dataclass(frozen=True)
class Factor:
    """Clusters of n rows by a common property: a user or a response."""

    by: str  # `USERS`, `RESPONSES` or `BOTH`
    rows: np.ndarray  # int [m], row indices, one for each cluster that a row belongs to
    groups: np.ndarray  # int [m], cluster of each entry, 0 to G - 1
    size: np.ndarray  # int [G], number of rows of each cluster

    __repr__ = short_repr

    def sums(self, values: np.ndarray) -> np.ndarray:
        """Return the sums of values [n] by cluster [G]."""
        return np.bincount(self.groups, values[self.rows], len(self.size))

    def pairs(self, values: np.ndarray, others: np.ndarray) -> np.ndarray:
        """Return, by cluster, the sums of values[i] others[j] over two different rows i and j."""
        return self.sums(values) * self.sums(others) - self.sums(values * others)

    def neighbours(self, values: np.ndarray, scale: np.ndarray) -> np.ndarray:
        """Return, for each row, the sum of the other rows' values in its clusters, scaled by [G] for each cluster."""
        of_group = (scale * self.sums(values))[self.groups] - scale[self.groups] * values[self.rows]
        return np.bincount(self.rows, of_group, len(values))

    def precision(self, correlation: float) -> np.ndarray:
        """Return the weights [G], of sum 1, of clusters in an estimate of their correlation; 0 for a single row.

        They are the inverse variances of the mean product of two values of a cluster, for normal values with this
        correlation.
        """
        n = np.maximum(self.size, 2).astype(np.float64)
        variance = ((1 + (n - 1) * correlation) ** 2 + (1 - correlation) ** 2 / (n - 1)) / n**2
        weights = np.where(self.size > 1, 1 / variance, 0.0)
        return weights / weights.sum()

    def degrees(self, correlation: float) -> float:
        """Return the degrees of freedom of a variance between clusters: the effective number of informative clusters
        minus 1; for clusters of one size, G - 1."""
        return max(1 / math.fsum(self.precision(correlation) ** 2) - 1, 2 / 3)


@dataclass(frozen=True)
class Sample:
    """Values of n rows and the factors they share, in an order that does not depend on the order of the data.

    The working model of an interval: all rows have the same variance. Two rows that share a user, or a response, have a
    covariance that is a fixed share (a correlation) of this variance; the covariances of several factors add up.
    """

    values: np.ndarray  # float64 [n]
    weights: np.ndarray  # float64 [n], with sum 1
    factors: tuple[Factor, ...]  # factors that any two rows share
    clusters: int  # number of users or of responses, whichever is smaller

    __repr__ = short_repr

    @cached_property
    def mean(self) -> float:
        """The weighted mean."""
        return math.fsum(self.weights * self.values)

    @cached_property
    def alone(self) -> float:
        """Variance of the mean of independent rows with variance 1."""
        return math.fsum(self.weights**2)

    @cached_property
    def shared(self) -> tuple[float, ...]:
        """For each factor, the covariance part of the mean's variance if all rows of each cluster were equal."""
        return tuple(math.fsum(factor.pairs(self.weights, self.weights)) for factor in self.factors)

    def variance(self, correlations: Sequence[float]) -> float:
        """Return the variance of the mean, in units of a row's variance, with a correlation for each factor."""
        shared = math.fsum(rho * part for rho, part in zip(correlations, self.shared, strict=True))
        return max(self.alone + shared, _LEAST * self.alone)

    def degrees(self, correlations: Sequence[float], *, factor: float = 1.0) -> float:
        """Return the degrees of freedom of this variance, between the degrees of its parts.

        It has a part between the clusters of each factor and one within all, each with separate degrees of freedom. The
        inverse degrees are averaged, weighted by the parts. Satterthwaite (1946) uses squared weights, which are right
        for well-estimated parts; here an estimated correlation of 0 may be wrong.

        Args:
          correlations: Correlations of the factors.
          factor: Multiplier for the degrees of the parts between clusters.
        """
        most, total = max(len(self.values) - 1.0, 1.0), self.variance(correlations)
        squares, inverse, parts = self.weights**2, 0.0, 0.0
        for one, rho, shared in zip(self.factors, correlations, self.shared, strict=True):
            # a row that is alone in its cluster has no information on the correlation; its part is within clusters
            keys = len(one.rows) // len(self.values)
            alone = math.fsum(squares[one.rows[one.size[one.groups] > 1]]) / keys
            part = abs(rho) * (alone + shared) / total
            inverse, parts = inverse + part / (factor * one.degrees(max(rho, 0.0))), parts + part
        return min(max(1 / (inverse + max(1 - parts, 0.0) / most), 1.0), most)


def sample_of(values: np.ndarray, clusters: Clusters, *, weights: np.ndarray | None = None) -> Sample:
    """Return the sample of values [n] with these clusters, and weights [n] in the mean (equal ones by default)."""
    n, keys = len(values), clusters.responses
    weights = np.ones(n) if weights is None else np.asarray(weights, np.float64)
    users = _numbers(clusters.users)
    columns = (
        [] if keys is None else list(_numbers([key for of_row in keys for key in of_row]).reshape(n, -1).T)
    )
    order = np.lexsort((values, *columns, users))
    users, columns = users[order], [column[order] for column in columns]
    lonely = users < 0
    users[lonely] = users.max(initial=-1) + 1 + np.arange(lonely.sum())
    weights = weights[order] / math.fsum(weights)
    of_users = _factor(USERS, [users])
    factors, least = [of_users], len(of_users.size)
    if columns:
        of_responses = _factor(RESPONSES, columns)
        both = _factor(BOTH, [users * (1 + int(np.max(columns))) + column for column in columns])
        factors, least = [of_users, of_responses, both], min(least, len(of_responses.size))
    shared = tuple(factor for factor in factors if factor.size.max(initial=0) > 1)
    return Sample(np.asarray(values, np.float64)[order], weights, shared, least)


def _numbers(names: Sequence[str | None]) -> np.ndarray:
    """Return a number for each name, in the order of the names; -1 for None."""
    number: dict[str | None, int] = {
        name: place for place, name in enumerate(sorted({name for name in names if name is not None}))
    }
    number[None] = -1
    return np.fromiter(map(number.__getitem__, names), np.int64, len(names))


def _factor(by: str, columns: Sequence[np.ndarray]) -> Factor:
    """Return the factor given by one or two keys of each row [n]."""
    _, groups, size = np.unique(np.stack(columns, axis=1), return_inverse=True, return_counts=True)
    return Factor(by, np.repeat(np.arange(len(columns[0])), len(columns)), groups.reshape(-1), size)


def mean_variance(sample: Sample) -> tuple[float, list[float]]:
    """Return an unbiased variance of the weighted mean, and the correlation of each factor (0 to 1).

    Covariances are estimated from products of the residuals of two rows of a cluster, with clusters weighted by
    `Factor.precision`. The estimated mean shares the errors of the rows, so the expected products are linear in the
    variance and the covariances. Solving the linear equations removes the bias.

    A negative covariance is set to 0 unless it is 2.5 standard errors of independent rows below 0. Truly negative ones
    exist: if two people disagree about the same answers, a scorer that ignores them is right for just one.

    Without a factor this is the usual variance of a mean; for clusters of one size, the variance of the cluster means.
    """
    n, factors = len(sample.values), sample.factors
    residuals, ones = sample.values - sample.mean, np.ones(n)
    square = float(residuals @ residuals) / n
    if not square:
        return 0.0, [0.0] * len(factors)
    scales = [_pair_weights(factor, residuals) for factor in factors]
    errors_of = [
        math.sqrt(2 * math.fsum(scale**2 * factor.size * (factor.size - 1.0)))
        for factor, scale in zip(factors, scales, strict=True)
    ]
    with_mean = [sample.weights, *(one.neighbours(sample.weights, np.ones(len(one.size))) for one in factors)]
    kept = list(range(len(factors)))
    while True:
        used = [factors[place] for place in kept]
        products, in_products = [square], [ones / n]
        system = np.eye(len(kept) + 1)
        for row, place in enumerate(kept, 1):
            products.append(float(scales[place] @ factors[place].pairs(residuals, residuals)))
            in_products.append(factors[place].neighbours(ones, scales[place]))
            system[row, 1:] = [_overlap(factors[place], scales[place], other, n) for other in used]
        errors = np.stack([with_mean[0], *(with_mean[1 + place] for place in kept)])
        system += sample.weights @ errors.T - 2 * np.stack(in_products) @ errors.T
        variance, *covariances = np.linalg.lstsq(system, np.array(products), rcond=None)[0].tolist()
        below = [
            (covariance, place)
            for covariance, place in zip(covariances, kept, strict=True)
            if covariance < 0 and covariance > -_SURELY * square * errors_of[place]
        ]
        if not below:
            break
        kept.remove(min(below)[1])
    correlations = [0.0] * len(factors)
    variance = max(variance, 0.0)
    for place, covariance in zip(kept, covariances, strict=True):
        correlations[place] = min(max(covariance / variance, -1.0), 1.0) if variance else 0.0
    return variance * sample.variance(correlations), correlations


def _pair_weights(factor: Factor, residuals: np.ndarray) -> np.ndarray:
    """Return the weight [G] of each pair of rows of a cluster in the covariance, iterated with its correlation."""
    counts, correlation = np.maximum(factor.size * (factor.size - 1.0), 1.0), 0.05
    products = factor.pairs(residuals, residuals) / counts / np.mean(residuals**2)
    for _ in range(3):
        correlation = min(max(float(factor.precision(correlation) @ products), 0.0), 1.0)
    return factor.precision(correlation) / counts


def _overlap(factor: Factor, scale: np.ndarray, other: Factor, n: int) -> float:
    """Return the sum over pairs of rows of a factor, scaled by cluster, of the number of clusters of the other factor
    that they share."""
    of_row = other.groups[np.argsort(other.rows, kind="stable")].reshape(n, -1)
    cells = factor.groups[:, None] * len(other.size) + of_row[factor.rows]
    cells, counts = np.unique(cells, return_counts=True)
    return float(scale[cells // len(other.size)] @ (counts * (counts - 1.0)))


def user_keys(users: Sequence[str | None]) -> list[Hashable]:
    """Return the cluster of each row: its user, or the row itself if it has no user."""
    return [("row", i) if user is None else ("user", user) for i, user in enumerate(users)]


def equal_users(users: Sequence[str | None]) -> np.ndarray:
    """Return weights of rows [n] that count every user equally; a row without a user counts as a user."""
    keys = user_keys(users)
    rows = Counter(keys)
    return np.array([1 / rows[key] for key in keys])


def fit_correlation(wins: np.ndarray, rows: np.ndarray) -> Callable[[float], float]:
    """Return a function that maps a true mean m to the most likely correlation within clusters.

    Cluster c has ``wins[c]`` of ``rows[c]`` rows, or fractions, from a beta-binomial distribution with mean m and
    correlation r: its win rate is drawn from a beta distribution with parameters m (1 - r) / r and (1 - m) (1 - r) / r.
    The correlation is 0 if all clusters have the same rate, and 1 if each cluster wins or loses everything.
    """
    from scipy.special import gammaln  # scipy is slow to import

    counted = [np.unique(values, return_counts=True) for values in (wins, rows - wins, rows)]

    def rising(place: int, start: np.ndarray) -> np.ndarray:
        # the sum of logarithms of start (start + 1) ... (start + value - 1)
        values, counts = counted[place]
        return (gammaln(values[:, None] + start) - gammaln(start)).T @ counts

    def scale_of(correlation: np.ndarray) -> np.ndarray:
        some = np.where(correlation > 0, correlation, 0.5)
        return (1 - some) / some

    coarse_rows = rising(2, scale_of(_COARSE))  # the same for each mean

    def likelihood(mean: float, correlation: np.ndarray) -> np.ndarray:
        # at 0 the beta distribution is a point: use the logarithm of a plain binomial
        scale = scale_of(correlation)
        of_rows = coarse_rows if correlation is _COARSE else rising(2, scale)
        total = rising(0, mean * scale) + rising(1, (1 - mean) * scale) - of_rows
        plain = wins.sum() * np.log(mean) + (rows - wins).sum() * np.log1p(-mean)
        return np.where(correlation > 0, total, plain)

    def most_likely(mean: float) -> float:
        best = int(likelihood(mean, _COARSE).argmax())
        low, high = _COARSE[max(best - 1, 0)], _COARSE[min(best + 1, len(_COARSE) - 1)]
        near = np.linspace(low, high, _FINE_STEPS + 1)
        return float(near[likelihood(mean, near).argmax()])

    return most_likely
