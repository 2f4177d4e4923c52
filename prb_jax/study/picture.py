"""The few-shot curves of a study: accuracy of each method against the number of comparisons of a person."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import TYPE_CHECKING, Any, Final

from prb_jax.data.writing import whole_file, writing
from prb_jax.errors import need_extra

if TYPE_CHECKING:
    from matplotlib.axes import Axes
    from matplotlib.figure import Figure

_COLUMNS: Final = 4
_REFERENCE: Final = "pooled"
_BASELINES: Final = "without comparisons"
_OTHERS: Final = "#b0b0b0"


def draw_curves(rows: Sequence[Mapping[str, Any]], path: Path) -> None:
    """Draw :func:`curves_figure` to a file.

    Args:
      rows: of ``results.json``.
      path: where to write; its suffix (.png, .pdf, .svg) says what.

    Raises:
      RunError: matplotlib is not installed, or the file cannot be written.
    """
    figure = curves_figure(rows)
    import matplotlib

    with matplotlib.rc_context({"svg.hashsalt": "prb"}), writing(path), whole_file(path) as file:
        dated = {"Date": None} if path.suffix == ".svg" else None
        figure.savefig(file, format=path.suffix[1:], dpi=120, metadata=dated)


def curves_figure(rows: Sequence[Mapping[str, Any]]) -> Figure:
    """Return accuracy on unseen people against shots: a panel for each method, with all other methods in grey.

    The band is the 95 % interval of the method; that of `bayes` shows the simulated ceiling too. The last panel names
    the baselines, which know no shots.

    Raises:
      RunError: matplotlib is not installed.
    """
    need_extra("report", "the picture")
    from matplotlib.figure import Figure

    here = [row for row in rows if row["split"] == "unseen" and row["control"] is None]
    ceiling = sorted(
        (row for row in rows if row["split"] == "unseen" and row["method"] == "ceiling"),
        key=lambda row: row["shots"],
    )
    reached = {row["shots"]: row.get("reached") for row in here}
    ticks = sorted(reached)
    curves: dict[str, list[Mapping[str, Any]]] = {}
    for row in sorted(here, key=lambda row: row["shots"]):
        if row["accuracy"] is not None:
            curves.setdefault(row["method"], []).append(row)
    baselines = {name: points for name, points in curves.items() if len(points) == 1 < len(ticks)}
    methods = [name for name in curves if name not in baselines]
    panels = [*methods, *([_BASELINES] if baselines else [])]
    columns = min(_COLUMNS, len(panels))
    lines = -(-len(panels) // columns)
    figure = Figure(figsize=(2.0 * columns + 0.8, 1.6 * lines + 1.2), layout="constrained")
    axes = figure.subplots(lines, columns, sharex=True, sharey=True, squeeze=False)
    for axis in axes.flat[len(panels) :]:
        axis.set_visible(False)
    for axis, panel in zip(axes.flat, panels, strict=False):
        for name, points in curves.items():
            if name not in (panel, _REFERENCE) and name not in baselines:
                _curve(axis, ticks, points, color=_OTHERS, linewidth=0.8, label="other methods")
        if panel == _BASELINES:
            _baselines(axis, ticks, {name: points[0]["accuracy"] for name, points in baselines.items()})
        else:
            if panel != _REFERENCE and _REFERENCE in methods:
                _curve(axis, ticks, curves[_REFERENCE], color="#ff7f0e", linestyle="--", label=_REFERENCE)
            _curve(axis, ticks, curves[panel], color="#1f77b4", marker="o", markersize=3, label="the method")
            if panel == "bayes" and ceiling:
                _curve(axis, ticks, ceiling, color="#1f77b4", linestyle=":", label="ceiling, simulated")
            bands = [(ticks.index(row["shots"]), row["accuracy_ci95"]) for row in curves[panel]]
            bands = [(x, bounds) for x, bounds in bands if bounds is not None]
            if bands:
                lows, highs = zip(*(bounds for _, bounds in bands))
                axis.fill_between([x for x, _ in bands], lows, highs, color="#1f77b4", alpha=0.2, linewidth=0)
        axis.axhline(0.5, color="#808080", linewidth=0.6, linestyle=":")
        axis.set_title(panel, fontsize=10)
        axis.set_xticks(
            range(len(ticks)),
            [str(k) if reached[k] is None else f"{k}\n{reached[k]:,}" for k in ticks],
        )
        axis.set_xlim(-0.3, len(ticks) - 0.7)
        axis.grid(alpha=0.3)
    for place in range(max(0, len(panels) - columns), (lines - 1) * columns):
        axes.flat[place].tick_params(labelbottom=True)  # nothing stands below it
    below = "" if None in reached.values() else "; below: people who have so many"
    figure.supxlabel(f"comparisons of the person that the method is adapted on{below}", fontsize=10)
    figure.supylabel("accuracy on unseen people", fontsize=10)
    lines_of = {
        label: line
        for axis in axes.flat
        for line, label in zip(*axis.get_legend_handles_labels(), strict=True)
    }
    figure.legend(
        lines_of.values(), lines_of, loc="outside upper center", ncols=4, frameon=False, fontsize=10
    )
    return figure


def _curve(axis: Axes, ticks: Sequence[int], points: Sequence[Mapping[str, Any]], **style: Any) -> None:
    axis.plot([ticks.index(row["shots"]) for row in points], [row["accuracy"] for row in points], **style)


def _baselines(axis: Axes, ticks: Sequence[int], accuracies: Mapping[str, float]) -> None:
    """Draw baselines as lines across, with their names at the left or the right end in turn."""
    for place, (name, accuracy) in enumerate(sorted(accuracies.items(), key=lambda item: item[1])):
        axis.axhline(accuracy, color="#1f77b4", linewidth=0.8)
        x, side = ((0.03, "left"), (0.97, "right"))[place % 2]
        axis.text(x, accuracy, name, transform=axis.get_yaxis_transform(), ha=side, va="bottom", fontsize=8)
