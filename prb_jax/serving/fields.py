"""Reads and checks the fields of requests: each error names the field, the value found and the value expected."""

from __future__ import annotations

import json
from collections.abc import Callable, Iterator, Mapping, Sequence
from string import ascii_lowercase
from typing import Any, TypeVar

import numpy as np

from prb_jax.errors import DataError, quote
from prb_jax.records import fields
from prb_jax.records.comparison import Message, Post, read_profile
from prb_jax.records.conversation import (
    Messages,
    from_json,
    read_context,
    refuse_extras,
    turns_of,
    with_context,
)
from prb_jax.records.fields import CONTEXT_FIELDS, UNREAD_FIELDS
from prb_jax.records.foreign_fields import PERSON_NAMES
from prb_jax.records.messages import as_response, read_message
from prb_jax.records.reading import parse_json
from prb_jax.records.template_marks import template_mark
from prb_jax.serving.sizes import PARTS, UNLIMITED, Sizes, TooLargeError

Value = TypeVar("Value")

WHERE = "the request"


def _misspelt(name: str) -> Iterator[str]:
    """Yield a name and all its one-typo variants: a letter added, removed or replaced, or two letters swapped."""
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
_MEANT |= dict.fromkeys(("users", "personas", "personaid"), "user_id") | PERSON_NAMES
"""Maps near misses, in lower case and without marks between words, to the field that says whose reward it is."""

_WORDS = ("user", "profile", "question", "history", "posts", "person", "annotator")
"""Parts of the names of fields that say whose reward it is, and of names close to these."""


class Body(Mapping[str, Any]):
    """The fields of a request or of a reward function call, with size limits.

    The body records which fields are read; the unread fields can then be reported or refused.
    """

    def __init__(self, given: Mapping[str, Any], sizes: Sizes = UNLIMITED, where: str = WHERE) -> None:
        self.given, self._read, self.sizes, self.where = given, set[str](), sizes, where

    def __getitem__(self, name: str) -> Any:
        self._read.add(name)
        return self.given[name]

    def __iter__(self) -> Iterator[str]:
        return iter(self.given)

    def __len__(self) -> int:
        return len(self.given)

    def ignored(self) -> list[str]:
        """Return the fields that nothing has read.

        Raises:
          DataError: If an unread field names the user or profile, probably with a typo in its name, or if a chat
            template would read the field.
        """
        names = [name for name in self.given if name not in self._read]
        for name in names:
            meant = _MEANT.get(name.casefold().replace("_", "").replace("-", ""))
            if meant is not None and self.given[name] is not None:
                instead = f"unknown; expected {meant!r} for whose reward it is"
                fields.fail(self.where, name, "not read here" if name == meant else instead)
        unread = [name for name in (*UNREAD_FIELDS, *CONTEXT_FIELDS) if name in names]
        refuse_extras(self.given, unread, self.where)
        return names


def text(body: Body, name: str) -> str:
    """Return a text."""
    return fields.text(body.get(name), body.where, name)


def texts(body: Body, *names: str) -> list[str]:
    """Return one or more texts, from the first of these fields that is present.

    Raises:
      TooLargeError: If there are more texts than a request may score.
    """
    name, value = _first(body, names)
    if isinstance(value, str):
        value = [value]
    listed = fields.sequence(value, body.where, name) if value is not None else []
    if not listed:
        fields.fail(body.where, name, f"expected a text or a list of texts, found {fields.found(value)}")
    body.sizes.check_count(len(listed), body.where)
    return [fields.text(entry, body.where, f"{name}[{k}]") for k, entry in enumerate(listed)]


def prompts(body: Body, *names: str, count: int) -> list[tuple[Message, ...]]:
    """Return the prompt of each of `count` responses, from the first of these fields that is present.

    A prompt is a text or a conversation; it is empty if the responses are whole conversations. One prompt serves all
    responses.
    """
    name, value = _first(body, names)
    if isinstance(value, list) and len(value) not in (1, count):
        expected = f"expected one, or as many as the {count} documents, found {len(value)}"
        fields.fail(body.where, name, expected)
    if _lists(value):
        read = [prompt(entry, f"{name}[{k}]") if entry else () for k, entry in enumerate(value)]
    else:
        read = [user_turn(entry, name) for entry in texts(body, *names)]
    return read if len(read) > 1 else read * count


def _first(body: Body, names: Sequence[str]) -> tuple[str, Any]:
    name = next((name for name in names if body.get(name) is not None), names[0])
    return name, body.get(name)


def _lists(value: object) -> bool:
    return isinstance(value, list) and any(isinstance(entry, list) for entry in value)


def prompt(value: object, name: str) -> tuple[Message, ...]:
    """Return a prompt from a conversation or from the text of a user."""
    return messages(value, name) if isinstance(value, list) else user_turn(value, name)


def user_turn(value: object, name: str) -> tuple[Message, ...]:
    """Return a prompt that is the text of a user.

    Raises:
      DataError: If a chat template has already rendered the text: it would be wrapped as a message again.
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


def messages(value: object, name: str) -> Messages:
    """Return a conversation."""
    _check_parts(value, name)
    given = enumerate(fields.sequence(value, WHERE, name))
    turns = tuple(read_message(entry, WHERE, f"{name}[{k}]") for k, entry in given)
    if not turns:
        fields.fail(WHERE, name, "expected at least one message, found none")
    return turns


def responses(body: Body, *names: str) -> list[str]:
    """Return one or more responses, texts or lists of messages, from the first of these fields that is present.

    Raises:
      TooLargeError: If there are more responses than a request may score.
    """
    name, value = _first(body, names)
    if not _lists(value):
        return texts(body, *names)
    body.sizes.check_count(len(value), body.where)
    read = []
    for k, entry in enumerate(value):
        whole = [{"role": "assistant", "content": entry}] if isinstance(entry, str) else entry
        turns = messages(whole, f"{name}[{k}]")
        if turns[-1].role != "assistant":
            found = quote(turns[-1].role)
            fields.fail(
                body.where, f"{name}[{k}]", f"expected the assistant's message at the end, found {found}"
            )
        read.append(as_response(turns))
    return read


def context(body: Body) -> str:
    """Return the chat template's inputs besides the messages (e.g. tools), as JSON; empty if there are none."""
    return read_context(body, body.where)


def placed(prompt: Messages, response: str, given: str) -> tuple[Messages, str]:
    """Return a prompt and its response with the chat template's other inputs attached, as `context` returns them."""
    if not given:
        return prompt, response
    if prompt:
        return with_context(prompt, given), response
    return prompt, as_response(with_context(turns_of(response), given))


def _check_parts(value: object, name: str) -> None:
    """Raise TooLargeError for more messages or posts than a request may hold, before reading any of them."""
    if isinstance(value, list) and len(value) > PARTS:
        raise TooLargeError(f"{WHERE}: {name}: expected at most {PARTS:,} entries, found {len(value):,}")


def response_input(value: object, name: str) -> Messages:
    """Return the messages of an `input` of the Responses API.

    Raises:
      DataError: If the input contains anything but messages of text.
    """
    turns = []
    for k, entry in enumerate(fields.sequence(value, WHERE, name)):
        item = fields.mapping(entry, WHERE, f"{name}[{k}]")
        if item.get("type") not in (None, "message"):
            fields.fail(WHERE, f"{name}[{k}].type", f"expected message, found {quote(item['type'])}")
        content = item.get("content")
        if isinstance(content, list):
            content = _texts_of(content, f"{name}[{k}].content", ("input_text", "output_text"))
        turns.append({"role": item.get("role"), "content": content})
    return messages(turns, name)


def _texts_of(content: object, name: str, types: Sequence[str]) -> str:
    """Return the texts of the parts of a message of the Responses API, joined."""
    texts = []
    for number, one in enumerate(fields.sequence(content, WHERE, name)):
        part = fields.mapping(one, WHERE, f"{name}[{number}]")
        if part.get("type") not in types:
            about = f"expected {' or '.join(types)}, found {quote(part.get('type'))}"
            fields.fail(WHERE, f"{name}[{number}].type", about)
        texts.append(fields.text(part.get("text"), WHERE, f"{name}[{number}].text"))
    return "".join(texts)


def output_text(value: object, name: str) -> str:
    """Return the text of a Responses API object: all messages in its `output`, joined.

    Raises:
      DataError: If the object has no text, or its messages contain anything but text.
    """
    given = fields.mapping(value, WHERE, name)
    parts = []
    for k, entry in enumerate(fields.sequence(given.get("output"), WHERE, f"{name}.output")):
        where = f"{name}.output[{k}]"
        item = fields.mapping(entry, WHERE, where)
        if item.get("type") == "reasoning":
            continue
        if item.get("type") != "message":
            expected = f"expected message or reasoning, found {quote(item.get('type'))}"
            fields.fail(WHERE, f"{where}.type", expected)
        parts.append(_texts_of(item.get("content"), f"{where}.content", ("output_text",)))
    text = "".join(parts)
    if not text.strip():
        fields.fail(WHERE, f"{name}.output", "expected a message with output_text, found no text")
    return text


def users(body: Body, count: int) -> list[str | None]:
    """Return the user of each of `count` responses: `user_id` is one user for all, or a list of one per response."""
    value = body.get("user_id")
    return _of_each(body, value, isinstance(value, list), count, fields.optional_identifier, "user_id")


def profiles(body: Body, count: int) -> list[tuple[Post, ...]]:
    """Return the profile posts that the model sees, for each of `count` responses.

    `profile` is one list of posts for all responses (read once), or a list of such lists.
    """
    value = from_json(body.get("profile"))
    if isinstance(value, str):
        fields.fail(
            body.where,
            "profile",
            "expected a list of posts {id, category, text}: a text goes with response_text",
        )

    def read(posts: object, where: str, name: str) -> tuple[Post, ...]:
        _check_parts(posts, name)
        return read_profile(posts, where if name == "profile" else f"{where}: {name}")[: body.sizes.posts]

    return _of_each(body, value, _lists(value), count, read, "profile")


def _of_each(
    body: Body,
    value: Any,
    several: bool,
    count: int,
    read: Callable[[object, str, str], Value],
    name: str,
) -> list[Value]:
    if not several:
        return [read(value, body.where, name)] * count
    if len(value) != count:
        fields.fail(body.where, name, f"expected one, or {count} for {count} responses, found {len(value)}")
    return [read(entry, body.where, f"{name}[{k}]") for k, entry in enumerate(value)]


def column(body: Body, name: str, count: int) -> Sequence[Any]:
    """Return a list with one entry of any type per response; Nones if the field is absent.

    A single response may give its entry without a list.
    """
    value = body.get(name)
    if value is None:
        return [None] * count
    if not isinstance(value, list):
        value = [value]
    if len(value) != count:
        fields.fail(body.where, name, f"expected one for each of {count} queries, found {len(value)}")
    return value


def label_fields(label: object, name: str, sizes: Sizes) -> Body:
    """Return the fields of a label that is an object, or an object as JSON text; any other label has no fields.

    Raises:
      DataError: If the label mentions a user or profile but is not an object, or repeats a field.
    """
    where = f"{WHERE}: {name}"
    given = label
    if not isinstance(label, Mapping):
        written = label if isinstance(label, str) else json.dumps(label)
        if not (
            written.lstrip().startswith(("{", "[")) and any(word in written.casefold() for word in _WORDS)
        ):
            return Body({})  # usually the reference answer of a task
        given = parse_json(written.encode("utf-8", "surrogatepass"), where=where, error=DataError)
    return Body(fields.mapping(given, WHERE, name), sizes, where)


def no_profile(body: Body) -> None:
    """Raise DataError for a profile if the prompt is already rendered."""
    if body.get("profile"):
        about = "a conversation that is rendered already takes no profile: send messages instead"
        fields.fail(body.where, "profile", about)


def flag(body: Body, *names: str, default: bool = False) -> bool:
    """Return true or false, from whichever of these fields is present."""
    given = {name: body[name] for name in names if body.get(name) is not None}
    for name, value in given.items():
        if not isinstance(value, bool):
            fields.fail(body.where, name, f"expected true or false, found {fields.found(value)}")
    if len(set(given.values())) > 1:
        raise DataError(f"{body.where}: {' and '.join(given)} contradict each other")
    return next(iter(given.values()), default)


def whole_number(body: Body, name: str, *, least: int, default: int | None) -> int | None:
    """Return a whole number."""
    value = body.get(name)
    if value is None:
        return default
    if type(value) is not int or value < least:
        fields.fail(body.where, name, f"expected a whole number from {least}, found {fields.found(value)}")
    return value


def token_ids(value: object) -> np.ndarray | None:
    """Return token ids, int32; None if the value is not a list of integers.

    Raises:
      DataError: If a number is outside the range of any vocabulary.
    """
    if not isinstance(value, list) or set(map(type, value)) != {int}:
        return None
    for end in (min(value), max(value)):
        if not 0 <= end < 2**31:
            raise DataError(f"input: expected token ids of the model, found {quote(end)}")
    return np.array(value, np.int32)
