"""Prompts and responses as texts or as lists of messages, checked."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Any, Final

from prb_jax.errors import quote, short_repr
from prb_jax.records import fields

ROLES: Final = ("system", "user", "assistant")

MESSAGE_EXTRAS: Final = (
    "tool_calls", "function_call", "tool_call_id", "name", "reasoning_content", "reasoning", "thinking",
    "images", "videos",
)  # fmt: skip
"""Fields of a message that chat templates read and this package does not render."""

TEMPLATE_EXTRAS: Final = ("tools", "chat_template_kwargs", "documents", "functions", "images", "videos")
"""Fields of a record or a request that chat templates read and this package does not render."""


@dataclass(frozen=True, slots=True)
class Message:
    """One turn of a conversation; ``role`` is "system", "user" or "assistant"."""

    role: str
    content: str

    __repr__ = short_repr


Messages = tuple[Message, ...]


def read_conversation(
    question: object, prompt: object, responses: Sequence[tuple[str, object]], *, where: str
) -> tuple[Messages, tuple[str, ...]]:
    """The prompt and the texts of K responses.

    A response is a text, or a conversation that ends with it. The first messages of the conversations, as far as
    they are all equal, are the prompt; one that is given beside them must be a part of it, or what comes before.

    Args:
      question, prompt: of the record: a text, a list of messages, or None.
      responses: K pairs of a field's name and its value.
      where: what error messages start with.

    Raises:
      DataError: naming the field.
    """
    given = None if prompt is None else _prompt(prompt, where, "prompt")
    if question is not None:
        asked = _prompt(question, where, "question")
        if given not in (None, asked):
            fields.fail(where, "prompt", "differs from 'question'; expected one of the two")
        given = asked
    for name, value in responses:
        if value is None:
            fields.fail(where, name, "missing")
    written_out = [isinstance(value, list | tuple) for _, value in responses]
    if not any(written_out):
        if given is None:
            fields.fail(where, "question", "missing; expected 'question' or 'prompt'")
        return given, tuple(_response(value, where, name) for name, value in responses)
    if not all(written_out):
        name, value = responses[written_out.index(True)]
        all_alike = "responses are all texts or all lists of messages"
        fields.fail(where, name, f"expected a string, found {fields.found(value)}; {all_alike}")
    conversations = {name: _messages(value, where, name) for name, value in responses}
    first, *others = conversations.values()
    count = min(map(len, conversations.values())) - 1
    while any(messages[:count] != first[:count] for messages in others):
        count -= 1
    for name, messages in conversations.items():
        if len(messages) != count + 1 or messages[-1].role != "assistant":
            found = ", ".join(message.role for message in messages[count:])
            expected = f"after {count} messages that all responses share, expected one of the assistant"
            fields.fail(where, name, f"{expected}, found {found}")
    texts = tuple(
        _response(messages[-1].content, where, f"{name}[{count}].content")
        for name, messages in conversations.items()
    )
    return _joined(given, first[:count], where, name=responses[0][0]), texts


def _joined(given: Messages | None, shared: Messages, where: str, *, name: str) -> Messages:
    """The prompt that is given, and the messages before all responses."""
    if given is None and not shared:
        message = "missing; expected 'question' or 'prompt', or messages before a response"
        fields.fail(where, "question", message)
    if given is not None and not shared:
        return given
    if given is not None and shared[0].role == "assistant":  # the conversation goes on after the prompt
        shared = given + shared
    elif given is not None and not any(shared[i : i + len(given)] == given for i in range(len(shared))):
        fields.fail(where, "prompt", f"differs from the messages before the response in '{name}'")
    _check_prompt(shared, where, name)
    return shared


def _prompt(value: object, where: str, name: str) -> Messages:
    if isinstance(value, str):
        messages: Messages = (Message("user", fields.text(value, where, name)),)
    else:
        messages = _messages(value, where, name)
    _check_prompt(messages, where, name)
    return messages


def _check_prompt(messages: Messages, where: str, name: str) -> None:
    last = messages[-1]
    if last.role != "user":
        fields.fail(where, f"{name}[{len(messages) - 1}].role", f"expected 'user', found {quote(last.role)}")
    if not last.content.strip():
        fields.fail(where, name, "the question is empty")


def _messages(value: object, where: str, name: str) -> Messages:
    if not isinstance(value, list | tuple):
        fields.fail(where, name, f"expected a string or a list of messages, found {fields.found(value)}")
    messages = tuple(_message(item, where, f"{name}[{i}]") for i, item in enumerate(value))
    if not messages:
        fields.fail(where, name, "no messages; expected at least one")
    for i, message in enumerate(messages):
        if message.role not in ROLES:
            expected = f"expected one of {', '.join(ROLES)}, found {quote(message.role)}"
            fields.fail(where, f"{name}[{i}].role", expected)
        if message.role == "system" and i > 0:
            fields.fail(where, f"{name}[{i}].role", "a system message may only come first")
    return messages


def refuse_extras(given: Mapping[str, Any], names: Sequence[str], where: str, *, within: str = "") -> None:
    """Raise DataError if one of these fields has a value: a score without it would belong to another conversation.

    Args:
      given: Message, record or request.
      names: `MESSAGE_EXTRAS` or `TEMPLATE_EXTRAS`.
      where: Beginning of the error message.
      within: Name of the message, put before the name of the field.
    """
    for name in names:
        if not is_empty(value := given.get(name)):
            fields.fail(
                where,
                f"{within}.{name}" if within else name,
                "is not rendered, so a score would be of a conversation without it; remove it or set it to null, "
                f"found {fields.found(value)}",
            )


def is_empty(value: object) -> bool:
    """Return whether a value is null, an empty text, list or object (also as JSON), or holds only such values."""
    if isinstance(value, str):
        return value.strip() in ("", "null", "[]", "{}")
    if isinstance(value, Mapping):
        return all(map(is_empty, value.values()))
    return all(map(is_empty, value)) if isinstance(value, list | tuple) else value is None


def _message(value: object, where: str, name: str) -> Message:
    if isinstance(value, Message):
        value = {"role": value.role, "content": value.content}
    item: Mapping[str, Any] = fields.mapping(value, where, name)
    if len(item) > 2:
        refuse_extras(item, MESSAGE_EXTRAS, where, within=name)
    parts = item.get("content")
    if isinstance(parts, list | tuple):
        kinds = sorted({str(part.get("type")) for part in parts if isinstance(part, Mapping)})
        fields.fail(
            where,
            f"{name}.content",
            f"expected a string, found a list of parts ({', '.join(kinds) or 'of no type'}): only text can be scored, "
            "so images are refused; join parts of text into one string",
        )
    return Message(
        fields.text(item.get("role"), where, f"{name}.role"),
        fields.text(item.get("content"), where, f"{name}.content"),
    )


def _response(value: object, where: str, name: str) -> str:
    text = fields.text(value, where, name)
    if not text:
        fields.fail(where, name, "empty; expected a response")
    return text
