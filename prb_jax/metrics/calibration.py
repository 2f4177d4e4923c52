"""Meaning of scores: whether they are calibrated Bradley-Terry probabilities, and how they depend on length."""

from __future__ import annotations

import math
from collections.abc import Sequence
from typing import Any, Final

import numpy as np

from prb_jax.errors import DataError, quote
from prb_jax.metrics.accuracy import margin
from prb_jax.metrics.rows import ScoredRow

CALIBRATION_DEFINITION: Final = (
    "the confidence in a comparison is the largest softmax of its scores (for a pair: the Bradley-Terry probability of "
    "the pick, at least 0.5); the pick is right if it has the highest label, with partial credit if several "
    "responses tie for the best score; bins of equal width; ece = the mean over comparisons of |share right - mean "
    "confidence| of their bins; brier = the mean of (confidence - 1)^2 where the pick is right and of confidence^2 "
    "where it is wrong (Brier 1950), which also rewards a scorer that knows which of its picks are right"
)

LENGTH_DEFINITION: Final = (
    "over the comparisons in which one response is longer (in characters) than all others: how often the preferred "
    "response is the longest one, how often the longest one has the best score (a tie has none), and the accuracy "
    "where the preferred response is the longest and where it is not; a scorer without a bias for length is as "
    "accurate in both"
)


def calibration(rows: Sequence[ScoredRow], *, bins: int = 20) -> dict[str, Any]:
    """Return the expected calibration error of scores read as probabilities, and its bins.

    The definition follows Guo et al. 2017, "On Calibration of Modern Neural Networks", equation 3, for the
    probabilities of the Bradley-Terry (K > 2: softmax) model that the training loss of reward models assumes. Bins have
    equal width between 0 and 1: pairs only fill the upper half.

    Returns:
      "ece", "brier", "confidence" (mean), "right" (share, with partial credit for ties), and "bins": "low", "high",
      "n", "confidence" and "right" of each non-empty bin.

    Raises:
      DataError: same as `prb_jax.metrics.accuracy.margin`.
    """
    picks = []
    for row in rows:
        margin(row.scores, row.labels, id=row.id)  # raises for rows that cannot be compared
        best, top = max(row.scores), max(row.labels)
        picked = [label for score, label in zip(row.scores, row.labels) if score == best]
        confidence = 1 / math.fsum(math.exp(score - best) for score in row.scores)
        picks.append((confidence, sum(label == top for label in picked) / len(picked)))
    return calibration_of(*np.array(picks).T, bins=bins)


def calibration_of(confidence: np.ndarray, right: np.ndarray, *, bins: int = 20) -> dict[str, Any]:
    """Return the result of :func:`calibration` from each pick's confidence [n] and whether it is right [n]."""
    place = np.minimum((confidence * bins).astype(np.int64), bins - 1)
    parts = []
    for number in np.unique(place):
        members = place == number
        parts.append(
            {
                "low": float(number / bins),
                "high": float((number + 1) / bins),
                "n": int(members.sum()),
                "confidence": math.fsum(confidence[members]) / int(members.sum()),
                "right": math.fsum(right[members]) / int(members.sum()),
            }
        )
    return {
        "ece": math.fsum(part["n"] * abs(part["right"] - part["confidence"]) for part in parts) / len(right),
        "brier": math.fsum(right * (1 - confidence) ** 2 + (1 - right) * confidence**2) / len(right),
        "confidence": math.fsum(confidence) / len(right),
        "right": math.fsum(right) / len(right),
        "bins": parts,
    }


def log_losses(rows: Sequence[ScoredRow]) -> np.ndarray:
    """Return, for each row [n], minus the log of the softmax of its scores on the responses with the best label.

    Raises:
      DataError: same as `prb_jax.metrics.accuracy.margin`.
    """
    losses = []
    for row in rows:
        margin(row.scores, row.labels, id=row.id)  # raises for rows that cannot be compared
        scores, top = np.array(row.scores, np.float64), max(row.labels)
        best = scores[[label == top for label in row.labels]]
        losses.append(np.logaddexp.reduce(scores) - np.logaddexp.reduce(best))
    return np.array(losses)


def length_bias(rows: Sequence[ScoredRow], lengths: Sequence[Sequence[int]]) -> dict[str, Any]:
    """Return how the picks of a scorer depend on the lengths [K] of the responses of each row.

    Returns:
      "n" comparisons with a longest response and "equal" without one; of the n, the shares "preferred_is_longest" and
      "picks_longest"; "n_longest" and "n_shorter" comparisons whose preferred response is or is not the longest, with
      "accuracy_longest" and "accuracy_shorter" (None for no comparisons).

    Raises:
      DataError: the numbers of lengths and scores differ; or `prb_jax.metrics.accuracy.margin` raises it.
    """
    wins: dict[bool, list[bool]] = {True: [], False: []}  # by whether the preferred response is the longest
    picks = equal = 0
    for row, sizes in zip(rows, lengths, strict=True):
        if len(sizes) != len(row.scores):
            raise DataError(f"row {quote(row.id)}: {len(sizes)} lengths for {len(row.scores)} scores")
        longest = max(sizes)
        if list(sizes).count(longest) > 1:
            equal += 1
            continue
        place = list(sizes).index(longest)
        picks += row.scores[place] > max(score for k, score in enumerate(row.scores) if k != place)
        won = margin(row.scores, row.labels, id=row.id) > 0
        wins[row.labels[place] == max(row.labels)].append(won)
    n_longest, n_shorter = len(wins[True]), len(wins[False])
    n = n_longest + n_shorter
    return {
        "n": n,
        "equal": equal,
        "preferred_is_longest": n_longest / n if n else None,
        "picks_longest": picks / n if n else None,
        "n_longest": n_longest,
        "accuracy_longest": sum(wins[True]) / n_longest if n_longest else None,
        "n_shorter": n_shorter,
        "accuracy_shorter": sum(wins[False]) / n_shorter if n_shorter else None,
    }
