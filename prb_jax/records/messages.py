"""Conversations of a record: lists of messages with the fields that chat templates read, tools, and rendered texts."""

from __future__ import annotations

import json
from collections.abc import Mapping, Sequence
from typing import Any, Final

from prb_jax.errors import quote
from prb_jax.records import fields
from prb_jax.records.conversation import (
    RENDERED,
    Message,
    Messages,
    Turns,
    as_text,
    from_json,
    is_empty,
    is_rendered,
    joined_parts,
    refuse_extras,
    turns_of,
)
from prb_jax.records.fields import CONTEXT_FIELDS, MEDIA_FIELDS, MESSAGE_FIELDS, NAME_FIELDS, SPOKEN_FIELDS
from prb_jax.seams import get

ROLES: Final = ("system", "developer", "user", "assistant", "tool")


_GIVEN_BY_CODE: Final = (
    "messages", "conversation", "tools", "documents", "add_generation_prompt", "continue_final_message",
    "bos_token", "eos_token", "pad_token", "unk_token",
)  # fmt: skip


def context_of(given: Mapping[str, Any], where: str) -> str:
    """Return the `CONTEXT_FIELDS` of a record or request as JSON; empty if they are.

    Raises:
      DataError: A field has the wrong type, or a template argument is reserved.
    """
    found: dict[str, Any] = {}
    for name, kind, noun in (("tools", list, "a list of tools"), ("chat_template_kwargs", dict, "an object")):
        value = from_json(given.get(name))
        if is_empty(value):
            continue
        if isinstance(value, tuple):
            value = list(value)
        if not isinstance(value, kind):
            fields.fail(where, name, f"expected {noun}, found {fields.found(value)}")
        found[name] = value
    for k, tool in enumerate(found.get("tools", ())):
        fields.mapping(tool, where, f"tools[{k}]")
    for name in found.get("chat_template_kwargs", ()):
        if name in _GIVEN_BY_CODE:
            fields.fail(where, f"chat_template_kwargs.{name}", "is set by the rendering itself; remove it")
    return _dumped(found, where, "tools") if found else ""


def read_message(value: object, where: str, name: str) -> Message:
    """Return a message, with the fields that chat templates read.

    Raises:
      DataError: an unknown role, no text and no tool call, or anything but text; names the field.
    """
    if isinstance(value, Message):
        return value
    item: Mapping[str, Any] = fields.mapping(value, where, name)
    role = fields.text(item.get("role"), where, f"{name}.role")
    if role not in ROLES:
        fields.fail(where, f"{name}.role", f"expected one of {', '.join(ROLES)}, found {quote(role)}")
    content = item.get("content")
    if isinstance(content, str) and len(item) == 2:
        return Message(role, fields.text(content, where, f"{name}.content"))
    refuse_extras(item, MEDIA_FIELDS, where, within=name)
    for key in item.keys() - MESSAGE_FIELDS:
        if not is_empty(item[key]) and (meant := get("formats", "message field").value(str(key))):
            fields.fail(
                where, f"{name}.{key}", f"is no field of a message and is not read; rename it to '{meant}'"
            )
    kept = {key: _calls(item[key]) if key in ("tool_calls", "function_call") else item[key]
            for key in (*SPOKEN_FIELDS, *NAME_FIELDS) if not is_empty(item.get(key))}  # fmt: skip
    if isinstance(content, list | tuple):
        content = [_part(part, where, f"{name}.content[{k}]") for k, part in enumerate(content)]
    elif content is not None or not any(key in SPOKEN_FIELDS for key in kept):
        fields.text(content, where, f"{name}.content")
    if isinstance(content, str) and not kept:
        return Message(role, content)
    whole = {"role": role, **({"content": content} if "content" in item else {}), **kept}
    return Message(role, as_text(whole), _dumped(whole, where, name))


def _calls(value: Any) -> Any:
    """Tool calls, which may be JSON, or a list of texts of JSON."""
    calls = from_json(value)
    return list(map(from_json, calls)) if isinstance(calls, list | tuple) else calls


def _part(value: object, where: str, name: str) -> dict[str, str]:
    part = fields.mapping(value, where, name)
    if part.get("type") != "text":
        about = f"expected 'text', found {fields.found(part.get('type'))}: only text can be scored"
        fields.fail(where, f"{name}.type", about)
    return {"type": "text", "text": fields.text(part.get("text"), where, f"{name}.text")}


def _dumped(value: Any, where: str, name: str) -> str:
    try:
        text = json.dumps(value)
    except (TypeError, ValueError) as error:
        fields.fail(where, name, f"expected values of JSON: {error}")
    # JSON can escape half of a surrogate pair, which no tokenizer accepts.
    fields.text(json.dumps(value, ensure_ascii=False), where, name)
    return text


ASKING: Final = ("user", "tool")
"""Roles of the last message of a prompt, to which the assistant responds."""


def rendered_prompt(prompt: object, responses: Sequence[tuple[str, object]], where: str) -> Messages:
    """Return a prompt of rendered text, which may be empty if the responses are whole conversations.

    Raises:
      DataError: The prompt or a response is not a text.
    """
    text = fields.optional_text(prompt, where, "prompt") or ""
    for name, value in responses:
        fields.text(value, where, name)
    return (Message(RENDERED, text),)


def split_response(messages: Messages, *, at: int | None = None) -> tuple[Messages, str]:
    """Return the prompt and the response of a conversation that ends with the assistant's message.

    Args:
      messages: The conversation.
      at: Maximum number of messages of the prompt, which ends with a role of `ASKING` or is empty.
    """
    at = len(messages) - 1 if at is None else at
    while at and messages[at - 1].role not in ASKING:
        at -= 1
    return messages[:at], as_response(messages[at:])


def read_messages(
    question: object, prompt: object, responses: Sequence[tuple[str, object]], *, where: str, found: str = ""
) -> tuple[Messages, tuple[str, ...]]:
    """Return the prompt and the K responses of a record; see :func:`prb_jax.records.conversation.read_conversation`."""
    given = None if prompt is None or prompt == () else _prompt(prompt, where, "prompt")
    if question is not None:
        asked = _prompt(question, where, "question")
        if given not in (None, asked):
            fields.fail(where, "prompt", "differs from 'question'; expected one of the two")
        given = asked
    for name, value in responses:
        if value is None:
            is_null = f"'{name}'" in found  # the names of the row's fields
            fields.fail(where, name, "null; expected a response" if is_null else f"missing{found}")
    written_out = [isinstance(value, list | tuple | Turns) for _, value in responses]
    if not any(written_out):
        if given is None:
            fields.fail(
                where,
                "question",
                "missing; expected 'question' or 'prompt'; if each response is a whole conversation in one text, use "
                f"--rendered (or a name that ends in '?rendered'){found}",
            )
        texts = tuple(_response(value, where, name) for name, value in responses)
        if given[-1].role != "assistant":
            return given, texts
        *before, prefill = given
        start, place = joined_parts(prefill.as_dict().get("content")) or "", _asked(before)
        if start.strip() and start.strip() in (text.strip() for text in texts):
            about = "is one of the responses already; expected the conversation before them"
            fields.fail(where, f"prompt[{len(given) - 1}]", about)
        answers = [(*before[place:], prefill.with_content(f"{start}{text}")) for text in texts]
        return tuple(before[:place]), tuple(map(as_response, answers))
    plain = [k for k, value in enumerate(written_out) if not value]
    if plain and not any(isinstance(value, Turns) for _, value in responses):
        name, value = responses[written_out.index(True)]
        all_alike = "responses are all texts or all lists of messages"
        fields.fail(where, name, f"expected a string, found {fields.found(value)}; {all_alike}")
    conversations = {
        name: _joined(given, _turns(value, where, name), where, name) for name, value in responses
    }
    for name, messages in conversations.items():
        if messages[-1].role != "assistant":
            expected = "expected a conversation that ends with the assistant's message"
            fields.fail(where, f"{name}[-1].role", f"{expected}, found {quote(messages[-1].role)}")
        if not messages[-1].content:
            fields.fail(where, f"{name}[-1].content", "empty; expected a response")
        if not _asked(messages):
            expected = "missing; expected 'question' or 'prompt', or messages before a response"
            fields.fail(where, "question", expected)
    first, *others = conversations.values()
    for name, messages in conversations.items():
        if _opening(messages) != _opening(first):
            expected = f"expected the question of '{responses[0][0]}', {quote(_opening(first).content)}"
            fields.fail(where, name, f"{expected}, found {quote(_opening(messages).content)}")
    count = min(map(len, conversations.values())) - 1
    while any(messages[:count] != first[:count] for messages in others):
        count -= 1
    parts = [split_response(messages, at=count) for messages in conversations.values()]
    shared = parts[0][0]
    if shared:
        _check_prompt(shared, where, responses[0][0])
    return shared, tuple(response for _, response in parts)


def _asked(messages: Sequence[Message]) -> int:
    """Return the number of messages up to the last one with a role of `ASKING`."""
    return max((k + 1 for k, message in enumerate(messages) if message.role in ASKING), default=0)


def _opening(messages: Messages) -> Message:
    """Return the first message after system and developer messages; compared conversations share it."""
    return next(message for message in messages if message.role not in ("system", "developer"))


def _turns(value: object, where: str, name: str) -> Messages:
    if isinstance(value, str):
        return turns_of(_response(value, where, name))
    return _messages(value, where, name)


def _joined(given: Messages | None, messages: Messages, where: str, name: str) -> Messages:
    """Return a whole conversation from the given prompt and the messages of a response."""
    if given is None:
        return messages
    if messages[0].role in ("assistant", "tool"):  # the conversation goes on after the prompt
        return given + messages
    if not any(messages[i : i + len(given)] == given for i in range(len(messages))):
        fields.fail(where, "prompt", f"differs from the messages before the response in '{name}'")
    return messages


def _prompt(value: object, where: str, name: str) -> Messages:
    if isinstance(value, str):
        messages: Messages = (Message("user", fields.text(value, where, name)),)
    else:
        messages = _messages(value, where, name)
    _check_prompt(messages, where, name)
    return messages


def _check_prompt(messages: Messages, where: str, name: str) -> None:
    if is_rendered(messages):
        return
    place = _asked(messages)
    if not place or any(message.role != "assistant" for message in messages[place:]):
        found = quote(messages[-1].role)
        fields.fail(where, f"{name}[{len(messages) - 1}].role", f"expected 'user', found {found}")
    last = messages[place - 1]
    if last.role == "user" and not last.content.strip():
        fields.fail(where, name, "the question is empty")


def _messages(value: object, where: str, name: str) -> Messages:
    if not isinstance(value, list | tuple):
        fields.fail(where, name, f"expected a string or a list of messages, found {fields.found(value)}")
    messages = tuple(read_message(item, where, f"{name}[{i}]") for i, item in enumerate(value))
    if not messages:
        fields.fail(where, name, "no messages; expected at least one")
    for i, message in enumerate(messages):
        if message.role == "system" and i > 0:
            fields.fail(where, f"{name}[{i}].role", "a system message may only come first")
    return messages


def _response(value: object, where: str, name: str) -> str:
    if isinstance(value, Turns):
        return value
    text = fields.text(value, where, name)
    if not text:
        fields.fail(where, name, "empty; expected a response")
    return text


def as_response(messages: Messages) -> str:
    """Return messages as a response: plain text for a single plain message, else :class:`Turns`."""
    plain = len(messages) == 1 and messages[0] == Message("assistant", messages[0].content)
    return messages[0].content if plain else Turns(messages)


def rendered_text(row: Mapping[str, Any], responses: Sequence[tuple[str, object]], where: str) -> Messages:
    """Return the prompt of a record of rendered texts."""
    if row["rendered"] is not True:
        fields.fail(where, "rendered", f"expected true or false, found {fields.found(row['rendered'])}")
    for name in ("question", *CONTEXT_FIELDS):
        if not is_empty(row.get(name)):
            fields.fail(
                where, name, "given beside 'rendered'; a rendered record has only 'prompt' and responses"
            )
    return rendered_prompt(row.get("prompt"), responses, where)
