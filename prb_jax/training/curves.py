"""The learning curves of a run as a picture."""

from __future__ import annotations

import itertools
import math
from collections.abc import Callable, Mapping, Sequence
from pathlib import Path
from typing import TYPE_CHECKING, Any

from prb_jax.data.writing import whole_file, writing
from prb_jax.errors import RunError, need_extra

if TYPE_CHECKING:
    from matplotlib.figure import Figure

Panels = Sequence[tuple[str, str]]
"""The name of a number in the rows, and what stands above its panel."""

PANELS: Panels = (("loss", "Loss"), ("accuracy", "Accuracy"), ("margin", "Mean margin"))


def plot_curves(
    rows: Sequence[Mapping[str, Any]], path: str | Path, *, title: str = "", panels: Panels = PANELS
) -> Path:
    """Draws the figure of `curves_figure` into a file.

    Args:
      rows: lines of `metrics.jsonl`.
      path: where to write; its suffix (.png, .pdf, .svg) says what.
      title: above the panels.
      panels: what is drawn.

    Raises:
      RunError: matplotlib is not installed, or the file cannot be written.
    """
    figure = curves_figure(rows, panels=panels)
    if title:
        figure.suptitle(title)
    target = Path(path)
    with writing(target), whole_file(target) as file:
        figure.savefig(file, dpi=120, format=target.suffix[1:])
    return target


def draw_learning_curves(
    rows: Sequence[Mapping[str, Any]], out: Path, *, say: Callable[[str], None], panels: Panels = PANELS
) -> None:
    """Draw `learning_curves.png` of a run; a picture less is said and no reason to fail."""
    try:
        plot_curves(rows, out / "learning_curves.png", title=out.name, panels=panels)
    except RunError as error:
        say(f"no picture: {error}")


def curves_figure(
    rows: Sequence[Mapping[str, Any]], *, size: tuple[float, float] = (12, 3.6), panels: Panels = PANELS
) -> Figure:
    """Return numbers of training (and their running means) and validation against the step.

    Args:
      rows: lines of `metrics.jsonl`.
      size: width and height in inches.
      panels: what is drawn; of a reward model loss, accuracy and margin.

    Raises:
      RunError: matplotlib is not installed.
    """
    need_extra("report", "learning curves (none: log.plot=false)")
    from matplotlib.figure import Figure

    figure = Figure(figsize=size, layout="constrained")
    axes = figure.subplots(1, len(panels), squeeze=False)[0]
    for axis, (name, label) in zip(axes, panels, strict=True):
        steps, values = _series(rows, name)
        if steps:
            axis.plot(steps, values, color="tab:blue", alpha=0.25, linewidth=0.8)
            axis.plot(steps, _running_mean(values), color="tab:blue", label="training")
        steps, values = _series(rows, f"validation_{name}")
        if steps:
            axis.plot(steps, values, color="tab:orange", marker="o", markersize=3, label="validation")
        if name == "loss":
            axis.axhline(math.log(2), color="gray", linewidth=0.8, linestyle=":", label="chance")
        if name == "accuracy":
            axis.axhline(0.5, color="gray", linewidth=0.8, linestyle=":", label="chance")
        axis.set_xlabel("step")
        axis.set_title(label)
        axis.grid(alpha=0.3)
    axes[0].legend()
    return figure


def _series(rows: Sequence[Mapping[str, Any]], name: str) -> tuple[list[int], list[float]]:
    found = [(row["step"], row[name]) for row in rows if name in row]
    return [step for step, _ in found], [value for _, value in found]


def _running_mean(values: Sequence[float]) -> list[float]:
    """Return the mean around each point, as many on either side: up to a fortieth of the run, fewer near its ends.

    So a straight line stays where it is, while a mean of the points before would run behind it.
    """
    sums, last, half = [0.0, *itertools.accumulate(values)], len(values) - 1, len(values) // 40
    reach = [min(half, i, last - i) for i in range(len(values))]
    return [(sums[i + r + 1] - sums[i - r]) / (2 * r + 1) for i, r in enumerate(reach)]
