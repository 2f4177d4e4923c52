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


def headline(summaries: Mapping[str, Mapping[str, Any]], *, title: str, note: str) -> PageTable:
    """Return the table of the main figures of some summaries, by name."""
    rows = [
        [
            Cell(name),
            figure_cell(summary.get("n"), form="{:,}"),
            figure_cell(summary.get("accuracy"), summary.get("ci95")),
            figure_cell(summary.get("user_accuracy"), summary.get("user_accuracy_ci95")),
            figure_cell(summary.get("coverage")),
            figure_cell(summary.get("ties"), form="{:,}"),
            figure_cell(summary.get("mean_margin"), form="{:.3g}"),
        ]
        for name, summary in summaries.items()
    ]
    heads = ("", "n", "accuracy", "mean over users", "coverage", "ties", "mean margin")
    return PageTable(title, heads, rows, note=note)


def _is_interval(value: Any) -> bool:
    return (
        isinstance(value, list | tuple) and len(value) == 2 and all(isinstance(v, int | float) for v in value)
    )
