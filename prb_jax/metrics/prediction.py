"""Does a benchmark predict a behaviour: figures of M models, resampled over users and models.

The users of a draw are those of all figures together: a user who is drawn twice counts twice in the benchmark and in
the behaviour, and for every model. The models of a draw are drawn with replacement too.
"""

from __future__ import annotations

import math
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Any, Final

import numpy as np

from prb_jax.errors import short_repr
from prb_jax.metrics.agreement import MEASURES, in_parts, permutation_test

LEAST_MODELS: Final = 3
"""With fewer there is nothing to correlate."""

MOST_MODELS: Final = 1000
"""That a plan looks at."""

_STUDIES: Final = 500  # that are simulated at a time

RESOLVED_FROM: Final = 10
"""Models below which an order is called not resolved."""

_LEAST_DEFINED: Final = 0.5  # share of the draws in which a measure has to be defined for an interval


@dataclass(frozen=True)
class Sample:
    """A figure of M models with its resampled values.

    Attributes:
      values: float64 [M].
      draws: float64 [N, M], over users; NaN where a draw holds no row of the figure.
    """

    values: np.ndarray
    draws: np.ndarray

    __repr__ = short_repr

    def intervals(self) -> list[list[float] | None]:
        """Return the 95 % percentile interval over users of each model."""
        return [percentiles(own) for own in self.draws.T]


@dataclass(frozen=True)
class Cells:
    """Sums and counts of rows, by cluster.

    Attributes:
      sums: float64 [C, M].
      counts: float64 [C, M].
    """

    sums: np.ndarray
    counts: np.ndarray

    __repr__ = short_repr


def draw_weights(clusters: int, *, draws: int, seed: int) -> np.ndarray:
    """Return how often each of C clusters is drawn: float64 [N, C], with replacement."""
    shares = np.full(clusters, 1 / clusters)
    return np.random.default_rng(seed).multinomial(clusters, shares, size=draws).astype(np.float64)


def pooled(cells: Cells, weights: np.ndarray) -> Sample:
    """Return the mean over all rows."""
    return Sample(cells.sums.sum(axis=0) / cells.counts.sum(axis=0), _ratio(cells, weights))


def cluster_mean(cells: Cells, weights: np.ndarray) -> Sample:
    """Return the mean over clusters of their own means."""
    means = _means(cells)
    total = weights.sum(axis=1, keepdims=True)
    return Sample(means.mean(axis=0), np.where(total > 0, weights @ means / np.maximum(total, 1), np.nan))


def cluster_quantile(cells: Cells, weights: np.ndarray, *, quantile: float) -> Sample:
    """Return a quantile over clusters of their own means."""
    means = _means(cells)
    places, rows = np.arange(len(means)), np.full((len(weights), means.shape[1]), np.nan)
    for row, own in enumerate(weights.astype(np.int64)):
        if own.any():
            rows[row] = np.quantile(means[np.repeat(places, own)], quantile, axis=0)
    return Sample(np.quantile(means, quantile, axis=0), rows)


def part_quantile(parts: Sequence[Cells], weights: np.ndarray, *, quantile: float) -> Sample:
    """Return a quantile over parts of the data (subsets) of the means over all rows of each."""
    values = np.stack([part.sums.sum(axis=0) / part.counts.sum(axis=0) for part in parts])
    draws = np.stack([_ratio(part, weights) for part in parts])
    return Sample(np.quantile(values, quantile, axis=0), np.quantile(draws, quantile, axis=0))


def predict(benchmark: Sample, behaviour: Sample, *, seed: int) -> dict[str, dict[str, Any]]:
    """Return each measure of how a benchmark predicts a behaviour: value, ci95, p, chance (its mean by chance).

    Args:
      benchmark, behaviour: of the same M models, with draws of the same users.
      seed: of the draws of models and of random orders.
    """
    draws, models = benchmark.draws.shape
    chosen = np.random.default_rng((seed, 1)).integers(models, size=(draws, models))
    x, y = (np.take_along_axis(each.draws, chosen, axis=1) for each in (benchmark, behaviour))
    defined = np.isfinite(x).all(axis=1) & np.isfinite(y).all(axis=1)
    found = {}
    for name, measure in MEASURES.items():
        value = float(measure(benchmark.values, behaviour.values))
        p, chance = permutation_test(name, benchmark.values, behaviour.values, seed=seed)
        resampled = np.full(draws, np.nan)
        if defined.any():
            resampled[defined] = in_parts(measure, x[defined], y[defined])
        found[name] = {
            "value": None if np.isnan(value) else value,
            "ci95": None if np.isnan(value) else percentiles(resampled),
            "p": p,
            "chance": chance,
        }
    return found


PREDICTION_DEFINITIONS: Final[Mapping[str, str]] = {
    "pearson": "Pearson's correlation of the figures",
    "spearman": "Spearman's rho; equal figures share their mean rank",
    "kendall": "Kendall's tau-b",
    "weighted_tau": "tau with additive hyperbolic weights 1/(1 + rank), ranked by either side, the mean (Vigna 2015)",
    "ndcg": "gain = behaviour scaled to 0..1 over the models, discount log2(1 + rank by the benchmark); equal figures "
    "share their discount",
    "rbo": "rank-biased overlap with p = 0.9, extrapolated (Webber et al. 2010, equation 30); with all models in both "
    "lists it is never near 0: compare it with its value by chance",
    "ci95": "95 % percentile interval over draws of users (the same for benchmark, behaviour and all models) and of "
    "models; null where a measure is not defined in half of the draws",
    "p": "permutation test: how many orders of the behaviour are at least as far out; two-sided, for ndcg and rbo "
    "one-sided; all orders for at most 8 models, else 9,999 random ones",
    "chance": "mean of the measure over these orders",
}


def _means(cells: Cells) -> np.ndarray:
    return cells.sums / cells.counts


def _ratio(cells: Cells, weights: np.ndarray) -> np.ndarray:
    below = weights @ cells.counts
    return np.where(below > 0, (weights @ cells.sums) / np.maximum(below, 1), np.nan)


def noise_and_spread(sample: Sample) -> tuple[float, float]:
    """Return the standard deviation of the sampling noise of a figure, and that of the models without the noise.

    What all models have in common in a draw of users is no noise of their order. The spread is 0 where the figures vary
    no more than the noise lets them.
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
    """Return the fewest models with which a correlation is found with a power, and the power with so many ``models``.

    True figures of benchmark and behaviour are normal with this correlation, and are seen with noise. It is found where
    the two-sided t test of Pearson's correlation at 0.05 rejects none, and its sign is right.

    Args:
      correlation: Pearson's of the true figures, above 0 and below 1.
      noise: standard deviations of the noise of benchmark and behaviour, in units of the spread of the true figures.
      models: of a study.
      power: share of the repetitions that find it.
      seed: of the draws.
      repeats: studies that are simulated.

    Returns:
      the models, None for more than `MOST_MODELS`; the power.
    """
    from scipy.special import ndtri, stdtrit  # scipy takes long to import

    seen = correlation / math.sqrt((1 + noise[0] ** 2) * (1 + noise[1] ** 2))
    # somewhat more models than Fisher's z asks for; nothing is known of the correlation beyond them
    guess = 20 + 1.4 * ((ndtri(0.975) + ndtri(power)) / math.atanh(seen)) ** 2
    most = max(int(min(guess, MOST_MODELS)), models)
    rng, found = np.random.default_rng(seed), np.zeros(most + 1)
    counts = np.arange(1, most + 1)
    degrees = np.maximum(counts - 2, 1)
    limit = stdtrit(degrees, 0.975)
    limit = limit / np.sqrt(degrees + limit**2)
    for start in range(0, repeats, _STUDIES):
        size = (min(_STUDIES, repeats - start), most)
        x, own = rng.standard_normal(size), rng.standard_normal(size)
        y = correlation * x + math.sqrt(1 - correlation**2) * own
        x, y = x + noise[0] * rng.standard_normal(size), y + noise[1] * rng.standard_normal(size)
        sums = [np.cumsum(part, axis=1) for part in (x, y, x * y, x * x, y * y)]
        shared = sums[2] - sums[0] * sums[1] / counts
        scale = np.sqrt((sums[3] - sums[0] ** 2 / counts) * (sums[4] - sums[1] ** 2 / counts))
        found[1:] += (shared > limit * scale).sum(axis=0) * (counts >= LEAST_MODELS)
    share = found / repeats
    below = np.flatnonzero(share < power)
    needed = int(below[-1]) + 1
    return (None if needed > most else needed), float(share[min(models, most)])


def percentiles(values: np.ndarray) -> list[float] | None:
    """Return the ends of the 95 % percentile interval of draws; None where half of them are not defined."""
    kept = values[np.isfinite(values)]
    if len(kept) < max(2, _LEAST_DEFINED * len(values)):
        return None
    return [float(end) for end in np.quantile(kept, [0.025, 0.975])]
