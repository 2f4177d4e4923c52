"""Whether a mean difference is small enough to make no difference, and how large a one a test would have found.

Two one-sided tests (TOST, Schuirmann 1987), and the power of the t test by the noncentral t distribution.
"""

from __future__ import annotations

import math
from dataclasses import dataclass

import numpy as np


@dataclass(frozen=True)
class Equivalence:
    """The result of two one-sided t tests.

    Attributes:
      estimate: the mean difference.
      margin: differences within -margin and +margin make no difference.
      p: the larger one of the two p-values; the difference is equivalent to none where it is below 0.05.
      ci90: the interval whose being within the margins is the same as ``p`` below 0.05.
    """

    estimate: float
    margin: float
    p: float
    ci90: tuple[float, float]

    @property
    def equivalent(self) -> bool:
        """Whether the difference is shown to be within the margins, at the level 0.05."""
        return self.p < 0.05


def tost(estimate: float, *, standard_error: float, degrees: float, margin: float) -> Equivalence:
    """Test that a mean difference is within the margins.

    Args:
      estimate: the mean difference.
      standard_error: of it.
      degrees: of freedom of the standard error.
      margin: above 0, in the unit of the estimate.
    """
    from scipy.special import stdtr, stdtrit  # scipy takes long to import

    assert margin > 0
    if standard_error > 0:
        above = float(stdtr(degrees, -(estimate + margin) / standard_error))
        below = float(stdtr(degrees, (estimate - margin) / standard_error))
    else:  # all differences are equal
        above, below = (float(not inside) for inside in (estimate > -margin, estimate < margin))
    half = float(stdtrit(degrees, 0.95)) * standard_error
    assert math.isfinite(half)
    return Equivalence(estimate, margin, max(above, below), (estimate - half, estimate + half))


def smallest_shift(
    values: np.ndarray, *, standard_error: float, degrees: float, level: float, power: float = 0.8
) -> float | None:
    """Return the smallest shift of a mean of verdicts from 0.5 that its interval would have excluded with a power.

    The variance within a shift is that of verdicts with as many ties as there are (fewer where the shift needs more
    decided ones), times the design effect that was found: the variance over clusters to that of independent rows, at
    least 1. Two further verdicts, one each way, are in the variance, as in the intervals of differences.

    Args:
      values: [n] verdicts: 0, 0.5 for a tie, or 1.
      standard_error: of their mean, over clusters, with the two further verdicts.
      degrees: of freedom of it.
      level: of the two-sided interval that must exclude 0.5.
      power: share of the repetitions in which it does.

    Returns:
      the shift, above 0 and at most 0.5; None where not even a shift of 0.5 would be found.
    """
    from scipy.special import nctdtrinc, stdtrit  # scipy takes long to import

    n, further = len(values), 0.5 / len(values) ** 2
    needed = float(nctdtrinc(degrees, 1 - power, stdtrit(degrees, (1 + level) / 2)))
    spread, decided = float(np.var(values)), float(np.mean(values != 0.5))
    effect = max((standard_error**2 - further) * n / spread, 1.0) if spread else 1.0
    shifts = np.linspace(0, 0.5, 2001)[1:]
    variances = effect * np.maximum(np.maximum(decided, 2 * shifts) / 4 - shifts**2, 0) / n + further
    enough = shifts >= needed * np.sqrt(variances)
    return float(shifts[np.argmax(enough)]) if enough.any() else None
