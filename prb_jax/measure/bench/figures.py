"""The figures of a bench: JSON has them by name, and a table shows those that have a head."""

from __future__ import annotations

import statistics
import time
from collections.abc import Callable, Sequence
from typing import Any, TypeVar

from prb_jax.reports.table import ResultsTable

Result = TypeVar("Result")


class Figures:
    """The figures of one result, in their order.

    Attributes:
      line: what the terminal shows as soon as the result is there; "" for nothing.
    """

    def __init__(self) -> None:
        self.line = ""
        self._values: dict[str, Any] = {}
        self._cells: dict[str, tuple[str, str]] = {}

    def add(self, name: str, value: Any, head: str = "", form: str = "{}") -> None:
        """Add a figure; with a head tables show it, in a form such as "{:,.1f} s", or as "-" where it is None."""
        self._values[name] = value
        if head:
            self._cells[name] = (head, "" if value is None else form.format(value))

    def __getitem__(self, name: str) -> Any:
        return self._values[name]

    def to_json(self) -> dict[str, Any]:
        """Return all figures by name."""
        return dict(self._values)

    def cell(self, name: str) -> str:
        """Return what a table shows of a figure; "" where it is None."""
        return self._cells[name][1]

    def heads(self) -> dict[str, str]:
        """Return the heads of the figures that tables show, by name."""
        return {name: head for name, (head, _) in self._cells.items()}


def bench_table(title: str, results: Sequence[Figures]) -> ResultsTable:
    """Return a line for each figure that some result has, and a column for each result."""
    lines = []
    for name, head in results[0].heads().items():
        cells = [result.cell(name) for result in results]
        if any(cells):
            lines.append((head, [cell or "-" for cell in cells]))
    return ResultsTable(title, lines)


def in_turn(rounds: int, *runs: Callable[[], Any]) -> list[list[Any]]:
    """Call functions in turn, in each of some rounds, so that all meet the same machine; return the results of each."""
    results = [[run() for run in runs] for _ in range(rounds)]
    return [list(column) for column in zip(*results, strict=True)]


def timed(run: Callable[[], Result]) -> tuple[float, Result]:
    """Return the seconds that a call takes, and its result."""
    start = time.perf_counter()
    result = run()
    return time.perf_counter() - start, result


def median_ratio(numerators: Sequence[float], denominators: Sequence[float]) -> float:
    """Return the median over rounds of a ratio: what slows a round down slows both sides."""
    return statistics.median(a / b for a, b in zip(numerators, denominators, strict=True))
