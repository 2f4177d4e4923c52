"""Power of a study of behaviour, and the size it needs: the gate and the plan of `prb correlate`.

The gate uses the upper bound: if a reward that knows the truth does not change the behaviour by a detectable amount, a
correlation of the orders of reward models is meaningless.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any, Final

import numpy as np

from prb_jax.metrics.prediction import Cells, Resampled, noise_and_spread, percentiles, plan_models, pooled
from prb_jax.metrics.uncertainty import LEAST_CLUSTERS
from prb_jax.runs.behaviour import Figure
from prb_jax.scoring import UPPER_BOUND

RANDOM: Final = "baseline:random"  # the reward whose behaviour is the start: nothing is learned

CORRELATIONS: Final = (0.3, 0.5, 0.8)
PROMPTS: Final = (0.5, 1.0, 2.0, 4.0, 8.0)  # multiples of the study's prompts in the plan

POWER: Final = 0.8

POWER_DEFINITIONS: Final[Mapping[str, str]] = {
    "gate": "improvement: the behaviour under the upper bound, a reward that knows the truth, minus the start (the "
    "behaviour under baseline:random, or --start), with its 95 % interval over draws of users; passed: the "
    "interval is above zero, and the improvement at least least_gain; null without an upper bound or a start. "
    "If it is not passed, no correlation is computed. detectable: the smallest improvement that would have passed with "
    "a power of 80 %",
    "plan": "for a true correlation (Pearson's, over models) and a number of prompts, the fewest models with which a "
    "two-sided test at 0.05 finds it with a power of 80 %, by simulation: true figures are normal with the spread of "
    "this study's models (the variance of their figures minus the sampling variance), figures have its sampling noise, "
    "whose variance falls with the prompts for the behaviour; null: more than 1,000 models",
}


def is_upper_bound(figure: Figure) -> bool:
    """Return whether the reward model of a figure is an upper bound."""
    return UPPER_BOUND in figure.reward_model


def gate(
    figures: Sequence[Figure],
    places: Mapping[str, int],
    weights: np.ndarray,
    *,
    start: float | None,
    least_gain: float,
) -> dict[str, Any]:
    """Return how much the upper bound changes a behaviour, and whether this is enough: see `POWER_DEFINITIONS`.

    Args:
      figures: Figures of one behaviour under all reward models.
      places: Position of each cluster in ``weights``, draws of clusters [N, C].
      start: Behaviour before any learning; None for the behaviour under `RANDOM`.
      least_gain: Minimum gain of the upper bound over the start.
    """
    upper = next((figure for figure in figures if is_upper_bound(figure)), None)
    chance = next((figure for figure in figures if figure.label == RANDOM), None)
    verdict: dict[str, Any] = {"upper_bound": None if upper is None else upper.value, "start": start}
    verdict |= dict.fromkeys(("improvement", "ci95", "detectable", "passed")) | {"least_gain": least_gain}
    if upper is None:
        return verdict | {
            "reason": "no upper bound: whether any reward could move this behaviour is not known"
        }
    if start is None and chance is None:
        reason = f"no start: give --start, or a run with {RANDOM} as the reward"
        return verdict | {"reason": f"the upper bound reaches {upper.value:.3f}, but there is {reason}"}
    compared = [upper] if start is not None or chance is None else [upper, chance]
    sample = pooled(behaviour_cells(compared, places), weights)
    origin = sample.values[1] if start is None else start
    gain = float(sample.values[0] - origin)
    moved = sample.draws[:, 0] - (sample.draws[:, 1] if start is None else start)
    ends = percentiles(moved) if min(len(set(one.clusters)) for one in compared) >= LEAST_CLUSTERS else None
    passed = gain >= least_gain and ends is not None and ends[0] > 0
    shown = "no interval" if ends is None else f"[{ends[0]:+.3f}, {ends[1]:+.3f}]"
    # 1.96 + 0.84 standard errors give a two-sided test at 0.05 a power of 80 %
    detectable = None if ends is None else max(2.8 * float(np.nanstd(moved)), least_gain)
    seen = "" if detectable is None else f"; {detectable:+.3f} would have been seen with a power of 80 %"
    needed = f" of at least {least_gain:+.3f}" if least_gain > 0 else ""
    reason = f"the upper bound moves it by {gain:+.3f} {shown}"
    if not passed:
        reason = f"no power: the upper bound itself moves it by {gain:+.3f} {shown}{seen}; no gain{needed} is shown, "
        reason += "and so no correlation"
    outcome = {"start": float(origin), "improvement": gain, "ci95": ends, "detectable": detectable}
    outcome |= {"passed": passed, "reason": reason}
    return verdict | outcome


def behaviour_cells(figures: Sequence[Figure], places: Mapping[str, int]) -> Cells:
    """Return the sums and counts of figures, by cluster."""
    sums, counts = (np.zeros((len(places), len(figures))) for _ in range(2))
    for column, figure in enumerate(figures):
        index = [places[cluster] for cluster in figure.clusters]
        sums[index, column], counts[index, column] = figure.sums, figure.counts
    return Cells(sums, counts)


def plan(benchmark: Resampled, behaviour: Resampled, *, prompts: int, seed: int) -> dict[str, Any]:
    """Return how many models and prompts resolve a correlation, see `POWER_DEFINITIONS`; ``prompts`` is the number for
    each model."""
    (noise_x, spread_x), (noise_y, spread_y) = (noise_and_spread(one) for one in (benchmark, behaviour))
    planned: dict[str, Any] = {
        "models": len(behaviour.values),
        "prompts": prompts,
        "benchmark": {"spread": spread_x, "noise": noise_x},
        "behaviour": {"spread": spread_y, "noise": noise_y},
        "rows": [],
        "reason": None,
    }
    for name, spread in (("benchmark", spread_x), ("behaviour", spread_y)):
        if not spread:
            reason = f"the models differ in their {name} by no more than chance: no number of them resolves an order"
            return planned | {"reason": reason}
    for correlation in CORRELATIONS:
        for factor in PROMPTS:
            needed, here = plan_models(
                correlation,
                noise=(noise_x / spread_x, noise_y / spread_y / np.sqrt(factor)),
                models=len(behaviour.values),
                power=POWER,
                seed=seed,
            )
            row = {"correlation": correlation, "prompts": round(prompts * factor), "models": needed}
            planned["rows"].append(row | {"power_here": here})
    return planned
