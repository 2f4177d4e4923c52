"""How alike the rows of one user are: the correlation within clusters, by the likelihood of a beta-binomial."""

from __future__ import annotations

from collections.abc import Callable

import numpy as np

_COARSE = np.concatenate([[0.0], np.geomspace(1e-5, 0.9, 40), [0.95, 0.99, 1 - 1e-9]])
_FINE_STEPS = 16


def fit_correlation(wins: np.ndarray, rows: np.ndarray) -> Callable[[float], float]:
    """Return a function of a mean m that gives the most likely correlation within clusters, if m is the true mean.

    Cluster c has ``wins[c]`` of ``rows[c]``, from a beta-binomial distribution with mean m and correlation r: its
    own rate is drawn from a beta distribution with the parameters m (1 - r) / r and (1 - m) (1 - r) / r. The
    correlation is 0 where all clusters have one rate, and 1 where a cluster wins or loses everything.

    Args:
      wins: [C] int.
      rows: [C] int, at least 1.
    """
    from scipy.special import gammaln  # scipy takes long to import

    counted = [np.unique(values, return_counts=True) for values in (wins, rows - wins, rows)]

    def likelihood(mean: float, correlation: np.ndarray) -> np.ndarray:
        # at 0 the beta distribution is a point: there the logarithm of a plain binomial
        some = np.where(correlation > 0, correlation, 0.5)
        scale = (1 - some) / some
        total = np.zeros_like(correlation)
        for (values, counts), start, sign in zip(
            counted, (mean * scale, (1 - mean) * scale, scale), (1, 1, -1), strict=True
        ):
            total += (
                sign * (gammaln(values[:, None] + start) - gammaln(start)).T @ counts
            )  # log of start (start + 1) ... (start + value - 1)
        plain = (wins.sum()) * np.log(mean) + (rows - wins).sum() * np.log1p(-mean)
        return np.where(correlation > 0, total, plain)

    def most_likely(mean: float) -> float:
        best = int(likelihood(mean, _COARSE).argmax())
        low, high = _COARSE[max(best - 1, 0)], _COARSE[min(best + 1, len(_COARSE) - 1)]
        near = np.linspace(low, high, _FINE_STEPS + 1)
        return float(near[likelihood(mean, near).argmax()])

    return most_likely
