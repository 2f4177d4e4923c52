"""Messages with the fields that chat templates read, and conversations: a prompt and K responses, texts or messages."""

from __future__ import annotations

import json
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, replace
from typing import Any, Final

from prb_jax.errors import short_repr
from prb_jax.records import fields
from prb_jax.records.fields import CONTEXT_FIELDS, SPOKEN_FIELDS
from prb_jax.seams import get


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
        return replace(self, content=as_text(changed), fields=json.dumps(changed))


Messages = tuple[Message, ...]


def read_context(given: Mapping[str, Any], where: str) -> str:
    """Return the `CONTEXT_FIELDS` of a record or request as JSON; empty without any.

    Raises:
      DataError: A field has the wrong type, or a template argument is reserved.
    """
    if all(is_empty(given.get(name)) for name in CONTEXT_FIELDS):
        return ""
    return get("messages", "context").value(given, where)


def from_json(value: Any) -> Any:
    """Parse text that contains a JSON list or object, as in tables; return any other value unchanged."""
    if isinstance(value, str) and value.lstrip()[:1] in ("[", "{"):
        try:
            return json.loads(value)
        except ValueError:
            return value
    return value


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


def joined_parts(content: Any) -> Any:
    """Return a list of text parts as one string; anything else as it is."""
    return "".join(part["text"] for part in content) if isinstance(content, list) else content


def as_text(message: Mapping[str, Any]) -> str:
    """Return the text of a message, followed by its other content as JSON."""
    spoken = {key: message[key] for key in SPOKEN_FIELDS if key in message}
    after = [json.dumps(spoken, ensure_ascii=False)] if spoken else []
    return "\n".join(filter(None, [joined_parts(message.get("content")) or "", *after]))


RENDERED: Final = "rendered"
"""Role of the single message of an already rendered prompt: the prompt and its responses are used unchanged."""


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


def conversations(messages: Sequence[Message], responses: Sequence[str]) -> list[list[Message]]:
    """Return the K whole conversations: the prompt followed by each response."""
    return [[*messages, *turns_of(response)] for response in responses]


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
    name, asked = ("prompt", prompt) if question is None else ("question", question)
    is_one = isinstance(asked, str) and asked.strip() and (question is None or prompt is None)
    if is_one and all(type(value) is str and value for _, value in responses):
        asked, *texts = (fields.text(value, where, name) for name, value in ((name, asked), *responses))
        return (Message("user", asked),), tuple(texts)
    return get("messages", "read").value(question, prompt, responses, where=where, found=found)
