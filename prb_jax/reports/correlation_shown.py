"""What `prb correlate` shows: tables for the terminal, and a picture of benchmark figures against behaviours."""

from __future__ import annotations

import textwrap
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import TYPE_CHECKING, Any, Final

from prb_jax.data.writing import whole_file, writing
from prb_jax.reports.style import NONE, new_table, signed
from prb_jax.reports.tables import interval

if TYPE_CHECKING:
    from matplotlib.axes import Axes
    from rich.console import Group
    from rich.table import Table

PICTURE: Final = "correlate.png"

_NAMED: Final = 20
"""The most models whose names stand beside their points."""

_NAME_HEIGHT: Final = 0.055  # of a line of names, as a share of the axes

_WORDS: Final = {
    "user_accuracy": "mean over users",
    "user_quantile": "quantile over users",
    "subset_quantile": "quantile over subsets",
    "pearson": "Pearson's r",
    "spearman": "Spearman's rho",
    "kendall": "Kendall's tau",
    "weighted_tau": "weighted tau",
    "ndcg": "nDCG",
    "rbo": "rank-biased overlap",
}


def render_correlation(found: Mapping[str, Any]) -> Group:
    """Return tables of what `prb_jax.correlate` gives: the models, and the measures for each behaviour."""
    from rich.console import Group
    from rich.markup import escape

    models = found["models"]
    behaviours = list(found["verdicts"])
    table = new_table("Reward models", ("run", "lineage", "accuracy", *map(_words, behaviours)), left=2)
    for model in sorted(models, key=lambda one: -one["benchmark"]["accuracy"]["value"]):
        cells = [model["name"], model["lineage"] or NONE, _cell(model["benchmark"]["accuracy"])]
        cells += [_cell(model["behaviour"].get(name)) for name in behaviours]
        table.add_row(*map(escape, cells))
    figures = [model["benchmark"]["accuracy"] for model in models]
    figures += [figure for model in models for figure in model["behaviour"].values()]
    table.caption = escape(
        "[..] 95 % interval over users" + _reasons(figures) + _unmatched(found["unmatched"])
    )
    parts = [table]
    for behaviour in behaviours:
        own = [each for each in found["correlations"] if each["behaviour"] == behaviour]
        part = new_table(
            f"Does the benchmark predict {_words(behaviour)}?",
            ("benchmark", "measure", "value", "p", "by chance"),
            left=2,
        )
        for each in own:
            for name, one in each["measures"].items():
                cells = [
                    _words(each["benchmark"]),
                    _words(name),
                    signed(one["value"], one["ci95"]),
                    _p(one["p"]),
                ]
                part.add_row(*map(escape, [*cells, _p(one["chance"])]))
        part.columns[2].no_wrap = True
        parameters = found["parameters"]
        if not own:
            part.add_row("no power")
        part.caption = escape(
            f"{found['verdicts'][behaviour]}.\n[..] 95 % interval over users and models, {parameters['draws']:,} "
            f"draws; p: permutation test; rank-biased overlap with p = {parameters['rbo_p']:g}, extrapolated; "
            f"quantile: {parameters['quantile']:g}"
            + _reasons([one for each in own for one in each["measures"].values()])
        )
        parts.append(part)
        parts += [
            _plan_table(behaviour, name, one) for name, one in found["plans"].get(behaviour, {}).items()
        ]
    return Group(*parts)


def _plan_table(behaviour: str, benchmark: str, plan: Mapping[str, Any]) -> Table:
    """How many models and prompts resolve a correlation."""
    from rich.markup import escape

    prompts = list(dict.fromkeys(row["prompts"] for row in plan["rows"]))
    title = (
        f"Models that find a correlation of {_words(benchmark)} and {_words(behaviour)}, with a power of 80 %"
    )
    heads = ("true correlation", "power here", *(f"{count:,} prompts" for count in prompts))
    table = new_table(escape(title), heads, left=1)
    for correlation in dict.fromkeys(row["correlation"] for row in plan["rows"]):
        rows = [row for row in plan["rows"] if row["correlation"] == correlation]
        here = next(row["power_here"] for row in rows if row["prompts"] == plan["prompts"])
        needed = ["> 1,000" if row["models"] is None else f"{row['models']:,}" for row in rows]
        table.add_row(f"{correlation:g}", f"{here:.2f}", *needed)
    sides = [
        f"{side}: spread of the models {plan[side]['spread']:.3f}, noise {plan[side]['noise']:.3f}"
        for side in ("benchmark", "behaviour")
    ]
    table.caption = escape(
        f"here: {plan['models']} models, {plan['prompts']:,} prompts each; {'; '.join(sides)}"
        + (f"\n{plan['reason']}" if plan["reason"] else "")
    )
    return table


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
    named = len(found["models"]) <= _NAMED
    figure = Figure(figsize=((5.2 if named else 3.6) * width, 3.4 * height), layout="constrained")
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
        shown = [model for model in found["models"] if each["behaviour"] in model["behaviour"]]
        if named:
            _name_points(
                axis,
                {
                    model["name"]: (
                        model["benchmark"][each["benchmark"]]["value"],
                        model["behaviour"][each["behaviour"]]["value"],
                    )
                    for model in shown
                },
            )
        rho = each["measures"]["spearman"]
        axis.set_title(f"Spearman's rho {signed(rho['value'], rho['ci95'])}, p {_p(rho['p'])}", fontsize=8)
        axis.set_xlabel(_words(each["benchmark"]))
        axis.set_ylabel(textwrap.fill(_words(each["behaviour"]), 34))
        axis.grid(alpha=0.3)
    if len(lineages) > 1:
        axes[0][0].legend(title="lineage", fontsize=7)
    with writing(path), whole_file(path) as file:
        figure.savefig(file, dpi=110, format="png", metadata={"Software": None})


def _name_points(axis: Axes, points: Mapping[str, tuple[float, float]]) -> None:
    """Write the names in a column at the right of the axes, each with a line to its point and none over another."""
    low, high = axis.get_ylim()
    axis.set_ylim(low, high)
    order = sorted(points, key=lambda name: points[name][1])
    wanted = [(points[name][1] - low) / (high - low) for name in order]
    gap = min(_NAME_HEIGHT, 1 / max(len(order) - 1, 1))
    heights = [0.0] * len(order)
    below = -gap
    for place, height in enumerate(wanted):
        heights[place] = below = max(height, below + gap)
    above = 1.0 + gap
    for place in reversed(range(len(order))):
        heights[place] = above = min(heights[place], above - gap)
    for name, height in zip(order, heights, strict=True):
        axis.annotate(
            name,
            points[name],
            (1.04, height),
            textcoords="axes fraction",
            va="center",
            fontsize=7,
            arrowprops={"arrowstyle": "-", "color": "#808080", "linewidth": 0.5, "shrinkA": 0, "shrinkB": 3},
        )


def _words(name: str) -> str:
    """What a figure is called in a table or a picture."""
    return _WORDS.get(name, name.replace("_", " "))


def _reasons(figures: Sequence[Mapping[str, Any]]) -> str:
    """Why some figures have no interval, each reason once."""
    reasons = dict.fromkeys(one["ci95_reason"] for one in figures if one["ci95_reason"])
    return "".join(f"\nno interval: {reason}" for reason in reasons)


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
