"""What a page is made of, as values, and the HTML of it: one file that needs nothing else."""

from __future__ import annotations

import base64
import re
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from hashlib import sha256
from importlib.resources import files
from typing import Any, ClassVar

from markupsafe import Markup

from prb_jax.errors import printable
from prb_jax.reports.table import Table
from prb_jax.version import __version__

# They turn the direction of text, also of the text of the page around them; and letters that are no letters.
_DIRECTIONS = re.compile("[\u061c\u200e\u200f\u202a-\u202e\u2066-\u2069\ud800-\udfff\ufffe\uffff]")


def visible(text: str) -> str:
    """Return the text with its control characters shown, and so without effect on a page or a reader.

    Escaping for HTML comes later, from the template.
    """
    text = printable(text.replace("\r\n", "\n"))
    return _DIRECTIONS.sub(lambda match: f"\\u{ord(match[0]):04x}", text)


def clipped(text: str, most: int) -> str:
    """Return the visible text, without its end where it is longer, and how much that is."""
    shown = visible(text[:most])
    return shown if len(text) <= most else f"{shown} ... [{len(text) - most:,} more characters]"


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
    lines: Sequence[str]


@dataclass(frozen=True)
class Preformatted:
    """Text that is shown as it is, folded away where it is long."""

    kind: ClassVar = "preformatted"
    title: str
    text: str
    folded: bool = False


@dataclass(frozen=True)
class PairList:
    """Comparisons to read, as `prb_jax.reports.pairs` makes them, with a choice of subset, user and verdict.

    Their private texts are for people only: no model saw them.
    """

    kind: ClassVar = "pairs"
    note: str
    pairs: Sequence[Mapping[str, Any]]
    subsets: Sequence[str]
    users: Sequence[str]


Block = Table | Drawing | Paragraph | Listing | Preformatted | PairList


@dataclass(frozen=True)
class Section:
    """A heading and what stands below it."""

    title: str
    blocks: Sequence[Block]


@dataclass(frozen=True)
class Chapter:
    """One run of the page, or what several have in common; `name` is its anchor."""

    title: str
    name: str
    sections: Sequence[Section]


def render_page(chapters: Sequence[Chapter], *, title: str) -> str:
    """Return the HTML of a page in one file, without any address of another one."""
    from jinja2 import Environment, StrictUndefined

    def shown(value: Any) -> Any:
        return visible(value) if isinstance(value, str) and not isinstance(value, Markup) else value

    style, script, page = (
        files("prb_jax.reports").joinpath(f"page.{kind}").read_text("utf-8") for kind in ("css", "js", "html")
    )
    environment = Environment(
        autoescape=True, undefined=StrictUndefined, finalize=shown, trim_blocks=True, lstrip_blocks=True
    )
    return environment.from_string(page).render(
        title=title,
        chapters=chapters,
        style=Markup(style),
        script=Markup(script),
        script_hash=base64.b64encode(sha256(script.encode()).digest()).decode(),
        version=__version__,
    )
