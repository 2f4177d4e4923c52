"""Tables as values that the terminal, a page and Markdown can show; and the formats of figures."""

from __future__ import annotations

import re
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any, ClassVar

from prb_jax.errors import printable
from prb_jax.platform.paths import shown

if TYPE_CHECKING:
    from rich.console import Console, ConsoleOptions, Group
    from rich.table import Table as RichTable

NONE = "–"  # placeholder for a missing figure
_INTERVAL = re.compile(r"\[[^\]]*\.\.[^\]]*\]")
_RESULTS_SIDE_BY_SIDE = 3  # minimum, even if cells are folded
_UNBOUNDED = 10_000

Getter = Callable[[Any], str]  # returns the cell of one column, given a row's item


class Cell(str):
    """The text of a cell that a page sorts by ``value``; plain text cells are sorted by their text."""

    value: float | None

    def __new__(cls, text: str, value: float | None = None) -> Cell:
        cell = super().__new__(cls, text)
        cell.value = value
        return cell


def number(value: Any, form: str = "{:.3f}") -> str:
    """Return a figure in this format; ``NONE`` for None."""
    return NONE if value is None else Cell(form.format(value), value)


def interval(value: float | None, bounds: Sequence[float] | None) -> str:
    """Return ``0.759 [0.741..0.776]``: a figure with its interval, if any."""
    if value is None:
        return NONE
    # no space inside the brackets: a narrow terminal then wraps the line before them
    shown = [f"{round(number, 3) + 0.0:.3f}" for number in (value, *(bounds or ()))]  # 0.000, never -0.000
    return Cell(shown[0] if bounds is None else f"{shown[0]} [{shown[1]}..{shown[2]}]", value)


def signed(value: float | None, bounds: Sequence[float] | None) -> str:
    """Return ``+0.012 [-0.003..+0.027]``: a difference with its interval, if any."""
    if value is None:
        return NONE
    shown = "" if bounds is None else f" [{bounds[0]:+.3f}..{bounds[1]:+.3f}]"
    return Cell(f"{value:+.3f}{shown}", value)


def percent(value: float, bounds: Sequence[float] | None) -> str:
    """Return ``79.5 % [74.9, 83.5]``: a share with its interval, if any, for a sentence."""
    shown = [
        f"{100 * round(number, 3):.1f}" for number in (value, *(bounds or ()))
    ]  # the digits of `interval`
    return f"{shown[0]} %" + ("" if bounds is None else f" [{shown[1]}, {shown[2]}]")


def gained(value: float, bounds: Sequence[float] | None) -> str:
    """Return ``+0.012 [-0.003, +0.027]``: a difference with its interval, if any, for a sentence."""
    return signed(value, bounds).replace("..", ", ")


def first_words(text: str, *, most: int = 80) -> str:
    """Return the beginning of a text on one line, cut at a blank if there is one."""
    words = " ".join(text[: 20 * most].split())
    if len(words) <= most:
        return words
    kept = words[: most - 4]
    return f"{kept[: kept.rfind(' ')] if ' ' in kept[most // 2 :] else kept} ..."


def field(key: str, form: str = "{}") -> Getter:
    """Return the getter of a column with one value of a mapping: a text, or a figure in this format."""
    return lambda row: row[key] if isinstance(row.get(key), str) else number(row.get(key), form)


def bounded(key: str, bounds: str = "") -> Getter:
    """Return the getter of a figure with its interval, by default the key KEY_ci95."""
    return lambda row: interval(row.get(key), row.get(bounds or f"{key}_ci95"))


def change(key: str, bounds: str = "") -> Getter:
    """Return the getter of a difference with its interval, like :func:`bounded`."""
    return lambda row: signed(row.get(key), row.get(bounds or f"{key}_ci95"))


@dataclass(frozen=True)
class Table:
    """Rows of cells under a ruled head: text at the left, figures at the right. No text is interpreted as markup."""

    kind: ClassVar = "table"
    title: str
    heads: Sequence[str]
    # the cells; an empty row is a rule between the rows above and below it, only on the terminal
    rows: Sequence[Sequence[str]]
    words: int = 1  # number of text columns at the left; figures follow
    note: str = ""
    filtered: bool = False  # whether a page has a field to filter the rows
    narrow: bool = False  # whether a terminal shows less room between columns
    whole: bool = False  # whether a narrow terminal folds only text columns, and leaves figures on one line

    @classmethod
    def of(cls, title: str, items: Iterable[Any], columns: Mapping[str, Getter], **more: Any) -> Table:
        """Return a table with a row for each item, from the getters of its columns by their headings."""
        rows = [[getter(item) for getter in columns.values()] for item in items]
        return cls(title, tuple(columns), rows, **more)

    def __rich__(self) -> RichTable:
        from rich.box import SIMPLE_HEAD
        from rich.markup import escape
        from rich.table import Table as RichTable

        def text(value: str) -> str:  # shorten names of local copies before a narrow terminal folds them
            return escape(shown(value))

        table = RichTable(
            title=text(self.title) or None,
            title_justify="left",
            caption=text(self.note) or None,
            caption_justify="left",
            box=SIMPLE_HEAD,
            show_header=bool(self.heads),
            pad_edge=False,
            show_edge=not self.narrow,
            padding=(0, 1, 0, 0) if self.narrow else (0, 1),
        )
        for place, head in enumerate(self.heads):
            table.add_column(text(head), justify="left" if place < self.words else "right", overflow="fold")
        if not self.heads:
            table.add_column(no_wrap=True, style="bold")
            table.add_column(overflow="fold")
        for place, column in enumerate(table.columns):
            intervals = [text for row in self.rows if row for text in _INTERVAL.findall(row[place])]
            # keeps "[0.741..0.776]" whole when a narrow terminal wraps the cell before it
            column.min_width = max(map(len, intervals), default=None)
            column.no_wrap = column.no_wrap or (self.whole and place >= self.words)
        for row in self.rows:
            if row:
                table.add_row(*map(text, row))
            else:
                table.add_section()
        return table

    def markdown(self, escape: Callable[[str], str]) -> list[str]:
        """Return the lines of the table in Markdown, without title and note; ``escape`` is applied to each text.

        Control characters are also escaped.
        """
        rule = ["---"] * self.words + ["---:"] * (len(self.heads) - self.words)
        rows = [[escape(printable(text)) for text in row] for row in (self.heads, *self.rows)]
        return [f"| {' | '.join(row)} |" for row in (rows[0], rule, *rows[1:])]


def facts_table(facts: Iterable[tuple[str, str]], *, title: str = "") -> Table:
    """Return a table of names and values, one line each."""
    return Table(title, (), list(facts))


def answered(table: Table, *, answer: str, notes: Sequence[str], title: str = "") -> Group:
    """Return the output of a verb: a title, the answer in one sentence, a table, and notes as wide as the terminal."""
    from rich.console import Group
    from rich.text import Text

    head = [Text(title, style="bold")] if title else []
    return Group(*head, Text(answer), table, Text("\n".join(notes), style="italic"))


@dataclass(frozen=True)
class ResultsTable:
    """Figures of several results: a line for each figure, with a text for each result, and as many result columns as
    fit. The first line is the head."""

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
        """Return tables with at most ``size`` result columns."""
        tables = []
        for start in range(0, len(self.figures[0][1]), size):
            head, *rows = ((name, *cells[start : start + size]) for name, cells in self.figures)
            tables.append(Table(self.title, head, rows))
        return tables
