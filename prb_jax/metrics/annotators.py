"""Agreement of annotators beyond chance, with intervals: Krippendorff's alpha, Fleiss' and Cohen's kappa, Gwet's AC1.

A table [U, R] contains the category that each of R annotators gave to each of U units, a number from 0, or ``MISSING``.
All coefficients are computed for B resamples at once: weights count how often each unit and each annotator was drawn. A
pair of ratings is weighted by the product of the weights of its two annotators. Annotators are never paired with
themselves, so drawing one twice adds no agreement. With weights of 1 the coefficients are the published ones:

- alpha: Krippendorff, "Content Analysis" (2004), chapter 11, nominal and ordinal; units with one rating do not count.
- Fleiss' kappa and AC1: Gwet, "Handbook of Inter-Rater Reliability" (4th ed., 2014), chapters 2 and 5, where units may
  have different numbers of ratings: the observed agreement uses the units with two ratings or more, the shares of the
  categories use all units.
- Cohen's kappa: Cohen (1960), on the units that both annotators rated.

A coefficient is NaN if it is undefined: no unit has two ratings, or disagreement by chance is impossible.
"""

from __future__ import annotations

from collections.abc import Hashable, Mapping, Sequence
from dataclasses import dataclass, field, replace
from typing import Any, Final, Literal

import numpy as np

from prb_jax.metrics.clusters import counted_clusters
from prb_jax.metrics.uncertainty import LEAST_CLUSTERS

MISSING: Final = -1  # in a table: this annotator did not rate this unit

NOMINAL: Final = "nominal"
ORDINAL: Final = "ordinal"
Level = Literal["nominal", "ordinal"]

DRAWS: Final = 2000  # resamples for an interval
_AT_ONCE: Final = 2_000_000  # approximate size of the largest array
_LEAST_DEFINED: Final = 0.95  # minimum share of the resamples in which a coefficient is defined


def agreement(
    table: np.ndarray,
    *,
    categories: int,
    level: Level = NOMINAL,
    units: np.ndarray | None = None,
    annotators: np.ndarray | None = None,
) -> dict[str, np.ndarray]:
    """Return the coefficients of a table, [B] each.

    Args:
      table: Categories from 0, or ``MISSING``, int [U, R].
      categories: Number of categories, including unused ones.
      level: Level of measurement: "nominal", or "ordinal" (only for alpha).
      units: How often each unit was drawn, [B, U]; by default one resample with each unit once.
      annotators: The same for annotators, [B, R]; [1, R] if they are the same in all resamples.

    Returns:
      {"alpha"}, and for nominal categories also {"fleiss", "ac1", "observed"}: the last one is the share of equal pairs
      of ratings, the mean over units.
    """
    table = np.asarray(table)
    units = np.ones((1, len(table))) if units is None else units
    annotators = np.ones((1, table.shape[1])) if annotators is None else annotators
    names = ("alpha",) if level == ORDINAL else ("alpha", "fleiss", "ac1", "observed")
    if not table.size:
        return dict.fromkeys(names, np.full(len(units), np.nan))
    given = (table[..., None] == np.arange(categories)).astype(np.float64)
    size = max(1, _AT_ONCE // max(1, len(table) * categories))
    parts = []
    for at in range(0, len(units), size):
        people = annotators if len(annotators) == 1 else annotators[at : at + size]
        parts.append(_agreement(given, level, units[at : at + size], people))
    return {name: np.concatenate([part[name] for part in parts]) for name in names}


def cohen(
    first: np.ndarray, second: np.ndarray, *, categories: int, units: np.ndarray | None = None
) -> np.ndarray:
    """Return Cohen's kappa [B] of two annotators: ``first`` and ``second`` are int [U]; the other arguments are
    the same as for :func:`agreement`."""
    first, second = np.asarray(first), np.asarray(second)
    weights = np.ones((1, len(first))) if units is None else np.asarray(units, np.float64)
    both = (first != MISSING) & (second != MISSING)
    cells = first[both] * categories + second[both]
    counts = weights[:, both] @ (cells[:, None] == np.arange(categories**2)).astype(np.float64)
    total = counts.sum(axis=-1)
    shares = (counts / np.where(total > 0, total, 1)[:, None]).reshape(-1, categories, categories)
    observed = np.trace(shares, axis1=1, axis2=2)
    expected = (shares.sum(axis=1) * shares.sum(axis=2)).sum(axis=-1)
    return _beyond_chance(observed, expected, total > 0)


def _agreement(
    given: np.ndarray, level: Level, drawn: np.ndarray, annotators: np.ndarray
) -> dict[str, np.ndarray]:
    """Return the coefficients of ``given`` [U, R, C]: whether an annotator gave a category to a unit."""
    drawn, weights = np.asarray(drawn, np.float64), np.asarray(annotators, np.float64)
    flat = given.transpose(1, 0, 2).reshape(given.shape[1], -1)
    shape = (len(weights), given.shape[0], given.shape[2])
    rated = (weights @ flat).reshape(shape)
    itself = (weights**2 @ flat).reshape(shape)  # pairs of an annotator with itself
    ratings = rated.sum(axis=-1)
    pairs = ratings**2 - itself.sum(axis=-1)
    paired = pairs > 0.5
    of_pair = np.where(paired, 1 / np.where(paired, pairs, 1), 0)

    scale = (of_pair * ratings)[..., None]
    together = _over_units(drawn, rated * scale, rated)
    diagonal = np.arange(shape[-1])
    together[:, diagonal, diagonal] -= _over_units(drawn, itself * scale, np.ones((*shape[:2], 1)))[..., 0]
    coefficients = {"alpha": _alpha(together, level)}
    if level == ORDINAL:
        return coefficients
    agreeing = (rated**2 - itself).sum(axis=-1) * of_pair
    some = ratings > 0
    share = rated / np.where(some, ratings, 1)[..., None]
    parts = np.concatenate([agreeing[..., None], paired[..., None], some[..., None], share], axis=-1)
    sums = _over_units(drawn, parts, np.ones((*shape[:2], 1)))[..., 0]
    observed = np.where(sums[:, 1] > 0, sums[:, 0] / np.where(sums[:, 1] > 0, sums[:, 1], 1), np.nan)
    shares = sums[:, 3:] / np.where(sums[:, 2] > 0, sums[:, 2], 1)[:, None]
    by_chance = {
        "fleiss": (shares**2).sum(axis=-1),
        "ac1": (shares * (1 - shares)).sum(axis=-1) / max(shape[-1] - 1, 1),
    }
    for name, expected in by_chance.items():
        coefficients[name] = _beyond_chance(observed, expected, sums[:, 1] > 0)
    return coefficients | {"observed": observed}


def _over_units(drawn: np.ndarray, left: np.ndarray, right: np.ndarray) -> np.ndarray:
    """Return the sum over drawn units [B, C, D] of left [B or 1, U, C] times right [B or 1, U, D]."""
    if len(left) == 1:
        products = (left[0, :, :, None] * right[0, :, None, :]).reshape(len(left[0]), -1)
        return (drawn @ products).reshape(len(drawn), left.shape[-1], right.shape[-1])
    return (left * drawn[..., None]).transpose(0, 2, 1) @ right


def _alpha(together: np.ndarray, level: Level) -> np.ndarray:
    """Return Krippendorff's alpha [B] of coincidences [B, C, C]."""
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


@dataclass(frozen=True)
class Estimate:
    """A figure about judgements with its intervals. Undefined entries are None; ``reasons`` explain them by name.

    ``ci95`` is the 95 % interval over items, or clusters of items, for fixed annotators. ``ci95_annotators`` treats
    both items and annotators as random draws.
    """

    value: float | None
    ci95: tuple[float, float] | None = None
    ci95_annotators: tuple[float, float] | None = None
    reasons: Mapping[str, str] = field(default_factory=dict)

    def to_json(self) -> dict[str, Any]:
        """Return the entries of a report."""
        pairs = {"ci95": self.ci95, "ci95_annotators": self.ci95_annotators}
        bounds = {name: None if pair is None else list(pair) for name, pair in pairs.items()}
        return {"value": self.value, **bounds, "reasons": dict(self.reasons)}


def agreement_with_intervals(
    table: np.ndarray,
    *,
    categories: int,
    level: Level = NOMINAL,
    clusters: Sequence[Hashable] | None = None,
    over: str = "items",
    draws: int = DRAWS,
    seed: int = 0,
) -> dict[str, Estimate]:
    """Return the coefficients of :func:`agreement` with percentile bootstrap intervals, over units and over both.

    Args:
      table, categories, level: Same as for :func:`agreement`.
      clusters: [U] clusters of units that are drawn together, e.g. the two responses of one pair; None for units.
      over: Name of the clusters in reasons, in the plural.
      draws, seed: Number and seed of the resamples.
    """
    table = np.asarray(table)
    rng = np.random.default_rng(seed)
    names = list(range(len(table))) if clusters is None else list(clusters)
    units = _draw_units(names, draws, rng)
    paired = (table != MISSING).sum(axis=1) > 1
    count = len({name for name, kept in zip(names, paired, strict=True) if kept})
    people = int((table[paired] != MISSING).any(axis=0).sum())
    drawn: dict[str, np.ndarray | None] = {"ci95": None}
    if people >= LEAST_CLUSTERS:
        all_people = table.shape[1]
        drawn["ci95_annotators"] = rng.multinomial(all_people, [1 / all_people] * all_people, size=draws)
    resampled = {
        name: agreement(table, categories=categories, level=level, units=units, annotators=annotators)
        for name, annotators in drawn.items()
    }
    return {
        name: _estimate(
            float(value[0]), {of: part[name] for of, part in resampled.items()}, count, people, over
        )
        for name, value in agreement(table, categories=categories, level=level).items()
    }


def cohen_with_interval(
    first: np.ndarray,
    second: np.ndarray,
    *,
    categories: int,
    clusters: Sequence[Hashable] | None = None,
    over: str = "items",
    draws: int = DRAWS,
    seed: int = 0,
) -> Estimate:
    """Return Cohen's kappa of two annotators [U] with its interval over units, for these two annotators only.

    The arguments are the same as for :func:`agreement_with_intervals`.
    """
    both = (np.asarray(first) != MISSING) & (np.asarray(second) != MISSING)
    first, second = np.asarray(first)[both], np.asarray(second)[both]
    names = range(len(both)) if clusters is None else clusters
    names = [name for name, kept in zip(names, both, strict=True) if kept]
    value = float(cohen(first, second, categories=categories)[0])
    units = _draw_units(names, draws, np.random.default_rng(seed))
    resampled = {"ci95": cohen(first, second, categories=categories, units=units)}
    estimate = _estimate(value, resampled, len(set(names)), LEAST_CLUSTERS, over)
    reasons = {name: reason for name, reason in estimate.reasons.items() if name != "ci95_annotators"}
    return replace(estimate, reasons=reasons)


def too_few(clusters: int, annotators: int, *, over: str) -> dict[str, str]:
    """Return the reasons why a figure has no interval: fewer than `LEAST_CLUSTERS` annotators, or clusters of items,
    whose plural name is ``over``."""
    if clusters < LEAST_CLUSTERS:
        reason = f"{counted_clusters(clusters, over)}; an interval needs at least {LEAST_CLUSTERS}"
        return {"ci95": reason, "ci95_annotators": reason}
    if annotators < LEAST_CLUSTERS:
        reason = f"{annotators} annotators; an interval over annotators needs at least {LEAST_CLUSTERS}"
        return {"ci95_annotators": reason}
    return {}


def _draw_units(names: Sequence[Hashable], draws: int, rng: np.random.Generator) -> np.ndarray:
    """Return how often each unit is drawn, [draws, U]; units with the same name are drawn together."""
    number: dict[Hashable, int] = {}
    of_unit = [number.setdefault(name, len(number)) for name in names]
    if not number:
        return np.zeros((draws, 0))
    return rng.multinomial(len(number), [1 / len(number)] * len(number), size=draws)[:, of_unit]


def _estimate(
    value: float, resampled: Mapping[str, np.ndarray], clusters: int, annotators: int, over: str
) -> Estimate:
    """Return a coefficient with percentile intervals of its resamples, by the names of the intervals."""
    if np.isnan(value):
        reason = "no two annotators judged the same item" if clusters == 0 else "all judgements are equal"
        return Estimate(None, reasons={"value": reason})
    reasons = too_few(clusters, annotators, over=over)
    intervals: dict[str, tuple[float, float]] = {}
    for name, values in resampled.items():
        defined = values[~np.isnan(values)]
        if name in reasons:
            continue
        if len(defined) < _LEAST_DEFINED * len(values):
            reasons[name] = f"not defined in {len(values) - len(defined):,} of {len(values):,} resamples"
            continue
        low, high = np.quantile(defined, [0.025, 0.975])
        intervals[name] = (float(low), float(high))
    return Estimate(value, **intervals, reasons=reasons)
