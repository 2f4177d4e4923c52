"""Intervals of benchmark scores: the comparisons are drawn again, and the benchmark's own rule is applied to them."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any, Final

import numpy as np

from prb_jax.benchmarks.benchmark import Benchmark
from prb_jax.metrics.accuracy import ScoredRow
from prb_jax.metrics.uncertainty import LEAST_CLUSTERS

RESAMPLES: Final = 400


def score_intervals(
    benchmark: Benchmark,
    rows: Sequence[ScoredRow],
    users: Sequence[str | None],
    *,
    seed: int,
    resamples: int = RESAMPLES,
) -> dict[str, Any]:
    """Return "score_ci95", "score_ci95_reason" and "figures_ci95" of one benchmark.

    Within each subset as many units are drawn with replacement as it has. A unit is a user where there are users, else
    what the benchmark says, usually a comparison. The ends are the 2.5th and the 97.5th percentile.

    Args:
      seed: of the draws; the same rows in any order, with the same seed, have the same intervals.
      resamples: how often the rows are drawn.
    """
    score = benchmark.score(rows)
    strata = _strata(benchmark, rows, users)
    units = sum(len(members) for members in strata)
    reason = None
    if score.score is None:
        reason = "the score is not defined"
    elif units < LEAST_CLUSTERS:
        reason = f"{units} units to draw from; an interval needs at least {LEAST_CLUSTERS}"
    elif any(len(members) < 2 for members in strata):
        reason = "a subset with a single unit has nothing to draw from"
    if reason is not None:
        return {
            "score_ci95": None,
            "score_ci95_reason": reason,
            "figures_ci95": dict.fromkeys(score.figures),
        }
    rng = np.random.default_rng(seed)
    drawn = [benchmark.score(_draw(benchmark, strata, rng)) for _ in range(resamples)]
    bounds = _bounds([each.score for each in drawn])
    return {
        "score_ci95": bounds,
        "score_ci95_reason": None if bounds else "all draws give one score",
        "figures_ci95": {name: _bounds([each.figures.get(name) for each in drawn]) for name in score.figures},
    }


def _strata(
    benchmark: Benchmark, rows: Sequence[ScoredRow], users: Sequence[str | None]
) -> list[list[list[ScoredRow]]]:
    """The rows by subset and unit, in an order that does not depend on theirs."""
    strata: dict[str, dict[str, list[ScoredRow]]] = {}
    for row, user in sorted(zip(rows, users, strict=True), key=lambda pair: pair[0].id):
        unit = benchmark.unit(row) if user is None else user
        strata.setdefault(row.subset or "", {}).setdefault(unit, []).append(row)
    return [list(strata[name].values()) for name in sorted(strata)]


def _draw(
    benchmark: Benchmark, strata: Sequence[Sequence[Sequence[ScoredRow]]], rng: np.random.Generator
) -> list[ScoredRow]:
    rows: list[ScoredRow] = []
    number = 0
    for members in strata:
        for place in rng.integers(len(members), size=len(members)).tolist():
            rows += [benchmark.copy(row, number) for row in members[place]]
            number += 1
    return rows


def _bounds(values: Sequence[float | None]) -> list[float] | None:
    known = [value for value in values if value is not None and np.isfinite(value)]
    if len(known) < len(values) or min(known) == max(known):
        return None
    low, high = np.quantile(known, [0.025, 0.975])
    return [float(low), float(high)]
