"""Whether scores mean what Bradley-Terry says: probabilities of the pick against how often it is right."""

from __future__ import annotations

import math
from collections.abc import Sequence
from typing import Any, Final

import numpy as np

from prb_jax.metrics.accuracy import ScoredRow, margin

CALIBRATION_DEFINITION: Final = (
    "the confidence in a comparison is the largest softmax of its scores (for a pair: the Bradley-Terry probability of "
    "the pick, at least 0.5); the pick is right if it has the highest label, and counts by its share where several "
    "responses tie for the best score; bins of equal width; ece = the mean over comparisons of |share right - mean "
    "confidence| of their bins"
)


def calibration(rows: Sequence[ScoredRow], *, bins: int = 20) -> dict[str, Any]:
    """Return the expected calibration error of scores read as probabilities, and its bins.

    The definition is that of Guo et al. 2017, "On Calibration of Modern Neural Networks", equation 3, for the
    probabilities of the Bradley-Terry (K > 2: softmax) model that the training loss of reward models assumes.

    Args:
      rows: the scored comparisons, at least one.
      bins: of equal width between 0 and 1; a pair fills the upper half alone.

    Returns:
      "ece", "confidence" (mean), "right" (share, ties by their share), and "bins": for each one that is not empty
      "low", "high", "n", "confidence" and "right".

    Raises:
      DataError: as `prb_jax.metrics.accuracy.margin`.
    """
    for row in rows:
        margin(row.scores, row.labels, id=row.id)  # refuses what cannot be compared
    confidence, right = np.array([_pick(row.scores, row.labels) for row in rows]).T
    return calibration_of(confidence, right, bins=bins)


def calibration_of(confidence: np.ndarray, right: np.ndarray, *, bins: int = 20) -> dict[str, Any]:
    """Return what :func:`calibration` does, from the confidence [n] of each pick and whether it is right [n]."""
    place = np.minimum((confidence * bins).astype(np.int64), bins - 1)
    found = []
    for number in np.unique(place):
        members = place == number
        found.append(
            {
                "low": float(number / bins),
                "high": float((number + 1) / bins),
                "n": int(members.sum()),
                "confidence": math.fsum(confidence[members]) / int(members.sum()),
                "right": math.fsum(right[members]) / int(members.sum()),
            }
        )
    return {
        "ece": math.fsum(part["n"] * abs(part["right"] - part["confidence"]) for part in found) / len(right),
        "confidence": math.fsum(confidence) / len(right),
        "right": math.fsum(right) / len(right),
        "bins": found,
    }


def _pick(scores: Sequence[float], labels: Sequence[float]) -> tuple[float, float]:
    """The largest softmax, and the share of the responses with the best score that have the highest label."""
    best, top = max(scores), max(labels)
    picked = [label for score, label in zip(scores, labels) if score == best]
    confidence = 1 / math.fsum(math.exp(score - best) for score in scores)
    return confidence, sum(label == top for label in picked) / len(picked)
