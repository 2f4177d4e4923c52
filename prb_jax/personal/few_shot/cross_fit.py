"""Fits that are made once, and chosen among by different people of the validation part.

A number that is the best of many tried has a loss that is too low on the people who chose it. Margins of people who did
not choose show how good such a choice is (cross-fitting). A fit is made and evaluated once, whoever chooses.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable
from dataclasses import dataclass, replace
from typing import Self

import numpy as np

from prb_jax.personal.few_shot.fitting import LOSS, FitData
from prb_jax.personal.few_shot.protocol import Fitted


@dataclass(frozen=True)
class CrossFitData(FitData):
    """Data that keeps each fit and its margins, so that others can choose among the same fits."""

    # bool [U], the people of the validation part who choose, each with a choice that is predicted; all if None
    choosers: np.ndarray | None = None

    def chosen_by(self, choosers: np.ndarray | None) -> Self:
        """Return the same data and fits, where others choose."""
        return replace(self, choosers=choosers)

    def made(
        self, step: tuple[object, ...], base: Fitted, make: Callable[[], Iterable[Fitted]]
    ) -> list[Fitted]:
        """Return the fits that a step makes from a base, made once."""
        return self.once((*step, id(base)), lambda: (base, list(make())))[1]

    def margins(self, fitted: Fitted) -> tuple[np.ndarray, np.ndarray]:
        """Return the margins of all people of the validation part, as `FitData.margins`, computed once."""
        known = super().margins
        return self.once(("margins", self.method.name, id(fitted)), lambda: (fitted, known(fitted)))[1]

    def margins_of_choosers(self, fitted: Fitted) -> np.ndarray:
        """Return the margins of the people who choose, float32 [m]."""
        margins, places = self.margins(fitted)
        return margins if self.choosers is None else margins[self.choosers[self.validation.users[places]]]

    def loss(self, fitted: Fitted) -> float:
        """Return the mean loss of the people who choose."""
        return float(np.mean(np.logaddexp(0.0, -self.margins_of_choosers(fitted), dtype=np.float64)))

    def best(self, candidates: Iterable[Fitted]) -> Fitted:
        """Return the first candidate of the lowest loss of the people who choose: one object for each candidate, with
        the loss of all people among its numbers."""
        fitted = min(((self.loss(one), one) for one in candidates), key=lambda pair: pair[0])[1]

        def found() -> Fitted:
            whole = np.float32(self.chosen_by(None).loss(fitted))
            best = replace(fitted, numbers={**fitted.numbers, LOSS: whole})
            known = self.margins(fitted)
            self.once(("margins", self.method.name, id(best)), lambda: (best, known))
            self.once(("best", id(best)), lambda: (best, best))  # may be a candidate of the next choice
            return best

        return self.once(("best", id(fitted)), lambda: (fitted, found()))[1]
