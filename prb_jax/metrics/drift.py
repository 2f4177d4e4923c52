"""How far one set of scores is from another of the same comparisons: drift, flipped verdicts, correlations."""

from __future__ import annotations

import math
from collections.abc import Sequence
from typing import Any, Final

import numpy as np

from prb_jax.metrics.accuracy import ScoredRow, outcomes
from prb_jax.metrics.clusters import Clusters
from prb_jax.metrics.uncertainty import paired_difference

DRIFT_DEFINITION: Final = (
    "against the reference on the same comparisons: its accuracy; difference = accuracy minus the reference's, with a "
    "95 % t interval, paired, clustered as ci95 (null, with difference_ci95_reason, under six clusters); "
    "flips = comparisons whose verdict (win, tie, loss) is another one; "
    "drift of every response's score: mean, rms (root mean square) and max_abs of score minus reference score, each "
    "also relative to the standard deviation of the reference's scores (null where that is 0); Pearson and Spearman "
    "correlation of the two (null where either is constant)"
)


def score_drift(
    rows: Sequence[ScoredRow], reference: Sequence[ScoredRow], *, clusters: Clusters | None = None
) -> dict[str, Any]:
    """The figures that ``DRIFT_DEFINITION`` explains, as plain JSON values.

    Args:
      rows: the scored comparisons, each once.
      reference: the same comparisons by other scores, in any order.
      clusters: of the rows, in their order; by their users where it is not given.

    Raises:
      DataError: the two do not hold the same comparisons, each once.
    """
    paired = paired_difference(rows, reference, clusters=clusters)
    by_id = {row.id: row for row in reference}
    matched = [by_id[row.id] for row in rows]
    ours, theirs = outcomes(rows), outcomes(matched)
    scores, others = _flat(rows), _flat(matched)
    spread = float(others.std())
    drift = _drift(scores - others)
    return {
        "accuracy": float(ours.wins.mean()),
        "reference_accuracy": float(theirs.wins.mean()),
        "difference": paired["difference"],
        "difference_ci95": paired["ci95"],
        "difference_ci95_reason": paired["ci95_reason"],
        "flips": int((np.sign(ours.margins) != np.sign(theirs.margins)).sum()),
        "n": len(rows),
        "scores": len(scores),
        "drift": drift,
        "reference_std": spread,
        "relative_drift": {name: value / spread if spread > 0 else None for name, value in drift.items()},
        "pearson": _correlation(scores, others),
        "spearman": _correlation(_ranks(scores), _ranks(others)),
    }


def _flat(rows: Sequence[ScoredRow]) -> np.ndarray:
    return np.array([score for row in rows for score in row.scores], np.float64)


def _drift(difference: np.ndarray) -> dict[str, float]:
    return {
        "mean": math.fsum(difference) / len(difference),
        "rms": math.sqrt(math.fsum(difference**2) / len(difference)),
        "max_abs": float(np.abs(difference).max()),
    }


def _ranks(values: np.ndarray) -> np.ndarray:
    """[n] from 1; equal values share the mean of their ranks."""
    _, place, counts = np.unique(values, return_inverse=True, return_counts=True)
    return (np.cumsum(counts) - (counts - 1) / 2)[place]


def _correlation(a: np.ndarray, b: np.ndarray) -> float | None:
    a, b = a - a.mean(), b - b.mean()
    size = math.sqrt(float(a @ a) * float(b @ b))
    return float(a @ b) / size if size > 0 else None
