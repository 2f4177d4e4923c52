"""A reward model as the reward function of RL trainers: TRL, verl and AReaL each call it in their own way."""

from __future__ import annotations

import warnings
from collections.abc import Mapping, Sequence
from typing import Any

import numpy as np

from prb_jax.data import fields as checks
from prb_jax.data.comparison import Message, Post, read_profile
from prb_jax.errors import DataError, PrbError, PrbWarning, quote
from prb_jax.scoring.reward_model import RewardModel
from prb_jax.serving import fields
from prb_jax.serving.fixed_shapes import shapes_for
from prb_jax.serving.items import MOST_RESPONSES, ChatItem, Score, TreeMaker
from prb_jax.text.view import ViewOptions

_QUESTION_KEYS = ("query", "question", "prompt")


def reward_fn(
    model: RewardModel,
    *,
    empty: float | None = None,
    profile_posts: int | None = None,
    protocol: str | None = None,
    max_length: int | None = None,
    batch_tokens: int | None = None,
) -> RewardFunction:
    """Return a reward function for TRL, verl and AReaL.

    Args:
      model: gives the rewards.
      empty: the reward of an empty completion, which no model reads; without it such a completion is an error.
      profile_posts, protocol, max_length, batch_tokens: as of :meth:`RewardModel.score`.
    """
    options = ViewOptions(profile_posts=profile_posts, protocol=protocol, max_length=max_length)
    return RewardFunction(model, options, empty=empty, batch_tokens=batch_tokens)


class RewardFunction:
    """Callable as each of the trainers calls it; completions of one prompt are scored as one tree.

    TRL: ``f(prompts=..., completions=..., **columns)`` gives a list of floats; the columns `user_id` and `profile` of
    the data are the users.

    verl: ``f(data_source=..., solution_str=..., ground_truth=..., extra_info=...)`` gives a float; `extra_info` holds
    the question as `query`, `question` or `prompt`, and may hold `user_id` and `profile`.

    AReaL: ``f(prompt, completion, prompt_ids, completion_ids, **columns)`` gives a float.

    Raises (when called):
      DataError: a completion that has no reward; the message names it. There is no default reward.
    """

    def __init__(
        self, model: RewardModel, options: ViewOptions, *, empty: float | None, batch_tokens: int | None
    ) -> None:
        view = model.reader.view(options)
        for remark in model.reader.remarks(view.protocol):
            warnings.warn(remark, PrbWarning, stacklevel=3)
        shapes = shapes_for(model, longest=model.reader.limit(view), batch_tokens=batch_tokens)
        self.__name__ = "prb_reward"  # TRL logs the mean under this name
        self._model, self._empty, self._batcher = model, empty, shapes.batcher()
        self._tree_maker = TreeMaker(model.reader, view, min(shapes.responses, MOST_RESPONSES))

    def __call__(self, *args: Any, **given: Any) -> Any:
        """Return the rewards in the form of the trainer that calls."""
        if "solution_str" in given:
            return self._verl(given["solution_str"], given.get("extra_info"))
        if "prompts" in given:
            return self._trl(given)
        named = dict(zip(("prompt", "completions"), args, strict=False)) | given
        if not {"prompt", "completions"} <= named.keys():
            expected = "prompts and completions (TRL), solution_str (verl), or prompt and completions (AReaL)"
            raise DataError(f"reward_fn: expected {expected}, found {', '.join(given) or 'no argument'}")
        user, profile = _user(named.get("user_id")), read_profile(named.get("profile"), "reward_fn")
        return self._rewards([_item(named["prompt"], named["completions"], user, profile, "completions")])[0]

    def _trl(self, given: Mapping[str, Any]) -> list[float]:
        prompts, completions = given["prompts"], given.get("completions")
        if not isinstance(completions, list | tuple) or len(completions) != len(prompts):
            raise DataError(f"reward_fn: completions: expected one for each of the {len(prompts)} prompts")
        columns = {name: given.get(name) or [None] * len(prompts) for name in ("user_id", "profile")}
        items = [
            _item(prompt, completion, _user(user), read_profile(profile, "reward_fn"), f"completions[{k}]")
            for k, (prompt, completion, user, profile) in enumerate(
                zip(prompts, completions, columns["user_id"], columns["profile"], strict=True)
            )
        ]
        return self._rewards(items)

    def _verl(self, solution: str, extra_info: Any) -> float:
        extra = checks.mapping(extra_info, "reward_fn", "extra_info")
        name = next((key for key in _QUESTION_KEYS if extra.get(key) is not None), None)
        if name is None:
            raise DataError(f"reward_fn: extra_info: expected the question as {' or '.join(_QUESTION_KEYS)}")
        prompt, profile = extra[name], extra.get("profile")
        if isinstance(profile, str) and isinstance(prompt, str):  # as the paper's training data has it
            prompt, profile = prompt + profile, None
        posts = read_profile(profile, "reward_fn")
        return self._rewards([_item(prompt, solution, _user(extra.get("user_id")), posts, "solution_str")])[0]

    def _rewards(self, items: Sequence[ChatItem]) -> list[float]:
        rewards = [0.0 if self._empty is None else self._empty] * len(items)
        places = [place for place, item in enumerate(items) if item.response]
        if self._empty is None and (empty := set(range(len(items))) - set(places)):
            raise DataError(
                f"reward_fn: completion {min(empty)} is empty, which has no reward: give reward_fn(model, empty=...) "
                "if it shall have one"
            )
        for place, score in zip(places, self._score([items[place] for place in places]), strict=True):
            if isinstance(score, PrbError):
                raise DataError(f"reward_fn: completion {place}: {score}") from score
            rewards[place] = score.value
        return rewards

    def _score(self, items: Sequence[ChatItem]) -> list[Score | PrbError]:
        """The score of each item, or why it has none."""
        trees, errors = self._tree_maker.make_trees(items)
        scores: dict[int, Score | PrbError] = dict(errors)
        for dealt in self._batcher([made.tree for made in trees], range(len(trees))):
            rows = dealt.take(np.asarray(self._model.dispatch(dealt.make()), np.float32))
            for member, row in zip(dealt.members, rows, strict=True):
                scores |= dict(zip(trees[member].members, trees[member].scores(row), strict=True))
        return [scores[place] for place in range(len(items))]


def _item(prompt: Any, completion: Any, user: str | None, profile: tuple[Post, ...], name: str) -> ChatItem:
    """A prompt and a completion, each a text or messages; the last message of a completion is the response."""
    messages = (
        (Message("user", prompt),) if isinstance(prompt, str) else fields.messages(_listed(prompt), "prompt")
    )
    if not isinstance(completion, str):
        said = fields.messages(_listed(completion), name)
        if said[-1].role != "assistant":
            raise DataError(
                f"reward_fn: {name}: expected the assistant's message at the end, found {quote(said[-1].role)}"
            )
        messages, completion = (*messages, *said[:-1]), said[-1].content
    return ChatItem(messages, completion, user, profile)


def _listed(value: Any) -> Any:
    """Arrays of rows, as data frames and arrow tables give them, as lists."""
    return value.tolist() if hasattr(value, "tolist") else value


def _user(value: Any) -> str | None:
    return checks.optional_identifier(value, "reward_fn", "user_id")
