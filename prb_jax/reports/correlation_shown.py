"""What `prb correlate` shows: tables for the terminal, and a picture of benchmark figures against behaviours."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import TYPE_CHECKING, Any, Final

from prb_jax.data.writing import whole_file, writing
from prb_jax.reports.style import NONE, new_table, signed
from prb_jax.reports.table import interval

if TYPE_CHECKING:
    from rich.console import Group

PICTURE: Final = "correlate.png"

_NAMED: Final = 20
"""The most models whose names stand beside their points."""


def render_correlation(found: Mapping[str, Any]) -> Group:
    """Return tables of what `prb_jax.correlate` gives: the models, and the measures for each behaviour."""
    from rich.console import Group
    from rich.markup import escape

    models = found["models"]
    behaviours = list(found["verdicts"])
    table = new_table("Reward models", ("run", "lineage", "accuracy", *behaviours), left=2)
    for model in sorted(models, key=lambda one: -one["benchmark"]["accuracy"]["value"]):
        cells = [model["name"], model["lineage"] or NONE, _cell(model["benchmark"]["accuracy"])]
        cells += [_cell(model["behaviour"].get(name)) for name in behaviours]
        table.add_row(*map(escape, cells))
    table.caption = escape("[..] 95 % interval over users" + _unmatched(found["unmatched"]))
    parts = [table]
    for behaviour in behaviours:
        own = [each for each in found["correlations"] if each["behaviour"] == behaviour]
        part = new_table(
            f"Does the benchmark predict {behaviour}?",
            ("benchmark", "measure", "value", "p", "by chance"),
            left=2,
        )
        for each in own:
            for name, one in each["measures"].items():
                cells = [each["benchmark"], name, signed(one["value"], one["ci95"]), _p(one["p"])]
                part.add_row(*map(escape, [*cells, _p(one["chance"])]))
        part.columns[2].no_wrap = True
        parameters = found["parameters"]
        part.caption = escape(
            f"{found['verdicts'][behaviour]}.\n[..] 95 % interval over users and models, {parameters['draws']:,} "
            f"draws; p: permutation test; rbo with p = {parameters['rbo_p']:g}, extrapolated; quantile: "
            f"{parameters['quantile']:g}"
        )
        parts.append(part)
    return Group(*parts)


def draw_correlation(path: Path, found: Mapping[str, Any]) -> None:
    """Draw every model as a point with its intervals: a row for each behaviour, a column for each benchmark figure.

    Of a single benchmark figure the behaviours stand side by side, up to four in a row.

    Raises:
      RunError: it cannot be written.
    """
    from matplotlib.figure import Figure

    pairs = found["correlations"]
    rows = list(dict.fromkeys(each["behaviour"] for each in pairs))
    columns = list(dict.fromkeys(each["benchmark"] for each in pairs))
    lineages = sorted({model["lineage"] or NONE for model in found["models"]})
    width = len(columns) if len(columns) > 1 else min(4, len(rows))
    height = -(-len(pairs) // width)
    figure = Figure(figsize=(3.4 * width, 3.1 * height), layout="constrained")
    axes = figure.subplots(height, width, squeeze=False)
    for axis in axes.flat[len(pairs) :]:
        axis.set_visible(False)
    places = sorted(pairs, key=lambda each: (rows.index(each["behaviour"]), columns.index(each["benchmark"])))
    for axis, each in zip(axes.flat, places, strict=False):
        for number, lineage in enumerate(lineages):
            own = [
                model
                for model in found["models"]
                if each["behaviour"] in model["behaviour"] and (model["lineage"] or NONE) == lineage
            ]
            points = [
                (model["benchmark"][each["benchmark"]], model["behaviour"][each["behaviour"]])
                for model in own
            ]
            if points:
                x, y = ([one[side]["value"] for one in points] for side in range(2))
                bars = [_bars([one[side] for one in points]) for side in range(2)]
                axis.errorbar(
                    x, y, xerr=bars[0], yerr=bars[1], fmt="o", markersize=4, linewidth=0.7, color=f"C{number}",
                    label=lineage,
                )  # fmt: skip
                for model, *place in zip(own, x, y, strict=True) if len(found["models"]) <= _NAMED else ():
                    axis.annotate(model["name"], place, (3, 3), textcoords="offset points", fontsize=5)
        rho = each["measures"]["spearman"]
        axis.set_title(f"Spearman {signed(rho['value'], rho['ci95'])}, p {_p(rho['p'])}", fontsize=8)
        axis.set_xlabel(each["benchmark"])
        axis.set_ylabel(each["behaviour"])
        axis.grid(alpha=0.3)
    axes[0][0].legend(title="lineage", fontsize=7)
    with writing(path), whole_file(path) as file:
        figure.savefig(file, dpi=110, format="png", metadata={"Software": None})


def _bars(points: Sequence[Mapping[str, Any]]) -> list[list[float]]:
    """How far each interval reaches below and above its value; not at all where there is none."""
    ends = [point["ci95"] or [point["value"]] * 2 for point in points]
    below = [max(point["value"] - low, 0.0) for point, (low, _) in zip(points, ends, strict=True)]
    return [below, [max(high - point["value"], 0.0) for point, (_, high) in zip(points, ends, strict=True)]]


def _cell(figure: Mapping[str, Any] | None) -> str:
    return NONE if figure is None else interval(figure["value"], figure["ci95"])


def _p(value: float | None) -> str:
    return NONE if value is None else f"{value:.3f}"


def _unmatched(found: Mapping[str, Any]) -> str:
    text = ""
    if found["scores"]:
        text += f"\nin --scores alone, left out: {', '.join(found['scores'])}"
    if found["behaviour"]:
        names = dict.fromkeys(f"{one['reward_model']} ({one['behaviour']})" for one in found["behaviour"])
        text += f"\nin --behaviour alone, left out: {', '.join(names)}"
    return text
