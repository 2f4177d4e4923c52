"""A judge that rates one response at a time: by replies in words, or by the expected number of the scale."""

from __future__ import annotations

import functools
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import numpy as np

from prb_jax.data.comparison import Comparison, Message
from prb_jax.errors import CheckpointError, DataError, RunError, quote
from prb_jax.generation.endpoint import Reply
from prb_jax.generation.judge import Judgement, said, tokens_of
from prb_jax.generation.judge_logits import fitted_tree, load_token_model, reply_tokens, tree_scores
from prb_jax.generation.judge_pairs import LETTER_TOKENS, REASON_TOKENS
from prb_jax.generation.ratings import (
    RatingTemplate,
    Scale,
    check_rateable,
    mean_rating,
    rated,
    rating_figures,
)
from prb_jax.generation.speakers import Speaker, all_fitted
from prb_jax.readouts.load_options import LoadOptions
from prb_jax.scoring.reward_model import RewardModel


class _Ratings:
    """The part of a judge that only the template and the scale decide."""

    template: RatingTemplate
    scale: Scale

    def firsts(self, comparisons: Sequence[Comparison]) -> list[int]:
        for each in comparisons:
            check_rateable(each)
            self.template.questions(each)  # all can be asked
        return [0] * len(comparisons)

    def figures(self, rows: Sequence[Mapping[str, Any]], comparisons: Sequence[Comparison]) -> dict[str, Any]:
        return rating_figures(rows, comparisons, self.scale)

    def _asked(self, each: Comparison, posts: int) -> list[tuple[Message, ...]]:
        return self.template.conversations(each, self.scale, profile_posts=posts)

    def _kept(self, each: Comparison, numbers: Sequence[float | None]) -> dict[str, Any]:
        """The rating of each response, and the numbers that it is the mean of where there are several."""
        questions = self.template.questions(each)
        if questions == 1:
            return {"ratings": list(numbers)}
        own = [numbers[start : start + questions] for start in range(0, len(numbers), questions)]
        return {"ratings": [mean_rating(row) for row in own], "numbers": [list(row) for row in own]}


@dataclass(frozen=True)
class SpokenRatings(_Ratings):
    """Asks for a number for every response, and reads it from the reply.

    Attributes:
      speaker: the model.
      template: that asks.
      scale: of the numbers.
      reason: whether the model thinks in words before it names the number.
      alternatives: most probable tokens that an endpoint tells of each place, of which the expected number is taken;
        None for the number in the reply itself.

    Raises:
      RunError: alternatives of a scale whose numbers are no single digits, of which one may begin another.
    """

    speaker: Speaker
    template: RatingTemplate
    scale: Scale
    reason: bool = False
    alternatives: int | None = None

    def __post_init__(self) -> None:
        if self.alternatives is not None and not 0 <= self.scale.low < self.scale.high <= 9:
            raise RunError(
                f"--scale {self.scale.low} {self.scale.high}: with --top-logprobs expected numbers of one digit"
            )

    def identity(self) -> Mapping[str, Any]:
        way = "reason" if self.reason else "number"
        return {
            **self.speaker.identity(),
            "judge": self.template.kind,
            "way": way if self.alternatives is None else f"{way}, top {self.alternatives}",
            "scale": [self.scale.low, self.scale.high],
            "template": self.template.digest,
        }

    def judge(
        self, comparisons: Sequence[Comparison], firsts: Sequence[int], *, profile_posts: int
    ) -> list[Judgement]:
        most = REASON_TOKENS if self.reason else LETTER_TOKENS
        conversations, dropped = all_fitted(
            self.speaker, comparisons, self._asked, posts=profile_posts, max_new_tokens=most
        )
        replies = self.speaker.replies(conversations, max_new_tokens=most, alternatives=self.alternatives)
        found, start = [], 0
        for each, lost in zip(comparisons, dropped, strict=True):
            own = replies[start : start + len(each.responses) * self.template.questions(each)]
            start += len(own)
            read = [self._read(reply) for reply in own]
            kept = self._kept(each, [number for number, _ in read])
            if self.alternatives is not None:
                kept["number_mass"] = [mass for _, mass in read]
            scores = rated(kept["ratings"], self.scale)
            found.append(Judgement(scores, tokens_of(own), kept | said(own), lost))
        return found

    def _read(self, reply: Reply) -> tuple[float | None, float | None]:
        """The number of a reply, and the probability of all numbers where it stands."""
        if self.alternatives is None:
            return self.scale.read(reply.text), None
        assert reply.alternatives is not None
        # With reasons before it, the number is the last one that is named; else the first.
        places = reversed(reply.alternatives) if self.reason else reply.alternatives
        named = {str(number) for number in self.scale.numbers}
        for token, others in places:
            if token.strip() in named and (found := self.scale.expected(others)) is not None:
                return found
        return None, None


@dataclass(frozen=True)
class ExpectedRatings(_Ratings):
    """Reads the expected number where the reply would begin: nothing is sampled.

    The probabilities are those of the scale's tokens among one another. All responses of a comparison are one tree.

    Attributes:
      model: a language model whose score is the expected number.
      template: that asks.
      scale: of the numbers.
      max_length: longest conversation in tokens.
    """

    model: RewardModel
    template: RatingTemplate
    scale: Scale
    max_length: int | None = None

    def identity(self) -> Mapping[str, Any]:
        return {
            **self.model.identity(),
            "judge": self.template.kind,
            "way": "logits",
            "scale": [self.scale.low, self.scale.high],
            # "template" is the digest of the chat template
            "rating_template": self.template.digest,
        }

    def judge(
        self, comparisons: Sequence[Comparison], firsts: Sequence[int], *, profile_posts: int
    ) -> list[Judgement]:
        read = [
            fitted_tree(
                self.model,
                each,
                functools.partial(self._asked, each),
                posts=profile_posts,
                max_length=self.max_length,
            )
            for each in comparisons
        ]
        found = []
        trees = [tree for tree, _ in read]
        for each, (tree, dropped), values in zip(
            comparisons, read, tree_scores(self.model, trees), strict=True
        ):
            if not np.isfinite(values).all():
                raise DataError(f"comparison {quote(each.id)}: the judge's ratings are {values.tolist()}")
            numbers, masses = values.astype(float).T.tolist()
            kept = self._kept(each, numbers) | {"number_mass": masses}
            found.append(Judgement(np.asarray(kept["ratings"], np.float32), tree.tokens, kept, dropped))
        return found


def load_expected_ratings(
    model: str | Path,
    options: LoadOptions,
    *,
    template: RatingTemplate,
    scale: Scale,
    max_length: int | None = None,
) -> ExpectedRatings:
    """Load a causal language model as a judge that is read at the logits of the numbers.

    Raises:
      CheckpointError: it cannot be loaded, or its tokenizer has no single token for a number at the start of a reply.
    """
    texts = [str(number) for number in scale.numbers]
    tokens = reply_tokens(model, options, texts)
    for text in texts:
        if text not in tokens:
            raise CheckpointError(
                f"{model}: the tokenizer has no single token for {text} at the start of a reply: choose a --scale of "
                "numbers that have one (1 9), or --reason, which reads the reply as text"
            )
    readout = "vocabulary:" + ",".join(f"{tokens[text]}={text}" for text in texts)
    return ExpectedRatings(load_token_model(model, options, readout), template, scale, max_length)
