"""Tasks and traces as verifiers hands them to a rubric (0.1) or to `score` of a judge (0.4), without the package."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any


@dataclass
class Dumped:
    """A pydantic model, which is no mapping: fields that were not given are None, as those of its messages are."""

    fields: dict[str, Any]

    def model_dump(self, *, exclude_none: bool = False) -> dict[str, Any]:
        return {name: value for name, value in self.fields.items() if not exclude_none or value is not None}


@dataclass
class Trace:
    """`messages` of the last branch, `tools` that were seen, and the reply of the root agent if others ran below it."""

    messages: Sequence[Dumped]
    tools: Sequence[Dumped] = ()
    root_reply: str | None = None


def task(prompt: Any, **fields: Any) -> Dumped:
    """A `TaskData` with fields of its own."""
    own = {"idx": 0, "name": None, "prompt": prompt, "system_prompt": None, "agent_user": None, "skills": []}
    return Dumped(own | fields)


def trace(messages: Sequence[dict[str, Any]], tools: Sequence[dict[str, Any]] = (), **more: Any) -> Trace:
    """A trace of messages of the API, whose calls and tools verifiers holds without the level `function`."""
    given = []
    for message in messages:
        message = dict(message)
        if calls := message.get("tool_calls"):
            message["tool_calls"] = [
                {"id": "c", "type": "function", "namespace": None, **call["function"]} for call in calls
            ]
        if message["role"] == "assistant":
            empty = dict.fromkeys(("content", "reasoning_content", "tool_calls", "provider_state"))
            message = {**empty, **message}
        given.append(Dumped(message))
    flat = [Dumped({"type": "function", "strict": None, **tool["function"]}) for tool in tools]
    return Trace(given, flat, **more)
