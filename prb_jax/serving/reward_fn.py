"""Reward functions for RL trainers, from any scorer. Each trainer has its own calling convention.

A model is opened at the first call, once per process: trainers with process pools pickle the function itself. A
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

from prb_jax.behaviour.judges.names import is_judge
from prb_jax.errors import DataError, PrbError, RunError, quote
from prb_jax.models.readouts.load_options import LoadOptions
from prb_jax.records.comparison import Comparison
from prb_jax.scoring.kinds import check_name, has_no_weights
from prb_jax.scoring.open_scorer import is_module, open_scorer
from prb_jax.scoring.remote import is_url
from prb_jax.scoring.remote.score_server import ScoreClient
from prb_jax.serving import fields
from prb_jax.serving.item_scorer import ItemScorer, open_item_scorer
from prb_jax.serving.items import ChatItem, Score
from prb_jax.serving.routes import get_reward
from prb_jax.serving.trainer_items import (
    WHERE,
    areal_item,
    batch_items,
    column,
    listed,
    swift_items,
    trace_item,
    verifiers_group,
    verifiers_item,
    verl_item,
)
from prb_jax.text.view import ViewOptions

if TYPE_CHECKING:
    from jax.sharding import Mesh

    from prb_jax.behaviour.judges.options import JudgeOptions
    from prb_jax.scoring.open_scorer import Model

_REQUIRED: Final = ("user_id", "profile")

_opened: dict[bytes, ItemScorer] = {}  # scorers of this process, by model and options
_opening = threading.Lock()
_is_forked = False  # whether JAX had started in the parent before this process was forked


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
      model: Source of the rewards: a :class:`prb_jax.RewardModel`, or anything else that :func:`prb_jax.evaluate`
        accepts (a path or hub id, a baseline, a fitted method of personalisation, a function). Also a judge
        (`judge:MODEL`, or `judge:URL#NAME` at an endpoint), or the URL of a running `prb serve`. With a path, name or
        URL the function can be pickled: each other process opens the model once, a path or hub id at the first call.
      name: Name in the logs of trainers (``__name__``); several rewards of one training need different names.
      empty: Reward of an empty completion, because no model reads one. If None, an empty completion is an error.
      require: Required fields of each completion, from "user_id" and "profile"; a missing field is an error.
      profile_posts, protocol, max_length, batch_tokens: See :meth:`RewardModel.score`.
      mesh: Devices of the model; see :func:`prb_jax.load`. Or the mesh of a learner, with any axis names: its devices
        then also hold the reward model, which is opened now and cannot go to another process.
      history: Comparisons of the users, or a folder of their states, for a fitted method of personalisation.
      judge: Options of a judge.
    """
    view = ViewOptions(profile_posts=profile_posts, protocol=protocol, max_length=max_length)
    opening = {"view": view, "batch_tokens": batch_tokens, "mesh": mesh, "history": history, "judge": judge}
    return RewardFunction(model, name=name, empty=empty, require=require, **opening)


class RewardFunction:
    """A callable with the signatures of all trainers; completions of one prompt are scored together.

    TRL: ``f(prompts=..., completions=..., **columns)`` gives a list of floats; the columns `user_id` and `profile` of
    the data give the users. tunix and MaxText call the same way, with arrays and rendered prompts: the column
    `question` replaces the prompt.

    verl: ``f(data_source=..., solution_str=..., ground_truth=..., extra_info=...)``, also by position, gives a float;
    `extra_info` contains the question as `query`, `question` or `prompt`, and optionally `user_id` and `profile`. The
    batch manager calls with ``solution_strs=..., extra_infos=...`` and gets a list.

    AReaL: ``f(prompt, completion, prompt_ids, completion_ids, **columns)`` gives a float. The prompt is rendered: the
    column `messages` or `question` replaces it. A trailing end-of-text token of the completion is removed.

    OpenRLHF: ``f(queries, prompts, labels)``, the ``reward_func`` of a file, returns the same answer as `/get_reward`
    of `prb serve`. A label is an object {question, user_id, profile}, or its JSON text.

    ms-swift: ``f(completions, messages=..., **columns)`` gives a list; the messages end with the completion.

    verifiers: ``f(prompt=..., completion=..., answer=..., state=..., info=...)``, a function of a `Rubric`, gives a
    float; `info`, or columns of the data, may contain `user_id`, `profile` and `tools`. With ``prompts=...,
    completions=..., infos=..., states=...``, as a group function gets them, it gives a list. From version 0.4,
    ``f(task, trace)``, the signature of ``score`` of a ``vf.Judge``, gives a float for the last conversation of the
    trace, with the tools that appear in it. The task may have the fields `user_id`, `profile` and `profile_order`.

    Raises (when called):
      RunError: If the process was forked after JAX had started.
      DataError: If a completion has no reward; the message names the completion, and no default replaces it. Also if
        a chat template has already rendered a prompt: it would be wrapped as a user's message again.
    """

    def __init__(
        self, model: Model, *, name: str, empty: float | None, require: Sequence[str], **opening: Any
    ) -> None:
        """Open models that do not start JAX now; for other models only check the name."""
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
        """Whether the mesh consists of devices of this process, instead of a text."""
        return not isinstance(self._options.get("mesh"), str | None)

    def _open(self) -> ItemScorer:
        """Return the scorer; each process opens it once."""
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
        """Return the rewards in the form that the calling trainer expects."""
        given = [listed(value) for value in args]
        lists = bool(given) and all(isinstance(value, list) for value in given)
        call = fields.Body(columns, where=WHERE)
        if len(args) == 4 and isinstance(args[3], Mapping):
            columns |= dict(zip(("data_source", "solution_str", "ground_truth", "extra_info"), args))
        if "solution_strs" in columns:
            texts = listed(call["solution_strs"])
            infos = column(call, "extra_infos", len(texts))
            call.ignored()
            pairs = enumerate(zip(texts, infos, strict=True))
            return self._rewards([verl_item(text, info, f"solution_strs[{k}]") for k, (text, info) in pairs])
        if "solution_str" in columns:
            item = verl_item(call["solution_str"], call.get("extra_info"), "solution_str")
            call.ignored()
            return self._rewards([item])[0]
        task, trace = args if len(args) == 2 else (call.get("task"), call.get("trace"))
        if hasattr(trace, "messages") and hasattr(task, "model_dump"):
            call.ignored()
            return self._rewards([trace_item(task, trace)])[0]
        if len(given) == 3 and lists:
            call.ignored()
            return self._openrlhf(*given)
        if len(given) == 1 and lists:
            columns |= {"completions": given[0]}
        of_swift = "messages" in columns and not given[1:] and not {"prompts", "prompt"} & columns.keys()
        if of_swift and isinstance(listed(columns.get("completions")), list):
            return self._rewards(swift_items(columns))
        if {"completions", "infos", "states"} <= columns.keys() and not given:
            return self._rewards(verifiers_group(columns))
        if "completion" in columns and not given:
            return self._rewards([verifiers_item(call)])[0]
        if len(given) == 2 and isinstance(given[0], list):
            columns |= {"prompts": given[0], "completions": given[1]}
        if "prompts" in columns:
            return self._rewards(batch_items(columns))
        columns |= dict(zip(("prompt", "completions"), args, strict=False))
        if not {"prompt", "completions"} <= columns.keys():
            expected = "prompts and completions (TRL), solution_str (verl), or prompt and completions (AReaL)"
            raise DataError(f"{WHERE}: expected {expected}, found {', '.join(columns) or 'no argument'}")
        return self._rewards([areal_item(fields.Body(columns, where=WHERE))])[0]

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
                f"{WHERE}: completion {min(empty)} is empty, which has no reward: use "
                "reward_fn(model, empty=...) to give it one"
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
