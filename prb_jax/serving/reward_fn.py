"""Whatever scores as the reward function of RL trainers, each of which calls it in its own way.

A model is opened at the first call, once in each process: trainers with pools of processes send the function itself. A
process that is forked after JAX has started cannot use JAX.
"""

from __future__ import annotations

import os
import pickle
import sys
import threading
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import TYPE_CHECKING, Any, Final

from prb_jax.behaviour.judges.options import is_judge
from prb_jax.errors import DataError, PrbError, RunError, quote
from prb_jax.models.readouts.load_options import LoadOptions
from prb_jax.records import fields as checks
from prb_jax.records.comparison import Comparison, Message, read_profile
from prb_jax.records.conversation import from_json, split_response
from prb_jax.records.template_marks import template_mark, without_end_marks
from prb_jax.scoring.load import check_name, has_no_weights, is_module, open_scorer
from prb_jax.scoring.remote import is_url
from prb_jax.scoring.remote.score_server import ScoreClient
from prb_jax.serving import fields
from prb_jax.serving.item_scorer import ItemScorer, open_item_scorer
from prb_jax.serving.items import ChatItem, Score
from prb_jax.serving.routes import get_reward
from prb_jax.text.view import ViewOptions

if TYPE_CHECKING:
    from jax.sharding import Mesh

    from prb_jax.behaviour.judges.options import JudgeOptions
    from prb_jax.scoring.load import Model

WHERE: Final = "reward_fn"

_QUESTION_KEYS: Final = ("query", "question", "prompt")
_OF_USER: Final = ("user_id", "profile", "profile_order")
_REQUIRED: Final = ("user_id", "profile")

_opened: dict[bytes, ItemScorer] = {}  # by what they were opened of: one in this process
_opening = threading.Lock()
_is_forked = False  # JAX had started in the process that this one was forked of


def _after_fork() -> None:
    global _is_forked, _opening
    bridge: Any = sys.modules.get("jax._src.xla_bridge")
    _is_forked = _is_forked or (bridge is not None and bridge.backends_are_initialized())
    _opening = threading.Lock()


os.register_at_fork(after_in_child=_after_fork)


def reward_fn(
    model: Model,
    *,
    name: str = "prb_reward",
    empty: float | None = None,
    require: Sequence[str] = (),
    profile_posts: int | None = None,
    protocol: str | None = None,
    max_length: int | None = None,
    batch_tokens: int | None = None,
    mesh: str | Mesh | None = None,
    history: Sequence[Comparison] | Path | None = None,
    judge: JudgeOptions | None = None,
) -> RewardFunction:
    """Return a reward function for TRL, tunix, verl, AReaL, OpenRLHF, ms-swift and verifiers.

    Args:
      model: gives the rewards: a :class:`prb_jax.RewardModel`, or anything else that :func:`prb_jax.evaluate` takes (a
        path or hub id, a baseline, a fitted method of personalisation, a function), a judge (`judge:MODEL`, or
        `judge:URL#NAME` at an endpoint), or the URL of a running `prb serve`. A function made of a path, a name or a
        URL can be pickled: each other process opens the model once. A path or a hub id is opened at the first call.
      name: under which trainers log it (``__name__``); several rewards of one training need several names.
      empty: the reward of an empty completion, which no model reads; without it such a completion is an error.
      require: which of "user_id" and "profile" each completion must have; one without it is an error.
      profile_posts, protocol, max_length, batch_tokens: as of :meth:`RewardModel.score`.
      mesh: devices of the model, as of :func:`prb_jax.load`; or the mesh of a learner, whatever its axes are called,
        whose devices hold the reward model too. The model is then opened now, and cannot go to another process.
      history: what a fitted method of personalisation knows of the users: comparisons, or a folder of states.
      judge: how a judge is asked.
    """
    view = ViewOptions(profile_posts=profile_posts, protocol=protocol, max_length=max_length)
    opening = {"view": view, "batch_tokens": batch_tokens, "mesh": mesh, "history": history, "judge": judge}
    return RewardFunction(model, name=name, empty=empty, require=require, **opening)


class RewardFunction:
    """Callable as each of the trainers calls it; completions of one prompt are scored together.

    TRL: ``f(prompts=..., completions=..., **columns)`` gives a list of floats; the columns `user_id` and `profile` of
    the data are the users. tunix and MaxText call alike, with arrays and rendered prompts: a column `question` is read
    instead.

    verl: ``f(data_source=..., solution_str=..., ground_truth=..., extra_info=...)``, also by position, gives a float;
    `extra_info` holds the question as `query`, `question` or `prompt`, and may hold `user_id` and `profile`. Its batch
    manager calls with ``solution_strs=..., extra_infos=...`` and is given a list.

    AReaL: ``f(prompt, completion, prompt_ids, completion_ids, **columns)`` gives a float. The prompt is rendered: the
    column `messages` or `question` is read instead, and an end-of-text token behind the completion is left out.

    OpenRLHF: ``f(queries, prompts, labels)``, as ``reward_func`` of a file, gives what `/get_reward` of `prb serve`
    answers; a label is an object {question, user_id, profile}, or JSON of one.

    ms-swift: ``f(completions, messages=..., **columns)`` gives a list; the messages end with the completion.

    verifiers: ``f(prompt=..., completion=..., answer=..., state=..., info=...)``, a function of a `Rubric`, gives a
    float; `info` may hold `user_id`, `profile` and `tools`. From its version 0.4, ``f(task, trace)``, as ``score`` of a
    ``vf.Judge`` is called, gives a float: of the trace's last conversation, with the tools that were seen in it; fields
    of the task may be `user_id`, `profile` and `profile_order`.

    Raises (when called):
      RunError: the process was forked after JAX had started.
      DataError: a completion that has no reward; the message names it. There is no default reward. A prompt that a
        chat template has rendered already, which would be wrapped as a user's message again.
    """

    def __init__(
        self, model: Model, *, name: str, empty: float | None, require: Sequence[str], **opening: Any
    ) -> None:
        """Open what starts no JAX, and check the names of other models."""
        if unknown := [field for field in require if field not in _REQUIRED]:
            raise RunError(f"require: expected {' or '.join(_REQUIRED)}, found {quote(unknown[0])}")
        self.__name__, self._empty, self._require = name, empty, tuple(require)
        if is_url(model):
            model = open_scorer(model, LoadOptions(mesh=opening.pop("mesh")))
        self._model: Model = model
        self._options = opening
        self._scorer: ItemScorer | None = None
        if not isinstance(model, str | Path) or not self._starts_jax or self._on_devices:
            self._scorer = open_item_scorer(self._model, **opening)
        elif not is_judge(model):
            check_name(model)

    @property
    def _starts_jax(self) -> bool:
        if not isinstance(self._model, str | Path):
            return getattr(self._model, "has_weights", is_module(self._model))
        at_endpoint = is_judge(self._model) and "://" in str(self._model)
        return not at_endpoint and not has_no_weights(self._model)

    @property
    def _on_devices(self) -> bool:
        """Whether it was given devices of this process, and no text."""
        return not isinstance(self._options.get("mesh"), str | None)

    def _open(self) -> ItemScorer:
        """Return the scorer, which is opened once in a process."""
        if _is_forked and self._starts_jax:
            raise RunError(
                f"{WHERE}: this process was forked after JAX had started in its parent, and would wait for ever: run "
                "`prb serve MODEL` and give reward_fn its URL, or start processes by spawn"
            )
        if self._scorer is None:
            key = pickle.dumps((self._model, self._options))
            with _opening:
                if key not in _opened:
                    _opened[key] = open_item_scorer(self._model, **self._options)
            self._scorer = _opened[key]
        return self._scorer

    def __getstate__(self) -> dict[str, Any]:
        if not isinstance(self._model, str | Path | ScoreClient) or self._on_devices:
            raise TypeError(
                "a reward function of a model that is loaded, or with the devices of a mesh, cannot go to another "
                "process: give reward_fn the path or name of the model, or the URL of a running `prb serve`"
            )
        return vars(self) | {"_scorer": None}

    def __call__(self, *args: Any, **columns: Any) -> Any:
        """Return the rewards in the form of the trainer that calls."""
        given = [_listed(value) for value in args]
        lists = bool(given) and all(isinstance(value, list) for value in given)
        call = fields.Body(columns, where=WHERE)
        if len(args) == 4 and isinstance(args[3], Mapping):
            columns |= dict(zip(("data_source", "solution_str", "ground_truth", "extra_info"), args))
        if "solution_strs" in columns:
            texts = _listed(call["solution_strs"])
            infos = _column(call, "extra_infos", len(texts))
            call.ignored()
            pairs = enumerate(zip(texts, infos, strict=True))
            return self._rewards([_verl_item(text, info, f"solution_strs[{k}]") for k, (text, info) in pairs])
        if "solution_str" in columns:
            item = _verl_item(call["solution_str"], call.get("extra_info"), "solution_str")
            call.ignored()
            return self._rewards([item])[0]
        task, trace = args if len(args) == 2 else (call.get("task"), call.get("trace"))
        if hasattr(trace, "messages") and hasattr(task, "model_dump"):
            call.ignored()
            return self._rewards([_trace_item(task, trace)])[0]
        if len(given) == 3 and lists:
            call.ignored()
            return self._openrlhf(*given)
        if len(given) == 1 and lists:
            columns |= {"completions": given[0]}
        of_swift = "messages" in columns and not given[1:] and not {"prompts", "prompt"} & columns.keys()
        if of_swift and isinstance(_listed(columns.get("completions")), list):
            return self._rewards(_swift_items(columns))
        if "completion" in columns and not given:
            return self._rewards([_verifiers_item(call)])[0]
        if len(given) == 2 and isinstance(given[0], list):
            columns |= {"prompts": given[0], "completions": given[1]}
        if "prompts" in columns:
            return self._rewards(_batch_items(columns))
        columns |= dict(zip(("prompt", "completions"), args, strict=False))
        if not {"prompt", "completions"} <= columns.keys():
            expected = "prompts and completions (TRL), solution_str (verl), or prompt and completions (AReaL)"
            raise DataError(f"{WHERE}: expected {expected}, found {', '.join(columns) or 'no argument'}")
        return self._rewards([_areal_item(fields.Body(columns, where=WHERE))])[0]

    def _openrlhf(self, queries: list[str], prompts: list[str], labels: list[Any]) -> dict[str, Any]:
        request = get_reward(fields.Body({"query": queries, "prompts": prompts, "labels": labels}))
        items = [item for item in request.items if isinstance(item, ChatItem)]
        if len(items) < len(queries):
            raise DataError(
                f"{WHERE}: labels: expected an object {{question, user_id, profile}} for each query, or JSON of one, "
                f"found {quote(labels)}"
            )
        return request.reply([Score(value, 0, False) for value in self._rewards(items)], "")

    def _rewards(self, items: Sequence[ChatItem]) -> list[float]:
        rewards = [0.0 if self._empty is None else self._empty] * len(items)
        places = [place for place, item in enumerate(items) if item.response]
        if self._empty is None and (empty := set(range(len(items))) - set(places)):
            raise DataError(
                f"{WHERE}: completion {min(empty)} is empty, which has no reward: give reward_fn(model, empty=...) "
                "if it shall have one"
            )
        for place, item in enumerate(items):
            if lacking := [field for field in self._require if not getattr(item, field)]:
                raise DataError(f"{WHERE}: completion {place}: field '{lacking[0]}': missing, and required")
        scores = self._open()([items[place] for place in places]) if places else ()
        for place, score in zip(places, scores, strict=True):
            if isinstance(score, PrbError):
                raise DataError(f"{WHERE}: completion {place}: {score}") from score
            rewards[place] = score.value
        return rewards


def _batch_items(columns: Mapping[str, Any]) -> list[ChatItem]:
    """Return the items of a call of TRL or tunix: columns of equal length, and values of the whole call."""
    prompts, completions = _listed(columns["prompts"]), _listed(columns.get("completions"))
    if not isinstance(completions, list | tuple) or len(completions) != len(prompts):
        raise DataError(f"{WHERE}: completions: expected one for each of the {len(prompts)} prompts")
    given = {name: _listed(value) for name, value in columns.items()}
    given |= {name: _column(columns, name, len(prompts)) for name in (*_OF_USER, "question")}
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


def _verl_item(solution: Any, extra_info: Any, name: str) -> ChatItem:
    extra = fields.Body(checks.mapping(extra_info, WHERE, "extra_info"), where=f"{WHERE}: extra_info")
    prompt, profile = _first(extra, _QUESTION_KEYS), from_json(extra.get("profile"))
    if prompt is None:
        raise DataError(f"{WHERE}: extra_info: expected the question as {' or '.join(_QUESTION_KEYS)}")
    if isinstance(profile, str) and isinstance(prompt, str):  # as the paper's training data has it
        prompt, extra = (
            prompt + profile,
            fields.Body({**extra, "profile": None}, where=f"{WHERE}: extra_info"),
        )
    return _item(prompt, solution, extra, name)


def _swift_items(columns: Mapping[str, Any]) -> list[ChatItem]:
    """Return the items of a call of ms-swift: its messages end with the completion, or stand before it."""
    completions, messages = _listed(columns["completions"]), _listed(columns["messages"])
    if not isinstance(messages, list | tuple) or len(messages) != len(completions):
        raise DataError(
            f"{WHERE}: messages: expected a conversation for each of {len(completions)} completions"
        )
    prompts = []
    for k, (turns, completion) in enumerate(zip(map(_listed, messages), completions, strict=True)):
        given = fields.messages(turns, f"messages[{k}]")
        if given[-1].role == "assistant":
            if given[-1].content != completion:
                raise DataError(
                    f"{WHERE}: messages[{k}]: expected to end with completion {k}, found another answer"
                )
            turns = turns[:-1]
        prompts.append(turns)
    others = {name: value for name, value in columns.items() if name != "messages"}
    return _batch_items({**others, "prompts": prompts})


def _verifiers_item(call: fields.Body) -> ChatItem:
    """Return the item of a call of a rubric of verifiers; `info` says whose reward it is."""
    prompt, completion, info = call.get("prompt"), call["completion"], from_json(call.get("info"))
    for name in ("answer", "state", "task"):
        call.get(name)
    call.ignored()
    about = fields.Body(checks.mapping({} if info is None else info, WHERE, "info"), where=f"{WHERE}: info")
    if isinstance(prompt, str) and about.get("question") is not None:
        prompt = about["question"]
    return _item(prompt, completion, about, "completion")


def _trace_item(task: Any, trace: Any) -> ChatItem:
    """Return the item of a judge of verifiers 0.4: the last conversation of a trace, for the person of the task."""
    about = task.model_dump()
    about.pop("prompt", None)  # at the beginning of the trace, as the harness wrote it
    if tools := [_function(tool.model_dump(exclude_none=True), "tools") for tool in trace.tools]:
        about["tools"] = tools
    turns = []
    for message in trace.messages:
        turn = message.model_dump(exclude_none=True)
        if calls := turn.pop("tool_calls", None):
            turn["tool_calls"] = [_function(call, "tool_calls") for call in calls]
        elif turn["role"] == "assistant":
            turn.setdefault("content", "")
        turns.append(turn)
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


def _function(given: Mapping[str, Any], name: str) -> dict[str, Any]:
    """Return a tool or a call of verifiers as chat templates read it."""
    if given.get("type", "function") != "function" or given.get("namespace") is not None:
        raise DataError(
            f"{WHERE}: trace: {name}: expected functions without a namespace, found {quote(dict(given))}"
        )
    parts = {key: given[key] for key in ("name", "description", "parameters", "strict") if key in given}
    if "arguments" in given:
        parts["arguments"] = from_json(given["arguments"])
    return {"type": "function", "function": parts} | ({"id": given["id"]} if "id" in given else {})


def _areal_item(columns: fields.Body) -> ChatItem:
    prompt, completion = columns["prompt"], columns["completions"]
    if isinstance(prompt, str):
        prompt = _first(columns, ("messages", "question", "prompt"))
    if isinstance(completion, str):
        completion = without_end_marks(completion)
    return _item(prompt, completion, columns, "completions")


def _first(columns: Mapping[str, Any], names: Sequence[str]) -> Any:
    return next((columns[name] for name in names if columns.get(name) is not None), None)


def _item(prompt: Any, completion: Any, about: fields.Body, name: str) -> ChatItem:
    """A prompt and a completion, each a text or messages; the last message of a completion is the response.

    Args:
      about: Columns that say whose reward it is.
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
        messages = fields.messages(_listed(prompt), "prompt")
    if isinstance(completion, str):
        completion = str(completion)  # of numpy too
    else:
        turns = fields.messages(_listed(completion), name)
        if turns[-1].role != "assistant":
            found = quote(turns[-1].role)
            raise DataError(f"{WHERE}: {name}: expected the assistant's message at the end, found {found}")
        messages, completion = split_response((*messages, *turns))
    user, profile, order = (_listed(about.get(field)) for field in _OF_USER)
    context = fields.context(about)
    about.ignored()
    return ChatItem(
        *fields.placed(messages, completion, context),
        checks.optional_identifier(user, WHERE, "user_id"),
        read_profile(profile, WHERE),
        checks.optional_text(order, WHERE, "profile_order"),
    )


def _column(columns: Mapping[str, Any], name: str, count: int) -> Sequence[Any]:
    """A column as a list; Nones where it is not there."""
    values = _listed(columns.get(name))
    if values is None:
        return [None] * count
    if not isinstance(values, list | tuple) or len(values) != count:
        expected = f"expected one for each of {count} completions, found {checks.found(values)}"
        raise DataError(f"{WHERE}: {name}: {expected}")
    return values


def _listed(value: Any) -> Any:
    """Arrays and numbers of numpy, as data frames and tunix give them, as lists and numbers of Python."""
    return value.tolist() if hasattr(value, "tolist") else value
