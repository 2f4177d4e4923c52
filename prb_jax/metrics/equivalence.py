"""Two one-sided tests (TOST, Schuirmann 1987): whether a mean difference is small enough to make no difference."""

from __future__ import annotations

import math
from dataclasses import dataclass


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
