"""The fields of requests, checked: each error names the field, and says what was found and expected."""

from __future__ import annotations

import json
from collections.abc import Callable, Iterator, Mapping, Sequence
from string import ascii_lowercase
from typing import Any, TypeVar

from prb_jax.data import fields
from prb_jax.data.comparison import Message, Post, read_profile
from prb_jax.data.conversation import MESSAGE_EXTRAS, ROLES, TEMPLATE_EXTRAS, refuse_extras
from prb_jax.data.template_marks import template_mark
from prb_jax.errors import DataError, quote

Value = TypeVar("Value")

WHERE = "the request"


def _misspelt(name: str) -> Iterator[str]:
    """Yield a name, and the names that one typing error makes of it: a letter more, less, other, or two swapped."""
    yield name
    for i in range(len(name) + 1):
        before, after = name[:i], name[i:]
        yield before + after[1:]
        yield before + after[1:2] + after[:1] + after[2:]
        for letter in ascii_lowercase:
            yield before + letter + after
            yield before + letter + after[1:]


_SPELLED = {
    "userid": "user_id",
    "profile": "profile",
    "userprofile": "profile",
    "profileorder": "profile_order",
}
_MEANT = {wrong: field for name, field in _SPELLED.items() for wrong in _misspelt(name)}
_MEANT |= {"user": "user_id", "users": "user_id", "history": "profile", "posts": "profile"}
"""Maps near misses, in lower case and without marks between words, to the field that says whose reward it is."""


class Body(Mapping[str, Any]):
    """The fields of a request, or of a call of a reward function.

    It notes which ones are looked at, so that the others can be told or refused.
    """

    def __init__(self, given: Mapping[str, Any], where: str = WHERE) -> None:
        self._given, self._where, self._read = given, where, set[str]()

    def __getitem__(self, name: str) -> Any:
        self._read.add(name)
        return self._given[name]

    def __iter__(self) -> Iterator[str]:
        return iter(self._given)

    def __len__(self) -> int:
        return len(self._given)

    def ignored(self) -> list[str]:
        """Return the fields that nothing has looked at.

        Raises:
          DataError: a field that tells whose reward it is, or nearly has its name, probably by a typing error; or one
            that a chat template would read.
        """
        names = [name for name in self._given if name not in self._read]
        for name in names:
            meant = _MEANT.get(name.casefold().replace("_", "").replace("-", ""))
            if meant is not None and self._given[name] is not None:
                instead = f"unknown; expected {meant!r} for whose reward it is"
                fields.fail(self._where, name, "not read here" if name == meant else instead)
        refuse_extras(
            {name: self._given[name] for name in TEMPLATE_EXTRAS if name in names},
            TEMPLATE_EXTRAS,
            self._where,
        )
        return names


def text(body: Body, name: str) -> str:
    """Return a text."""
    return fields.text(body.get(name), WHERE, name)


def texts(body: Body, *names: str) -> list[str]:
    """Return one or more texts, from the first of these fields that is there."""
    name, value = _first(body, names)
    if isinstance(value, str):
        value = [value]
    listed = fields.sequence(value, WHERE, name) if value is not None else []
    if not listed:
        fields.fail(WHERE, name, f"expected a text or a list of texts, found {fields.found(value)}")
    return [fields.text(entry, WHERE, f"{name}[{k}]") for k, entry in enumerate(listed)]


def prompts(body: Body, *names: str) -> list[tuple[Message, ...]]:
    """Return one or more prompts, from the first of these fields that is there: each is a text or a conversation."""
    name, value = _first(body, names)
    if not _lists(value):
        return [user_turn(entry, name) for entry in texts(body, *names)]
    return [prompt(entry, f"{name}[{k}]") for k, entry in enumerate(value)]


def _first(body: Body, names: Sequence[str]) -> tuple[str, Any]:
    name = next((name for name in names if body.get(name) is not None), names[0])
    return name, body.get(name)


def _lists(value: object) -> bool:
    return isinstance(value, list) and any(isinstance(entry, list) for entry in value)


def prompt(value: object, name: str) -> tuple[Message, ...]:
    """Return a prompt, which is a conversation or the text of a user."""
    return messages(value, name) if isinstance(value, list) else user_turn(value, name)


def user_turn(value: object, name: str) -> tuple[Message, ...]:
    """Return a prompt that is the text of a user.

    Raises:
      DataError: a chat template has rendered it already, and it would be wrapped as a message again.
    """
    turn = fields.text(value, WHERE, name)
    if mark := template_mark(turn):
        fields.fail(
            WHERE,
            name,
            f"holds {mark!r}: a chat template has rendered it already; send a list of messages, or the whole "
            "conversation as 'input' to /classify",
        )
    return (Message("user", turn),)


def messages(value: object, name: str) -> tuple[Message, ...]:
    """Return a conversation."""
    turns = []
    for k, entry in enumerate(fields.sequence(value, WHERE, name)):
        given = fields.mapping(entry, WHERE, f"{name}[{k}]")
        role = fields.text(given.get("role"), WHERE, f"{name}[{k}].role")
        if role not in ROLES:
            fields.fail(WHERE, f"{name}[{k}].role", f"expected {' or '.join(ROLES)}, found {quote(role)}")
        refuse_extras(given, MESSAGE_EXTRAS, WHERE, within=f"{name}[{k}]")
        turns.append(Message(role, _content(given.get("content"), f"{name}[{k}].content")))
    if not turns:
        fields.fail(WHERE, name, "expected at least one message, found none")
    return tuple(turns)


def _content(value: object, name: str) -> str:
    """A text; or a list of parts {type: text, text}, as newer clients write it."""
    if not isinstance(value, list):
        return fields.text(value, WHERE, name)
    parts = []
    for k, entry in enumerate(value):
        part = fields.mapping(entry, WHERE, f"{name}[{k}]")
        if part.get("type") != "text":
            fields.fail(WHERE, f"{name}[{k}].type", f"expected text, found {quote(part.get('type'))}")
        parts.append(fields.text(part.get("text"), WHERE, f"{name}[{k}].text"))
    return "".join(parts)


def users(body: Body, count: int) -> list[str | None]:
    """Return the user of each of `count` responses: `user_id` is one for all, or a list with one for each."""
    value = body.get("user_id")
    return _of_each(value, count, isinstance(value, list), fields.optional_identifier, "user_id")


def profiles(body: Body, count: int) -> list[tuple[Post, ...]]:
    """Return the posts for each of `count` responses: `profile` is one list of posts, or a list of such lists."""
    value = body.get("profile")
    if isinstance(value, str):
        fields.fail(
            WHERE, "profile", "expected a list of posts {id, category, text}: a text goes with response_text"
        )

    def read(posts: object, where: str, name: str) -> tuple[Post, ...]:
        return read_profile(posts, where if name == "profile" else f"{where}: {name}")

    return _of_each(value, count, _lists(value), read, "profile")


def _of_each(
    value: Any, count: int, several: bool, read: Callable[[object, str, str], Value], name: str
) -> list[Value]:
    if not several:
        return [read(value, WHERE, name)] * count
    if len(value) != count:
        fields.fail(WHERE, name, f"expected one, or {count} for {count} responses, found {len(value)}")
    return [read(entry, WHERE, f"{name}[{k}]") for k, entry in enumerate(value)]


def column(body: Body, name: str, count: int) -> Sequence[Any]:
    """Return a list with one entry for each response, of any kind; Nones where it is not there or of another length."""
    value = body.get(name)
    return value if isinstance(value, list) and len(value) == count else [None] * count


def label_fields(label: object) -> Body:
    """Return the fields of a label that is an object, or a text that is one in JSON; no fields for any other."""
    if isinstance(label, str) and label.lstrip().startswith("{"):
        try:
            label = json.loads(label)
        except (ValueError, RecursionError):
            return Body({})  # a text that happens to begin so
    return Body(label if isinstance(label, Mapping) else {})


def no_profile(body: Body) -> None:
    """Raise DataError for a profile where the prompt is rendered already."""
    if body.get("profile"):
        about = "a conversation that is rendered already takes no profile: send messages instead"
        fields.fail(WHERE, "profile", about)


def flag(body: Body, *names: str, default: bool = False) -> bool:
    """Return true or false, from the one of these fields that is there."""
    given = {name: body[name] for name in names if body.get(name) is not None}
    for name, value in given.items():
        if not isinstance(value, bool):
            fields.fail(WHERE, name, f"expected true or false, found {fields.found(value)}")
    if len(set(given.values())) > 1:
        raise DataError(f"{WHERE}: {' and '.join(given)} contradict each other")
    return next(iter(given.values()), default)


def whole_number(body: Body, name: str, *, least: int, default: int | None) -> int | None:
    """Return a whole number."""
    value = body.get(name)
    if value is None:
        return default
    if type(value) is not int or value < least:
        fields.fail(WHERE, name, f"expected a whole number from {least}, found {fields.found(value)}")
    return value


def token_ids(value: object) -> tuple[int, ...] | None:
    """Return token ids; None where the value is not a list of integers.

    Raises:
      DataError: a number outside the range of any vocabulary.
    """
    if not isinstance(value, list) or set(map(type, value)) != {int}:
        return None
    for end in (min(value), max(value)):
        if not 0 <= end < 2**31:
            raise DataError(f"input: expected token ids of the model, found {quote(end)}")
    return tuple(value)
