"""A reward model that guides a policy, token by token or chunk by chunk.

Token by token (ARGS, Khanov et al. 2024): a token is chosen by the policy's log-probability plus a weight w times the
reward of the text with this token; :func:`prb_jax.behaviour.generation.steps.run_steps` runs on the device.

Chunk by chunk: the guided policy is p(c | x, y) = π(c | x, y) exp(w r(x, y c)) / Z over chunks c of L tokens. C chunks
are drawn from π, and one is chosen with probability proportional to exp(w r): importance resampling. For large weights
this becomes best-of-C for each chunk (blockwise controlled decoding, Mudgal et al. 2024). The reward scores the text so
far exactly as `prb evaluate` scores a response, so any reward model works, with any tokenizer and head. The caches of
both models grow with the text (:mod:`prb_jax.behaviour.generation.chunk_caches`). A reward model that cannot read token
by token rereads prompt and text for every chunk.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass, replace
from functools import partial
from typing import Any

import numpy as np

from prb_jax.behaviour.generation.choose import Rules
from prb_jax.behaviour.generation.chunk_caches import PolicyCaches, RewardCaches
from prb_jax.behaviour.generation.policy import Policy
from prb_jax.behaviour.generation.programs import GuidedTask, Task, make_programs, prompt_columns
from prb_jax.behaviour.generation.prompts import Prompt
from prb_jax.behaviour.generation.rules import SampleOptions
from prb_jax.behaviour.generation.schedule import Drawn, draw
from prb_jax.behaviour.generation.steps import Guidance
from prb_jax.behaviour.generation.token_scores import (
    reward_program,
    reward_trees,
    why_not_by_token,
    why_not_token_level,
)
from prb_jax.errors import DataError, quote
from prb_jax.records.comparison import Comparison
from prb_jax.runs.behaviour import reward_identity
from prb_jax.trees.tree import round_up

TOGETHER = 16
"""Number of prompts whose chunk-guided texts are returned together."""


@dataclass(frozen=True, eq=False, kw_only=True)
class Guide:
    """A reward model that guides a policy."""

    model: Any  # the reward model; for chunks also a baseline or a fitted personalisation method
    weight: float  # w; 0 uses only the policy, whose tokens are then drawn from the whole vocabulary
    candidates: int  # C, number of most likely tokens to try at each step, or of chunks to draw each time
    chunk: int | None = None  # L, maximum tokens of a chunk; None guides every token

    def checked(self, policy: Policy) -> Guide:
        """Return the guide after checking that it suits the policy.

        Raises:
          DataError: a number out of range, or a reward model that cannot read this policy's tokens one by one.
        """
        tokens = policy.config.vocab_size
        if not np.isfinite(self.weight):
            raise DataError(f"weight: expected a finite number, found {self.weight}")
        if self.chunk is not None:
            for name in ("candidates", "chunk"):
                if getattr(self, name) < 1:
                    raise DataError(f"{name}: expected 1 or more, found {getattr(self, name)}")
        elif not 1 <= self.candidates <= tokens:
            raise DataError(
                f"candidates: expected 1 to {tokens}, the policy's tokens, found {self.candidates}"
            )
        elif why := why_not_token_level(self.model, policy):
            name = getattr(self.model, "name", type(self.model).__name__)
            raise DataError(f"{name}: cannot guide {policy.name} token by token: {why}")
        return self

    def identity(self) -> dict[str, Any]:
        """Return everything that determines how texts are guided, JSON-ready."""
        model = reward_identity(self.model.identity())
        chunk = {} if self.chunk is None else {"chunk": self.chunk}
        return {"reward_model": model, "weight": self.weight, "candidates": self.candidates, **chunk}

    def draw(
        self,
        policy: Policy,
        comparisons: Sequence[Comparison],
        prompts: Sequence[Prompt],
        options: SampleOptions,
        *,
        rows: int | None = None,
        skip: Callable[[range], bool] = lambda unit: False,
    ) -> Iterator[list[Drawn]]:
        """Draw guided samples, as :meth:`prb_jax.behaviour.generation.policy.Policy.draw` draws plain ones.

        ``comparisons`` belong to the prompts, in the form that the reward model reads.

        Raises:
          DataError: options that do not suit the guide, a prompt that does not fit into the reward model's context, or
            a reward that is not finite.
        """
        if self.chunk is None and replace(options.rules, temperature=1.0) != Rules():
            raise DataError(
                "guided tokens are chosen among the candidates: remove all rules except the temperature"
            )
        if self.weight == 0:
            yield from policy.draw(prompts, options, rows=rows, skip=skip)
        elif self.chunk is not None and options.temperature == 0:
            raise DataError(
                "temperature: expected more than 0 with chunks, because greedy chunks are all the same"
            )
        elif not prompts:
            return
        elif self.chunk is None:
            no_response = [(np.zeros(1, np.int32),)] * len(comparisons)
            shown = reward_trees(self.model, comparisons, no_response, room=options.max_new_tokens)
            guided = GuidedTask(self.model.params, self.weight, [tree.prefix for tree in shown])
            task = policy.task(prompts, options, guided=guided)
            guidance = Guidance(
                reward=reward_program(self.model), readout=self.model.readout, candidates=self.candidates
            )
            programs = make_programs(policy.program, policy.shape(prompts, options, rows), guidance)
            yield from draw(programs, policy.params, task, skip=skip)
        else:
            yield from self._draw_chunks(policy, comparisons, prompts, options, rows, skip)

    def _draw_chunks(
        self,
        policy: Policy,
        comparisons: Sequence[Comparison],
        prompts: Sequence[Prompt],
        options: SampleOptions,
        rows: int | None,
        skip: Callable[[range], bool],
    ) -> Iterator[list[Drawn]]:
        """Draw texts chunk by chunk; a text depends only on its prompt, its number and the seed."""
        chunk = self.chunk or 1
        # Longer texts than the switch have other rotary angles from their first token on, and caches keep the old ones.
        by_token = why_not_by_token(self.model) is None and self.model.decoder.rope_switch is None
        longest = max(len(prompt.ids) for prompt in prompts) + options.max_new_tokens
        columns = round_up(prompt_columns(longest), policy.mesh.shape["sequence"])
        drawing = replace(options, n=self.candidates, max_new_tokens=chunk)
        shape = policy.shape(prompts, drawing, rows)  # one tree for each text that grows
        shape = replace(shape, samples=self.candidates, prompt_columns=columns)
        planned = make_programs(policy.program, shape).planned(policy.task(prompts, options))

        def grow(texts: list[Drawn]) -> list[Drawn]:
            """Draw texts together to their ends; a text that continues has an empty finish."""
            numbers, length = [text.prompt * options.n + text.sample for text in texts], 0
            of_texts = [planned.prompts[text.prompt] for text in texts]
            task = replace(planned, prompts=of_texts, numbers=numbers)
            caches = PolicyCaches(policy, shape, task)
            judge = RewardCaches(self.model, shape, room=options.max_new_tokens) if by_token else None
            while growing := [place for place, text in enumerate(texts) if not text.finish]:
                size = min(chunk, options.max_new_tokens - length)
                seed = np.random.SeedSequence([options.seed, length // chunk]).generate_state(1)[0] >> 1
                drawn, length = caches.draw(growing, size=size, seed=int(seed)), length + size
                tried = [
                    [
                        _joined(texts[place], more, task, last=length >= options.max_new_tokens)
                        for more in chunks
                    ]
                    for place, chunks in zip(growing, drawn, strict=True)
                ]
                shown = [
                    _shown(policy, comparisons[texts[place].prompt], candidates)
                    for place, candidates in zip(growing, tried, strict=True)
                ]
                rewards, kept = self._rewards(growing, shown, judge), dict[int, int]()
                for place, candidates, (_, same), values in zip(growing, tried, shown, rewards, strict=True):
                    draws = np.random.default_rng([options.seed, numbers[place], length])
                    best = self.best(values, draws.gumbel(size=len(values)))
                    texts[place] = candidates[best]
                    if texts[place].finish:
                        continue
                    kept[place] = best
                    if judge is not None:
                        judge.keep(
                            place, next((row for row, texts_of in enumerate(same) if best in texts_of), None)
                        )
                if kept:
                    caches.keep(kept)
            return texts

        nothing = np.zeros(0, np.int32), np.zeros(0, np.float32), np.zeros(0, np.float32)
        for start in range(0, len(prompts), TOGETHER):
            unit = range(start, min(start + TOGETHER, len(prompts)))
            if not skip(unit):
                texts = [Drawn(prompt, k, *nothing, "") for prompt in unit for k in range(options.n)]
                parts = range(0, len(texts), shape.trees)
                yield [text for first in parts for text in grow(texts[first : first + shape.trees])]

    def best(self, rewards: np.ndarray, noise: np.ndarray) -> int:
        """Return the candidate to keep, given rewards and Gumbel noise float64 [C]; never one with reward -inf."""
        return int(np.argmax(np.where(np.isfinite(rewards), self.weight * rewards + noise, -np.inf)))

    def _rewards(
        self,
        places: Sequence[int],
        shown: Sequence[tuple[Comparison, list[list[int]]]],
        judge: RewardCaches | None,
    ) -> list[np.ndarray]:
        """Rewards float64 [C] of each text with each candidate. Candidates without a word cannot be scored and get
        -inf, unless all are like this."""
        rewards = [np.full(self.candidates, -np.inf if worded else 0.0) for _, worded in shown]
        which = [number for number, (_, worded) in enumerate(shown) if worded]
        asked, at = [shown[number][0] for number in which], [places[number] for number in which]
        score = self.model.score if judge is None else partial(judge.score, places=at)
        for number, scores in zip(which, score(asked) if asked else (), strict=True):
            comparison, worded = shown[number]
            if not np.isfinite(scores).all():
                name = quote(comparison.id)
                raise DataError(f"comparison {name}: a reward is {scores.tolist()}; expected finite numbers")
            for score_of, candidates in zip(scores, worded, strict=True):
                rewards[number][candidates] = float(score_of)
        return rewards


def _joined(text: Drawn, chunk: Drawn, task: Task, *, last: bool) -> Drawn:
    """Append a chunk to a text, and cut the result at its stop text, if any."""
    longer = text.followed_by(chunk)
    if task.cut is not None and (at := task.cut(longer.tokens)) is not None:
        return longer.cut(at, finish="text")
    return longer if last or longer.finish == "stop" else replace(longer, finish="")


def _shown(
    policy: Policy, comparison: Comparison, texts: Sequence[Drawn]
) -> tuple[Comparison, list[list[int]]]:
    """The comparison as the reward model sees it, with texts that have a word, and the candidates for each text."""
    worded: dict[str, list[int]] = {}
    for place, text in enumerate(texts):
        response = policy.decode(text.tokens)
        if response.strip():
            worded.setdefault(response, []).append(place)
    if worded:
        comparison = replace(comparison, responses=list(worded), labels=None)
    return comparison, list(worded.values())
