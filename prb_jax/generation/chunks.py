"""Guidance chunk by chunk: of several continuations that the policy draws, one is kept by its reward.

The guided policy is p(c | x, y) = π(c | x, y) exp(w r(x, y c)) / Z over chunks c of L tokens. C of them are drawn from
π, and one of these is drawn with probability proportional to exp(w r): importance resampling, which becomes best-of-C
chunk by chunk (blockwise controlled decoding, Mudgal et al. 2024) where the weight is large. The reward is that of the
text so far, as `prb evaluate` reads a response, so that any reward model takes part, with any tokenizer and head.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass, field, replace
from typing import Any

import numpy as np

from prb_jax.data.comparison import Comparison
from prb_jax.errors import DataError, quote
from prb_jax.generation.policy import Policy
from prb_jax.generation.prompts import Prompt
from prb_jax.generation.schedule import Drawn
from prb_jax.generation.settings import SampleOptions
from prb_jax.runs.behaviour import reward_identity

TOGETHER = 16
"""Prompts whose texts grow side by side."""


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

        Prompt and text so far are read again for every chunk.

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
        for start in range(0, len(prompts), TOGETHER):
            unit = range(start, min(start + TOGETHER, len(prompts)))
            if not skip(unit):
                yield self._grow(policy, comparisons, prompts, options, unit, rows)

    def _grow(
        self,
        policy: Policy,
        comparisons: Sequence[Comparison],
        prompts: Sequence[Prompt],
        options: SampleOptions,
        unit: range,
        rows: int | None,
    ) -> list[Drawn]:
        """Draw the texts of some prompts to their ends."""
        texts = [_Text(prompt, sample) for prompt in unit for sample in range(options.n)]
        cut, length = policy.task([], options).cut, 0
        while growing := [text for text in texts if not text.finish]:
            size = min(self.chunk, options.max_new_tokens - length)
            tried = self._try(policy, prompts, growing, options, size, chunk=length // self.chunk, rows=rows)
            length += size
            rewards = self._rewards(policy, comparisons, growing, tried, cut)
            for text, own, values in zip(growing, tried, rewards, strict=True):
                number = text.prompt * options.n + text.sample
                noise = np.random.default_rng([options.seed, number, length]).gumbel(size=len(own))
                kept = own[int(np.argmax(self.weight * values + noise))]
                text.chunks.append(kept)
                at = None if cut is None else cut(text.tokens)
                if at is not None and kept.finish != "text":  # a text that began in the chunk before ends it
                    text.chunks[-1] = _shortened(kept, len(text.tokens) - at)
                    text.finish = "text"
                elif kept.finish != "length" or length >= options.max_new_tokens:
                    text.finish = kept.finish
        return [_whole(text) for text in texts]

    def _try(
        self,
        policy: Policy,
        prompts: Sequence[Prompt],
        texts: Sequence[_Text],
        options: SampleOptions,
        size: int,
        *,
        chunk: int,
        rows: int | None,
    ) -> list[list[Drawn]]:
        """Draw the candidates of each text's next chunk."""
        longer = [
            replace(prompts[text.prompt], ids=np.concatenate([prompts[text.prompt].ids, text.tokens]))
            for text in texts
        ]
        seed = int(np.random.SeedSequence([options.seed, chunk]).generate_state(1)[0] >> 1)
        drawing = replace(options, n=self.candidates, max_new_tokens=size, seed=seed)
        numbers = [text.prompt * options.n + text.sample for text in texts]
        found: list[dict[int, Drawn]] = [{} for _ in texts]
        for batch in policy.draw(longer, drawing, rows=rows, numbers=numbers):
            for one in batch:
                found[one.prompt][one.sample] = one
        return [[own[number] for number in range(self.candidates)] for own in found]

    def _rewards(
        self,
        policy: Policy,
        comparisons: Sequence[Comparison],
        texts: Sequence[_Text],
        tried: Sequence[Sequence[Drawn]],
        cut: Callable[[np.ndarray], int | None] | None,
    ) -> list[np.ndarray]:
        """The rewards float64 [C] of each text with each candidate; -inf for one without a word, of which no reward is
        known, unless all are so."""
        asked, places = [], []
        rewards = [np.full(len(own), -np.inf) for own in tried]
        for number, (text, own) in enumerate(zip(texts, tried, strict=True)):
            spoken: dict[str, list[int]] = {}
            for place, one in enumerate(own):
                ids = np.concatenate([text.tokens, one.tokens])
                at = None if cut is None else cut(ids)
                said = policy.decode(ids if at is None else ids[:at])
                if said.strip():
                    spoken.setdefault(said, []).append(place)
            if spoken:
                comparison = comparisons[text.prompt]
                asked.append(replace(comparison, responses=list(spoken), labels=None))
                places.append((number, list(spoken.values())))
            else:
                rewards[number][:] = 0.0
        for (number, own), scores in zip(places, self.model.score(asked) if asked else [], strict=True):
            if not np.isfinite(scores).all():
                name = quote(comparisons[texts[number].prompt].id)
                raise DataError(f"comparison {name}: a reward is {scores.tolist()}; expected finite numbers")
            for score, members in zip(scores, own, strict=True):
                rewards[number][members] = float(score)
        return rewards


def _shortened(chunk: Drawn, less: int) -> Drawn:
    kept = max(0, len(chunk.tokens) - less)
    return replace(
        chunk,
        tokens=chunk.tokens[:kept],
        logprobs=chunk.logprobs[:kept],
        sampled_logprobs=chunk.sampled_logprobs[:kept],
    )


def _whole(text: _Text) -> Drawn:
    return Drawn(
        prompt=text.prompt,
        sample=text.sample,
        tokens=text.tokens,
        logprobs=np.concatenate([chunk.logprobs for chunk in text.chunks]),
        sampled_logprobs=np.concatenate([chunk.sampled_logprobs for chunk in text.chunks]),
        finish=text.finish,
    )
