"""The parts of a page as values: tables, pictures, texts and pairs to read; the template makes HTML of them."""

from __future__ import annotations

import re
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any, ClassVar, Literal

from markupsafe import Markup

from prb_jax.errors import printable
from prb_jax.reports.tables import NONE, interval

# They turn the direction of text, also of the text of the page around them; and letters that are no letters.
_DIRECTIONS = re.compile("[\u061c\u200e\u200f\u202a-\u202e\u2066-\u2069\ud800-\udfff\ufffe\uffff]")


def visible(text: str) -> str:
    """Return the text with its control characters shown, and so without effect on a page or a reader.

    Escaping for HTML comes later, from the template.
    """
    text = printable(text.replace("\r\n", "\n"))
    return _DIRECTIONS.sub(lambda found: f"\\u{ord(found[0]):04x}", text)


def clipped(text: str, most: int) -> str:
    """Return the visible text, without its end where it is longer, and how much that is."""
    shown = visible(text[:most])
    return shown if len(text) <= most else f"{shown} ... [{len(text) - most:,} more characters]"


@dataclass(frozen=True)
class Cell:
    """One cell of a table; `value` is what it is sorted by, the text itself where it is None."""

    text: str
    value: float | None = None


@dataclass(frozen=True)
class PageTable:
    """A table with columns that can be sorted; `words` columns at the left hold words, the others figures."""

    kind: ClassVar = "table"
    title: str
    heads: Sequence[str]
    rows: Sequence[Sequence[Cell]]
    words: int = 1
    note: str = ""
    filtered: bool = False


@dataclass(frozen=True)
class Drawing:
    """A picture: its title is its accessible name too, the description is shown below it, the SVG is safe markup."""

    kind: ClassVar = "drawing"
    title: str
    description: str
    svg: Markup


@dataclass(frozen=True)
class Paragraph:
    """A few sentences; with `reason`, they say why something is not shown."""

    kind: ClassVar = "paragraph"
    text: str
    reason: bool = False


@dataclass(frozen=True)
class Listing:
    """Sentences that stand below each other."""

    kind: ClassVar = "listing"
    items: Sequence[str]


@dataclass(frozen=True)
class Preformatted:
    """Text that is shown as it is, folded away where it is long."""

    kind: ClassVar = "preformatted"
    title: str
    text: str
    folded: bool = False


@dataclass(frozen=True)
class Response:
    """One response of a pair: whether it was preferred, and whether the model gave it the best score."""

    text: str
    score: str
    label: str
    preferred: bool
    picked: bool


@dataclass(frozen=True)
class Pair:
    """One comparison to read. The private texts are for people only: no model saw them."""

    id: str
    subset: str
    user: str
    margin: str
    verdict: Literal["wrong", "tie", "right"]
    messages: Sequence[tuple[str, str]]
    responses: Sequence[Response]
    posts: Sequence[tuple[str, str]] = ()
    posts_note: str = ""
    private: Sequence[tuple[str, str]] = ()
    notes: Sequence[str] = ()


@dataclass(frozen=True)
class Pairs:
    """Comparisons to read, with a choice of subset, user and verdict."""

    kind: ClassVar = "pairs"
    note: str
    items: Sequence[Pair]
    subsets: Sequence[str]
    users: Sequence[str]


Block = PageTable | Drawing | Paragraph | Listing | Preformatted | Pairs


@dataclass(frozen=True)
class Section:
    """A heading and what stands below it."""

    title: str
    blocks: Sequence[Block]


@dataclass(frozen=True)
class Chapter:
    """One run of the page, or what several have in common."""

    title: str
    name: str
    sections: Sequence[Section] = field(default_factory=tuple)


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
