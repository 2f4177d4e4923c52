"""Items of the calls that RL trainers make of a reward function: prompts, completions, users and profiles."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any, Final

from prb_jax.errors import DataError, quote
from prb_jax.records import fields as checks
from prb_jax.records.comparison import Message, parsed_profile, read_profile
from prb_jax.records.conversation import from_json
from prb_jax.records.fields import CONTEXT_FIELDS
from prb_jax.records.messages import split_response
from prb_jax.records.template_marks import template_mark, without_end_marks
from prb_jax.serving import fields
from prb_jax.serving.items import ChatItem

WHERE: Final = "reward_fn"

_QUESTION_KEYS: Final = ("query", "question", "prompt")
_OF_USER: Final = ("user_id", "profile", "profile_order")


def batch_items(columns: Mapping[str, Any]) -> list[ChatItem]:
    """Return the items of a TRL or tunix call: columns of equal length, and values for the whole call."""
    prompts, completions = listed(columns["prompts"]), listed(columns.get("completions"))
    if not isinstance(completions, list | tuple) or len(completions) != len(prompts):
        raise DataError(f"{WHERE}: completions: expected one for each of the {len(prompts)} prompts")
    given = {name: listed(value) for name, value in columns.items()}
    given |= {name: column(columns, name, len(prompts)) for name in (*_OF_USER, "question")}
    items = []
    for k, (prompt, completion) in enumerate(zip(prompts, completions)):
        row = fields.Body(
            {
                name: value[k] if isinstance(value, list | tuple) and len(value) == len(prompts) else value
                for name, value in given.items()
            },
            where=f"{WHERE}: completion {k}",
        )
        if isinstance(prompt, str) and row["question"] is not None:
            prompt = row["question"]
        items.append(_item(prompt, completion, row, f"completions[{k}]"))
    return items


def verl_item(solution: Any, extra_info: Any, name: str) -> ChatItem:
    extra = fields.Body(checks.mapping(extra_info, WHERE, "extra_info"), where=f"{WHERE}: extra_info")
    prompt, profile = _first(extra, _QUESTION_KEYS), parsed_profile(extra.get("profile"), WHERE)
    if prompt is None:
        raise DataError(f"{WHERE}: extra_info: expected the question as {' or '.join(_QUESTION_KEYS)}")
    if isinstance(profile, str) and isinstance(prompt, str):  # the format of the paper's training data
        prompt, extra = (
            prompt + profile,
            fields.Body({**extra, "profile": None}, where=f"{WHERE}: extra_info"),
        )
    return _item(prompt, solution, extra, name)


def swift_items(columns: Mapping[str, Any]) -> list[ChatItem]:
    """Return the items of an ms-swift call; its messages end with the completion, or just before it."""
    completions, messages = listed(columns["completions"]), listed(columns["messages"])
    if not isinstance(messages, list | tuple) or len(messages) != len(completions):
        raise DataError(
            f"{WHERE}: messages: expected a conversation for each of {len(completions)} completions"
        )
    prompts = []
    for k, (turns, completion) in enumerate(zip(map(listed, messages), completions, strict=True)):
        given = fields.messages(turns, f"messages[{k}]")
        if given[-1].role == "assistant":
            if given[-1].content != completion:
                raise DataError(
                    f"{WHERE}: messages[{k}]: expected to end with completion {k}, found another answer"
                )
            turns = turns[:-1]
        prompts.append(turns)
    others = {name: value for name, value in columns.items() if name != "messages"}
    return batch_items({**others, "prompts": prompts})


def verifiers_group(columns: Mapping[str, Any]) -> list[ChatItem]:
    """Return the items of the rollouts of one prompt, from the columns of a group function of a verifiers rubric."""
    names = {"prompts": "prompt", "completions": "completion", "infos": "info", "states": "state"}
    count = len(columns["completions"])
    lists = {name: column(columns, plural, count) for plural, name in names.items()}
    return [
        verifiers_item(
            fields.Body({name: values[k] for name, values in lists.items()}, where=f"{WHERE}: completion {k}")
        )
        for k in range(count)
    ]


def verifiers_item(call: fields.Body) -> ChatItem:
    """Return the item of a verifiers rubric call; `info`, or columns of the data, give the user and the profile."""
    prompt, completion, info = call.get("prompt"), call["completion"], from_json(call.get("info"))
    given = dict(checks.mapping({} if info is None else info, WHERE, "info"))
    for name in (*_OF_USER, "question", *CONTEXT_FIELDS):
        value = listed(call.get(name))
        if value is not None and given.setdefault(name, value) != value:
            about = f"expected {quote(given[name])}, as in info, found {quote(value)}"
            checks.fail(WHERE, name, about)
    state = call.get("state")
    tools = state.get("tool_defs") if isinstance(state, Mapping) else None
    if tools and given.get("tools") is None:
        given["tools"] = [_function(tool, "tools") for tool in map(_plain, tools)]
    for name in ("answer", "task"):
        call.get(name)
    call.ignored()
    about = fields.Body(given, where=f"{WHERE}: info")
    if isinstance(prompt, str) and about.get("question") is not None:
        prompt = about["question"]
    prompt, completion = (
        [_turn(message) for message in turns] if isinstance(turns, list | tuple) else turns
        for turns in (prompt, completion)
    )
    return _item(prompt, completion, about, "completion")


def trace_item(task: Any, trace: Any) -> ChatItem:
    """Return the item of a verifiers 0.4 judge: the last conversation of a trace, for the user of the task."""
    about = task.model_dump()
    about.pop("prompt", None)  # the trace already begins with the prompt, as the harness wrote it
    if tools := [_function(_plain(tool), "tools") for tool in trace.tools]:
        about["tools"] = tools
    turns = [_turn(message) for message in trace.messages]
    if not turns or turns[-1]["role"] != "assistant":
        found = quote(turns[-1]["role"]) if turns else "no message"
        raise DataError(f"{WHERE}: trace: expected the assistant's message at the end, found {found}")
    reply, said = trace.root_reply, turns[-1].get("content", "")
    if reply is not None and reply.strip() != said.strip():
        raise DataError(
            f"{WHERE}: trace: expected a last conversation that ends with the root agent's reply, {quote(reply)}, "
            f"found {quote(said)}"
        )
    return _item(turns[:-1], turns[-1:], fields.Body(about, where=f"{WHERE}: task"), "trace.messages")


def _plain(value: Any) -> Any:
    """Return a pydantic object, as verifiers makes of messages and tools, as a dict; anything else unchanged."""
    return value.model_dump(exclude_none=True) if hasattr(value, "model_dump") else value


def _turn(message: Any) -> Any:
    """Return a message of verifiers in the form that chat templates read; a plain message unchanged."""
    turn = _plain(message)
    if turn is message:
        return message
    turn.pop("provider_state", None)  # opaque items of the provider's API
    if blocks := turn.pop("thinking_blocks", None):
        turn.setdefault("reasoning_content", "".join(block.get("thinking", "") for block in blocks))
    if calls := turn.pop("tool_calls", None):
        turn["tool_calls"] = [_function(call, "tool_calls") for call in calls]
    elif turn["role"] == "assistant":
        turn.setdefault("content", "")
    return turn


def _function(given: Mapping[str, Any], name: str) -> dict[str, Any]:
    """Return a verifiers tool or tool call in the form that chat templates read."""
    if given.get("type", "function") != "function" or given.get("namespace") is not None:
        raise DataError(
            f"{WHERE}: {name}: expected functions without a namespace, found {quote(dict(given))}"
        )
    parts = {key: given[key] for key in ("name", "description", "parameters", "strict") if key in given}
    if "arguments" in given:
        parts["arguments"] = from_json(given["arguments"])
    return {"type": "function", "function": parts} | ({"id": given["id"]} if "id" in given else {})


def areal_item(columns: fields.Body) -> ChatItem:
    prompt, completion = columns["prompt"], columns["completions"]
    if isinstance(prompt, str):
        prompt = _first(columns, ("messages", "question", "prompt"))
    return _item(prompt, completion, columns, "completions")


def _first(columns: Mapping[str, Any], names: Sequence[str]) -> Any:
    return next((columns[name] for name in names if columns.get(name) is not None), None)


def _item(prompt: Any, completion: Any, about: fields.Body, name: str) -> ChatItem:
    """Return the item of a prompt and a completion, each a text or messages.

    The last message of a completion is the response. A text loses the end-of-text token that some trainers leave.

    Args:
      about: Columns with the user and the profile.
      name: Name of the completion in error messages.
    """
    if isinstance(prompt, str):
        if mark := template_mark(prompt):
            raise DataError(
                f"{WHERE}: prompt: holds {mark!r}, so a chat template has rendered it already, and it would be wrapped "
                "as a user's message again: give messages, in the column 'messages' (AReaL), as conversational "
                "prompts (TRL), or the plain question in the column 'question' (tunix)"
            )
        messages = (Message("user", str(prompt)),)
    else:
        messages = fields.messages(listed(prompt), "prompt")
    if isinstance(completion, str):
        completion = without_end_marks(str(completion))  # `str` converts numpy strings
    else:
        turns = fields.messages(listed(completion), name)
        if turns[-1].role != "assistant":
            found = quote(turns[-1].role)
            raise DataError(f"{WHERE}: {name}: expected the assistant's message at the end, found {found}")
        messages, completion = split_response((*messages, *turns))
    user, profile, order = (listed(about.get(field)) for field in _OF_USER)
    context = fields.context(about)
    about.ignored()
    return ChatItem(
        *fields.placed(messages, completion, context),
        checks.optional_identifier(user, WHERE, "user_id"),
        read_profile(profile, WHERE),
        checks.optional_text(order, WHERE, "profile_order"),
    )


def column(columns: Mapping[str, Any], name: str, count: int) -> Sequence[Any]:
    """Return a column as a list; Nones if it is absent."""
    values = listed(columns.get(name))
    if values is None:
        return [None] * count
    if not isinstance(values, list | tuple) or len(values) != count:
        expected = f"expected one for each of {count} completions, found {checks.found(values)}"
        raise DataError(f"{WHERE}: {name}: {expected}")
    return values


def listed(value: Any) -> Any:
    """Convert numpy arrays and numbers, which data frames and tunix pass, to Python lists and numbers."""
    return value.tolist() if hasattr(value, "tolist") else value
