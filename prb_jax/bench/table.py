"""The figures of a bench: every field of a result says how a table shows it, and what it means."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import fields
from typing import Any

from prb_jax.reports.table import ResultsTable


def shown(head: str, form: str = "{v}", meaning: str = "") -> Mapping[str, str]:
    """Return the metadata of a field that tables show.

    Args:
      head: of its line; `{rival}` stands for the name of what was timed beside.
      form: of the cell, of `v`, the value, and of `r`, the whole result.
      meaning: what the head does not say.
    """
    return {"head": head, "form": form, "meaning": meaning}


def bench_table(title: str, results: Sequence[Any], *, rival: str | None = None) -> ResultsTable:
    """Return a line for each figure that some result has, and a column for each result."""
    lines = []
    for field in fields(results[0]):
        values = [getattr(result, field.name) for result in results]
        if "head" not in field.metadata or all(value is None for value in values):
            continue
        cells = [
            "-" if value is None else field.metadata["form"].format(v=value, r=result)
            for value, result in zip(values, results, strict=True)
        ]
        lines.append((field.metadata["head"].format(rival=rival), cells))
    return ResultsTable(title, lines)
