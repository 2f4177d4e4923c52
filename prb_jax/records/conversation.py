"""Prompts and responses as texts or as lists of messages, checked."""

from __future__ import annotations

import json
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, replace
from typing import Any, Final

from prb_jax.errors import quote, short_repr
from prb_jax.records import fields

ROLES: Final = ("system", "developer", "user", "assistant", "tool")

RENDERED: Final = "rendered"
"""Role of the single message of an already rendered prompt: the prompt and its responses are used unchanged."""

ASKING: Final = ("user", "tool")
"""Roles of the last message of a prompt, to which the assistant responds."""

SPOKEN_FIELDS: Final = (
    "tool_calls", "function_call", "reasoning_content", "reasoning", "thinking", "tool_plan", "tool_responses",
)  # fmt: skip
"""Fields of a message with content beyond its text."""

NAME_FIELDS: Final = ("name", "tool_call_id")
"""Fields of a message that identify the speaker; many templates omit them."""

MEDIA_FIELDS: Final = ("images", "videos", "audio")
"""Fields of a message with other media than text, which no model here can read."""

CONTEXT_FIELDS: Final = ("tools", "chat_template_kwargs")
"""Fields of a record or request that a chat template receives in addition to the messages."""

UNREAD_FIELDS: Final = ("documents", "functions", "images", "videos")
"""Fields of a record or a request that chat templates read and this package does not render."""

_GIVEN_BY_CODE: Final = (
    "messages", "conversation", "tools", "documents", "add_generation_prompt", "continue_final_message",
    "bos_token", "eos_token", "pad_token", "unk_token",
)  # fmt: skip


@dataclass(frozen=True, slots=True)
class Message:
    """One turn of a conversation.

    Attributes:
      role: One of `ROLES`.
      content: Text of the message, followed by the `SPOKEN_FIELDS` as JSON for readers without a chat template.
      fields: Whole message as JSON for chat templates; empty if there are only role and content.
      context: `CONTEXT_FIELDS` as JSON on the first message of a conversation; empty on the others.
    """

    role: str
    content: str
    fields: str = ""
    context: str = ""

    __repr__ = short_repr

    def as_dict(self) -> dict[str, Any]:
        """Return the message in the format of chat templates and JSON files."""
        return json.loads(self.fields) if self.fields else {"role": self.role, "content": self.content}

    def with_content(self, content: str) -> Message:
        """Return the message with another text; its other fields stay."""
        if not self.fields:
            return replace(self, content=content)
        changed = self.as_dict() | {"content": content}
        return replace(self, content=_as_text(changed), fields=json.dumps(changed))


Messages = tuple[Message, ...]


class Turns(str):
    """A response of several messages, or of one message with more than a text.

    As a string it is the whole conversation in plain text, for readers without a chat template. It never equals a plain
    string.

    Attributes:
      messages: Messages for a chat template.
    """

    messages: Messages

    def __new__(cls, messages: Messages) -> Turns:
        alone = len(messages) == 1 and messages[0].role == "assistant"
        self = super().__new__(cls, messages[0].content if alone else transcript(messages))
        self.messages = messages
        return self

    def __getnewargs__(self) -> tuple[Messages]:  # pyright: ignore[reportIncompatibleMethodOverride]
        return (self.messages,)

    def __eq__(self, other: object) -> bool:
        return isinstance(other, Turns) and self.messages == other.messages

    def __ne__(self, other: object) -> bool:
        return not self == other

    def __hash__(self) -> int:
        return hash(self.messages)


def turns_of(response: str) -> Messages:
    """Return the messages of a response."""
    return response.messages if isinstance(response, Turns) else (Message("assistant", response),)


def as_response(messages: Messages) -> str:
    """Return messages as a response: plain text for a single plain message, else :class:`Turns`."""
    plain = len(messages) == 1 and messages[0] == Message("assistant", messages[0].content)
    return messages[0].content if plain else Turns(messages)


def transcript(messages: Sequence[Message]) -> str:
    """Return a conversation in plain text, with its tools: for readers without a chat template."""
    before = [f"Tools: {messages[0].context}"] if messages and messages[0].context else []
    return "\n\n".join([*before, *(f"{turn.role.capitalize()}: {turn.content}" for turn in messages)])


def with_context(messages: Messages, context: str) -> Messages:
    """Return the conversation with this context on its first message."""
    return (replace(messages[0], context=context), *messages[1:]) if messages else messages


def is_rendered(messages: Sequence[Message]) -> bool:
    """Return True if a conversation begins with already rendered text."""
    return bool(messages) and messages[0].role == RENDERED


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


def read_context(given: Mapping[str, Any], where: str) -> str:
    """Return the `CONTEXT_FIELDS` of a record or request as JSON; empty without any.

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


def without_padding(row: dict[str, Any]) -> dict[str, Any]:
    """Return a table row without the nulls that tables add to the fields of messages and tools."""
    for name in ("question", "prompt", "chosen", "rejected", "responses", *CONTEXT_FIELDS):
        if isinstance(row.get(name), list | dict):
            row[name] = _without_nulls(row[name])
    return row


def _without_nulls(value: Any) -> Any:
    if isinstance(value, dict):
        kept = {key: item for key, item in value.items() if item is not None or key == "content"}
        return {key: _without_nulls(item) for key, item in kept.items()}
    return list(map(_without_nulls, value)) if isinstance(value, list) else value


def from_json(value: Any) -> Any:
    """Parse text that contains a JSON list or object, as in tables; return any other value unchanged."""
    if isinstance(value, str) and value.lstrip()[:1] in ("[", "{"):
        try:
            return json.loads(value)
        except ValueError:
            return value
    return value


def read_conversation(
    question: object, prompt: object, responses: Sequence[tuple[str, object]], *, where: str, found: str = ""
) -> tuple[Messages, tuple[str, ...]]:
    """Return the prompt and the K responses of a record.

    A response is a text or a conversation. The prompt is the common start of all conversations, up to a message of the
    user or of a tool; the rest of each conversation is its response. A prompt given in addition to conversations must
    be a part of them, or precede them. A prompt can end with the beginning of the answer (a prefill), which texts
    continue.

    Args:
      question, prompt: Fields of the record: a text, a list of messages, or None.
      responses: K pairs of a field's name and its value.
      where: Start of error messages.
      found: End of messages about a missing field.

    Raises:
      DataError: A field is invalid; the message names it.
    """
    given = None if prompt is None or prompt == () else _prompt(prompt, where, "prompt")
    if question is not None:
        asked = _prompt(question, where, "question")
        if given not in (None, asked):
            fields.fail(where, "prompt", "differs from 'question'; expected one of the two")
        given = asked
    for name, value in responses:
        if value is None:
            fields.fail(where, name, f"missing{found}")
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


def refuse_extras(given: Mapping[str, Any], names: Sequence[str], where: str, *, within: str = "") -> None:
    """Raise DataError if one of these fields has a value: a score without it would belong to another conversation.

    Args:
      given: Message, record or request.
      names: `MEDIA_FIELDS` or `UNREAD_FIELDS`.
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
    kept = {key: _calls(item[key]) if key in ("tool_calls", "function_call") else item[key]
            for key in (*SPOKEN_FIELDS, *NAME_FIELDS) if not is_empty(item.get(key))}  # fmt: skip
    if isinstance(content, list | tuple):
        content = [_part(part, where, f"{name}.content[{k}]") for k, part in enumerate(content)]
    elif content is not None or not any(key in SPOKEN_FIELDS for key in kept):
        fields.text(content, where, f"{name}.content")
    if isinstance(content, str) and not kept:
        return Message(role, content)
    whole = {"role": role, **({"content": content} if "content" in item else {}), **kept}
    return Message(role, _as_text(whole), _dumped(whole, where, name))


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


def joined_parts(content: Any) -> Any:
    """Return a list of text parts as one string; anything else as it is."""
    return "".join(part["text"] for part in content) if isinstance(content, list) else content


def _as_text(message: Mapping[str, Any]) -> str:
    """Return the text of a message, followed by its other content as JSON."""
    spoken = {key: message[key] for key in SPOKEN_FIELDS if key in message}
    after = [json.dumps(spoken, ensure_ascii=False)] if spoken else []
    return "\n".join(filter(None, [joined_parts(message.get("content")) or "", *after]))


def _dumped(value: Any, where: str, name: str) -> str:
    try:
        text = json.dumps(value)
    except (TypeError, ValueError) as error:
        fields.fail(where, name, f"expected values of JSON: {error}")
    # JSON can escape half of a surrogate pair, which no tokenizer accepts.
    fields.text(json.dumps(value, ensure_ascii=False), where, name)
    return text


def _response(value: object, where: str, name: str) -> str:
    if isinstance(value, Turns):
        return value
    text = fields.text(value, where, name)
    if not text:
        fields.fail(where, name, "empty; expected a response")
    return text
