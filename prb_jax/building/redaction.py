"""E-mail addresses, accounts and numbers in the records are replaced before anything reads them."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from typing import Any

from prb_jax.building.records import Record
from prb_jax.data.comparison import Comparison
from prb_jax.errors import RunError

Redactor = Callable[[str], str]


def load_redactor() -> Redactor:
    """Return the cleaning function of scrubadub.

    Raises:
      RunError: it is not installed.
    """
    try:
        import scrubadub  # pyright: ignore[reportMissingImports]
    except ImportError as error:
        raise RunError(
            "--redact: needs the package scrubadub, which is not installed: pip install 'prb-jax[redact]'"
        ) from error
    return lambda text: str(scrubadub.clean(text))


def redact(record: Record, redactor: Redactor) -> Record:
    """Return a record whose question, profile, aspects and narrative are redacted."""
    row = record.comparison.to_row()
    for name in ("question", "narrative"):
        if isinstance(row.get(name), str):
            row[name] = redactor(row[name])
    for name, parts in (("prompt", ("content",)), ("profile", ("text",))):
        row |= _each(row, name, parts, redactor)
    row |= _each(row, "rubric_aspects", ("aspect", "evidence", "reason"), redactor)
    return Record(record.where, Comparison.from_row(row, where=record.where, labelled=False))


def _each(row: Mapping[str, Any], name: str, parts: tuple[str, ...], redactor: Redactor) -> dict[str, Any]:
    """The field of a row whose items have texts, redacted; nothing where it is absent."""
    if name not in row:
        return {}
    return {name: [{**item, **{part: redactor(item[part]) for part in parts}} for item in row[name]]}
