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

    # float64 [U], how much the losses of each person of the validation part count in a choice; all alike if None
    votes: np.ndarray | None = None

    def chosen_by(self, votes: np.ndarray | None) -> Self:
        """Return the same data and fits, where others choose."""
        return replace(self, votes=votes)

    def made(
        self, step: tuple[object, ...], base: Fitted, make: Callable[[], Iterable[Fitted]]
    ) -> list[Fitted]:
        """Return the fits that a step makes from a base, made once."""
        return self.once((*step, id(base)), lambda: (base, list(make())))[1]

    def margins(self, fitted: Fitted) -> tuple[np.ndarray, np.ndarray]:
        """Return the margins of all people of the validation part, as `FitData.margins`, computed once."""
        known = super().margins
        return self.once(("margins", self.method.name, id(fitted)), lambda: (fitted, known(fitted)))[1]

    def weights(self, fitted: Fitted) -> np.ndarray:
        """Return how much each of the margins counts in a choice, float64 [m], of mean 1."""
        places = self.margins(fitted)[1]
        if self.votes is None:
            return np.ones(len(places))
        counted = self.votes[self.validation.users[places]]
        return counted / counted.mean()

    def loss(self, fitted: Fitted) -> float:
        """Return the mean loss of the people who choose."""
        losses = np.logaddexp(0.0, -self.margins(fitted)[0], dtype=np.float64)
        return float(np.mean(losses if self.votes is None else self.weights(fitted) * losses))

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
