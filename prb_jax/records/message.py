"""Messages of conversations, checked, with the fields that chat templates read."""

from __future__ import annotations

import json
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, replace
from typing import Any, Final

from prb_jax.errors import short_repr
from prb_jax.records import fields
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
