"""Intervals of coefficients of agreement: the bootstrap over units, and over units and annotators at once."""

from __future__ import annotations

from collections.abc import Hashable, Mapping, Sequence
from dataclasses import dataclass, field, replace
from typing import Any, Final

import numpy as np

from prb_jax.metrics.annotators import MISSING, NOMINAL, Level, Weights, agreement, cohen
from prb_jax.metrics.uncertainty import LEAST_CLUSTERS

DRAWS: Final = 2000

_LEAST_DEFINED: Final = 0.95  # share of the resamples in which a coefficient is defined


@dataclass(frozen=True)
class Estimate:
    """A figure about judgements with its intervals.

    Attributes:
      value: None where it is not defined.
      ci95: 95 % interval over items, or over clusters of them, judged by these annotators; None where there is none.
      ci95_annotators: likewise over both items and annotators, as draws from many; None where there is none.
      reasons: why there is none, by the name of the attribute.
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
    """Return the coefficients of `prb_jax.metrics.annotators.agreement` with percentile bootstrap intervals.

    Args:
      table: int [U, R].
      categories: how many there are.
      level: of measurement.
      clusters: [U] units of one cluster are drawn together, as the two responses of one pair; None for units that
        are drawn alone.
      over: what a cluster is called in reasons, in the plural.
      draws: resamples.
      seed: of the resamples.
    """
    table = np.asarray(table)
    values = agreement(table, categories=categories, level=level)
    rng = np.random.default_rng(seed)
    names = list(range(len(table))) if clusters is None else list(clusters)
    units = _unit_weights(names, draws, rng)
    paired = (table != MISSING).sum(axis=1) > 1
    count = len({name for name, kept in zip(names, paired, strict=True) if kept})
    people = int((table[paired] != MISSING).any(axis=0).sum())
    weights = {"ci95": Weights(units, np.ones((1, table.shape[1])))}
    if people >= LEAST_CLUSTERS:
        shares = [1 / table.shape[1]] * table.shape[1]
        weights["ci95_annotators"] = Weights(units, rng.multinomial(table.shape[1], shares, size=draws))
    resampled = {
        name: agreement(table, categories=categories, level=level, weights=each)
        for name, each in weights.items()
    }
    return {
        name: _estimate(
            float(value[0]), {of: each[name] for of, each in resampled.items()}, count, people, over
        )
        for name, value in values.items()
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
    """Return Cohen's kappa of two annotators with its interval over units; other two would have another kappa.

    Args:
      first, second: int [U].
      categories, clusters, over, draws, seed: as of `agreement_with_intervals`.
    """
    names = np.arange(len(first)).tolist() if clusters is None else list(clusters)
    both = (np.asarray(first) != MISSING) & (np.asarray(second) != MISSING)
    first, second = np.asarray(first)[both], np.asarray(second)[both]
    names = [name for name, kept in zip(names, both, strict=True) if kept]
    value = float(cohen(first, second, categories=categories)[0])
    units = _unit_weights(names, draws, np.random.default_rng(seed))
    resampled = cohen(first, second, categories=categories, unit_weights=units)
    found = _estimate(value, {"ci95": resampled}, len(set(names)), LEAST_CLUSTERS, over)
    kept = {name: reason for name, reason in found.reasons.items() if name != "ci95_annotators"}
    return replace(found, reasons=kept)


def _unit_weights(names: Sequence[Hashable], draws: int, rng: np.random.Generator) -> np.ndarray:
    """How often each unit is drawn, [draws, U]; units of one name together."""
    number: dict[Hashable, int] = {}
    of_unit = [number.setdefault(name, len(number)) for name in names]
    if not number:
        return np.zeros((draws, 0))
    return rng.multinomial(len(number), [1 / len(number)] * len(number), size=draws)[:, of_unit]


def too_few(clusters: int, annotators: int, *, over: str) -> dict[str, str]:
    """Return the reasons why a figure has no interval: fewer than `LEAST_CLUSTERS` of what it is taken over.

    Args:
      clusters: of items.
      annotators: who judged them.
      over: what the clusters are called, in the plural.
    """
    reasons = {}
    if clusters < LEAST_CLUSTERS:
        reasons["ci95"] = f"{clusters} {over}; an interval needs at least {LEAST_CLUSTERS}"
        reasons["ci95_annotators"] = reasons["ci95"]
    elif annotators < LEAST_CLUSTERS:
        reasons["ci95_annotators"] = (
            f"{annotators} annotators; an interval over annotators needs at least {LEAST_CLUSTERS}"
        )
    return reasons


def _estimate(
    value: float, resampled: Mapping[str, np.ndarray], clusters: int, annotators: int, over: str
) -> Estimate:
    """A coefficient with percentile intervals of its resamples, by the names of the intervals."""
    if np.isnan(value):
        reason = "no two annotators judged the same item" if clusters == 0 else "all judgements are equal"
        return Estimate(None, reasons={"value": reason})
    reasons = too_few(clusters, annotators, over=over)
    found: dict[str, tuple[float, float]] = {}
    for name, values in resampled.items():
        defined = values[~np.isnan(values)]
        if name in reasons:
            continue
        if len(defined) < _LEAST_DEFINED * len(values):
            reasons[name] = f"not defined in {len(values) - len(defined):,} of {len(values):,} resamples"
            continue
        low, high = np.quantile(defined, [0.025, 0.975])
        found[name] = (float(low), float(high))
    return Estimate(value, found.get("ci95"), found.get("ci95_annotators"), reasons)
