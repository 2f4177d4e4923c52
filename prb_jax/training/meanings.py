"""Every option of a training run with its meaning, as the docstrings of `prb_jax.training.settings` give it."""

from __future__ import annotations

import dataclasses
import inspect
import re
import textwrap
from collections.abc import Iterator
from typing import Any, get_type_hints

from prb_jax.training.config import choices_of, value_text

_WIDTH = 80


def explained_settings(settings: Any) -> str:
    """Return every option on a line of its own, below its meaning; the whole is a YAML config."""
    return "\n".join(_lines(settings)) + "\n"


def meanings(section: type) -> dict[str, str]:
    """Return the meaning of each attribute that the docstring of a dataclass explains."""
    listed = (inspect.getdoc(section) or "").partition("Attributes:\n")[2].partition("\n\n")[0]
    found = {}
    # A line that goes on is indented deeper than the name at its beginning.
    for entry in re.sub(r"\n\s+", " ", textwrap.dedent(listed)).splitlines():
        names, _, meaning = entry.partition(": ")
        found.update((name.strip(), meaning) for name in names.split(","))
    return found


def _lines(section: Any, prefix: str = "") -> Iterator[str]:
    explained, hints = meanings(type(section)), get_type_hints(type(section))
    for field in dataclasses.fields(section):
        value = getattr(section, field.name)
        if dataclasses.is_dataclass(value):
            about = (inspect.getdoc(type(value)) or "").partition("\n\n")[0]
            yield from ("", *_comment(about))
            yield from _lines(value, f"{prefix}{field.name}.")
        else:
            choices = choices_of(hints[field.name])
            one_of = f" One of: {', '.join(choices)}." if choices else ""
            yield from ("", *_comment(explained[field.name] + one_of))
            yield f"{prefix}{field.name}: {value_text(value)}"


def _comment(text: str) -> list[str]:
    text = text if text.startswith("`") else text[:1].upper() + text[1:]
    return textwrap.wrap(text, _WIDTH, initial_indent="# ", subsequent_indent="# ", break_on_hyphens=False)
