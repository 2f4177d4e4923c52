"""Figures as cells of a page's tables."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

from prb_jax.reports.blocks import Cell, PageTable
from prb_jax.reports.table import NONE, interval


def figure_cell(value: Any, bounds: Any = None, *, form: str = "{:.3f}") -> Cell:
    """Return a cell with a figure, and its interval where there is one."""
    if not isinstance(value, int | float) or isinstance(value, bool):
        return Cell(NONE)
    if _is_interval(bounds):
        return Cell(interval(value, list(bounds)), value)
    return Cell(form.format(value), value)


def any_cell(value: Any) -> Cell:
    """Return a cell with a value of JSON."""
    if _is_interval(value):
        return Cell(f"[{value[0]:.3f}..{value[1]:.3f}]")
    if isinstance(value, int) and not isinstance(value, bool):
        return Cell(f"{value:,}", value)
    return (
        figure_cell(value, form="{:.5g}")
        if isinstance(value, float)
        else Cell(NONE if value is None else str(value))
    )


def scorers(summary: Mapping[str, Any], *, name: str) -> dict[str, Mapping[str, Any]]:
    """Return the summaries within a summary, by the name to show: the model, its controls, the baselines."""
    said = {"blind": "shown no profile", "swap": "shown another user's profile"}
    controls = {
        f"{name}, {said.get(control, control)}": figures
        for control, figures in (summary.get("controls") or {}).items()
    }
    return {name: summary, **controls, **(summary.get("baselines") or {})}


def missing(shown: Mapping[str, Mapping[str, Any]]) -> list[str]:
    """Return why figures and intervals of some summaries are missing, each reason once, with the names."""
    reasons: dict[str, list[str]] = {}
    for name, summary in shown.items():
        for key in ("ci95", "user_accuracy_ci95", "coverage", "coverage_ci95", "difference_ci95"):
            if reason := summary.get(f"{key}_reason"):
                names = reasons.setdefault(str(reason), [])
                names += [] if name in names else [name]
    return [f"Not shown for {', '.join(names)}: {reason}." for reason, names in reasons.items()]


def headline(summaries: Mapping[str, Mapping[str, Any]], *, title: str, note: str) -> PageTable:
    """Return the table of the main figures of some summaries, by name."""
    rows = [
        [
            Cell(name),
            figure_cell(summary.get("n"), form="{:,}"),
            figure_cell(summary.get("accuracy"), summary.get("ci95")),
            figure_cell(summary.get("user_accuracy"), summary.get("user_accuracy_ci95")),
            figure_cell(summary.get("coverage"), summary.get("coverage_ci95")),
            figure_cell(summary.get("ties"), form="{:,}"),
            figure_cell(summary.get("mean_margin"), form="{:.3g}"),
        ]
        for name, summary in summaries.items()
    ]
    heads = ("run", "n", "accuracy", "mean over users", "coverage", "ties", "mean margin")
    return PageTable(title, heads, rows, note=note)


def _is_interval(value: Any) -> bool:
    return (
        isinstance(value, list | tuple) and len(value) == 2 and all(isinstance(v, int | float) for v in value)
    )


def last_figures(summary: Mapping[str, Any]) -> PageTable:
    """Return the table of the last figures of a finished training run."""
    rows = []
    for name, part in (
        ("training, last tenth", summary.get("last_tenth")),
        ("validation of the exported model", summary.get("validation")),
    ):
        if isinstance(part, dict):
            cells = [figure_cell(part.get(key), form="{:.4f}") for key in ("loss", "accuracy", "margin")]
            rows.append([Cell(name), *cells])
    note = f"{summary.get('steps'):,} steps; the model of step {summary.get('exported_step'):,} was exported."
    return PageTable("Last figures", ("", "loss", "accuracy", "margin"), rows, note=note)
