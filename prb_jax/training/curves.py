"""The plot of a run's learning curves."""

from __future__ import annotations

import itertools
import math
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import TYPE_CHECKING, Any

from prb_jax.platform.extras import need_extra
from prb_jax.records.writing import whole_file, writing

if TYPE_CHECKING:
    from matplotlib.figure import Figure

_PANELS = {"loss": "Loss", "accuracy": "Accuracy", "margin": "Mean margin"}
_REWARDED = {
    "reward": "Reward", "gold": "Gold", "kl": "KL to the reference", "entropy": "Entropy", "length": "Tokens"
}  # fmt: skip
"""Metrics to plot and their titles, for runs that learn from labels and for runs that learn from a reward."""


def panels_of(rows: Sequence[Mapping[str, Any]]) -> dict[str, str]:
    """Return the metrics to plot from these rows: names and panel titles."""
    panels = _REWARDED if any("reward" in row for row in rows) else _PANELS
    return {name: title for name, title in panels.items() if any(name in row for row in rows)} or _PANELS


def plot_curves(rows: Sequence[Mapping[str, Any]], path: Path, *, title: str) -> None:
    """Save :func:`curves_figure` of these rows, with a title, as a PNG file.

    Raises:
      RunError: Matplotlib is not installed, or the file cannot be written.
    """
    figure = curves_figure(rows)
    figure.suptitle(title)
    with writing(path), whole_file(path) as file:
        figure.savefig(file, dpi=120, format="png")


def curves_figure(
    rows: Sequence[Mapping[str, Any]], *, size: tuple[float, float] = (12, 3.6), panel: str | None = None
) -> Figure:
    """Plot training metrics (with running means) and validation metrics against the step.

    Args:
      rows: Lines of `metrics.jsonl`.
      size: Width and height in inches.
      panel: The only metric to plot; by default all of `panels_of`.

    Raises:
      RunError: Matplotlib is not installed.
    """
    need_extra("report", "learning curves (none: log.plot=false)")
    from matplotlib.figure import Figure

    def series(name: str) -> tuple[list[int], list[float]]:
        return [row["step"] for row in rows if name in row], [row[name] for row in rows if name in row]

    figure, panels = Figure(figsize=size, layout="constrained"), panels_of(rows)
    explained = next(iter(panels))
    panels = panels if panel is None else {panel: panels[panel]}
    axes = figure.subplots(1, len(panels), squeeze=False)[0]
    for axis, (name, title) in zip(axes, panels.items(), strict=True):
        steps, values = series(name)
        if steps:
            axis.plot(steps, values, color="tab:blue", alpha=0.25, linewidth=0.8)
            axis.plot(steps, _running_mean(values), color="tab:blue", label="training")
        steps, values = series(f"validation_{name}")
        if steps:
            axis.plot(steps, values, color="tab:orange", marker="o", markersize=3, label="validation")
        if (chance := {"loss": math.log(2), "accuracy": 0.5}.get(name)) is not None:
            axis.axhline(chance, color="gray", linewidth=0.8, linestyle=":", label="chance")
        axis.set_xlabel("step")
        axis.set_title(title)
        axis.grid(alpha=0.3)
        if name == explained:
            axis.legend()
    return figure


def _running_mean(values: Sequence[float]) -> list[float]:
    """Return centred running means: up to a fortieth of the run on either side, fewer near the ends.

    A straight line is unchanged, whereas a mean over earlier points would lag behind.
    """
    sums, last, half = [0.0, *itertools.accumulate(values)], len(values) - 1, len(values) // 40
    reach = [min(half, i, last - i) for i in range(len(values))]
    return [(sums[i + r + 1] - sums[i - r]) / (2 * r + 1) for i, r in enumerate(reach)]
