"""The parts of a page as values: tables, pictures, texts and pairs to read; the template makes HTML of them."""

from __future__ import annotations

import re
from collections.abc import Sequence
from dataclasses import dataclass, field
from typing import ClassVar, Literal

from markupsafe import Markup

from prb_jax.errors import printable

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
