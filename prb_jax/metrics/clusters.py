"""What belongs together, rows of one user and rows in which the same responses are judged; the variance of their mean.

Where rows share users or responses it is clustered two ways, after Cameron, Gelbach and Miller (2011): the variance
by user, plus the one by what is judged, minus the one by both. Where the two responses of a pair occur in other pairs
too, two rows belong together if they share any of their responses (dyadic clustering, Aronow, Samii and Assenova 2015).
"""

from __future__ import annotations

import math
from collections import Counter
from collections.abc import Callable, Hashable, Iterable, Sequence
from dataclasses import dataclass, replace
from typing import Final

import numpy as np

from prb_jax.errors import short_repr

OVER_USERS: Final = "users"
OVER_DERIVED_USERS: Final = "users derived from shared profile posts"
OVER_COMPARISONS: Final = "comparisons"

_COARSE = np.concatenate([[0.0], np.geomspace(1e-5, 0.9, 40), [0.95, 0.99, 1 - 1e-9]])
_FINE_STEPS = 16


@dataclass(frozen=True)
class Clusters:
    """For n rows, in their order, what makes them depend on each other."""

    users: tuple[str | None, ...]  # [n] the user of each row; None for a row that is a cluster of its own
    # [n] keys of the responses that are judged in each row, where several users judge the same ones (crossed
    # data): one key for the whole set of responses, or two for a pair whose responses also occur in other
    # pairs. None where the data are not crossed
    responses: tuple[tuple[str, ...], ...] | None = None
    derived: bool = False  # whether the users were derived from shared posts, because the data name none

    __repr__ = short_repr

    @property
    def over(self) -> str:
        """What an interval is taken over: "users", "users derived from ...", or "comparisons"."""
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


def shared_rows(users: Sequence[str | None], responses: Sequence[Sequence[str]]) -> int:
    """Return how many rows have a response that another user judges too, from the user and the keys of each row [n]."""
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

    A response that always occurs in the same set needs no key beside that of its set. The two responses of
    a pair keep a key each where one of them also occurs in another pair.
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
    """Connected components: disjoint sets of nodes, each known by its root; a node that was never named is alone."""

    def __init__(self) -> None:
        self._parent: dict[Hashable, Hashable] = {}

    def root(self, node: Hashable) -> Hashable:
        """Return the node that stands for all nodes that are joined with this one by now."""
        parent = self._parent
        while parent.setdefault(node, node) != node:
            parent[node] = parent[parent[node]]  # halve the path
            node = parent[node]
        return node

    def join(self, node: Hashable, other: Hashable) -> None:
        """Put two nodes, and what belongs to each, together; the root is that of the other."""
        self._parent[self.root(node)] = self.root(other)


@dataclass(frozen=True)
class CrossedVariance:
    """The variance of a mean, and what it is made of.

    It is never below the smaller one of ``by_user`` and ``by_responses``, because the difference that two-way
    clustering takes can be negative by chance; where rows share single responses, whose variance can be negative too,
    never below ``by_user``; and never below that of half a verdict (``least``). ``clusters`` and ``effective`` are the
    smaller ones of the (effective) numbers of users and of sets of responses.
    """

    variance: float
    by_user: float
    by_responses: float
    by_both: float
    clusters: int
    effective: float


def crossed_variance(
    values: np.ndarray, clusters: Clusters, *, weights: np.ndarray | None = None, least: float = 0.25
) -> CrossedVariance:
    """Return the variance of the mean of values [n] over users and responses.

    Args:
      values: Values [n] of the rows.
      clusters: Clusters of the rows.
      weights: Weights [n] of the rows in the mean, for example `equal_users`; equal ones by default.
      least: Least variance of the sum of all values; half a verdict's by default.
    """
    assert clusters.responses is not None
    users = user_keys(clusters.users)
    keys = clusters.responses
    of_both = [tuple((user, key) for key in pair) for user, pair in zip(users, keys)]
    by_user = one_way_variance(values, users, weights=weights)
    by_responses = _by_responses(values, keys, weights)
    by_both = _by_responses(values, of_both, weights)
    difference = by_user.variance + by_responses.variance - by_both.variance
    below = by_user.variance if len(keys[0]) > 1 else min(by_user.variance, by_responses.variance)
    return CrossedVariance(
        variance=max(difference, below, least / len(values) ** 2),
        by_user=by_user.variance,
        by_responses=by_responses.variance,
        by_both=by_both.variance,
        clusters=min(by_user.clusters, by_responses.clusters),
        effective=min(by_user.effective, by_responses.effective),
    )


@dataclass(frozen=True)
class OneWayVariance:
    """The variance of a mean, clustered one way."""

    raw: float  # the sum of the squared sums of residuals by cluster, over n squared
    # makes ``raw`` unbiased where all variance is that of clusters: 1 / (1 - 2 sum w^3 / sum w^2 + sum w^2)
    # for clusters with the shares w of the rows, which is G / (G - 1) for G clusters of one size
    factor: float
    clusters: int  # G
    effective: float  # the effective number of clusters, 1 / sum w^2 (Kish 1965): G for clusters of one size

    @property
    def variance(self) -> float:
        """With the factor."""
        return self.raw * self.factor


def user_keys(users: Sequence[str | None]) -> list[Hashable]:
    """Return the cluster of each row: its user, or the row itself where it has none."""
    return [("row", i) if user is None else ("user", user) for i, user in enumerate(users)]


def equal_users(users: Sequence[str | None]) -> np.ndarray:
    """Return weights of rows [n] that count every user the same; a row without a user is a user."""
    keys = user_keys(users)
    rows = Counter(keys)
    return np.array([1 / rows[key] for key in keys])


def _by_responses(
    values: np.ndarray, keys: Sequence[tuple[Hashable, ...]], weights: np.ndarray | None
) -> OneWayVariance:
    """Clustered by the one key of each row, or by either of the two."""
    if len(keys[0]) == 1:
        return one_way_variance(values, [key[0] for key in keys], weights=weights)
    either = one_way_variance(
        np.repeat(values, 2),
        [key for pair in keys for key in pair],
        weights=None if weights is None else np.repeat(weights, 2),
    )
    # two rows of one pair share both keys, and count once
    both = one_way_variance(values, keys, weights=weights)
    return replace(either, raw=either.raw * 4 - both.raw)


def one_way_variance(
    values: np.ndarray, keys: Iterable[Hashable], *, weights: np.ndarray | None = None
) -> OneWayVariance:
    """Return the variance of the mean of values [n], with weights or without, clustered by one key of each row."""
    number: dict[Hashable, int] = {}
    of_row = np.fromiter((number.setdefault(key, len(number)) for key in keys), np.int64, len(values))
    if weights is None:
        sums, shares = (
            np.bincount(of_row, weights=values),
            np.bincount(of_row),
        )  # exact for small whole numbers
        return variance_of_sums(sums, shares, mean=values.sum() / len(values))
    order = np.lexsort((values, weights, of_row))  # no sum depends on the order of the rows
    of_row, weights = of_row[order], weights[order]
    products = weights * values[order]
    sums, shares = np.bincount(of_row, weights=products), np.bincount(of_row, weights=weights)
    return variance_of_sums(sums, shares, mean=math.fsum(products) / math.fsum(weights))


def variance_of_sums(sums: np.ndarray, shares: np.ndarray, *, mean: float) -> OneWayVariance:
    """Return the variance of a mean, clustered, from sums of values and of weights of each cluster [G]; the weights are
    numbers of rows (int), or any."""
    residuals = sums - mean * shares
    weights = shares.tolist()
    add = math.fsum if shares.dtype.kind == "f" else sum  # whole numbers are added exactly, of any size
    n, squares, cubes = add(weights), add(w**2 for w in weights), add(w**3 for w in weights)
    above, below = squares * n**2, squares * n**2 - 2 * n * cubes + squares**2
    return OneWayVariance(
        raw=math.fsum(residuals**2) / n**2,  # exact: not even the last bit depends on the order of the rows
        factor=above / below if below else 1.0,  # of whole numbers, and so exact for clusters of one size
        clusters=len(weights),
        effective=n**2 / squares,
    )


def fit_correlation(wins: np.ndarray, rows: np.ndarray) -> Callable[[float], float]:
    """Return a function of a mean m that gives the most likely correlation within clusters, if m is the true mean.

    Cluster c has ``wins[c]`` of ``rows[c]``, one or more, from a beta-binomial distribution with mean m and correlation
    r: its own rate is drawn from a beta distribution with the parameters m (1 - r) / r and (1 - m) (1 - r) / r. The
    correlation is 0 where all clusters have one rate, and 1 where a cluster wins or loses everything.
    """
    from scipy.special import gammaln  # scipy takes long to import

    counted = [np.unique(values, return_counts=True) for values in (wins, rows - wins, rows)]

    def likelihood(mean: float, correlation: np.ndarray) -> np.ndarray:
        # at 0 the beta distribution is a point: there the logarithm of a plain binomial
        some = np.where(correlation > 0, correlation, 0.5)
        scale = (1 - some) / some
        starts = (mean * scale, (1 - mean) * scale, scale)
        total = np.zeros_like(correlation)
        for (values, counts), start, sign in zip(counted, starts, (1, 1, -1), strict=True):
            # the logarithm of start (start + 1) ... (start + value - 1)
            total += sign * (gammaln(values[:, None] + start) - gammaln(start)).T @ counts
        plain = wins.sum() * np.log(mean) + (rows - wins).sum() * np.log1p(-mean)
        return np.where(correlation > 0, total, plain)

    def most_likely(mean: float) -> float:
        best = int(likelihood(mean, _COARSE).argmax())
        low, high = _COARSE[max(best - 1, 0)], _COARSE[min(best + 1, len(_COARSE) - 1)]
        near = np.linspace(low, high, _FINE_STEPS + 1)
        return float(near[likelihood(mean, near).argmax()])

    return most_likely
