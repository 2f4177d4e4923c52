"""Figures of a benchmark: JSON has all by name, and tables show those with a head."""

from __future__ import annotations

import statistics
import time
from collections.abc import Callable, Sequence
from typing import Any, TypeVar

from prb_jax.reports.table import ResultsTable

Result = TypeVar("Result")


class Figures:
    """Figures of one result, in order.

    Attributes:
      line: Line that the terminal shows as soon as the result is ready; "" for none.
    """

    def __init__(self) -> None:
        self.line = ""
        self._values: dict[str, Any] = {}
        self._cells: dict[str, tuple[str, str]] = {}

    def add(self, name: str, value: Any, head: str = "", form: str = "{}") -> None:
        """Add a figure; with a head, tables show it in a format such as "{:,.1f} s", or as "-" if it is None."""
        self._values[name] = value
        if head:
            self._cells[name] = (head, "" if value is None else form.format(value))

    def __getitem__(self, name: str) -> Any:
        return self._values[name]

    def to_json(self) -> dict[str, Any]:
        """Return all figures by name."""
        return dict(self._values)

    def cell(self, name: str) -> str:
        """Return a figure's cell in tables; "" if it is None."""
        return self._cells[name][1]

    def heads(self) -> dict[str, str]:
        """Return the heads of the figures that tables show, by name."""
        return {name: head for name, (head, _) in self._cells.items()}


def bench_table(title: str, results: Sequence[Figures]) -> ResultsTable:
    """Return a table with one line per figure that some result has, and one column per result."""
    lines = []
    for name, head in results[0].heads().items():
        cells = [result.cell(name) for result in results]
        if any(cells):
            lines.append((head, [cell or "-" for cell in cells]))
    return ResultsTable(title, lines)


def in_turn(rounds: int, *runs: Callable[[], Any]) -> list[list[Any]]:
    """Call functions alternately for some rounds, so all see the same machine load; return the results of each."""
    results = [[run() for run in runs] for _ in range(rounds)]
    return [list(column) for column in zip(*results, strict=True)]


def timed(run: Callable[[], Result]) -> tuple[float, Result]:
    """Return the seconds that a call takes, and its result."""
    start = time.perf_counter()
    result = run()
    return time.perf_counter() - start, result


def median_ratio(numerators: Sequence[float], denominators: Sequence[float]) -> float:
    """Return the median of per-round ratios: a slow round slows both sides."""
    return statistics.median(a / b for a, b in zip(numerators, denominators, strict=True))
