"""Guidance chunk by chunk: of several continuations that the policy draws, one is kept by its reward.

The guided policy is p(c | x, y) = π(c | x, y) exp(w r(x, y c)) / Z over chunks c of L tokens. C of them are drawn from
π, and one of these is drawn with probability proportional to exp(w r): importance resampling, which becomes best-of-C
chunk by chunk (blockwise controlled decoding, Mudgal et al. 2024) where the weight is large. The reward is that of the
text so far, as `prb evaluate` reads a response, so that any reward model takes part, with any tokenizer and head. The
caches of both models grow with the text (:mod:`prb_jax.generation.chunk_caches`); a reward model that cannot read token
by token reads prompt and text again for every chunk.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass, field, replace
from typing import Any

import numpy as np

from prb_jax.data.comparison import Comparison
from prb_jax.errors import DataError, quote
from prb_jax.generation.chunk_caches import PolicyCaches, RewardCaches, chunk_shape, reads_by_caches
from prb_jax.generation.policy import Policy
from prb_jax.generation.programs import Shape
from prb_jax.generation.prompts import Prompt
from prb_jax.generation.rules import SampleOptions
from prb_jax.generation.schedule import Cut, Drawn
from prb_jax.runs.behaviour import reward_identity

TOGETHER = 16
"""Prompts whose texts are given back together."""


@dataclass(eq=False)
class _Text:
    """A text that grows: of which prompt, which of its samples, and its chunks so far."""

    prompt: int
    sample: int
    chunks: list[Drawn] = field(default_factory=list)
    finish: str = ""

    @property
    def tokens(self) -> np.ndarray:
        return np.concatenate([np.zeros(0, np.int32), *(chunk.tokens for chunk in self.chunks)])


@dataclass(frozen=True, eq=False, kw_only=True)
class ChunkGuide:
    """A reward model that guides a policy chunk by chunk.

    Attributes:
      model: a reward model, a baseline or a fitted method of personalisation.
      weight: w; 0 is the policy alone.
      candidates: C, chunks that are drawn each time.
      chunk: L, most tokens of a chunk.
    """

    model: Any
    weight: float
    candidates: int
    chunk: int

    def checked(self, policy: Policy) -> ChunkGuide:
        """Return the guide itself.

        Raises:
          DataError: a number out of range.
        """
        if not np.isfinite(self.weight):
            raise DataError(f"weight: expected a finite number, found {self.weight}")
        for name in ("candidates", "chunk"):
            if getattr(self, name) < 1:
                raise DataError(f"{name}: expected 1 or more, found {getattr(self, name)}")
        return self

    def identity(self) -> dict[str, Any]:
        """Return everything that decides how texts are guided, JSON-ready."""
        model = reward_identity(self.model.identity())
        return {
            "reward_model": model,
            "weight": self.weight,
            "candidates": self.candidates,
            "chunk": self.chunk,
        }

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
        """Draw guided texts; a text depends on its prompt, its number and the seed alone.

        Args:
          policy: that is guided.
          comparisons: of the prompts, as the reward model is shown them.
          prompts, options, rows, skip: as of :meth:`prb_jax.generation.policy.Policy.draw`.

        Raises:
          DataError: temperature 0, or a reward that is no number.
        """
        if self.weight == 0:
            yield from policy.draw(prompts, options, rows=rows, skip=skip)
            return
        if options.temperature == 0:
            raise DataError(
                "temperature: expected more than 0 with chunks, for those of temperature 0 are all the same"
            )
        if not prompts:
            return
        shape = chunk_shape(policy, prompts, options, candidates=self.candidates, chunk=self.chunk, rows=rows)
        for start in range(0, len(prompts), TOGETHER):
            unit = range(start, min(start + TOGETHER, len(prompts)))
            if skip(unit):
                continue
            texts = [_Text(prompt, sample) for prompt in unit for sample in range(options.n)]
            for first in range(0, len(texts), shape.trees):
                part = texts[first : first + shape.trees]
                self._grow(policy, comparisons, prompts, options, part, shape)
            yield [_whole(text) for text in texts]

    def _grow(
        self,
        policy: Policy,
        comparisons: Sequence[Comparison],
        prompts: Sequence[Prompt],
        options: SampleOptions,
        texts: Sequence[_Text],
        shape: Shape,
    ) -> None:
        """Draw texts side by side to their ends."""
        cut, length = policy.task([], options).cut, 0
        numbers = [text.prompt * options.n + text.sample for text in texts]
        caches = PolicyCaches(policy, shape, [prompts[text.prompt] for text in texts], numbers, options)
        judge = RewardCaches(self.model, policy, shape, options) if reads_by_caches(self.model) else None
        while growing := [place for place, text in enumerate(texts) if not text.finish]:
            size = min(self.chunk, options.max_new_tokens - length)
            seed = int(np.random.SeedSequence([options.seed, length // self.chunk]).generate_state(1)[0] >> 1)
            tried = [
                [_up_to_stop(candidate, cut) for candidate in candidates]
                for candidates in caches.draw(growing, size=size, seed=seed)
            ]
            length += size
            asked = [
                _asked(policy, comparisons, texts[place], candidates, cut)
                for place, candidates in zip(growing, tried, strict=True)
            ]
            rewards = self._rewards(growing, asked, judge)
            goes_on: dict[int, int] = {}
            for place, candidates, (_, worded), values in zip(growing, tried, asked, rewards, strict=True):
                text = texts[place]
                noise = np.random.default_rng([options.seed, numbers[place], length]).gumbel(
                    size=len(candidates)
                )
                best = self.best(values, noise)
                chunk = candidates[best]
                text.chunks.append(chunk)
                at = None if cut is None else cut(text.tokens)
                if at is not None and chunk.finish != "text":  # a text that began in the chunk before ends it
                    text.chunks[-1] = _shortened(chunk, len(text.tokens) - at)
                    text.finish = "text"
                elif chunk.finish != "length" or length >= options.max_new_tokens:
                    text.finish = chunk.finish
                else:
                    goes_on[place] = best
                    if judge is not None and worded:
                        row = next((row for row, places in enumerate(worded) if best in places), None)
                        judge.choose(place, row)
            if goes_on:
                caches.keep(goes_on)

    def best(self, rewards: np.ndarray, noise: np.ndarray) -> int:
        """Return which candidate is kept, by rewards and Gumbel noise float64 [C]; none whose reward is -inf."""
        return int(np.argmax(np.where(np.isfinite(rewards), self.weight * rewards + noise, -np.inf)))

    def _rewards(
        self,
        places: Sequence[int],
        asked: Sequence[tuple[Comparison, list[list[int]]]],
        judge: RewardCaches | None,
    ) -> list[np.ndarray]:
        """The rewards float64 [C] of each text with each candidate; -inf for one without a word, of which no reward is
        known, unless all are so."""
        rewards = [np.full(self.candidates, -np.inf if worded else 0.0) for _, worded in asked]
        which = [number for number, (_, worded) in enumerate(asked) if worded]
        if not which:
            return rewards
        shown = [asked[number][0] for number in which]
        by_text = (
            self.model.score(shown)
            if judge is None
            else judge.score([places[number] for number in which], shown)
        )
        for number, scores in zip(which, by_text, strict=True):
            comparison, worded = asked[number]
            if not np.isfinite(scores).all():
                name = quote(comparison.id)
                raise DataError(f"comparison {name}: a reward is {scores.tolist()}; expected finite numbers")
            for score, candidates in zip(scores, worded, strict=True):
                rewards[number][candidates] = float(score)
        return rewards


def _up_to_stop(chunk: Drawn, cut: Cut | None) -> Drawn:
    """A candidate up to a text that ends it, if there is one."""
    at = None if cut is None else cut(chunk.tokens)
    return chunk if at is None else replace(_shortened(chunk, len(chunk.tokens) - at), finish="text")


def _asked(
    policy: Policy,
    comparisons: Sequence[Comparison],
    text: _Text,
    tried: Sequence[Drawn],
    cut: Cut | None,
) -> tuple[Comparison, list[list[int]]]:
    """A text with each candidate as the reward model is shown it, and the candidates of each response; none without
    a word."""
    worded: dict[str, list[int]] = {}
    for place, candidate in enumerate(tried):
        ids = np.concatenate([text.tokens, candidate.tokens])
        at = None if cut is None else cut(ids)
        response = policy.decode(ids if at is None else ids[:at])
        if response.strip():
            worded.setdefault(response, []).append(place)
    comparison = comparisons[text.prompt]
    shown = replace(comparison, responses=list(worded), labels=None) if worded else comparison
    return shown, list(worded.values())


def _shortened(chunk: Drawn, less: int) -> Drawn:
    size = max(0, len(chunk.tokens) - less)
    arrays = {name: getattr(chunk, name)[:size] for name in ("tokens", "logprobs", "sampled_logprobs")}
    return replace(chunk, **arrays)


def _whole(text: _Text) -> Drawn:
    return Drawn(
        prompt=text.prompt,
        sample=text.sample,
        tokens=text.tokens,
        logprobs=np.concatenate([chunk.logprobs for chunk in text.chunks]),
        sampled_logprobs=np.concatenate([chunk.sampled_logprobs for chunk in text.chunks]),
        finish=text.finish,
    )
