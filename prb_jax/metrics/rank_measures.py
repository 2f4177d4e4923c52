"""How alike two lists of numbers order M models: six measures, their exact tests, and their values by chance.

Measures accept arrays [..., M], a number for each model, and reduce the last axis. A measure is NaN if it is undefined
(a list of equal numbers). ``x`` predicts, ``y`` is the outcome; higher is better in both.
"""

from __future__ import annotations

import itertools
import math
from collections.abc import Callable, Mapping
from types import MappingProxyType
from typing import Final

import numpy as np

RBO_P: Final = 0.9  # persistence of rank-biased overlap
EXACT_UP_TO: Final = 8  # maximum number of models for all orders; beyond that, random orders

Measure = Callable[[np.ndarray, np.ndarray], np.ndarray]


def pearson(x: np.ndarray, y: np.ndarray) -> np.ndarray:
    """Return Pearson's correlation."""
    x, y = (values - values.mean(axis=-1, keepdims=True) for values in (_float(x), _float(y)))
    scale = np.sqrt((x**2).sum(axis=-1) * (y**2).sum(axis=-1))
    return _divide((x * y).sum(axis=-1), scale, where=_varies(x) & _varies(y))


def spearman(x: np.ndarray, y: np.ndarray) -> np.ndarray:
    """Return Spearman's correlation: Pearson's of the ranks, where equal numbers share their mean rank."""
    return pearson(_mean_ranks(x), _mean_ranks(y))


def kendall(x: np.ndarray, y: np.ndarray) -> np.ndarray:
    """Return Kendall's tau-b."""
    return _weighted_tau(x, y, np.ones(1))


def weighted_tau(x: np.ndarray, y: np.ndarray) -> np.ndarray:
    """Return the weighted tau of Vigna (2015) with additive hyperbolic weights: exchanges at the top count more.

    The mean of two values that rank the models by x (then y), and by y (then x), as in scipy's ``weightedtau``.
    """
    taus = []
    for first, second in ((x, y), (y, x)):
        weight = 1 / (1 + _places(first, second))
        taus.append(_weighted_tau(x, y, weight[..., :, None] + weight[..., None, :]))
    return (taus[0] + taus[1]) / 2


def ndcg(x: np.ndarray, y: np.ndarray) -> np.ndarray:
    """Return the normalised discounted cumulative gain of the order by x.

    The gain of a model is y, scaled from 0 (the worst) to 1 (the best); the discount is log2(1 + rank). Models of equal
    x share their mean discount, as in scikit-learn's ``ndcg_score``.
    """
    x, y = np.broadcast_arrays(_float(x), _float(y))
    low, high = y.min(axis=-1, keepdims=True), y.max(axis=-1, keepdims=True)
    gain = (y - low) / np.where(high > low, high - low, 1)
    discount = 1 / np.log2(2 + np.arange(x.shape[-1]))
    total = np.concatenate([[0.0], np.cumsum(discount)])
    above, equal = _counts(x)
    gained = (gain * (total[above + equal] - total[above]) / equal).sum(axis=-1)
    best = (-np.sort(-gain, axis=-1) * discount).sum(axis=-1)
    return _divide(gained, best, where=_varies(y))


def rbo(x: np.ndarray, y: np.ndarray, *, p: float = RBO_P) -> np.ndarray:
    """Return the rank-biased overlap of Webber, Moffat and Zobel (2010), extrapolated (their equation 30).

    Both lists [..., M] rank the same M models, the best first, and p between 0 and 1 is the persistence. Models with
    equal numbers share their places: the value is the mean over all their orders.
    """
    x, y = np.broadcast_arrays(_float(x), _float(y))
    depth = np.arange(1, x.shape[-1] + 1)
    shares = []
    for values in (x, y):
        above, equal = _counts(values)  # give the share of orders in which a model is among the first d
        shares.append(np.clip((depth - above[..., None]) / equal[..., None], 0, 1))
    agreement = (shares[0] * shares[1]).sum(axis=-2) / depth
    return extrapolated_overlap(agreement, p=p)


def extrapolated_overlap(agreement: np.ndarray, *, p: float) -> np.ndarray:
    """Return the rank-biased overlap, given agreements [..., D]: the shared fraction of the first d for d = 1 to D."""
    depth = np.arange(1, agreement.shape[-1] + 1)
    seen = (1 - p) / p * (agreement * p**depth).sum(axis=-1)
    return seen + agreement[..., -1] * p ** agreement.shape[-1]


MEASURES: Final[Mapping[str, Measure]] = MappingProxyType(
    {
        "pearson": pearson,
        "spearman": spearman,
        "kendall": kendall,
        "weighted_tau": weighted_tau,
        "ndcg": ndcg,
        "rbo": rbo,
    }
)
"""The measures by name."""

ONE_SIDED: Final = ("ndcg", "rbo")
"""Measures without a sign: only large values are evidence against chance."""


def permutation_test(
    name: str, x: np.ndarray, y: np.ndarray, *, seed: int = 0, draws: int = 9999
) -> tuple[float | None, float | None]:
    """Return the p-value of a measure of x, y [M] under random orders of y, and its mean over these orders.

    Two-sided, except for ``ONE_SIDED``. Exact up to ``EXACT_UP_TO`` models; otherwise (b + 1) / (draws + 1), where b of
    the random orders are at least as extreme. Returns (None, None) if the measure is undefined.
    """
    measure, models = MEASURES[name], len(y)
    value = float(measure(x, y))
    if math.isnan(value):
        return None, None
    if models <= EXACT_UP_TO:
        orders = np.array(list(itertools.permutations(range(models))))
    else:
        orders = np.random.default_rng(seed).permuted(np.tile(np.arange(models), (draws, 1)), axis=1)
    values = in_parts(measure, np.broadcast_to(_float(x), orders.shape), _float(y)[orders])
    if name in ONE_SIDED:
        far = values >= value - 1e-12
    else:
        far = np.abs(values) >= abs(value) - 1e-12
    p = far.mean() if models <= EXACT_UP_TO else (far.sum() + 1) / (draws + 1)
    return float(p), float(values.mean())


def in_parts(measure: Measure, x: np.ndarray, y: np.ndarray) -> np.ndarray:
    """Return a measure of many lists [N, M], computed in chunks because it needs arrays [N, M, M]."""
    size = max(1, 4_000_000 // x.shape[-1] ** 2)
    return np.concatenate([measure(x[i : i + size], y[i : i + size]) for i in range(0, len(x), size)])


def tau_error(models: int) -> float:
    """Return the standard error of Kendall's tau between two unrelated orders."""
    return math.sqrt(2 * (2 * models + 5) / (9 * models * (models - 1)))


def _float(values: np.ndarray) -> np.ndarray:
    return np.asarray(values, np.float64)


def _varies(values: np.ndarray) -> np.ndarray:
    return values.max(axis=-1) > values.min(axis=-1)


def _divide(above: np.ndarray, below: np.ndarray, *, where: np.ndarray) -> np.ndarray:
    return np.where(where, above / np.where(where, below, 1), np.nan)


def _counts(values: np.ndarray) -> tuple[np.ndarray, np.ndarray]:
    """Return how many numbers are larger than each number, and how many equal it, including itself."""
    number, other = _float(values)[..., :, None], _float(values)[..., None, :]
    return (other > number).sum(axis=-1), (other == number).sum(axis=-1)


def _mean_ranks(values: np.ndarray) -> np.ndarray:
    above, equal = _counts(values)
    return -(above + (equal + 1) / 2)


def _places(first: np.ndarray, second: np.ndarray) -> np.ndarray:
    """Return the place of each model, from 0, by the first number and then the second one, the largest first."""
    a, b = (_float(values) for values in np.broadcast_arrays(first, second))
    above = a[..., None, :] > a[..., :, None]
    level = a[..., None, :] == a[..., :, None]
    more = b[..., None, :] > b[..., :, None]
    same = level & (b[..., None, :] == b[..., :, None])
    earlier = np.tri(a.shape[-1], k=-1, dtype=bool)
    return (above | (level & more) | (same & earlier)).sum(axis=-1)


def _weighted_tau(x: np.ndarray, y: np.ndarray, weight: np.ndarray) -> np.ndarray:
    signs = [np.sign(_float(values)[..., :, None] - _float(values)[..., None, :]) for values in (x, y)]
    together, *alone = ((weight * a * b).sum(axis=(-2, -1)) for a, b in (signs, signs[:1] * 2, signs[1:] * 2))
    return _divide(together, np.sqrt(alone[0] * alone[1]), where=(alone[0] > 0) & (alone[1] > 0))
