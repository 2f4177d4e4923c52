"""Names of a record's fields, and whether a record is in our own form: only our fields, in messages and posts too."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, field
from typing import Any, Final

from prb_jax.errors import DataError, quote
from prb_jax.records.conversation import CONTEXT_FIELDS, MESSAGE_FIELDS
from prb_jax.seams import get

RECORD_FIELDS: Final = (
    "id",
    "question",
    "prompt",
    "chosen",
    "rejected",
    "responses",
    "labels",
    "user_id",
    "profile",
    "profile_order",
    "category",
    "subset",
    "margin",
    *CONTEXT_FIELDS,
    "rendered",
    "rubric_aspects",
    "narrative",
)


KNOWN: Final = frozenset(RECORD_FIELDS)
CONVERSATIONS: Final = ("question", "prompt", "chosen", "rejected", "responses")
POST_FIELDS: Final = frozenset(("id", "category", "text"))


@dataclass(frozen=True)
class FieldNames:
    """Columns to read from a record: fields, columns mapped to fields, and columns with similar names.

    Raises:
      DataError: A mapping names an unknown field, or maps a column that is itself a field.
    """

    columns: Mapping[str, str] = field(default_factory=dict)  # field -> its name in the data
    rendered: bool = False  # if True, texts are already rendered by a chat template

    def __post_init__(self) -> None:
        for name, column in self.columns.items():
            if name not in KNOWN:
                expected = f"expected FIELD=COLUMN with a field of a record: {', '.join(RECORD_FIELDS)}"
                raise DataError(f"columns: {quote(name)} is not a field; {expected}")
            if column in KNOWN:
                raise DataError(f"columns: {name}={column}: {quote(column)} is itself a field of a record")

    def __contains__(self, name: object) -> bool:
        """Return True if a column is read."""
        return name in KNOWN or get("formats", "foreign column").value(str(name), self)

    def field(self, column: str) -> str:
        """Return the field to which a column is mapped, or the column's name."""
        return next((name for name, mapped in self.columns.items() if mapped == column), column)


RECORD: Final = FieldNames()  # no mapped columns


class FieldMapper:
    """Gives the records of one source our names of fields; records in our own form stay as they are."""

    def __init__(self, names: FieldNames, source: object) -> None:
        self._names, self._source = names, source
        self._is_mapped = names != RECORD
        self._foreign: Any = None  # made for the first record in another form

    def __call__(self, value: Any, *, where: str) -> Any:
        """Return a record with the fields of a comparison.

        Raises:
          DataError: A record has both a field and its mapped column, or a mapped column never occurs.
        """
        if not self._is_mapped and is_own_form(value):
            return value
        return self._mapper()(value, where=where)

    def finish(self) -> None:
        """Raise DataError if a mapped column did not occur in any record."""
        if self._names.columns:
            self._mapper().finish()

    def _mapper(self) -> Any:
        self._foreign = self._foreign or get("formats", "foreign fields").value(self._names, self._source)
        return self._foreign


def is_own_form(value: Any) -> bool:
    """Return True if a record and the messages and posts in it have only our fields."""
    if not isinstance(value, Mapping) or not value.keys() <= KNOWN:
        return False
    return (
        all(_has_only(value.get(name), MESSAGE_FIELDS) for name in CONVERSATIONS)
        and _has_only(value.get("profile"), POST_FIELDS)
        and not any(_is_written_out(value.get(name)) for name in CONVERSATIONS)
        and not is_negative(value.get("margin"))  # the record says itself that `rejected` is better
    )


def _is_written_out(value: Any) -> bool:
    """Return True if a text, or one in a list, may contain turns: JSON, or the raw text of HH."""
    if isinstance(value, list | tuple):
        return any(map(_is_written_out, value))
    return isinstance(value, str) and value.lstrip().startswith(("[", "Human:"))


def is_negative(value: Any) -> bool:
    """Return True for a number below 0."""
    return isinstance(value, int | float) and value < 0


def _has_only(value: Any, known: frozenset[str]) -> bool:
    """Return True if the objects in a list, or in lists in it, have only these fields."""
    if isinstance(value, list | tuple):
        return all(
            item.keys() <= known if isinstance(item, Mapping) else _has_only(item, known) for item in value
        )
    return not isinstance(value, Mapping)
