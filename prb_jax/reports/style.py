"""The one style of all tables: a title and a ruled head, words at the left, figures at the right, 80 columns."""

from __future__ import annotations

from collections.abc import Iterable, Iterator, Sequence
from dataclasses import dataclass
from typing import TYPE_CHECKING

if TYPE_CHECKING:
    from rich.console import Console, ConsoleOptions
    from rich.table import Table

NONE = "–"
"""In the place of a figure that there is not."""

_RESULTS_SIDE_BY_SIDE = 3  # also where they are folded
_UNBOUNDED = 10_000


def signed(value: float | None, bounds: Sequence[float] | None) -> str:
    """``+0.012 [-0.003..+0.027]``: a difference with its interval, where there is one."""
    if value is None:
        return NONE
    return f"{value:+.3f}" if bounds is None else f"{value:+.3f} [{bounds[0]:+.3f}..{bounds[1]:+.3f}]"


def new_table(title: str = "", headings: Sequence[str] = (), *, left: int = 1) -> Table:
    """Return an empty table.

    Args:
      title: above it, as it is: no markup.
      headings: of columns; without any, columns are added by the caller and no head is shown.
      left: how many columns hold words; figures follow.
    """
    from rich.box import SIMPLE_HEAD
    from rich.markup import escape
    from rich.table import Table

    table = Table(
        title=escape(title) or None,
        title_justify="left",
        caption_justify="left",
        box=SIMPLE_HEAD,
        show_header=bool(headings),
        pad_edge=False,
    )
    for number, heading in enumerate(headings):
        table.add_column(escape(heading), justify="left" if number < left else "right", overflow="fold")
    return table


def facts_table(facts: Iterable[tuple[str, str]], *, title: str = "") -> Table:
    """Return a table of names and what they are, a line each."""
    from rich.text import Text

    table = new_table(title)
    table.add_column(no_wrap=True)
    table.add_column(overflow="fold")
    for name, value in facts:
        table.add_row(Text(name, style="bold"), Text(value))
    return table


@dataclass(frozen=True)
class ResultsTable:
    """Figures of several results: a line for each figure, a column for each result, as many as have room.

    Attributes:
      title: above each table.
      figures: the name of a figure, and its text for each result; the first one is the head.
    """

    title: str
    figures: Sequence[tuple[str, Sequence[str]]]

    def __rich_console__(self, console: Console, options: ConsoleOptions) -> Iterator[Table]:
        from rich.measure import Measurement

        size = len(self.figures[0][1])
        wide = options.update(max_width=_UNBOUNDED)
        while size > _RESULTS_SIDE_BY_SIDE and any(
            Measurement.get(console, wide, table).maximum > options.max_width for table in self.tables(size)
        ):
            size -= 1
        yield from self.tables(size)

    def tables(self, size: int) -> list[Table]:
        """Return tables with at most so many results side by side."""
        from rich.markup import escape

        (name, headings), *figures = self.figures
        tables = []
        for start in range(0, len(headings), size):
            results = slice(start, start + size)
            table = new_table(self.title, [name, *headings[results]])
            for figure, cells in figures:
                table.add_row(figure, *map(escape, cells[results]))
            tables.append(table)
        return tables
