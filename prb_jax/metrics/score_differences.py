"""How far one set of scores is from another of the same comparisons: flipped verdicts, drift, correlations."""

from __future__ import annotations

import math
from collections.abc import Sequence
from typing import Any, Final

import numpy as np

from prb_jax.metrics.accuracy import ScoredRow

SCORES_DEFINITION: Final = (
    "of every response, the score by a minus the score by b: mean, rms (root mean square), max_abs; std_b, the "
    "standard deviation of the scores by b; Pearson and Spearman correlation of the two (null where either is constant)"
)
FLIPS_DEFINITION: Final = (
    "comparisons whose verdict (win, tie, loss; the grade, of graded rows) is another one by a than by b"
)


def score_differences(a: np.ndarray, b: np.ndarray) -> dict[str, Any]:
    """Return the figures that ``SCORES_DEFINITION`` explains, as plain JSON values.

    Args:
      a, b: [n] float64, two scores of each response.
    """
    difference = a - b
    return {
        "mean": math.fsum(difference) / len(difference),
        "rms": math.sqrt(math.fsum(difference**2) / len(difference)),
        "max_abs": float(np.abs(difference).max()),
        "std_b": float(b.std()),
        "pearson": _correlation(a, b),
        "spearman": _correlation(_ranks(a), _ranks(b)),
    }


def flat_scores(rows: Sequence[ScoredRow]) -> np.ndarray:
    """Return the scores of all responses, one comparison after another, as float64."""
    return np.array([score for row in rows for score in row.scores], np.float64)


def _ranks(values: np.ndarray) -> np.ndarray:
    """[n] from 1; equal values share the mean of their ranks."""
    _, place, counts = np.unique(values, return_inverse=True, return_counts=True)
    return (np.cumsum(counts) - (counts - 1) / 2)[place]


def _correlation(a: np.ndarray, b: np.ndarray) -> float | None:
    a, b = a - a.mean(), b - b.mean()
    size = math.sqrt(float(a @ a) * float(b @ b))
    return float(a @ b) / size if size > 0 else None
