"""Convert records in the layouts of other tools to the schema of `prb_jax.records.comparison`.

Sources: ShareGPT (``conversations`` of ``from`` and ``value``) and Alpaca (``instruction``, ``input``, ``system``,
``history``) as LLaMA-Factory reads them, ms-swift (``messages`` with ``rejected_response``), OpenRLHF
(``context_messages``), Chatbot Arena (``winner`` of ``conversation_a`` and ``conversation_b``), and the raw text of
Anthropic's HH (``chosen`` and ``rejected`` that begin with "Human:").
"""

from __future__ import annotations

import re
from collections.abc import Mapping
from typing import Any, Final

from prb_jax.errors import quote
from prb_jax.records import fields
from prb_jax.records.conversation import from_json, is_empty

INSTRUCTION: Final = "instruction"

LAYOUT_COLUMNS: Final = (
    INSTRUCTION, "input", "system", "history", "conversations", "messages", "rejected_response",
    "rejected_messages", "context_messages", "winner", "conversation_a", "conversation_b", "text_chosen",
    "text_rejected", "system_prompt", "system_message", "context",
)  # fmt: skip
"""Columns of layouts that are not fields of a record."""

PROMPT_COLUMNS: Final = (
    "system", INSTRUCTION, "input", "conversations", "context_messages", "messages", "history", "system_prompt",
    "system_message", "context",
)  # fmt: skip
"""Those with a part of the prompt; beside 'question' or 'prompt' they are not read."""

_COLUMNS: Final = frozenset(LAYOUT_COLUMNS)
_SPEAKERS: Final = {
    "human": "user", "user": "user", "gpt": "assistant", "chatgpt": "assistant", "assistant": "assistant",
    "system": "system", "observation": "tool", "tool": "tool", "function_call": "function_call",
}  # fmt: skip
_MESSAGES: Final = re.compile(r"\s*(\[\s*)?\{")
_PRINTED: Final = re.compile(r"\s*(\[\s*)?\{\s*'(role|content|from|value)'\s*:")
_TURN: Final = re.compile(r"\n\n(Human|Assistant):")
_OPENING: Final = re.compile(r"\s*Human:.*?\n\nAssistant:", re.DOTALL)


def as_record(row: Mapping[str, Any], where: str) -> Mapping[str, Any]:
    """Return a record with the fields of a comparison; a row in no known layout is returned unchanged.

    Raises:
      DataError: A column of a layout is invalid or cannot be read; the message names it.
    """
    if not row.keys() & _COLUMNS:
        return _from_text(_with_roles(row, where))
    row = _with_roles(row, where)
    if row.get("text_chosen") is not None and row.get("chosen") is None:
        fields.fail(
            where,
            "text_chosen",
            "contains a whole conversation that a chat template has rendered; expected 'prompt', 'chosen' and "
            "'rejected' as lists of {role, content}, or map both columns and take the text as it is: "
            "'?chosen=text_chosen&rejected=text_rejected&rendered'",
        )
    for make in (_swift, _arena, _context_messages, _sharegpt, _alpaca):
        row = make(row, where)
    return row


def is_prompt_column(name: str, row: Mapping[str, Any]) -> bool:
    """Return whether a record has a column with a part of a prompt that nothing has read."""
    value = from_json(row.get(name))
    if is_empty(value):
        return False
    if name == "messages":  # many data sets repeat the better conversation there
        said = [row.get(other) for other in ("chosen", "prompt", "question")]
        if (
            not isinstance(value, list)
            or [{"role": "user", "content": text} for text in said[1:] if text] == value
        ):
            return False
        return not any(isinstance(turns, list) and turns[: len(value)] == value for turns in said)
    # "history" is also a name for a profile
    return name != "history" or (isinstance(value, list) and isinstance(value[0], list | tuple))


def _asks(row: Mapping[str, Any]) -> bool:
    return any(row.get(name) is not None for name in ("question", "prompt"))


def _without(row: Mapping[str, Any], *names: str) -> dict[str, Any]:
    return {name: value for name, value in row.items() if name not in names}


def _with_roles(row: Mapping[str, Any], where: str) -> Mapping[str, Any]:
    """Turns {from, value} into {role, content}, and a response that is a single message, or JSON, into a list."""
    changed: dict[str, Any] = {}
    row = _from_json(row, where)
    for name in ("prompt", "chosen", "rejected", "conversations", "conversation_a", "conversation_b"):
        value = row.get(name)
        if isinstance(value, Mapping):
            value = [value]
        if name.startswith("conversation"):
            value = from_json(value)
        if isinstance(value, list | tuple) and (value is not row[name] or any(map(_is_said, value))):
            changed[name] = [_turn(item, where, f"{name}[{k}]") for k, item in enumerate(value)]
    return {**row, **changed} if changed else row


def _from_json(row: Mapping[str, Any], where: str) -> Mapping[str, Any]:
    """Return the record with messages in place of their JSON: of the prompt, and of all responses or of none.

    Raises:
      DataError: A text holds messages as Python prints them.
    """

    def turns_of(name: str) -> list[Any]:
        return _turns_in(row.get(name), where, name)

    changed = {name: turns for name in ("prompt", "question") if (turns := turns_of(name))}
    sides = {name: turns_of(name) for name in ("chosen", "rejected")}
    if all(sides.values()):
        changed |= sides
    responses = row.get("responses")
    if (
        isinstance(responses, list | tuple)
        and responses
        and all(listed := [_turns_in(one, where, f"responses[{k}]") for k, one in enumerate(responses)])
    ):
        changed["responses"] = listed
    return {**row, **changed} if changed else row


def _turns_in(value: Any, where: str, name: str) -> list[Any]:
    """Return the messages, or the message, that a text contains as JSON; an empty list for any other value."""
    if not isinstance(value, str) or not _MESSAGES.match(value):
        return []
    if _PRINTED.match(value) and value.rstrip().endswith(("}", "]")):
        fields.fail(where, name, "a list of messages as Python prints it; expected JSON")
    turns = from_json(value)
    turns = [turns] if isinstance(turns, Mapping) else turns
    both = ({"role", "content"}, {"from", "value"}, {"role", "tool_calls"})
    known = isinstance(turns, list) and all(
        isinstance(turn, Mapping) and any(names <= turn.keys() for names in both) for turn in turns
    )
    return turns if known else []


def _is_said(item: object) -> bool:
    return isinstance(item, Mapping) and "from" in item and "value" in item


def _turn(item: Any, where: str, name: str) -> Any:
    if not _is_said(item):
        return item
    role = _SPEAKERS.get(str(item["from"]).casefold())
    if role is None:
        fields.fail(
            where, f"{name}.from", f"expected one of {', '.join(_SPEAKERS)}, found {quote(item['from'])}"
        )
    if role != "function_call":
        return {**_without(item, "from", "value"), "role": role, "content": item["value"]}
    calls = from_json(item["value"])
    calls = [calls] if isinstance(calls, Mapping) else calls
    if not isinstance(calls, list):
        fields.fail(where, f"{name}.value", f"expected a tool call as JSON, found {fields.found(calls)}")
    calls = [{"type": "function", "function": call} for call in calls]
    return {"role": "assistant", "content": None, "tool_calls": calls}


def _swift(row: Mapping[str, Any], where: str) -> Mapping[str, Any]:
    names = ("rejected_response", "rejected_messages")
    given = [name for name in names if row.get(name) is not None]
    if not given or row.get("messages") is None or row.get("chosen") is not None:
        return row
    if len(given) > 1:
        fields.fail(where, given[0], f"given beside {given[1]!r}; expected one of the two")
    chosen = _list(row["messages"], where, "messages")
    rejected = from_json(row[given[0]])
    if isinstance(rejected, str):
        rejected = [*chosen[:-1], {"role": "assistant", "content": rejected}]
    return {**_without(row, "messages", *names), "chosen": chosen, "rejected": rejected}


def _arena(row: Mapping[str, Any], where: str) -> Mapping[str, Any]:
    sides = {"model_a": ("conversation_a", "conversation_b"), "model_b": ("conversation_b", "conversation_a")}
    if row.get("winner") is None or row.get("conversation_a") is None or row.get("chosen") is not None:
        return row
    if row["winner"] not in sides:
        fields.fail(
            where,
            "winner",
            f"{quote(row['winner'])} prefers neither response; remove such rows: a comparison has a better response",
        )
    chosen, rejected = (row.get(name) for name in sides[row["winner"]])
    return {
        **_without(row, "winner", "conversation_a", "conversation_b"),
        "chosen": chosen,
        "rejected": rejected,
    }


def _context_messages(row: Mapping[str, Any], where: str) -> Mapping[str, Any]:
    if row.get("context_messages") is None or _asks(row):
        return row
    return {**_without(row, "context_messages"), "prompt": row["context_messages"]}


def _alpaca(row: Mapping[str, Any], where: str) -> Mapping[str, Any]:
    """The instruction with its input, behind system message and history."""
    if _asks(row) or row.get(INSTRUCTION) is None:
        return row
    parts = [(name, row.get(name)) for name in (INSTRUCTION, "input")]
    asked = "\n".join(fields.text(part, where, name) for name, part in parts if not is_empty(part))
    turns: list[Any] = []
    for k, pair in enumerate(() if is_empty(row.get("history")) else _list(row["history"], where, "history")):
        both = _list(pair, where, f"history[{k}]")
        if len(both) != 2:
            fields.fail(
                where, f"history[{k}]", f"expected a question and an answer, found {fields.found(pair)}"
            )
        turns += [{"role": "user", "content": both[0]}, {"role": "assistant", "content": both[1]}]
    turns = [*_system(row, where), *turns, {"role": "user", "content": asked}]
    prompt = {"question": asked} if len(turns) == 1 else {"prompt": turns}
    return {**_without(row, INSTRUCTION, "input", "system", "history"), **prompt}


def _sharegpt(row: Mapping[str, Any], where: str) -> Mapping[str, Any]:
    """Conversations before the responses, behind the system message."""
    if _asks(row) or row.get("conversations") is None:
        return row
    turns = _list(row["conversations"], where, "conversations")
    if turns and isinstance(turns[-1], Mapping) and turns[-1].get("role") == "assistant":
        fields.fail(
            where,
            f"conversations[{len(turns) - 1}]",
            "is an answer; expected the conversation before 'chosen' and 'rejected', which ends with the user or an "
            "observation",
        )
    return {**_without(row, "conversations", "system"), "prompt": [*_system(row, where), *turns]}


def _system(row: Mapping[str, Any], where: str) -> list[dict[str, str]]:
    text = row.get("system")
    return [] if is_empty(text) else [{"role": "system", "content": fields.text(text, where, "system")}]


def _list(value: Any, where: str, name: str) -> list[Any] | tuple[Any, ...]:
    return fields.sequence(from_json(value), where, name)


def _from_text(row: Mapping[str, Any]) -> Mapping[str, Any]:
    """Raw conversations of HH as messages: they begin with "Human:" and are answered, and no prompt is given."""
    texts = [row.get(name) for name in ("chosen", "rejected")]
    if not all(isinstance(text, str) and _OPENING.match(text) for text in texts) or _asks(row):
        return row
    return {**row, **{name: _said(str(text)) for name, text in zip(("chosen", "rejected"), texts)}}


def _said(text: str) -> list[dict[str, str]]:
    _, *parts = _TURN.split(f"\n\n{text.lstrip()}")
    roles = {"Human": "user", "Assistant": "assistant"}
    return [{"role": roles[who], "content": said.strip()} for who, said in zip(parts[::2], parts[1::2])]
