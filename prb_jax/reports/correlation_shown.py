"""Results of `prb correlate`: the answer, the table for the terminal, the chapter of a page, and the plot."""

from __future__ import annotations

import textwrap
from collections.abc import Mapping, Sequence
from dataclasses import replace
from functools import partial
from pathlib import Path
from typing import TYPE_CHECKING, Any, Final, TypedDict

from prb_jax.errors import RunError
from prb_jax.metrics.prediction import RESOLVED_FROM
from prb_jax.records.reading import read_json
from prb_jax.records.schema import check_schema
from prb_jax.records.writing import whole_file, writing
from prb_jax.reports.drawings import drawing
from prb_jax.reports.forest import Estimate, draw_forest
from prb_jax.reports.page import Block, Chapter, Listing, Section
from prb_jax.reports.table import NONE, Table, answered, bounded, change, field, gained, number, signed

if TYPE_CHECKING:
    from matplotlib.axes import Axes
    from matplotlib.figure import Figure
    from rich.console import Group

CORRELATE: Final = "correlate.json"
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


class _Part(TypedDict):
    behaviour: str
    benchmark: str
    models: int
    measures: dict[str, dict[str, Any]]


class _Unmatched(TypedDict):
    scores: list[str]
    behaviour: list[dict[str, Any]]


class Correlation(TypedDict):
    """The contents of ``correlate.json``."""

    models: list[dict[str, Any]]
    correlations: list[_Part]
    unmatched: _Unmatched
    verdicts: dict[str, str]
    gates: dict[str, dict[str, Any]]
    plans: dict[str, dict[str, dict[str, Any]]]
    parameters: dict[str, float | str]
    definitions: dict[str, str]


def correlation_answer(correlation: Mapping[str, Any]) -> str:
    """Return whether the first benchmark figure predicts the first behaviour, in one sentence."""
    parts = correlation["correlations"]
    if not parts:
        behaviour, gate = next(iter(correlation["gates"].items()))
        return f"No correlation with {_words(behaviour)} is computed: {gate['reason']}."
    part = parts[0]
    rho = part["measures"]["spearman"]
    value = "undefined" if rho["value"] is None else gained(rho["value"], rho["ci95"])
    p = "" if rho["p"] is None else f", p {rho['p']:.2g}"
    few = (
        f"; fewer than {RESOLVED_FROM} models do not resolve an order"
        if part["models"] < RESOLVED_FROM
        else ""
    )
    return (
        f"Over {part['models']} reward models, Spearman's rho of {_words(part['benchmark'])} and "
        f"{_words(part['behaviour'])} is {value}{p}{few}."
    )


def render_correlation(correlation: Mapping[str, Any]) -> Group:
    """Return the answer of `prb_jax.correlate`, a table of the models and of their rank correlations, and plans."""
    from rich.console import Group

    models, behaviours = _models(correlation), list(correlation["verdicts"])
    rows = [*models.rows, []]
    for benchmark in dict.fromkeys(part["benchmark"] for part in correlation["correlations"]):
        found = {
            part["behaviour"]: part["measures"]["spearman"]
            for part in correlation["correlations"]
            if part["benchmark"] == benchmark
        }
        cells = [
            f"{signed(found[name]['value'], found[name]['ci95'])}\np {number(found[name]['p'])}"
            if name in found
            else "no power"
            for name in behaviours
        ]
        blank = [""] * (len(models.heads) - len(cells) - 1)
        rows.append([f"{_words('spearman')} with {_words(benchmark)}", *blank, *cells])
    gates: dict[str, list[str]] = {}
    for name in behaviours:
        gates.setdefault(correlation["gates"][name]["reason"], []).append(_words(name))
    verdict = next(iter(correlation["verdicts"].values())).partition(".\n")[0]
    notes = [f"[..] 95 % interval, of figures over users, of correlations over models; {verdict}"]
    notes += ["; ".join(f"{', '.join(names)}: {reason}" for reason, names in gates.items())]
    notes += [models.note] if models.note else []
    table = replace(models, title="", rows=rows, note="")
    shown = answered(table, answer=correlation_answer(correlation), notes=notes)
    return Group(shown, *_plans(correlation))


def correlation_chapter(folder: Path, run_name: str, anchor: str) -> Chapter:
    """Return the chapter of a page about the result of `prb correlate`.

    Raises:
      RunError: the file is damaged.
    """
    correlation = read_json(folder / CORRELATE, error=RunError)
    check_schema(correlation, Correlation, where=str(folder / CORRELATE), error=RunError)
    parts = correlation["correlations"]
    opening: list[Block] = []
    estimates = [
        Estimate(
            f"{_words(part['benchmark'])} and {_words(part['behaviour'])}",
            part["measures"]["spearman"]["value"],
            part["measures"]["spearman"]["ci95"],
        )
        for part in parts
        if part["measures"]["spearman"]["value"] is not None
    ]
    if estimates:
        title = "Spearman's rho of a benchmark figure and a behaviour, over models"
        opening.append(
            draw_forest(
                title, estimates, reference=("no correlation", 0.0), figure=signed, what="a correlation"
            )
        )
    notes = [f"{_words(name)}: {verdict}." for name, verdict in correlation["verdicts"].items()]
    opening.append(Listing("What these correlations rest on", [line.replace(".\n", "; ") for line in notes]))
    sections = []
    if parts:
        figure = parts[0]["benchmark"]
        title = f"{_words(figure)} and behaviour"
        about = "Each point is a reward model, with its 95 % intervals over users."
        alone = {**correlation, "correlations": [part for part in parts if part["benchmark"] == figure]}
        picture = drawing(partial(correlation_figure, alone, across=1), title[0].upper() + title[1:], about)
        sections.append(Section("Benchmark and behaviour", [picture]))
    tables = [_models(correlation), *_measures(correlation), *_plans(correlation)]
    meanings = list(correlation["definitions"].items())
    sections += [
        Section("Figures", tables),
        Section("Definitions", [Table("What the figures mean", ("figure", "meaning"), meanings, words=2)]),
    ]
    heading = f"{run_name}: does the benchmark predict behaviour?"
    return Chapter(heading, anchor, correlation_answer(correlation), opening, sections)


def _measures(correlation: Mapping[str, Any]) -> list[Table]:
    """Return a table of all measures for each behaviour that has correlations."""
    parameters = correlation["parameters"]
    columns = {
        "benchmark": lambda row: _words(row["benchmark"]),
        "measure": lambda row: _words(row["measure"]),
        "value": change("value", "ci95"),
        "p": field("p", "{:.3f}"),
        "p, Holm": field("p_holm", "{:.3f}"),
        "by chance": field("chance", "{:.3f}"),
    }
    tables = []
    for behaviour in correlation["verdicts"]:
        rows = [
            {"benchmark": part["benchmark"], "measure": name, **measure}
            for part in correlation["correlations"]
            if part["behaviour"] == behaviour
            for name, measure in _with_true(part["measures"]).items()
        ]
        note = (
            "[..] 95 % interval over models; without noise: of the figures that infinitely many users would give; p: "
            f"permutation test; rank-biased overlap with p = {parameters['rbo_p']:g}, extrapolated; quantile: "
            f"{parameters['quantile']:g}{_reasons(rows)}"
        )
        if rows:
            title = f"Does the benchmark predict {_words(behaviour)}?"
            tables.append(Table.of(title, rows, columns, words=2, note=note))
    return tables


def _plans(correlation: Mapping[str, Any]) -> list[Table]:
    return [
        _plan_table(behaviour, figure, plan)
        for behaviour, plans in correlation["plans"].items()
        for figure, plan in plans.items()
    ]


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
        **({"lineage": field("lineage")} if any(one["lineage"] for one in correlation["models"]) else {}),
        "accuracy": lambda model: accuracy(model["benchmark"]["accuracy"]),
    }
    words = len(columns) - 1
    for name in correlation["verdicts"]:
        columns[_words(name)] = lambda model, name=name: accuracy(model["behaviour"].get(name, {}))
    models = sorted(correlation["models"], key=lambda model: -model["benchmark"]["accuracy"]["value"])
    figures = [model["benchmark"]["accuracy"] for model in correlation["models"]]
    figures += [figure for model in correlation["models"] for figure in model["behaviour"].values()]
    notes, unmatched = [_reasons(figures).strip()], correlation["unmatched"]
    if unmatched["scores"]:
        notes.append(f"only in --scores, left out: {', '.join(unmatched['scores'])}")
    if unmatched["behaviour"]:
        names = dict.fromkeys(f"{one['reward_model']} ({one['behaviour']})" for one in unmatched["behaviour"])
        notes.append(f"only in --behaviour, left out: {', '.join(names)}")
    return Table.of("Reward models", models, columns, words=words, note="; ".join(filter(None, notes)))


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
    """Write the picture of `correlation_figure`.

    Raises:
      RunError: the plot cannot be written.
    """
    with writing(path), whole_file(path) as file:
        correlation_figure(correlation).savefig(file, dpi=110, format="png", metadata={"Software": None})


def correlation_figure(correlation: Mapping[str, Any], *, across: int = 4) -> Figure:
    """Draw every model as a point with its intervals: a row for each behaviour, a column for each benchmark figure.

    With only one benchmark figure, up to ``across`` behaviours share a row.
    """
    from matplotlib.figure import Figure

    parts, models = correlation["correlations"], correlation["models"]
    rows = list(dict.fromkeys(part["behaviour"] for part in parts))
    columns = list(dict.fromkeys(part["benchmark"] for part in parts))
    lineages = sorted({model["lineage"] or NONE for model in models})
    width = len(columns) if len(columns) > 1 else min(across, len(rows))
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
        axis.set_title(title, fontsize=9)
        axis.set_xlabel(_words(part["benchmark"]))
        axis.set_ylabel(textwrap.fill(_words(part["behaviour"]), 34))
        axis.grid(alpha=0.3)
    if len(lineages) > 1:
        axes[0][0].legend(title="lineage", fontsize=7)
    return figure


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
            fontsize=8,
            arrowprops={"arrowstyle": "-", "color": "#808080", "linewidth": 0.5, "shrinkA": 0, "shrinkB": 3},
        )


def _words(name: str) -> str:
    """Return the label of a figure for tables and plots."""
    return _WORDS.get(name, name.replace("_", " "))


def _reasons(figures: Sequence[Mapping[str, Any]]) -> str:
    """Return the distinct reasons why some figures have no interval."""
    reasons = dict.fromkeys(one["ci95_reason"] for one in figures if one["ci95_reason"])
    return "".join(f"\nno interval: {reason}" for reason in reasons)
