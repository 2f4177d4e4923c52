"""Output of `prb correlate`: tables for the terminal, and a plot of benchmark figures against behaviours."""

from __future__ import annotations

import textwrap
from collections.abc import Mapping, Sequence
from dataclasses import replace
from pathlib import Path
from typing import TYPE_CHECKING, Any, Final

from prb_jax.records.writing import whole_file, writing
from prb_jax.reports.table import NONE, Table, bounded, change, field, number, signed

if TYPE_CHECKING:
    from matplotlib.axes import Axes
    from rich.console import Group

PICTURE: Final = "correlate.png"

_NAMED: Final = 20  # maximum number of models for which points have names
_NAME_HEIGHT: Final = 0.055  # height of a line of names, as a share of the axes

_WORDS: Final = {
    "user_accuracy": "mean over users",
    "user_quantile": "quantile over users",
    "subset_quantile": "quantile over subsets",
    "pearson": "Pearson's r",
    "without_noise": "without noise",
    "spearman": "Spearman's rho",
    "kendall": "Kendall's tau",
    "weighted_tau": "weighted tau",
    "ndcg": "nDCG",
    "rbo": "rank-biased overlap",
}


def render_correlation(correlation: Mapping[str, Any]) -> Group:
    """Return tables of the result of `prb_jax.correlate`: the models, and the measures for each behaviour."""
    from rich.console import Group

    tables, parameters = [_models(correlation)], correlation["parameters"]
    columns = {
        "benchmark": lambda row: _words(row["benchmark"]),
        "measure": lambda row: _words(row["measure"]),
        "value": change("value", "ci95"),
        "p": field("p", "{:.3f}"),
        "p, Holm": field("p_holm", "{:.3f}"),
        "by chance": field("chance", "{:.3f}"),
    }
    for behaviour, verdict in correlation["verdicts"].items():
        rows = [
            {"benchmark": part["benchmark"], "measure": name, **measure}
            for part in correlation["correlations"]
            if part["behaviour"] == behaviour
            for name, measure in _with_true(part["measures"]).items()
        ]
        note = (
            f"{verdict}.\n[..] 95 % interval over models; without noise: of the figures that infinitely many users "
            f"would give; p: permutation test; rank-biased overlap with p = {parameters['rbo_p']:g}, extrapolated; "
            f"quantile: {parameters['quantile']:g}"
        )
        table = Table.of(
            f"Does the benchmark predict {_words(behaviour)}?", rows, columns, words=2, whole=True,
            note=note + _reasons(rows),
        )  # fmt: skip
        tables.append(table if rows else replace(table, rows=[["no power", *[""] * (len(columns) - 1)]]))
        tables += [
            _plan_table(behaviour, figure, plan)
            for figure, plan in correlation["plans"].get(behaviour, {}).items()
        ]
    return Group(*tables)


def _with_true(measures: Mapping[str, Mapping[str, Any]]) -> dict[str, Mapping[str, Any]]:
    """Return the measures, with the noise-free Pearson correlation after the raw one."""
    rows = dict(measures)
    if (true := measures["pearson"]["without_noise"]) is not None:
        return {"pearson": rows.pop("pearson"), "without_noise": true, **rows}
    return rows


def _models(correlation: Mapping[str, Any]) -> Table:
    accuracy = bounded("value", "ci95")
    columns = {
        "run": field("name"),
        "lineage": field("lineage"),
        "accuracy": lambda model: accuracy(model["benchmark"]["accuracy"]),
    }
    for name in correlation["verdicts"]:
        columns[_words(name)] = lambda model, name=name: accuracy(model["behaviour"].get(name, {}))
    models = sorted(correlation["models"], key=lambda model: -model["benchmark"]["accuracy"]["value"])
    figures = [model["benchmark"]["accuracy"] for model in correlation["models"]]
    figures += [figure for model in correlation["models"] for figure in model["behaviour"].values()]
    note, unmatched = "[..] 95 % interval over users" + _reasons(figures), correlation["unmatched"]
    if unmatched["scores"]:
        note += f"\nonly in --scores, left out: {', '.join(unmatched['scores'])}"
    if unmatched["behaviour"]:
        names = dict.fromkeys(f"{one['reward_model']} ({one['behaviour']})" for one in unmatched["behaviour"])
        note += f"\nonly in --behaviour, left out: {', '.join(names)}"
    return Table.of("Reward models", models, columns, words=2, note=note)


def _plan_table(behaviour: str, benchmark: str, plan: Mapping[str, Any]) -> Table:
    """Return the table of how many models and prompts resolve a correlation."""
    by_correlation: dict[float, dict[int, Mapping[str, Any]]] = {}
    for row in plan["rows"]:
        by_correlation.setdefault(row["correlation"], {})[row["prompts"]] = row
    columns = {
        "true correlation": lambda correlation: f"{correlation:g}",
        "power here": lambda correlation: f"{by_correlation[correlation][plan['prompts']]['power_here']:.2f}",
    }
    for prompts in dict.fromkeys(row["prompts"] for row in plan["rows"]):
        columns[f"{prompts:,} prompts"] = lambda correlation, prompts=prompts: (
            "> 1,000" if (models := by_correlation[correlation][prompts]["models"]) is None else f"{models:,}"
        )
    sides = (
        f"{side}: spread of the models {plan[side]['spread']:.3f}, noise {plan[side]['noise']:.3f}"
        for side in ("benchmark", "behaviour")
    )
    note = f"here: {plan['models']} models, {plan['prompts']:,} prompts each; {'; '.join(sides)}"
    note += f"\n{plan['reason']}" if plan["reason"] else ""
    title = (
        f"Models that find a correlation of {_words(benchmark)} and {_words(behaviour)}, with a power of 80 %"
    )
    return Table.of(title, by_correlation, columns, note=note)


def draw_correlation(path: Path, correlation: Mapping[str, Any]) -> None:
    """Draw every model as a point with its intervals: a row for each behaviour, a column for each benchmark figure.

    With only one benchmark figure, up to four behaviours share a row.

    Raises:
      RunError: the plot cannot be written.
    """
    from matplotlib.figure import Figure

    parts, models = correlation["correlations"], correlation["models"]
    rows = list(dict.fromkeys(part["behaviour"] for part in parts))
    columns = list(dict.fromkeys(part["benchmark"] for part in parts))
    lineages = sorted({model["lineage"] or NONE for model in models})
    width = len(columns) if len(columns) > 1 else min(4, len(rows))
    height = -(-len(parts) // width)
    named = len(models) <= _NAMED
    figure = Figure(figsize=((5.2 if named else 3.6) * width, 3.4 * height), layout="constrained")
    axes = figure.subplots(height, width, squeeze=False)
    for axis in axes.flat[len(parts) :]:
        axis.set_visible(False)
    parts = sorted(parts, key=lambda part: (rows.index(part["behaviour"]), columns.index(part["benchmark"])))
    for axis, part in zip(axes.flat, parts, strict=False):
        points = {
            model["name"]: (model["benchmark"][part["benchmark"]], model["behaviour"][part["behaviour"]])
            for model in models
            if part["behaviour"] in model["behaviour"]
        }
        for place, lineage in enumerate(lineages):
            estimated = [
                points[model["name"]]
                for model in models
                if model["name"] in points and (model["lineage"] or NONE) == lineage
            ]
            if estimated:
                (x, x_bars), (y, y_bars) = map(_bars, zip(*estimated, strict=True))
                style = {"fmt": "o", "markersize": 4, "linewidth": 0.7, "color": f"C{place}"}
                axis.errorbar(x, y, xerr=x_bars, yerr=y_bars, label=lineage, **style)
        if named:
            _name_points(axis, {name: (x["value"], y["value"]) for name, (x, y) in points.items()})
        rho = part["measures"]["spearman"]
        title = f"Spearman's rho {signed(rho['value'], rho['ci95'])}, p {number(rho['p'])}"
        axis.set_title(title, fontsize=8)
        axis.set_xlabel(_words(part["benchmark"]))
        axis.set_ylabel(textwrap.fill(_words(part["behaviour"]), 34))
        axis.grid(alpha=0.3)
    if len(lineages) > 1:
        axes[0][0].legend(title="lineage", fontsize=7)
    with writing(path), whole_file(path) as file:
        figure.savefig(file, dpi=110, format="png", metadata={"Software": None})


def _bars(figures: Sequence[Mapping[str, Any]]) -> tuple[list[float], list[list[float]]]:
    """Return values, and the lengths of each interval below and above its value; 0 without an interval."""
    values = [figure["value"] for figure in figures]
    ends = [figure["ci95"] or [figure["value"]] * 2 for figure in figures]
    below = [max(value - low, 0.0) for value, (low, _) in zip(values, ends, strict=True)]
    return values, [below, [max(high - value, 0.0) for value, (_, high) in zip(values, ends, strict=True)]]


def _name_points(axis: Axes, points: Mapping[str, tuple[float, float]]) -> None:
    """Write the names in a column to the right of the axes, without overlap, each with a line to its point."""
    low, high = axis.get_ylim()
    axis.set_ylim(low, high)
    order = sorted(points, key=lambda name: points[name][1])
    wanted = [(points[name][1] - low) / (high - low) for name in order]
    gap = min(_NAME_HEIGHT, 1 / max(len(order) - 1, 1))
    heights, below = [0.0] * len(order), -gap
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
    """Return the label of a figure for tables and plots."""
    return _WORDS.get(name, name.replace("_", " "))


def _reasons(figures: Sequence[Mapping[str, Any]]) -> str:
    """Return the distinct reasons why some figures have no interval."""
    reasons = dict.fromkeys(one["ci95_reason"] for one in figures if one["ci95_reason"])
    return "".join(f"\nno interval: {reason}" for reason in reasons)
