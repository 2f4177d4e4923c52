"""Limits and fields of requests, checked: each error names the field, and says what was found and expected."""

from __future__ import annotations

import json
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass
from typing import Any

from prb_jax.data import fields
from prb_jax.data.comparison import Message, Post, read_profile
from prb_jax.data.conversation import ROLES
from prb_jax.data.options import option
from prb_jax.errors import DataError, quote

WHERE = "the request"


@dataclass(frozen=True, kw_only=True)
class Limits:
    """How much a client may ask for."""

    bytes: int = option(16_000_000, "bytes of a request", least=1, flag="max-bytes")
    items: int = option(1024, "responses of a request", least=1, flag="max-items")
    waiting: int = option(8192, "responses that may wait for their scores", least=1, flag="max-waiting")
    connections: int = option(2048, "connections at a time", least=1, flag="max-connections")
    seconds: float = option(120.0, "seconds until a request is answered", least=1, flag="timeout")


_NEAR = {
    "user_id": {"user", "users", "userid", "userids"},
    "profile": {"profiles", "userprofile", "userprofiles", "history", "posts"},
    "profile_order": {"profileorders", "profileorder"},
}
"""By field, names without marks between their words, which say whose reward it is and would change nothing."""


TEMPLATE_MARKS = (
    "<|im_start|>", "<|start_header_id|>", "<|header_start|>", "<start_of_turn>", "[INST]", "<|user|>", "<|User|>",
    "<｜User｜>", "<|start_of_role|>", "<|START_OF_TURN_TOKEN|>", "<|start|>user", "[|user|]",
)  # fmt: skip
"""What chat templates put before a turn."""


END_MARKS = (
    "<|im_end|>", "<|eot_id|>", "<|endoftext|>", "<end_of_turn>", "</s>", "<|end|>", "<|end_of_text|>", "<eos>",
    "<|eot|>", "<|return|>", "<｜end▁of▁sentence｜>",
)  # fmt: skip
"""End-of-text tokens, with which a decoded completion may end."""


def without_end_marks(text: str) -> str:
    """Return a decoded completion without the end-of-text tokens, and the blanks between them, that it ends with."""
    end, kept = len(text), len(text)
    while True:
        while end and text[end - 1].isspace():
            end -= 1
        mark = next((mark for mark in END_MARKS if text.endswith(mark, 0, end)), None)
        if mark is None:
            return text[:kept]
        kept = end = end - len(mark)


def template_mark(text: str) -> str | None:
    """Return the mark of a chat template that a text holds; None where it holds none."""
    return next((mark for mark in TEMPLATE_MARKS if mark in text), None)


def user_turn(text: str, name: str) -> tuple[Message, ...]:
    """Return a prompt that is a user's message.

    Raises:
      DataError: a chat template has rendered it already, and it would be wrapped as a message again.
    """
    if mark := template_mark(text):
        fields.fail(
            WHERE,
            name,
            f"holds {mark!r}: a chat template has rendered it already; send a list of messages, or the whole "
            "conversation as 'input' to /classify",
        )
    return (Message("user", text),)


class Body(Mapping[str, Any]):
    """The fields of a request. It notes which ones are looked at, so that the others can be told or refused."""

    def __init__(self, given: Mapping[str, Any]) -> None:
        self._given, self._read = given, set[str]()

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
          DataError: the name of one is nearly that of a field by which the reward is somebody's.
        """
        names = [name for name in self._given if name not in self._read]
        for name in names:
            plain = name.casefold().replace("_", "").replace("-", "")
            for meant, near in _NEAR.items():
                if plain in near and self._given[name] is not None:
                    fields.fail(WHERE, name, f"unknown; expected {meant!r} for whose reward it is")
        return names


def text(body: Body, name: str) -> str:
    """Return a text."""
    return fields.text(body.get(name), WHERE, name)


def texts(body: Body, *names: str) -> list[str]:
    """Return one or more texts, from the first of these fields that is there."""
    name = next((each for each in names if body.get(each) is not None), names[0])
    value = body.get(name)
    if isinstance(value, str):
        value = [value]
    found = fields.sequence(value, WHERE, name) if value is not None else []
    if not found:
        fields.fail(WHERE, name, f"expected a text or a list of texts, found {fields.found(value)}")
    return [fields.text(each, WHERE, f"{name}[{k}]") for k, each in enumerate(found)]


def prompts(body: Body, *names: str) -> list[tuple[Message, ...]]:
    """Return one or more prompts, from the first of these fields that is there: each is a text or a conversation."""
    name = next((each for each in names if body.get(each) is not None), names[0])
    value = body.get(name)
    if not isinstance(value, list) or not any(isinstance(each, list) for each in value):
        return [user_turn(text, name) for text in texts(body, *names)]
    return [
        messages(each, f"{name}[{k}]")
        if isinstance(each, list)
        else user_turn(fields.text(each, WHERE, f"{name}[{k}]"), f"{name}[{k}]")
        for k, each in enumerate(value)
    ]


def messages(value: object, name: str) -> tuple[Message, ...]:
    """Return a conversation."""
    found = []
    for k, each in enumerate(fields.sequence(value, WHERE, name)):
        given = fields.mapping(each, WHERE, f"{name}[{k}]")
        role = fields.text(given.get("role"), WHERE, f"{name}[{k}].role")
        if role not in ROLES:
            fields.fail(WHERE, f"{name}[{k}].role", f"expected {' or '.join(ROLES)}, found {quote(role)}")
        found.append(Message(role, _content(given.get("content"), f"{name}[{k}].content")))
    if not found:
        fields.fail(WHERE, name, "expected at least one message, found none")
    return tuple(found)


def _content(value: object, name: str) -> str:
    """A text; or a list of parts {type: text, text}, as newer clients write it."""
    if not isinstance(value, list):
        return fields.text(value, WHERE, name)
    parts = []
    for k, each in enumerate(value):
        part = fields.mapping(each, WHERE, f"{name}[{k}]")
        if part.get("type") != "text":
            fields.fail(WHERE, f"{name}[{k}].type", f"expected text, found {quote(part.get('type'))}")
        parts.append(fields.text(part.get("text"), WHERE, f"{name}[{k}].text"))
    return "".join(parts)


def users(body: Body, count: int) -> list[str | None]:
    """Return the user of each of `count` responses: `user_id` is one for all, or a list with one for each."""
    value = body.get("user_id")
    if not isinstance(value, list):
        return [fields.optional_identifier(value, WHERE, "user_id")] * count
    if len(value) != count:
        fields.fail(WHERE, "user_id", f"expected one, or {count} for {count} responses, found {len(value)}")
    return [fields.optional_identifier(each, WHERE, f"user_id[{k}]") for k, each in enumerate(value)]


def profiles(body: Body, count: int) -> list[tuple[Post, ...]]:
    """Return the posts for each of `count` responses: `profile` is one list of posts, or a list of such lists."""
    value = body.get("profile")
    if isinstance(value, str):
        fields.fail(
            WHERE, "profile", "expected a list of posts {id, category, text}: a text goes with response_text"
        )
    if not isinstance(value, list) or not any(isinstance(each, list) for each in value):
        return [read_profile(value, WHERE)] * count
    if len(value) != count:
        fields.fail(WHERE, "profile", f"expected one, or {count} for {count} responses, found {len(value)}")
    return [read_profile(each, f"{WHERE}: profile[{k}]") for k, each in enumerate(value)]


def orders(body: Body, count: int) -> list[str | None]:
    """Return by what the posts of each of `count` responses are ordered: `profile_order`, one for all of them."""
    return [fields.optional_text(body.get("profile_order"), WHERE, "profile_order")] * count


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
    """Refuse a profile where the prompt is rendered already.

    Raises:
      DataError: there is one.
    """
    if body.get("profile"):
        fields.fail(
            WHERE,
            "profile",
            "a conversation that is rendered already takes no profile: send messages instead",
        )


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
    """Return token ids; None for what is no list of numbers.

    Raises:
      DataError: a number that no vocabulary has.
    """
    if not isinstance(value, list) or set(map(type, value)) != {int}:
        return None
    for end in (min(value), max(value)):
        if not 0 <= end < 2**31:
            raise DataError(f"input: expected token ids of the model, found {quote(end)}")
    return tuple(value)
