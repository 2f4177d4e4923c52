"""Messages of conversations, checked, with the fields that chat templates read."""

from __future__ import annotations

import difflib
import functools
import json
import re
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, replace
from typing import Any, Final

from prb_jax.errors import quote, short_repr
from prb_jax.records import fields

ROLES: Final = ("system", "developer", "user", "assistant", "tool")

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


@functools.lru_cache(maxsize=1024)
def nearest_message_field(name: str) -> str | None:
    """Return the field of a message that a field with another name probably means; None if it resembles none."""
    plain = re.sub(r"[^a-z]", "", name.casefold())
    if plain in ("thought", "thoughts"):
        return "reasoning_content"
    spelled = {known.replace("_", ""): known for known in sorted(MESSAGE_FIELDS)}
    near = difflib.get_close_matches(plain, spelled, n=1, cutoff=0.86)
    return spelled[near[0]] if near and name not in MESSAGE_FIELDS else None


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
    for key in item.keys() - MESSAGE_FIELDS:
        if (meant := nearest_message_field(str(key))) and not is_empty(item[key]):
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
