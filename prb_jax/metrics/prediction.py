"""Does one list of numbers predict the order of another, e.g. a benchmark a behaviour, for M models each?

Figures are resampled over users. A draw covers the users of all figures: a user who is drawn twice counts twice in the
benchmark and in the behaviour, and for every model. Intervals of the measures (`prb_jax.metrics.rank_measures`) are
over models.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from types import MappingProxyType
from typing import Any, Final

import numpy as np

from prb_jax.errors import short_repr
from prb_jax.metrics.rank_measures import MEASURES, Measure, in_parts, permutation_test

LEAST_MODELS: Final = 3  # minimum number of models for a correlation
MOST_MODELS: Final = 1000  # maximum number of models in a plan
_STUDIES: Final = 500  # number of studies to simulate at a time
RESOLVED_FROM: Final = 10  # with fewer models, an order is reported as not resolved
_LEAST_DEFINED: Final = 0.5  # minimum share of draws with a defined measure for an interval


@dataclass(frozen=True)
class Resampled:
    """A figure of M models, float64 [M], with draws over users [N, M]; NaN if a draw contains no row of the figure."""

    values: np.ndarray
    draws: np.ndarray

    __repr__ = short_repr

    def intervals(self) -> list[list[float] | None]:
        """Return the 95 % percentile interval over users of each model."""
        return [percentiles(of_model) for of_model in self.draws.T]


@dataclass(frozen=True)
class Cells:
    """Sums and counts of rows by cluster, float64 [C, M]."""

    sums: np.ndarray
    counts: np.ndarray

    __repr__ = short_repr


def draw_weights(clusters: int, *, draws: int, seed: int) -> np.ndarray:
    """Return how often each of C clusters is drawn: float64 [N, C], with replacement."""
    shares = np.full(clusters, 1 / clusters)
    return np.random.default_rng(seed).multinomial(clusters, shares, size=draws).astype(np.float64)


def pooled(cells: Cells, weights: np.ndarray) -> Resampled:
    """Return the mean over all rows."""
    return Resampled(cells.sums.sum(axis=0) / cells.counts.sum(axis=0), _ratio(cells, weights))


def cluster_mean(cells: Cells, weights: np.ndarray) -> Resampled:
    """Return the mean of the cluster means."""
    means = cells.sums / cells.counts
    total = weights.sum(axis=1, keepdims=True)
    return Resampled(means.mean(axis=0), np.where(total > 0, weights @ means / np.maximum(total, 1), np.nan))


def cluster_quantile(cells: Cells, weights: np.ndarray, *, quantile: float) -> Resampled:
    """Return a quantile of the cluster means."""
    means = cells.sums / cells.counts
    places, rows = np.arange(len(means)), np.full((len(weights), means.shape[1]), np.nan)
    for row, times in enumerate(weights.astype(np.int64)):
        if times.any():
            rows[row] = np.quantile(means[np.repeat(places, times)], quantile, axis=0)
    return Resampled(np.quantile(means, quantile, axis=0), rows)


def part_quantile(parts: Sequence[Cells], weights: np.ndarray, *, quantile: float) -> Resampled:
    """Return a quantile over parts of the data (subsets) of each part's mean over all rows."""
    values = np.stack([part.sums.sum(axis=0) / part.counts.sum(axis=0) for part in parts])
    draws = np.stack([_ratio(part, weights) for part in parts])
    return Resampled(np.quantile(values, quantile, axis=0), np.quantile(draws, quantile, axis=0))


def predict(benchmark: Resampled, behaviour: Resampled, *, seed: int) -> dict[str, dict[str, Any]]:
    """Return each measure of how a benchmark predicts a behaviour of the same models: value, ci95, p, p_holm (None),
    chance (its mean by chance). Pearson's correlation also has "without_noise".

    Intervals are over models. The figures already contain the noise of their users; drawing users would add it again.
    ``seed`` draws models and random orders.
    """
    x, y = benchmark.values, behaviour.values
    figures = {}
    for name, measure in MEASURES.items():
        value = float(measure(x, y))
        p, chance = permutation_test(name, x, y, seed=seed)
        defined = not math.isnan(value)
        if name in _FISHER:
            ends = fisher_interval(name, value, len(x)) if defined else None
        else:
            ends = bca_interval(measure, x, y, seed=seed) if defined else None
        figures[name] = {
            "value": value if defined else None,
            "ci95": ends,
            "p": p,
            "p_holm": None,
            "chance": chance,
        }
    pearson_figure = figures["pearson"]
    pearson_figure["without_noise"] = without_noise(benchmark, behaviour, pearson_figure)
    return figures


_FISHER: Final[Mapping[str, Callable[[float, int], tuple[float, float]]]] = MappingProxyType(
    {  # (value, models) -> variance of its Fisher z times an effective number of models, and this number
        "pearson": lambda value, models: (1.0, models - 3),
        "spearman": lambda value, models: (1 + value**2 / 2, models - 3),  # Bonett and Wright 2000
        "kendall": lambda value, models: (0.437, models - 4),  # Fieller, Hartley and Pearson 1957
    }
)


def fisher_interval(name: str, value: float, models: int) -> list[float] | None:
    """Return the 95 % interval of a correlation by Fisher's z; None with too few models.

    A rank correlation of 1 is replaced by the midpoint to the next lower value possible for this number of models.
    """
    scaled, count = _FISHER[name](value, models)
    if count < 1:
        return None
    steps = {
        "pearson": 0.0,
        "spearman": 6 / (models * (models**2 - 1)),
        "kendall": 2 / (models * (models - 1)),
    }
    most = 1 - max(steps[name], 1e-15)
    z, half = math.atanh(min(max(value, -most), most)), 1.959964 * math.sqrt(scaled / count)
    return [min(math.tanh(z - half), value), max(math.tanh(z + half), value)]  # holds a value of 1, too


def bca_interval(
    measure: Measure, x: np.ndarray, y: np.ndarray, *, seed: int, draws: int = 2000
) -> list[float] | None:
    """Return the 95 % bias-corrected and accelerated bootstrap interval over models (Efron 1987)."""
    from scipy.special import ndtr, ndtri  # scipy is slow to import

    models, value = len(x), float(measure(x, y))
    chosen = np.random.default_rng((seed, 1)).integers(models, size=(draws, models))
    values = in_parts(measure, x[chosen], y[chosen])
    values = values[np.isfinite(values)]
    if len(values) < max(2, _LEAST_DEFINED * draws):
        return None
    others = np.array([[k for k in range(models) if k != left_out] for left_out in range(models)])
    jackknife = measure(x[others], y[others])
    jackknife = jackknife[np.isfinite(jackknife)]
    apart = jackknife.mean() - jackknife if len(jackknife) else np.zeros(1)
    spread = float((apart**2).sum())
    acceleration = float((apart**3).sum()) / (6 * spread**1.5) if spread > 0 else 0.0
    below = (np.sum(values < value) + np.sum(values == value) / 2) / len(values)
    bias = ndtri(min(max(below, 1 / len(values)), 1 - 1 / len(values)))
    shifted = bias + ndtri([0.025, 0.975])
    places = ndtr(bias + shifted / np.maximum(1 - acceleration * shifted, 1e-9))
    return [float(end) for end in np.quantile(values, places)]


def without_noise(
    benchmark: Resampled, behaviour: Resampled, measured: Mapping[str, Any]
) -> dict[str, Any] | None:
    """Return Pearson's correlation, and its interval, for the figures that infinitely many users would give.

    Errors in variables: subtracts the noise of users from the variances, and its shared part from the covariance
    (Spearman 1904). None if the models differ by no more than noise, or the correlation is undefined.
    """
    (noise_x, spread_x), (noise_y, spread_y) = (noise_and_spread(one) for one in (benchmark, behaviour))
    if measured["value"] is None or not spread_x * spread_y:
        return None
    models = len(benchmark.values)
    kept = np.isfinite(benchmark.draws).all(axis=1) & np.isfinite(behaviour.draws).all(axis=1)
    apart = [one.draws[kept] - one.draws[kept].mean(axis=1, keepdims=True) for one in (benchmark, behaviour)]
    apart = [one - one.mean(axis=0) for one in apart]
    shared = float(np.mean(apart[0] * apart[1])) * models / (models - 1)
    size = math.hypot(noise_x, spread_x) * math.hypot(noise_y, spread_y)

    def true(correlation: float) -> float:
        return min(max((correlation * size - shared) / (spread_x * spread_y), -1.0), 1.0)

    ends = measured["ci95"]
    return {"value": true(measured["value"]), "ci95": None if ends is None else [true(end) for end in ends]}


PREDICTION_DEFINITIONS: Final[Mapping[str, str]] = {
    "pearson": "Pearson's correlation of the figures",
    "spearman": "Spearman's rho; equal figures share their mean rank",
    "kendall": "Kendall's tau-b",
    "weighted_tau": "tau with additive hyperbolic weights 1/(1 + rank), ranked by either side, the mean (Vigna 2015)",
    "ndcg": "gain = behaviour scaled to 0..1 over the models, discount log2(1 + rank by the benchmark); equal figures "
    "share their discount",
    "rbo": "rank-biased overlap with p = 0.9, extrapolated (Webber et al. 2010, equation 30); with all models in both "
    "lists it is never near 0: compare it with its value by chance",
    "ci95": "95 % interval over models, of the figures as they were measured: by Fisher's z for the correlations "
    "(Pearson's, Spearman's, Kendall's), else the BCa bootstrap over models. The noise of users is in the figures, and "
    "is not added again; null with too few models",
    "without_noise": "Pearson's correlation, with its interval, of the figures that infinitely many users would give "
    "(errors in variables); null if the models differ by no more than the noise of users",
    "p_holm": "p adjusted by the method of Holm (1979) for all measures, figures and behaviours",
    "p": "permutation test: how many orders of the behaviour are at least as far out; two-sided, for ndcg and rbo "
    "one-sided; all orders for at most 8 models, else 9,999 random ones",
    "chance": "mean of the measure over these orders",
}


def _ratio(cells: Cells, weights: np.ndarray) -> np.ndarray:
    below = weights @ cells.counts
    return np.where(below > 0, (weights @ cells.sums) / np.maximum(below, 1), np.nan)


def noise_and_spread(sample: Resampled) -> tuple[float, float]:
    """Return the standard deviation of the sampling noise of a figure, and of the models without this noise.

    Variation that is common to all models in a draw of users is not noise of their order. The spread is 0 if the
    figures vary no more than the noise explains.
    """
    models = len(sample.values)
    draws = sample.draws[np.isfinite(sample.draws).all(axis=1)]
    apart = draws - draws.mean(axis=1, keepdims=True)
    noise = float(np.mean(np.var(apart, axis=0))) * models / (models - 1)
    return math.sqrt(noise), math.sqrt(max(float(np.var(sample.values, ddof=1)) - noise, 0.0))


def plan_models(
    correlation: float,
    *,
    noise: tuple[float, float],
    models: int,
    power: float = 0.8,
    seed: int = 0,
    repeats: int = 2000,
) -> tuple[int | None, float]:
    """Return the smallest number of models that detects the correlation with this power, and the power with ``models``
    models.

    True figures of benchmark and behaviour are normal with this correlation, and are observed with noise; its standard
    deviations are in units of their spread. Detection means that the two-sided t test of Pearson's correlation at 0.05
    rejects 0, with the right sign. The number is None above `MOST_MODELS`; ``repeats`` studies are simulated.
    """
    from scipy.special import ndtri, stdtrit  # scipy is slow to import

    seen = correlation / math.sqrt((1 + noise[0] ** 2) * (1 + noise[1] ** 2))
    # somewhat more models than Fisher's z requires; more are not simulated
    guess = 20 + 1.4 * ((ndtri(0.975) + ndtri(power)) / math.atanh(seen)) ** 2
    most = max(int(min(guess, MOST_MODELS)), models)
    rng, rejected = np.random.default_rng(seed), np.zeros(most + 1)
    counts = np.arange(1, most + 1)
    degrees = np.maximum(counts - 2, 1)
    limit = stdtrit(degrees, 0.975)
    limit = limit / np.sqrt(degrees + limit**2)
    for start in range(0, repeats, _STUDIES):
        size = (min(_STUDIES, repeats - start), most)
        x, independent = rng.standard_normal(size), rng.standard_normal(size)
        y = correlation * x + math.sqrt(1 - correlation**2) * independent
        x, y = x + noise[0] * rng.standard_normal(size), y + noise[1] * rng.standard_normal(size)
        sums = [np.cumsum(part, axis=1) for part in (x, y, x * y, x * x, y * y)]
        shared = sums[2] - sums[0] * sums[1] / counts
        scale = np.sqrt((sums[3] - sums[0] ** 2 / counts) * (sums[4] - sums[1] ** 2 / counts))
        rejected[1:] += (shared > limit * scale).sum(axis=0) * (counts >= LEAST_MODELS)
    share = rejected / repeats
    below = np.flatnonzero(share < power)
    needed = int(below[-1]) + 1
    return (None if needed > most else needed), float(share[min(models, most)])


def percentiles(values: np.ndarray) -> list[float] | None:
    """Return the ends of the 95 % percentile interval of draws; None if half of them are undefined."""
    kept = values[np.isfinite(values)]
    if len(kept) < max(2, _LEAST_DEFINED * len(values)):
        return None
    return [float(end) for end in np.quantile(kept, [0.025, 0.975])]
