"""The blocks of a page as values, and its HTML: one self-contained file."""

from __future__ import annotations

import base64
import re
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from hashlib import sha256
from importlib.resources import files
from pathlib import Path
from typing import Any, ClassVar

from markupsafe import Markup

from prb_jax.errors import RunError, printable
from prb_jax.records.writing import write_once
from prb_jax.reports.table import Table
from prb_jax.version import __version__

# Marks that change the direction of text, even of the surrounding page; and code points that are not characters.
_DIRECTIONS = re.compile("[\u061c\u200e\u200f\u202a-\u202e\u2066-\u2069\ud800-\udfff\ufffe\uffff]")


def visible(text: str) -> str:
    """Return the text with its control characters made visible, so they cannot affect a page or a reader.

    The template escapes HTML later.
    """
    text = printable(text.replace("\r\n", "\n"))
    return _DIRECTIONS.sub(lambda match: f"\\u{ord(match[0]):04x}", text)


def clipped(text: str, most: int) -> str:
    """Return the visible text, cut if it is longer, with the number of cut characters."""
    shown = visible(text[:most])
    return shown if len(text) <= most else f"{shown} ... [{len(text) - most:,} more characters]"


@dataclass(frozen=True)
class Drawing:
    """A drawing: the title is also its accessible name, the description is shown below it, the SVG is safe markup."""

    kind: ClassVar = "drawing"
    title: str
    description: str
    svg: Markup


@dataclass(frozen=True)
class Paragraph:
    """A few sentences; with `reason`, they explain why something is missing."""

    kind: ClassVar = "paragraph"
    text: str
    reason: bool = False


@dataclass(frozen=True)
class Listing:
    """Sentences in a list, folded below its title."""

    kind: ClassVar = "listing"
    title: str
    lines: Sequence[str]


@dataclass(frozen=True)
class Preformatted:
    """Text that is shown verbatim, folded if long."""

    kind: ClassVar = "preformatted"
    title: str
    text: str
    folded: bool = False


@dataclass(frozen=True)
class PairList:
    """Comparisons to read, from `prb_jax.reports.pairs`, with filters for subset, user and verdict.

    Their private texts are only for people: no model saw them.
    """

    kind: ClassVar = "pairs"
    note: str
    pairs: Sequence[Mapping[str, Any]]
    subsets: Sequence[str]
    users: Sequence[str]


Block = Table | Drawing | Paragraph | Listing | Preformatted | PairList


@dataclass(frozen=True)
class Section:
    """A heading and its blocks."""

    title: str
    blocks: Sequence[Block]


@dataclass(frozen=True)
class Chapter:
    """One run of the page, or a comparison of several.

    Attributes:
      title: Heading, also in the list of chapters.
      name: Anchor.
      answer: Sentence that answers the question of a reader; the first chapter's opens the page.
      opening: Blocks below the answer: a picture of it, and warnings.
      sections: Details, in the order of their weight.
    """

    title: str
    name: str
    answer: str
    opening: Sequence[Block]
    sections: Sequence[Section]


def render_page(chapters: Sequence[Chapter], *, title: str) -> str:
    """Return the HTML of a page as one file, without links to other resources."""
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


def check_page(out: str | Path) -> Path:
    """Return the path of a page to write.

    Raises:
      RunError: the name does not end in .html, or is the name of a folder.
    """
    target = Path(out)
    if target.suffix.lower() not in (".html", ".htm"):
        raise RunError(f"{target}: expected a name that ends in .html")
    if target.is_dir():
        raise RunError(f"{target}: the page would replace a folder; give --out a file")
    return target


def write_page(chapters: Sequence[Chapter], *, out: str | Path, title: str) -> Path:
    """Write a page, replacing an existing one, and return its path.

    Raises:
      RunError: the name does not end in .html or is a folder's; or the page cannot be written.
    """
    target = check_page(out)
    write_once({target: render_page(chapters, title=title).encode("utf-8")}, replace=True)
    return target
