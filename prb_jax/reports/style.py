"""The one style of all tables: a title and a ruled head, words at the left, figures at the right, 80 columns."""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from typing import TYPE_CHECKING

if TYPE_CHECKING:
    from rich.console import Group
    from rich.table import Table

NONE = "–"
"""In the place of a figure that there is not."""

_RESULTS_SIDE_BY_SIDE = 3


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


def results_table(title: str, figures: Sequence[tuple[str, Sequence[str]]]) -> Group:
    """Return figures of several results: a line for each figure, a column for each result, a few side by side."""
    from rich.console import Group
    from rich.markup import escape

    tables, count = [], len(figures[0][1])
    for start in range(0, count, _RESULTS_SIDE_BY_SIDE):
        results = slice(start, start + _RESULTS_SIDE_BY_SIDE)
        name, headings = figures[0]
        table = new_table(title, [name, *headings[results]])
        for name, cells in figures[1:]:
            table.add_row(name, *map(escape, cells[results]))
        tables.append(table)
    return Group(*tables)
