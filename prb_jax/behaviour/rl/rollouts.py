"""Inputs of a training step: rollouts of the policy, or labelled responses, as trees and host arrays.

Letters: B trees of the step, K rollouts of each, R columns of tokens, the same in every step.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, field, replace
from functools import cached_property
from typing import Any

import numpy as np

from prb_jax.behaviour.generation.policy import Policy
from prb_jax.behaviour.generation.programs import Task, choose_shape, make_programs, placing_program
from prb_jax.behaviour.generation.reading import prompt_length
from prb_jax.behaviour.generation.rules import SampleOptions
from prb_jax.behaviour.generation.schedule import collect, draw
from prb_jax.behaviour.rl.credit import Credit
from prb_jax.behaviour.rl.settings import PpoSettings
from prb_jax.errors import short_repr
from prb_jax.models.decoder import Params
from prb_jax.records.comparison import Comparison
from prb_jax.trees.tree import Tree


def _none() -> np.ndarray:
    return np.zeros(0, np.float32)


@dataclass(frozen=True, eq=False)
class Rollouts:
    """Inputs of a step; each phase of a step adds fields, for all rows of the step."""

    trees: Sequence[Tree]  # B prompts with their responses: rollouts, or labelled responses of the data
    columns: int  # R
    texts: Sequence[Sequence[str]] = ()  # text of each rollout
    # bool [B, K], whether the last token of a rollout is a stop token
    ended: np.ndarray = field(default_factory=_none)
    # float32 [B, K, R], log-probabilities of rollouts from the sampler
    sampled: np.ndarray = field(default_factory=_none)
    # float32 [B, K, R], log-probabilities under the policy that drew them, before the first update
    logprobs: np.ndarray = field(default_factory=_none)
    reference: np.ndarray = field(default_factory=_none)  # float32 [B, K, R], under the reference
    values: np.ndarray = field(default_factory=_none)  # float32 [B, K, R + 1]; 0 without a value function
    scores: np.ndarray = field(default_factory=_none)  # float32 [B, K], scores of the reward
    credit: Credit | None = None  # advantages of rollouts
    kl: float = 0.0  # coefficient of the KL in the loss; 0 if the KL is in the reward

    __repr__ = short_repr

    @cached_property
    def lengths(self) -> np.ndarray:
        """Number of tokens of each response, int32 [B, K]."""
        return np.asarray([[len(response) for response in tree.responses] for tree in self.trees], np.int32)

    @cached_property
    def mask(self) -> np.ndarray:
        """1 for real tokens of a response, float32 [B, K, R]."""
        return (np.arange(self.columns) < self.lengths[:, :, None]).astype(np.float32)

    def kl_numbers(self) -> dict[str, float]:
        """Return the means over rollouts and over tokens of log p(policy) - log p(reference)."""
        exact = ((self.logprobs - self.reference) * self.mask).sum(axis=-1)
        return {"kl": float(exact.mean()), "kl_per_token": float(exact.sum() / max(self.mask.sum(), 1.0))}

    def distinct_words(self) -> dict[str, float]:
        """Return the shares of distinct words and pairs of words in the rollouts."""
        return {f"distinct_{n}": distinct(self.texts, n) for n in (1, 2)}

    def rows(self, step: int, comparisons: Sequence[Comparison], count: int) -> list[dict[str, Any]]:
        """Return the rollouts of the first ``count`` prompts of a step, counted from 1, as readable rows."""
        kl = (self.logprobs - self.reference).sum(axis=-1)
        return [
            {
                "step": step,
                "id": comparison.id,
                "user_id": comparison.user_id,
                "rollout": k,
                "text": text,
                "reward": float(self.scores[row, k]),
                "kl": float(kl[row, k]),
                "tokens": int(self.lengths[row, k]),
                "ended": bool(self.ended[row, k]),
            }
            for row, comparison in enumerate(comparisons[:count])
            for k, text in enumerate(self.texts[row])
        ]


def distinct(texts: Sequence[Sequence[str]], n: int) -> float:
    """Return the share of distinct n-grams of words among all n-grams in these texts; 1 for texts without any."""
    runs = [
        tuple(words[place : place + n])
        for rollouts in texts
        for words in (text.split() for text in rollouts)
        for place in range(len(words) - n + 1)
    ]
    return len(set(runs)) / len(runs) if runs else 1.0


class Sampler:
    """Draws the rollouts of a step with the current weights: one program serves the whole run.

    If the program has a different mesh than the policy, the weights are resharded for drawing.

    A rollout depends on the weights, its prompt, the seed, the step, its place in the step and its number.

    Args:
      policy: Policy without weights.
      comparisons: Comparisons whose prompts are used.
      settings: Settings of the run.

    Attributes:
      prompts: Prompts of the comparisons.

    Raises:
      DataError: a prompt does not fit.
    """

    def __init__(self, policy: Policy, comparisons: Sequence[Comparison], settings: PpoSettings) -> None:
        asked = settings.rollout
        self.policy, self.settings = policy, settings
        self._options = SampleOptions(
            n=asked.n, temperature=asked.temperature, max_new_tokens=asked.max_new_tokens
        )
        room = policy.limit(self._options, settings.max_length)
        self.prompts = policy.encode(comparisons, profile_posts=settings.profile_posts, limit=room)
        self._stop_ids = policy.stops(self._options)
        longest = max(len(prompt.ids) for prompt in self.prompts)
        sizes: dict[str, Any] = {"longest": longest, "prompts": settings.batch.prompts, "rows": asked.rows}
        shape = choose_shape(policy.program, self._options, **sizes)
        self._programs, self._place = make_programs(policy.program, shape), None
        cached = [prompt.ids[:-1] for prompt in self.prompts]
        together = min(shape.unit, settings.batch.prompts)
        self._stream = prompt_length(policy.program, cached, together=together, columns=shape.prompt_columns)

    def longest(self) -> list[Tree]:
        """Return trees of rollouts with maximum length that are all different."""
        count, length = self._options.n, self._options.max_new_tokens
        rollouts = tuple(np.full(length, k, np.int32) for k in range(count))
        return [Tree(prompt.ids, rollouts, (length - 1,) * count) for prompt in self.prompts]

    def draw(self, params: Params, members: Sequence[int], *, step: int, columns: int) -> Rollouts:
        """Return the rollouts of some prompts.

        Args:
          params: Parameters of the policy, including adapters.
          members: Numbers of the prompts.
          step: Step of the run.
          columns: R.
        """
        program, count = self.policy.program, self._options.n
        # Below 2^31, and different for every pair of seed and step.
        seed = np.random.SeedSequence([self.settings.seed, step]).generate_state(1)[0] & 0x7FFFFFFF
        task = Task(
            prompts=[self.prompts[member].ids for member in members],
            options=replace(self._options, seed=int(seed)),
            stop_ids=self._stop_ids,
            stream=self._stream,
        )
        if program.mesh != self.policy.mesh:
            self._place = self._place or placing_program(program, params)
            params = self._place(params)
        trees, texts = [], []
        ended = np.zeros((len(members), count), bool)
        sampled = np.zeros((len(members), count, columns), np.float32)
        for row, samples in enumerate(collect(draw(self._programs, params, task))):
            tokens = tuple(sample.tokens.astype(np.int32) for sample in samples)
            trees.append(Tree(task.prompts[row], tokens, tuple(len(ids) - 1 for ids in tokens)))
            texts.append([self.policy.decode(ids) for ids in tokens])
            for k, sample in enumerate(samples):
                ended[row, k] = sample.finish == "stop"
                sampled[row, k, : len(sample.tokens)] = sample.sampled_logprobs
        return Rollouts(trees, columns, texts, ended, sampled)


def ended_response(response: np.ndarray, policy: Policy) -> np.ndarray:
    """Return the response up to its last stop token, or with the policy's first stop token appended if it has none."""
    ends = np.flatnonzero(np.isin(response, np.asarray(policy.stop_ids, np.int32)))
    if ends.size:
        return response[: ends[-1] + 1]
    return np.append(response, np.int32(policy.stops(SampleOptions())[0]))
