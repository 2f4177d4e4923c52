"""Ways to judge pairs by replies in words: the paper's, and both orders."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Any

import numpy as np

from prb_jax.data.comparison import Comparison, Message
from prb_jax.errors import RunError
from prb_jax.generation.judge import Judgement, said, tokens_of
from prb_jax.generation.speakers import Speaker, all_fitted, fitted
from prb_jax.generation.verdicts import (
    PaperPrompts,
    better,
    default_figures,
    default_messages,
    default_verdict,
    paper_figures,
    paper_first,
    paper_verdict,
)

PAPER_TOKENS = 512
LETTER_TOKENS = 16
REASON_TOKENS = 1024


@dataclass(frozen=True)
class PaperWay:
    """As the scripts of Personalised RewardBench: one order by a seeded coin, and what cannot be read counts as A."""

    speaker: Speaker
    prompts: PaperPrompts

    def identity(self) -> Mapping[str, Any]:
        return {**self.speaker.identity(), "judge": "paper", "max_new_tokens": PAPER_TOKENS}

    def firsts(self, comparisons: Sequence[Comparison]) -> list[int]:
        return paper_first(comparisons)

    def judge(
        self, comparisons: Sequence[Comparison], firsts: Sequence[int], *, profile_posts: int
    ) -> list[Judgement]:
        if profile_posts:
            raise RunError(
                "profile_posts: the paper's judge is shown no profile: expected 0, or leave it out"
            )
        asked = []
        for each, first in zip(comparisons, firsts, strict=True):
            messages = self.prompts.messages(each, first)
            asked += fitted(
                self.speaker,
                each,
                lambda posts, messages=messages: [messages],
                posts=0,
                max_new_tokens=PAPER_TOKENS,
            )[0]
        found = []
        for first, reply in zip(
            firsts, self.speaker.replies(asked, max_new_tokens=PAPER_TOKENS), strict=True
        ):
            verdict = paper_verdict(reply.text)
            scores = np.zeros(2, np.float32)
            scores[1 - first if verdict == "B" else first] = 1.0
            kept = {"first": first, "verdicts": [verdict], **said([reply])}
            found.append(Judgement(scores, tokens_of([reply]), kept))
        return found

    def figures(self, rows: Sequence[Mapping[str, Any]], comparisons: Sequence[Comparison]) -> dict[str, Any]:
        return paper_figures(rows, [better(each) for each in comparisons])


@dataclass(frozen=True)
class BothOrders:
    """Asks twice, with each response as A once; a response that is preferred in both orders wins.

    Attributes:
      speaker: the model.
      reason: whether it thinks in words before it names its verdict.
    """

    speaker: Speaker
    reason: bool = False

    def identity(self) -> Mapping[str, Any]:
        return {**self.speaker.identity(), "judge": "default", "way": "reason" if self.reason else "letter"}

    def firsts(self, comparisons: Sequence[Comparison]) -> list[int]:
        for each in comparisons:
            better(each)  # all are pairs
        return [0] * len(comparisons)

    def judge(
        self, comparisons: Sequence[Comparison], firsts: Sequence[int], *, profile_posts: int
    ) -> list[Judgement]:
        most = REASON_TOKENS if self.reason else LETTER_TOKENS

        def asked(each: Comparison, posts: int) -> list[tuple[Message, ...]]:
            return [default_messages(each, k, profile_posts=posts, reason=self.reason) for k in (0, 1)]

        conversations, dropped = all_fitted(
            self.speaker, comparisons, asked, posts=profile_posts, max_new_tokens=most
        )
        replies = self.speaker.replies(conversations, max_new_tokens=most)
        found = []
        for number, lost in enumerate(dropped):
            pair = replies[2 * number : 2 * number + 2]
            verdicts = [default_verdict(reply.text) for reply in pair]
            for_first = [{"A": 1 - k, "B": k, None: 0.5}[verdict] for k, verdict in enumerate(verdicts)]
            share = float(np.mean(for_first)) if None not in verdicts else 0.5
            scores = np.asarray([share, 1 - share], np.float32)
            kept = {"first": 0, "verdicts": verdicts, **said(pair)}
            found.append(Judgement(scores, tokens_of(pair), kept, lost))
        return found

    def figures(self, rows: Sequence[Mapping[str, Any]], comparisons: Sequence[Comparison]) -> dict[str, Any]:
        return default_figures(rows, [better(each) for each in comparisons])
