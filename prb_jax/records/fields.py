"""The fields of a record: their names, and strict checks of single values.

Each error of a check starts with ``where`` ("FILE:LINE") and names the field. A record in our own form has only our
fields, in messages and posts too; other records get our names by a `FieldMapper`.
"""

from __future__ import annotations

import math
import numbers
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any, Final, NoReturn

from prb_jax.errors import DataError, quote
from prb_jax.seams import get

SPOKEN_FIELDS: Final = (
    "tool_calls", "function_call", "reasoning_content", "reasoning", "thinking", "tool_plan", "tool_responses",
)  # fmt: skip
"""Fields of a message with content beyond its text."""

NAME_FIELDS: Final = ("name", "tool_call_id")
"""Fields of a message that identify the speaker; many templates omit them."""

MEDIA_FIELDS: Final = ("images", "videos", "audio")
"""Fields of a message with other media than text, which no model here can read."""

MESSAGE_FIELDS: Final = frozenset(("role", "content", *SPOKEN_FIELDS, *NAME_FIELDS, *MEDIA_FIELDS))
"""All fields of a message that are read, or refused by name."""

CONTEXT_FIELDS: Final = ("tools", "chat_template_kwargs")
"""Fields of a record or request that a chat template receives in addition to the messages."""

UNREAD_FIELDS: Final = ("documents", "functions", "images", "videos")
"""Fields of a record or a request that chat templates read and this package does not render."""

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
    return isinstance(value, str) and value.lstrip().startswith(("[", '{"role"', "{'role'", "Human:"))


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


def fail(where: str, name: str, message: str) -> NoReturn:
    """Raise the ``DataError`` for field ``name``."""
    raise DataError(f"{where}: field '{name}': {message}")


def found(value: object) -> str:
    """Return a value and its type, short enough for one line."""
    if value is None:
        return "null"
    return f"{quote(value)} ({type(value).__name__})"


def text(value: object, where: str, name: str) -> str:
    """Return ``value`` as a string that can be written as UTF-8."""
    if not isinstance(value, str):
        fail(where, name, "missing" if value is None else f"expected a string, found {found(value)}")
    if not value.isascii():
        # JSON can escape half of a surrogate pair, which no tokenizer and no file accepts.
        try:
            value.encode("utf-8")
        except UnicodeEncodeError as error:
            fail(where, name, f"character {error.start} is a lone surrogate, which is not text")
    return value


def optional_text(value: object, where: str, name: str) -> str | None:
    """Like ``text``, but return None for an absent field."""
    return None if value is None else text(value, where, name)


def identifier(value: object, where: str, name: str) -> str:
    """Return a non-empty name; an integer becomes its digits."""
    if isinstance(value, numbers.Integral) and not isinstance(value, bool):
        return str(int(value))
    if not text(value, where, name):
        fail(where, name, "empty; expected a name")
    return str(value)


def optional_identifier(value: object, where: str, name: str) -> str | None:
    """Like ``identifier``, but return None for an absent field."""
    return None if value is None else identifier(value, where, name)


def number(value: object, where: str, name: str) -> float:
    """Return a finite number; booleans are refused."""
    if isinstance(value, bool) or not isinstance(value, numbers.Real):
        fail(where, name, f"expected a number, found {found(value)}")
    try:
        result = float(value)
    except OverflowError:
        result = math.inf
    if not math.isfinite(result):
        fail(where, name, f"expected a finite number, found {quote(value)}")
    return result


def sequence(value: object, where: str, name: str) -> list[Any] | tuple[Any, ...]:
    """Return ``value`` if it is a list or tuple."""
    if not isinstance(value, (list, tuple)):
        fail(where, name, f"expected a list, found {found(value)}")
    return value


def objects(value: object, where: str, name: str) -> Sequence[Any]:
    """Like ``sequence``, but convert an object of equally long lists, as in older data sets, to a list of objects."""
    if not isinstance(value, Mapping):
        return sequence(value, where, name)
    columns = list(value.values())
    if columns and all(isinstance(column, list) and len(column) == len(columns[0]) for column in columns):
        return [dict(zip(value, items)) for items in zip(*columns)]
    return sequence(value, where, name)


def mapping(value: object, where: str, name: str) -> Mapping[str, Any]:
    """Return ``value`` if it is an object with named fields."""
    if not isinstance(value, Mapping):
        fail(where, name, f"expected an object, found {found(value)}")
    return value


def as_list(values: Iterable[Any] | None) -> Any:
    """Return an iterable as a list, and anything else unchanged, so ``sequence`` raises the error."""
    if values is None or isinstance(values, (str, bytes, Mapping)) or not isinstance(values, Iterable):
        return values
    return list(values)
