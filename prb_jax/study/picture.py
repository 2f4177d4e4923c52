"""The few-shot curves of a study: accuracy of each method against the number of comparisons of a person."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import TYPE_CHECKING, Any

from prb_jax.data.writing import whole_file, writing
from prb_jax.errors import RunError

if TYPE_CHECKING:
    from matplotlib.figure import Figure


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
    """Return accuracy on unseen people against shots, a line and a band of 95 % intervals for each method.

    Raises:
      RunError: matplotlib is not installed.
    """
    try:
        import matplotlib
        from matplotlib.figure import Figure
    except ImportError as error:
        raise RunError(
            "the picture needs matplotlib, which is not installed: pip install matplotlib"
        ) from error
    here = [row for row in rows if row["split"] == "unseen" and row["control"] is None]
    names = list(dict.fromkeys(row["method"] for row in here))
    ticks = sorted({row["shots"] for row in here})
    figure = Figure(figsize=(7.5, 4.6), layout="constrained")
    axis = figure.subplots()
    colours = matplotlib.colormaps["tab20"].colors  # pyright: ignore[reportAttributeAccessIssue]
    for number, name in enumerate(names):
        points = sorted((row for row in here if row["method"] == name), key=lambda row: row["shots"])
        xs, ys = [ticks.index(row["shots"]) for row in points], [row["accuracy"] for row in points]
        colour = colours[number % len(colours)]
        if len(points) == 1 and len(ticks) > 1:  # a baseline knows no shots
            axis.axhline(ys[0], color=colour, linestyle=":", linewidth=1.2, label=name)
            continue
        axis.plot(xs, ys, marker="o", markersize=3, color=colour, label=name)
        bands = [(x, row["accuracy_ci95"]) for x, row in zip(xs, points) if row["accuracy_ci95"] is not None]
        if bands:
            lows, highs = zip(*(bounds for _, bounds in bands))
            axis.fill_between([x for x, _ in bands], lows, highs, color=colour, alpha=0.08, linewidth=0)
    axis.axhline(0.5, color="gray", linewidth=0.8)
    axis.set_xticks(range(len(ticks)), [str(tick) for tick in ticks])
    axis.set_xlabel("comparisons of the person that the method is adapted on")
    axis.set_ylabel("accuracy on unseen people, 95 % bands")
    axis.grid(alpha=0.3)
    axis.legend(fontsize="x-small", ncols=2, loc="center left", bbox_to_anchor=(1.0, 0.5), frameon=False)
    return figure
