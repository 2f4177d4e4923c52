"""How much annotators agree beyond chance: Krippendorff's alpha, Fleiss' and Cohen's kappa, Gwet's AC1.

A table [U, R] holds the category that each of R annotators gave to each of U units, a number from 0, and ``MISSING``
where there is none. All coefficients are computed for B resamples at once: weights say how often each unit and each
annotator was drawn. A pair of ratings counts as often as the product of the weights of its two annotators, and nobody
is paired with himself, so that an annotator who is drawn twice does not agree with himself. With weights of 1 the
coefficients are the published ones:

- alpha: Krippendorff, "Content Analysis" (2004), chapter 11, nominal and ordinal; units with one rating do not count.
- Fleiss' kappa and AC1: Gwet, "Handbook of Inter-Rater Reliability" (4th ed., 2014), chapters 2 and 5, where units may
  have different numbers of ratings: the observed agreement is that of the units with two ratings or more, the shares of
  the categories are those of all units.
- Cohen's kappa: Cohen (1960), of the units that both annotators rated.

A coefficient is NaN where it is not defined: no unit with two ratings, or no disagreement that chance could make.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from typing import Final, Literal

import numpy as np

MISSING: Final = -1
"""In a table: this annotator did not rate this unit."""

NOMINAL: Final = "nominal"
ORDINAL: Final = "ordinal"
Level = Literal["nominal", "ordinal"]

_AT_ONCE: Final = 2_000_000
"""Numbers in the largest array, about."""


@dataclass(frozen=True)
class Weights:
    """How often units and annotators were drawn, in B resamples.

    Attributes:
      units: [B, U] numbers from 0.
      annotators: [B, R] numbers from 0; [1, R] where they are the same in all resamples.
    """

    units: np.ndarray
    annotators: np.ndarray


def agreement(
    table: np.ndarray, *, categories: int, level: Level = NOMINAL, weights: Weights | None = None
) -> dict[str, np.ndarray]:
    """Return the coefficients of a table, [B] each.

    Args:
      table: int [U, R], categories from 0, or ``MISSING``.
      categories: how many there are, also those that nobody gave.
      level: of measurement: "nominal", or "ordinal" for alpha alone.
      weights: of the resamples; one resample with weights of 1 where it is not given.

    Returns:
      {"alpha"}, and of nominal categories also {"fleiss", "ac1", "observed"}: the last one is the share of the pairs of
      ratings that are equal, the mean over units.
    """
    table = np.asarray(table)
    units, annotators = table.shape
    if weights is None:
        weights = Weights(np.ones((1, units)), np.ones((1, annotators)))
    if not table.size:
        return dict.fromkeys(_names(level), np.full(len(weights.units), np.nan))
    given = (table[..., None] == np.arange(categories)).astype(np.float64)
    size = max(1, _AT_ONCE // max(1, units * categories))
    parts = []
    for at in range(0, len(weights.units), size):
        people = weights.annotators if len(weights.annotators) == 1 else weights.annotators[at : at + size]
        parts.append(_agreement(given, level, weights.units[at : at + size], people))
    return {name: np.concatenate([part[name] for part in parts]) for name in _names(level)}


def cohen(
    first: np.ndarray, second: np.ndarray, *, categories: int, unit_weights: np.ndarray | None = None
) -> np.ndarray:
    """Return Cohen's kappa [B] of two annotators.

    Args:
      first, second: int [U], categories from 0, or ``MISSING``.
      categories: how many there are.
      unit_weights: [B, U], how often each unit was drawn; one resample with weights of 1 where it is not given.
    """
    first, second = np.asarray(first), np.asarray(second)
    weights = np.ones((1, len(first))) if unit_weights is None else np.asarray(unit_weights, np.float64)
    both = (first != MISSING) & (second != MISSING)
    cells = first[both] * categories + second[both]
    counts = weights[:, both] @ (cells[:, None] == np.arange(categories**2)).astype(np.float64)
    total = counts.sum(axis=-1)
    shares = (counts / np.where(total > 0, total, 1)[:, None]).reshape(-1, categories, categories)
    observed = np.trace(shares, axis1=1, axis2=2)
    expected = (shares.sum(axis=1) * shares.sum(axis=2)).sum(axis=-1)
    return _beyond_chance(observed, expected, total > 0)


def _names(level: Level) -> tuple[str, ...]:
    return ("alpha",) if level == ORDINAL else ("alpha", "fleiss", "ac1", "observed")


def _agreement(
    given: np.ndarray, level: Level, unit_weights: np.ndarray, annotator_weights: np.ndarray
) -> Mapping[str, np.ndarray]:
    """The coefficients of ``given`` [U, R, C], whether an annotator gave a category to a unit."""
    units, annotators, categories = given.shape
    flat = given.transpose(1, 0, 2).reshape(annotators, units * categories)
    weights = np.asarray(annotator_weights, np.float64)
    shape = (len(weights), units, categories)
    rated = (weights @ flat).reshape(shape)
    itself = (weights**2 @ flat).reshape(shape)  # what pairs of an annotator with himself would add
    ratings = rated.sum(axis=-1)
    pairs = ratings**2 - itself.sum(axis=-1)
    paired = pairs > 0.5
    drawn = np.asarray(unit_weights, np.float64)
    of_pair = np.where(paired, 1 / np.where(paired, pairs, 1), 0)

    scale = (of_pair * ratings)[..., None]
    together = _over_units(drawn, rated * scale, rated)
    diagonal = np.arange(categories)
    together[:, diagonal, diagonal] -= _over_units(drawn, itself * scale, np.ones((*shape[:2], 1)))[..., 0]
    found = {"alpha": _alpha(together, level)}
    if level == ORDINAL:
        return found
    agreeing = (rated**2 - itself).sum(axis=-1) * of_pair
    some = ratings > 0
    share = rated / np.where(some, ratings, 1)[..., None]
    parts = np.concatenate([agreeing[..., None], paired[..., None], some[..., None], share], axis=-1)
    sums = _over_units(drawn, parts, np.ones((*shape[:2], 1)))[..., 0]
    observed = np.where(sums[:, 1] > 0, sums[:, 0] / np.where(sums[:, 1] > 0, sums[:, 1], 1), np.nan)
    shares = sums[:, 3:] / np.where(sums[:, 2] > 0, sums[:, 2], 1)[:, None]
    by_chance = {
        "fleiss": (shares**2).sum(axis=-1),
        "ac1": (shares * (1 - shares)).sum(axis=-1) / max(categories - 1, 1),
    }
    for name, expected in by_chance.items():
        found[name] = _beyond_chance(observed, expected, sums[:, 1] > 0)
    return found | {"observed": observed}


def _over_units(drawn: np.ndarray, left: np.ndarray, right: np.ndarray) -> np.ndarray:
    """The sum over units [B, C, D] of left [B or 1, U, C] times right [B or 1, U, D], each as often as it was drawn."""
    if len(left) == 1:
        products = (left[0, :, :, None] * right[0, :, None, :]).reshape(len(left[0]), -1)
        return (drawn @ products).reshape(len(drawn), left.shape[-1], right.shape[-1])
    return (left * drawn[..., None]).transpose(0, 2, 1) @ right


def _alpha(together: np.ndarray, level: Level) -> np.ndarray:
    """Krippendorff's alpha [B] of coincidences [B, C, C]."""
    of_category = together.sum(axis=-1)
    if level == ORDINAL:
        middle = np.cumsum(of_category, axis=-1) - of_category / 2
        distance = (middle[:, :, None] - middle[:, None, :]) ** 2
    else:
        distance = 1 - np.eye(together.shape[-1])[None]
    total = of_category.sum(axis=-1)
    observed = (together * distance).sum(axis=(1, 2))
    expected = (of_category[:, :, None] * of_category[:, None, :] * distance).sum(axis=(1, 2))
    defined = expected > 1e-9
    return np.where(defined, 1 - (total - 1) * observed / np.where(defined, expected, 1), np.nan)


def _beyond_chance(observed: np.ndarray, expected: np.ndarray, defined: np.ndarray) -> np.ndarray:
    defined = defined & (expected < 1 - 1e-12)
    return np.where(defined, (observed - expected) / np.where(defined, 1 - expected, 1), np.nan)
