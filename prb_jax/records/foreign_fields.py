"""Fields with other names than ours: mapped columns, layouts of other tools, and warnings about near misses.

:mod:`prb_jax.records.fields` sends the records here that are not in our own form.
"""

from __future__ import annotations

import difflib
import functools
import re
import warnings
from collections.abc import Collection, Iterator, Mapping, Sequence
from typing import Any, Final

from prb_jax.errors import DataError, PrbWarning, listed, quote
from prb_jax.records.conversation import is_empty
from prb_jax.records.fields import (
    CONVERSATIONS,
    KNOWN,
    MESSAGE_FIELDS,
    POST_FIELDS,
    RECORD_FIELDS,
    SPOKEN_FIELDS,
    UNREAD_FIELDS,
    FieldNames,
    is_negative,
)
from prb_jax.records.layouts import INSTRUCTION, LAYOUT_COLUMNS, PROMPT_COLUMNS, as_record, is_prompt_column

_OTHER_NAMES: Final = {
    "user_id": "user uid username annotator annotatorid worker workerid person personid persona rater raterid author "
    "customerid memberid participantid respondentid evaluatorid labelerid reviewerid useridentifier",
    "profile": "history posts userhistory userposts userprofile profiletext profilejson",
    "question": "query instruction userprompt",
    "responses": "answers completions candidates",
    "labels": "label ratings",
    "chosen": "preferred winner",
    "rejected": "dispreferred loser",
}
PERSON_NAMES: Final = {
    other: name
    for name in ("user_id", "profile")
    for other in _OTHER_NAMES[name].split()
    if other not in ("uid", "author")  # trainers and data sets use these for other things
}
"""Names, in lower case and without marks, that can only mean whose record it is."""
_MEANT: Final = {other: name for name, others in _OTHER_NAMES.items() for other in others.split()}
_INSTEAD: Final = {
    "question": ("prompt",),
    "prompt": ("question",),
    "responses": ("chosen",),
    "labels": ("chosen",),
    "chosen": ("responses",),
    "rejected": ("responses",),
}
"""Field -> alternative fields: if one of these is present, the field is not missing."""

_RATINGS: Final = tuple(
    (pattern.format("chosen"), pattern.format("rejected"))
    for pattern in ("score_{}", "{}_score", "rating_{}", "{}_rating", "{}-rating", "reward_{}", "{}_reward")
)
"""Columns with a number for each of the two responses."""
_OF_A_SIDE: Final = re.compile(
    r"(?:chosen|rejected)_(?:reasoning\w*|thinking|thoughts?|tool_calls|tool_plan)"
)
_LETTER: Final = re.compile(r"\S{0,12}")  # a value that names a response: "a", "model_b", "tie"

_NEAR: Final = 0.86
_PATIENCE: Final = 1000  # records in which a mapped column must occur


@functools.lru_cache(maxsize=4096)
def nearest_field(name: str) -> str | None:
    """Return the field that a column with another name probably means; None if it resembles none."""
    plain = re.sub(r"[^a-z0-9]", "", name.casefold())
    if name in KNOWN or not plain:
        return None
    if plain in _MEANT:
        return _MEANT[plain]
    return _nearest(plain, RECORD_FIELDS)


@functools.lru_cache(maxsize=1024)
def nearest_message_field(name: str) -> str | None:
    """Return the field of a message that a field with another name probably means; None if it resembles none."""
    plain = re.sub(r"[^a-z]", "", name.casefold())
    if plain in ("thought", "thoughts"):
        return "reasoning_content"
    return None if name in MESSAGE_FIELDS else _nearest(plain, sorted(MESSAGE_FIELDS))


def _nearest(plain: str, names: Sequence[str]) -> str | None:
    spelled = {known.replace("_", ""): known for known in names}
    near = difflib.get_close_matches(plain, spelled, n=1, cutoff=_NEAR)
    return spelled[near[0]] if near else None


def is_foreign_column(name: str, names: FieldNames) -> bool:
    """Return True if a column that is not a field is read: mapped, of a layout, refused by name, or a near miss."""
    known = name in (*UNREAD_FIELDS, *LAYOUT_COLUMNS) or name in names.columns.values()
    if known or _is_spoken(name) or any(name in pair for pair in _RATINGS):
        return True
    return nearest_field(name) is not None


def unread_parts(record: Mapping[str, Any]) -> set[str]:
    """Return the names, with their place, of the fields of messages and posts that have a value and are not read."""
    found: set[str] = set()
    for name in CONVERSATIONS:
        for message in _mappings(record.get(name)):
            found |= {f"field {str(key)!r} of a message" for key in _others(message, MESSAGE_FIELDS)}
    for post in _mappings(record.get("profile")):
        if len(post) > len(POST_FIELDS):
            found |= {f"field {str(key)!r} of a post" for key in _others(post, POST_FIELDS)}
    return found


def _mappings(value: Any) -> Iterator[Mapping[str, Any]]:
    """Yield the objects of a list, or of a list of lists."""
    for item in value if isinstance(value, list | tuple) else ():
        if isinstance(item, Mapping):
            yield item
        else:
            yield from _mappings(item)


def _others(item: Mapping[str, Any], known: Collection[str]) -> list[Any]:
    return [key for key, value in item.items() if key not in known and not is_empty(value)]


_CONTENTS: Final = frozenset(
    (*CONVERSATIONS, "labels", "profile", "rubric_aspects", "narrative", *LAYOUT_COLUMNS)
)


def check_columns(columns: Sequence[str], wanted: FieldNames | None, where: str) -> None:
    """Check that a table has a column with contents of a comparison; `wanted` are the columns to read, None for all.

    Raises:
      DataError: It has none; the message names its columns.
    """
    if wanted is None or any(
        wanted.field(name) in _CONTENTS or nearest_field(name) in _CONTENTS for name in columns
    ):
        return
    if len(columns) == 1 and (mark := next((mark for mark in (";", "\t", "|") if mark in columns[0]), None)):
        raise DataError(
            f"{where}: the columns are separated by {mark!r}; expected commas between the columns of a .csv"
        )
    raise DataError(
        f"{where}: names no field of a record: found the columns {listed([quote(name) for name in columns], most=12)}; "
        "expected id,question,chosen,rejected; add other names of fields: --columns question=COLUMN chosen=COLUMN, or "
        '"DATA?question=COLUMN&chosen=COLUMN" in Python and configs'
    )


@functools.lru_cache(maxsize=1024)
def _is_spoken(column: str) -> bool:
    """Return whether a column has the name of a message's field, which is not read outside of messages."""
    return column in SPOKEN_FIELDS or bool(_OF_A_SIDE.fullmatch(column))


def _is_contrary(record: Mapping[str, Any]) -> str | None:
    """Return what says that `rejected` is better than `chosen`; None if nothing does."""
    for better, worse in _RATINGS:
        if better not in record or worse not in record:
            continue
        try:
            high, low = float(record[better]), float(record[worse])
        except (TypeError, ValueError):
            continue
        if high < low:
            return f"{better!r} is {high:g} and {worse!r} is {low:g}"
    margin = record.get("margin")
    return f"'margin' is {margin:g}" if is_negative(margin) else None


_REMEDY: Final = "write the whole prompt as 'prompt', a list of {role, content}"


class ForeignMapper:
    """Renames the mapped columns of one source's records, and warns once about each column that resembles a field."""

    def __init__(self, names: FieldNames, source: object) -> None:
        self._names, self._source = names, source
        self._missing = set(names.columns)
        self._told: set[str] = set()
        self._records = 0

    def __call__(self, value: Any, *, where: str) -> Any:
        """Return a record with mapped columns renamed to fields.

        Raises:
          DataError: A record has both a field and its mapped column, or a mapped column never occurs.
        """
        if not isinstance(value, Mapping):
            return value  # `Comparison.from_row` raises the error
        for name, column in self._names.columns.items():
            if column in value:
                if value.get(name) is not None:
                    raise DataError(
                        f"{where}: field {name!r}: given beside {quote(column)}, which is mapped to it"
                    )
                self._missing.discard(name)
                if column != INSTRUCTION or name not in (
                    "question",
                    "prompt",
                ):  # else with the rest of its prompt
                    value = {
                        name if key == column else key: item for key, item in value.items() if key != name
                    }
        self._records += 1
        if self._missing and self._records == _PATIENCE:
            self.finish()
        value = {**value, "rendered": True} if self._names.rendered else as_record(value, where)
        mapped = self._names.columns.values()
        for name in PROMPT_COLUMNS:
            if name not in self._told and name not in mapped and is_prompt_column(name, value):
                self._told.add(name)
                about = f"{self._source}: {name!r}: not read; if it belongs to the prompt, {_REMEDY}"
                warnings.warn(about, PrbWarning, stacklevel=2)
        if unread := unread_parts(value) - self._told:
            self._told |= unread
            names = " and ".join(sorted(unread))
            about = f"{where}: {names}: not read, so no model sees it, here and in other records"
            warnings.warn(about, PrbWarning, stacklevel=2)
        self._tell_of_values(value, where)
        for column in value.keys() - KNOWN - self._told:
            name = nearest_field(column) if isinstance(column, str) else None
            if name is None:
                self._told.add(column)
            elif name in ("chosen", "rejected") and _LETTER.fullmatch(str(value[column])):
                continue  # "model_a" is no response
            elif is_empty(value[column]):
                continue
            elif all(value.get(other) is None for other in (name, *_INSTEAD.get(name, ()))):
                self._told.add(column)
                warnings.warn(
                    f"{self._source}: {quote(column)} is not a field of a record, so it is not read; to read it as "
                    f"{name!r}, add '?{name}={column}' to the name of the data (on the command line, --columns "
                    f"{name}={column})",
                    PrbWarning,
                    stacklevel=2,
                )
        return value

    def _tell_of_values(self, value: Mapping[str, Any], where: str) -> None:
        """Warn once about columns of messages' fields, and about the first record whose sides seem exchanged."""
        spoken = [
            name for name in value.keys() - self._told if _is_spoken(str(name)) and not is_empty(value[name])
        ]
        for name in sorted(spoken):
            self._told.add(name)
            about = (
                f"{where}: {name!r}: not read, so no model sees it; it belongs into a message of the response"
            )
            warnings.warn(about, PrbWarning, stacklevel=3)
        if "exchanged" not in self._told and (found := _is_contrary(value)):
            self._told.add("exchanged")
            about = f"{where}: {found}: 'rejected' is then the better response, but 'chosen' counts as better"
            warnings.warn(f"{about}, here and in other records", PrbWarning, stacklevel=3)

    def finish(self) -> None:
        """Raise DataError if a mapped column did not occur in any record."""
        for name in sorted(self._missing):
            column = self._names.columns[name]
            records = f"the first {self._records:,} records" if self._records == _PATIENCE else "any record"
            raise DataError(
                f"{self._source}: columns: {name}={column}: no field {quote(column)} in {records}"
            )
