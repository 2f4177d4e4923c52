"""The protocols "score" and "rubric": a number for one response at a time, in words or by the logits of a scale."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import numpy as np

from prb_jax.data.comparison import Comparison, Message
from prb_jax.errors import CheckpointError, RunError
from prb_jax.judges.chat import ChatModel, fit_conversations
from prb_jax.judges.logits import load_token_model, read_replies, reply_tokens
from prb_jax.judges.pairs import LETTER_TOKENS, REASON_TOKENS
from prb_jax.judges.rating_template import RatingTemplate, Scale
from prb_jax.judges.scorer import Judgement, check_labels, spoken
from prb_jax.readouts.load_options import LoadOptions
from prb_jax.remote.endpoint import Reply
from prb_jax.runs.rows import Row
from prb_jax.scoring.reward_model import RewardModel


class _Ratings:
    """The parts of the protocols that the template and the scale alone decide."""

    template: RatingTemplate
    scale: Scale

    def firsts(self, comparisons: Sequence[Comparison]) -> list[int]:
        for comparison in comparisons:
            check_labels(comparison)
            self.template.questions(comparison)  # all can be asked
        return [0] * len(comparisons)

    def figures(self, rows: Sequence[Row], comparisons: Sequence[Comparison]) -> dict[str, Any]:
        better: list[float] = []
        others: list[float] = []
        for row, comparison in zip(rows, comparisons, strict=True):
            labels = comparison.labels or ()
            for number, label in zip(row["ratings"], labels, strict=True):
                if number is not None:
                    (better if label == max(labels) else others).append(number)
        ratings = [number for row in rows for number in row["ratings"]]
        masses = [mass for row in rows for mass in row.get("number_mass", ()) if mass is not None]
        return {
            "n": len(rows),
            "scale": [self.scale.low, self.scale.high],
            "mean_rating": _mean(better + others),
            "mean_rating_of_better": _mean(better),
            "mean_rating_of_others": _mean(others),
            "ratings": len(ratings),
            "unparsable": sum(None in row["ratings"] for row in rows),
            "unparsable_ratings": ratings.count(None),
            **({"mean_number_mass": _mean(masses)} if masses else {}),
        }

    def _ask(self, comparison: Comparison, posts: int) -> list[tuple[Message, ...]]:
        return self.template.conversations(comparison, self.scale, profile_posts=posts)

    def _ratings(self, comparison: Comparison, numbers: Sequence[float | None]) -> dict[str, Any]:
        """The rating of each response, and the numbers that it is the mean of where there are several."""
        questions = self.template.questions(comparison)
        if questions == 1:
            return {"ratings": list(numbers)}
        groups = [list(numbers[start : start + questions]) for start in range(0, len(numbers), questions)]
        means = [None if None in group else float(np.mean(np.asarray(group, float))) for group in groups]
        return {"ratings": means, "numbers": groups}


@dataclass(frozen=True)
class RatingsInWords(_Ratings):
    """Asks for a number for every response, and reads it from the reply.

    Attributes:
      chat: the model.
      template: that asks.
      scale: of the numbers.
      reason: whether the model thinks in words before it names the number.
      alternatives: most probable tokens that an endpoint tells of each place, of which the expected number is taken;
        None for the number in the reply itself.

    Raises:
      RunError: alternatives of a scale whose numbers are no single digits, of which one may begin another.
    """

    chat: ChatModel
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
            **self.chat.identity(),
            "judge": self.template.kind,
            "way": way if self.alternatives is None else f"{way}, top {self.alternatives}",
            "scale": [self.scale.low, self.scale.high],
            "template": self.template.digest,
        }

    def judge(
        self, comparisons: Sequence[Comparison], firsts: Sequence[int], *, profile_posts: int
    ) -> list[Judgement]:
        most = REASON_TOKENS if self.reason else LETTER_TOKENS
        conversations, dropped = fit_conversations(
            self.chat, comparisons, self._ask, posts=profile_posts, max_new_tokens=most
        )
        every = iter(self.chat.replies(conversations, max_new_tokens=most, alternatives=self.alternatives))
        judgements = []
        for comparison, lost in zip(comparisons, dropped, strict=True):
            count = len(comparison.responses) * self.template.questions(comparison)
            replies = [next(every) for _ in range(count)]
            numbers = [self._read(reply) for reply in replies]
            details = self._ratings(comparison, [number for number, _ in numbers])
            if self.alternatives is not None:
                details["number_mass"] = [mass for _, mass in numbers]
            # A comparison with a reply that cannot be read is a tie, which is no win.
            unread = None in details["ratings"]
            ratings = [self.scale.middle] * len(comparison.responses) if unread else details["ratings"]
            judgements.append(spoken(np.asarray(ratings, np.float32), replies, details, lost))
        return judgements

    def _read(self, reply: Reply) -> tuple[float | None, float | None]:
        """The number of a reply, and the probability of all numbers where it stands."""
        if self.alternatives is None:
            return self.scale.read(reply.text), None
        assert reply.alternatives is not None
        # With reasons before it, the number is the last one that is named; else the first.
        places = reversed(reply.alternatives) if self.reason else reply.alternatives
        numbers = {str(number) for number in self.scale.numbers}
        for token, others in places:
            if token.strip() in numbers and (expected := self.scale.expected(others)) is not None:
                return expected
        return None, None


@dataclass(frozen=True)
class RatingsByLogits(_Ratings):
    """Reads the expected number where the reply would begin: nothing is sampled.

    The probabilities are those of the scale's tokens among one another. All responses of a comparison are one tree.

    Attributes:
      model: a language model whose values are the expected number, and the probability of all numbers among all tokens.
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
        judgements = []
        for comparison, read in zip(
            comparisons,
            read_replies(self.model, comparisons, self._ask, posts=profile_posts, max_length=self.max_length),
            strict=True,
        ):
            details = self._ratings(comparison, read.values.astype(float).tolist())
            details["number_mass"] = read.masses.astype(float).tolist()
            scores = np.asarray(details["ratings"], np.float32)
            judgements.append(Judgement(scores, read.tokens, details, read.posts_dropped))
        return judgements


def load_ratings_by_logits(
    model: str | Path,
    options: LoadOptions,
    *,
    template: RatingTemplate,
    scale: Scale,
    max_length: int | None = None,
) -> RatingsByLogits:
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
    return RatingsByLogits(load_token_model(model, options, readout), template, scale, max_length)


def _mean(numbers: Sequence[float]) -> float | None:
    return float(np.mean(numbers)) if numbers else None
