"""The few-shot curves of a study: accuracy of each method against the number of comparisons of a person."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import TYPE_CHECKING, Any, Final

from prb_jax.platform.extras import need_extra
from prb_jax.records.writing import whole_file, writing

if TYPE_CHECKING:
    from matplotlib.axes import Axes
    from matplotlib.figure import Figure

_COLUMNS: Final = 4
_REFERENCE: Final = "pooled"
_BASELINES: Final = "without comparisons"
_BLUE: Final = "#1f77b4"


def save_figure(figure: Figure, path: Path) -> None:
    """Write a figure atomically and reproducibly; the suffix (.png, .pdf, .svg) selects the format.

    Raises:
      RunError: the file cannot be written.
    """
    import matplotlib

    metadata = {".svg": {"Date": None}, ".png": {"Software": None}}.get(path.suffix)
    with matplotlib.rc_context({"svg.hashsalt": "prb"}), writing(path), whole_file(path) as file:
        figure.savefig(file, format=path.suffix[1:], dpi=120, metadata=metadata)


def curves_figure(rows: Sequence[Mapping[str, Any]]) -> Figure:
    """Return accuracy on unseen people against shots, from the rows of ``results.json``: a panel for each method, with
    all other methods in grey.

    The band is the 95 % interval of the method; the panel of `bayes` also shows the simulated ceiling. The last panel
    shows the baselines, which have no shots.

    Raises:
      RunError: matplotlib is not installed.
    """
    need_extra("report", "the picture")
    from matplotlib.figure import Figure

    unseen = sorted((row for row in rows if row["split"] == "unseen"), key=lambda row: row["shots"])
    here = [row for row in unseen if row["control"] is None]
    reached = {row["shots"]: row.get("reached") for row in here}
    ticks = list(reached)
    curves: dict[str, list[Mapping[str, Any]]] = {}
    for row in here:
        if row["accuracy"] is not None:
            curves.setdefault(row["method"], []).append(row)
    baselines = {name: points for name, points in curves.items() if len(points) == 1 < len(ticks)}
    methods = [name for name in curves if name not in baselines]
    panels = [*methods, *([_BASELINES] if baselines else [])]
    columns = min(_COLUMNS, len(panels))
    lines = -(-len(panels) // columns)
    figure = Figure(figsize=(2.0 * columns + 0.8, 1.6 * lines + 1.2), layout="constrained")
    axes = figure.subplots(lines, columns, sharex=True, sharey=True, squeeze=False)

    def draw(axis: Axes, points: Sequence[Mapping[str, Any]], **style: Any) -> None:
        axis.plot([ticks.index(row["shots"]) for row in points], [row["accuracy"] for row in points], **style)

    for axis in axes.flat[len(panels) :]:
        axis.set_visible(False)
    for axis, panel in zip(axes.flat, panels, strict=False):
        for name in methods:
            if name not in (panel, _REFERENCE):
                draw(axis, curves[name], color="#b0b0b0", linewidth=0.8, label="other methods")
        if panel == _BASELINES:
            # horizontal lines, with names alternately at the left and the right end
            accuracies = {name: points[0]["accuracy"] for name, points in baselines.items()}
            for place, (name, accuracy) in enumerate(sorted(accuracies.items(), key=lambda item: item[1])):
                axis.axhline(accuracy, color=_BLUE, linewidth=0.8)
                x, side = ((0.03, "left"), (0.97, "right"))[place % 2]
                across = axis.get_yaxis_transform()
                axis.text(x, accuracy, name, transform=across, ha=side, va="bottom", fontsize=8)
        else:
            if panel != _REFERENCE and _REFERENCE in methods:
                draw(axis, curves[_REFERENCE], color="#ff7f0e", linestyle="--", label=_REFERENCE)
            draw(axis, curves[panel], color=_BLUE, marker="o", markersize=3, label="the method")
            ceiling = [row for row in unseen if row["method"] == "ceiling" and row["accuracy"] is not None]
            if panel == "bayes" and ceiling:
                draw(axis, ceiling, color=_BLUE, linestyle=":", label="ceiling, simulated")
            known = [row for row in curves[panel] if row["accuracy_ci95"] is not None]
            if known:
                lows, highs = zip(*(row["accuracy_ci95"] for row in known))
                places = [ticks.index(row["shots"]) for row in known]
                axis.fill_between(places, lows, highs, color=_BLUE, alpha=0.2, linewidth=0)
        axis.axhline(0.5, color="#808080", linewidth=0.6, linestyle=":")
        axis.set_title(panel, fontsize=10)
        names = [str(k) if reached[k] is None else f"{k}\n{reached[k]:,}" for k in ticks]
        axis.set_xticks(range(len(ticks)), names)
        axis.set_xlim(-0.3, len(ticks) - 0.7)
        axis.grid(alpha=0.3)
    for place in range(max(0, len(panels) - columns), (lines - 1) * columns):
        axes.flat[place].tick_params(labelbottom=True)  # the grid has no panel below
    below = "" if None in reached.values() else "\nbelow: people who have so many"
    figure.supxlabel(f"comparisons of a person to adapt on{below}", fontsize=10)
    figure.supylabel("accuracy on unseen people", fontsize=10)
    handles = {
        label: line
        for axis in axes.flat
        for line, label in zip(*axis.get_legend_handles_labels(), strict=True)
    }
    figure.legend(handles.values(), handles, loc="outside upper center", ncols=4, frameon=False, fontsize=10)
    return figure
