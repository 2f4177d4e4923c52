"""How sure the numbers are: bootstrap intervals over clusters, paired differences, exact tests.

Rows of one user are not independent, so intervals resample whole users, never single rows.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import numpy as np

from prb_jax.errors import DataError, quote
from prb_jax.metrics.accuracy import ScoredRow, group_counts, outcomes


def bootstrap_interval(
    sums: np.ndarray, sizes: np.ndarray, *, seed: int = 0, resamples: int = 2000, level: float = 0.95
) -> list[float] | None:
    """Percentile bootstrap interval of ``sum(sums) / sum(sizes)``, resampling clusters.

    Clusters with equal sum and size are interchangeable, so it is enough to draw how many of each
    kind a resample holds (multinomial): the same distribution as drawing clusters one by one, some
    hundred times faster, and independent of the order of the clusters.

    Args:
      sums: [C] numerator of each cluster, as its number of wins.
      sizes: [C] denominator of each cluster, above 0, as its number of rows.
      seed: of the resamples; the same input gives the same interval.
      resamples: how many to draw.
      level: share of the resamples inside the interval.

    Returns:
      [low, high], or None with fewer than two clusters, which say nothing about variation.
    """
    if len(sums) < 2:
        return None
    clusters = np.stack([np.asarray(sums, np.float64), np.asarray(sizes, np.float64)], axis=1)
    kinds, counts = np.unique(clusters, axis=0, return_counts=True)
    rng = np.random.default_rng(seed)
    chunk = max(1, 4_000_000 // len(kinds))  # at most 32 MB of draws at a time
    values = np.empty(resamples, np.float64)
    for start in range(0, resamples, chunk):
        stop = min(start + chunk, resamples)
        drawn = rng.multinomial(len(sums), counts / len(sums), size=stop - start)
        totals = drawn @ kinds
        values[start:stop] = totals[:, 0] / totals[:, 1]
    tail = (1 - level) / 2
    low, high = np.quantile(values, [tail, 1 - tail])
    return [float(low), float(high)]


def binomial_p_values(wins: np.ndarray, rows: np.ndarray) -> np.ndarray:
    """[U] one-sided exact p-values against chance: P(X >= wins) for X ~ Binomial(rows, 1/2)."""
    from scipy.special import bdtrc  # scipy takes long to import

    wins = np.asarray(wins, np.int64)
    upper = bdtrc(np.maximum(wins - 1, 0).astype(np.float64), np.asarray(rows, np.int64), 0.5)
    return np.where(wins > 0, upper, 1.0)


def paired_difference(
    rows_a: Sequence[ScoredRow], rows_b: Sequence[ScoredRow], *, seed: int = 0, resamples: int = 2000
) -> dict[str, Any]:
    """Accuracy of ``rows_a`` minus accuracy of ``rows_b`` on the same comparisons.

    Rows are matched by id; the interval resamples users, each with both results, so what is hard
    for both cancels out.

    Returns:
      {"difference": float, "ci95": [low, high] or None with a single cluster}

    Raises:
      DataError: if the two do not hold the same comparisons, each once, or there are none.
    """
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
    gains = outcomes(rows_a).wins.astype(np.int64) - outcomes(matched).wins.astype(np.int64)
    counts = group_counts(gains, [row.user_id for row in rows_a])
    return {
        "difference": float(gains.mean()),
        "ci95": bootstrap_interval(counts.wins, counts.rows, seed=seed, resamples=resamples),
    }
