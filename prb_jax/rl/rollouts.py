"""What a step learns from: rollouts of the policy, or labelled responses, as trees and arrays of the host.

Letters: B trees of the step, K rollouts of each, R columns of tokens, the same in every step.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, field
from functools import cached_property
from typing import Any

import jax
import numpy as np

from prb_jax.data.comparison import Comparison
from prb_jax.errors import DataError, quote, short_repr
from prb_jax.generation.policy import Policy
from prb_jax.generation.programs import choose_shape, make_programs, placing_program
from prb_jax.generation.prompts import Prompt
from prb_jax.generation.rules import SampleOptions
from prb_jax.generation.schedule import Drawn, Task, as_rules, draw
from prb_jax.generation.steps import Program
from prb_jax.models.decoder import Params
from prb_jax.rl.credit import Credit
from prb_jax.rl.sections import RolloutSettings
from prb_jax.text.view import View
from prb_jax.trees.encode import encode_comparisons
from prb_jax.trees.tree import Tree, common_run

ROLLOUTS = "rollouts.jsonl"


def _no_array() -> np.ndarray:
    return np.zeros(0, np.float32)


@dataclass(frozen=True, eq=False)
class TokenStats:
    """What models say of the tokens of a step before its first update.

    Attributes:
      logprobs: float32 [B, K, R], under the policy that drew them.
      reference: float32 [B, K, R].
      values: float32 [B, K, R + 1]; 0 without a value function.
    """

    logprobs: np.ndarray
    reference: np.ndarray
    values: np.ndarray


@dataclass(frozen=True, eq=False)
class StepBatch:
    """What a step learns from; it gains fields on its way, each for all of the step.

    Attributes:
      trees: B prompts, and their responses: rollouts, or labelled ones of the data.
      columns: R.
      texts: of each rollout.
      ended: bool [B, K], whether a stop token is the last one of a rollout.
      sampled: float32 [B, K, R], log-probabilities of rollouts as the sampler has them.
      scores: float32 [B, K], of the reward.
      stats: of the tokens; None of preferred responses, which need nothing more.
      credit: advantages of rollouts.
      kl: coefficient of the KL in the loss; 0 where it is in the reward.
    """

    trees: Sequence[Tree]
    columns: int
    texts: Sequence[Sequence[str]] = ()
    ended: np.ndarray = field(default_factory=_no_array)
    sampled: np.ndarray = field(default_factory=_no_array)
    scores: np.ndarray = field(default_factory=_no_array)
    stats: TokenStats | None = None
    credit: Credit | None = None
    kl: float = 0.0

    __repr__ = short_repr

    @property
    def lengths(self) -> np.ndarray:
        """int32 [B, K]: tokens of each response."""
        return lengths_of(self.trees)

    @cached_property
    def mask(self) -> np.ndarray:
        """float32 [B, K, R]: 1 where a response has a token."""
        return (np.arange(self.columns) < self.lengths[:, :, None]).astype(np.float32)


class Sampler:
    """Draws the rollouts of a step, with the weights of the step: one program serves the whole run.

    Where the program has another mesh than the policy, the weights are split as it says for the time of the drawing.

    A rollout depends on the weights, its prompt, the seed, the step, its place in the step and its number.
    """

    def __init__(
        self,
        policy: Policy,
        program: Program,
        prompts: Sequence[Prompt],
        settings: RolloutSettings,
        *,
        per_step: int,
    ) -> None:
        self.policy, self.prompts, self.settings = policy, prompts, settings
        self.options = self.options_of(settings)
        self._stop_ids = policy.stops(self.options)
        shape = choose_shape(
            program,
            longest=max(len(prompt.ids) for prompt in prompts),
            samples=settings.n,
            tokens=settings.max_new_tokens,
            prompts=per_step,
            rows=settings.rows,
        )
        self._programs = make_programs(program, shape)
        self._program, self._place = program, None

    @staticmethod
    def options_of(settings: RolloutSettings) -> SampleOptions:
        """Return how rollouts are drawn."""
        return SampleOptions(
            n=settings.n, temperature=settings.temperature, max_new_tokens=settings.max_new_tokens
        )

    def draw(
        self, params: Params, members: Sequence[int], *, seed: int, step: int, columns: int
    ) -> StepBatch:
        """Return the rollouts of some prompts.

        Args:
          params: of the policy, adapters included.
          members: numbers of the prompts.
          seed, step: of the run.
          columns: R.
        """
        task = Task(
            prompts=[self.prompts[member].ids for member in members],
            samples=self.settings.n,
            # Of the host: an array of this process's device could not go to those of others.
            rules=jax.tree.map(np.asarray, as_rules(self.options.rules)),
            stop_ids=self._stop_ids,
            tokens=self.settings.max_new_tokens,
            seed=step_seed(seed, step),
        )
        if self._program.mesh != self.policy.mesh:
            self._place = self._place or placing_program(self._program, params)
            params = self._place(params)
        draws: list[list[Drawn | None]] = [[None] * self.settings.n for _ in members]
        for some in draw(self._programs, params, task):
            for sample in some:
                draws[sample.prompt][sample.sample] = sample
        trees, texts = [], []
        ended = np.zeros((len(members), self.settings.n), bool)
        sampled = np.zeros((len(members), self.settings.n, columns), np.float32)
        for row, drawn in enumerate(draws):
            samples = [sample for sample in drawn if sample is not None]
            assert len(samples) == self.settings.n
            tokens = tuple(sample.tokens.astype(np.int32) for sample in samples)
            trees.append(Tree(task.prompts[row], tokens, tuple(len(ids) - 1 for ids in tokens)))
            texts.append([self.policy.decode(ids) for ids in tokens])
            for k, sample in enumerate(samples):
                ended[row, k] = sample.finish == "stop"
                sampled[row, k, : len(sample.tokens)] = sample.sampled_logprobs
        return StepBatch(trees, columns, texts, ended, sampled)


def step_seed(seed: int, step: int) -> int:
    """Return the seed of a step's draws, below 2^31: another one for every pair of seed and step."""
    return int(np.random.SeedSequence([seed, step]).generate_state(1)[0] & 0x7FFFFFFF)


def lengths_of(trees: Sequence[Tree]) -> np.ndarray:
    """int32 [B, K]: tokens of each response."""
    return np.asarray([[len(response) for response in tree.responses] for tree in trees], np.int32)


def encode_pairs(
    comparisons: Sequence[Comparison], policy: Policy, *, profile_posts: int, max_length: int | None
) -> list[Tree]:
    """Return the trees of labelled pairs, the chosen response first, each up to its last stop token.

    What the template writes behind that token is no part of a response; where it writes none, the policy's first stop
    token is put behind it. Tokens with which both responses begin belong to the prefix: their log-ratios are equal and
    cancel in the loss.

    Raises:
      DataError: a comparison that is no pair of different labels, or does not fit; names it.
    """
    for comparison in comparisons:
        if (
            len(comparison.responses) != 2
            or comparison.labels is None
            or comparison.labels[0] == comparison.labels[1]
        ):
            raise DataError(
                f"comparison {quote(comparison.id)}: dpo expects two responses with different labels, found "
                f"{len(comparison.responses)} with the labels {quote(comparison.labels)}"
            )
    limit = policy.context if max_length is None else max_length
    whole = encode_comparisons(comparisons, policy.tokenizer, view=View(profile_posts, max_length=limit))
    trees = []
    for comparison, tree in zip(comparisons, whole, strict=True):
        responses = [_ended(response, policy) for response in tree.responses]
        if len(tree.prefix) + max(map(len, responses)) > limit:  # a stop token needs room
            view = View(profile_posts, max_length=limit - 1)
            (tree,) = encode_comparisons([comparison], policy.tokenizer, view=view)
            responses = [_ended(response, policy) for response in tree.responses]
        if not len(tree.prefix):
            raise DataError(f"comparison {quote(comparison.id)}: its prompt has no token")
        assert comparison.labels is not None
        if comparison.labels[0] < comparison.labels[1]:
            responses.reverse()
        ends = tuple(len(response) - 1 for response in responses)
        trees.append(Tree(tree.prefix, tuple(responses), ends, tree.truncation))
    return trees


def encode_preferred(
    comparisons: Sequence[Comparison], policy: Policy, *, profile_posts: int, max_length: int | None
) -> list[Tree]:
    """Return trees of one response each, that with the highest label, behind the prompt that the sampler shows.

    The response is what the template makes of it, up to its last stop token; where the template writes none, the
    policy's first stop token is put behind it, for nobody would learn to end otherwise.

    Raises:
      DataError: a comparison without labels, or which does not fit; names it.
    """
    limit = policy.context if max_length is None else max_length
    alone = []
    for comparison in comparisons:
        if comparison.labels is None:
            raise DataError(
                f"comparison {quote(comparison.id)}: sft expects labelled responses, found no label"
            )
        best = comparison.responses[int(np.argmax(comparison.labels))]
        alone.append(Comparison(id=comparison.id, prompt=comparison.prompt, responses=[best]))
    bare = policy.encode(alone, profile_posts=0, limit=limit)
    whole = encode_comparisons(alone, policy.tokenizer, view=View(0))
    prompts = policy.encode(comparisons, profile_posts=profile_posts, limit=limit)
    trees = []
    for comparison, start, conversation, prompt in zip(comparisons, bare, whole, prompts, strict=True):
        ids = conversation.sequence(0)
        shared = common_run([start.ids, ids])
        response = _ended(ids[shared:], policy)
        if len(prompt.ids) + len(response) > limit:
            (prompt,) = policy.encode([comparison], profile_posts=profile_posts, limit=limit - len(response))
        prefix = prompt.ids[: len(prompt.ids) - len(start.ids) + shared]
        trees.append(Tree(prefix, (response,), (len(response) - 1,)))
    return trees


def _ended(response: np.ndarray, policy: Policy) -> np.ndarray:
    """The response up to its last stop token, or with the policy's first one behind it where it has none."""
    ends = np.flatnonzero(np.isin(response, np.asarray(policy.stop_ids, np.int32)))
    if ends.size:
        return response[: ends[-1] + 1]
    return np.append(response, np.int32(policy.stops(SampleOptions())[0]))


def rollout_rows(step: int, comparisons: Sequence[Comparison], batch: StepBatch) -> list[dict[str, Any]]:
    """Return the rollouts of these comparisons, the first ones of a step, as rows.

    Args:
      step: number of the step, from 1.
      comparisons: of the prompts.
      batch: of the step, with scores and stats.
    """
    assert batch.stats is not None
    ratios = (batch.stats.logprobs - batch.stats.reference).sum(axis=-1)
    lengths = batch.lengths
    return [
        {
            "step": step,
            "id": comparison.id,
            "user_id": comparison.user_id,
            "rollout": k,
            "text": text,
            "reward": float(batch.scores[row, k]),
            "kl": float(ratios[row, k]),
            "tokens": int(lengths[row, k]),
            "ended": bool(batch.ended[row, k]),
        }
        for row, comparison in enumerate(comparisons)
        for k, text in enumerate(batch.texts[row])
    ]
