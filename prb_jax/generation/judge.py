"""A language model as a judge of pairs: a scorer as any other, whose verdicts are kept beside its scores."""

from __future__ import annotations

import hashlib
import json
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Any, Protocol

import numpy as np

from prb_jax.data.comparison import Comparison, Message
from prb_jax.errors import RunError, quote
from prb_jax.generation.endpoint import Endpoint, Reply
from prb_jax.generation.policy import Policy
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
from prb_jax.runs.rows import open_rows, read_rows
from prb_jax.scoring.scored import ScoredBatch
from prb_jax.trees.tree import Truncation

JUDGEMENTS = "judgements.jsonl"
"""In the run folder: what the judge was shown first, and what it said, a row for each comparison."""

TOGETHER = 64
"""Comparisons that are judged at a time."""

PAPER_TOKENS = 512
LETTER_TOKENS = 16
REASON_TOKENS = 1024

_FIELDS = ("id", "judge", "first", "verdicts", "tokens")


class Speaker(Protocol):
    """A model that replies to conversations, always in the same way."""

    def identity(self) -> Mapping[str, Any]:
        """Everything that decides its replies, JSON-ready."""
        ...

    def replies(self, conversations: Sequence[Sequence[Message]], *, max_new_tokens: int) -> list[Reply]:
        """Return the most probable reply to each conversation, or what the model makes of temperature 0."""
        ...


@dataclass(frozen=True)
class PolicySpeaker:
    """A language model on this machine."""

    policy: Policy

    def identity(self) -> Mapping[str, Any]:
        return self.policy.identity()

    def replies(self, conversations: Sequence[Sequence[Message]], *, max_new_tokens: int) -> list[Reply]:
        prompts = [[asdict(message) for message in messages] for messages in conversations]
        found = self.policy.sample(prompts, temperature=0.0, max_new_tokens=max_new_tokens)
        return [Reply(one.text, len(one.prompt_token_ids), len(one.token_ids)) for (one,) in found]


@dataclass(frozen=True)
class EndpointSpeaker:
    """A model behind an endpoint."""

    endpoint: Endpoint

    def identity(self) -> Mapping[str, Any]:
        options = self.endpoint.options
        return {"name": options.model, "endpoint": options.url, "model": options.model}

    def replies(self, conversations: Sequence[Sequence[Message]], *, max_new_tokens: int) -> list[Reply]:
        return self.endpoint.ask_all(conversations, temperature=0.0, max_new_tokens=max_new_tokens)


@dataclass(frozen=True)
class Judgement:
    """What a judge said of one comparison.

    Attributes:
      first: the response that was shown as A at first.
      verdicts: A, B or None for each time that it was asked; the second time the other response is A.
      scores: float32 [2], of the responses.
      tokens: of prompts and replies, as far as they are known.
      facts: what else is kept: replies, or probabilities.
      posts_dropped: posts that did not fit.
    """

    first: int
    verdicts: Sequence[str | None]
    scores: np.ndarray
    tokens: int
    facts: Mapping[str, Any]
    posts_dropped: int = 0


class Way(Protocol):
    """A way to judge pairs."""

    def identity(self) -> Mapping[str, Any]:
        """Everything that decides the judgements, JSON-ready."""
        ...

    def judge(
        self, comparisons: Sequence[Comparison], firsts: Sequence[int], *, profile_posts: int
    ) -> list[Judgement]:
        """Return the judgement of each comparison, which shows the response of `firsts` as A."""
        ...

    def firsts(self, comparisons: Sequence[Comparison]) -> list[int]:
        """Return which response is shown as A at first in each of all comparisons."""
        ...

    def figures(self, rows: Sequence[Mapping[str, Any]], right: Sequence[int]) -> dict[str, Any]:
        """Return the figures of judgements, given which response is the better one."""
        ...


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
        asked = [self.prompts.messages(each, first) for each, first in zip(comparisons, firsts, strict=True)]
        found = []
        for first, reply in zip(
            firsts, self.speaker.replies(asked, max_new_tokens=PAPER_TOKENS), strict=True
        ):
            verdict = paper_verdict(reply.text)
            scores = np.zeros(2, np.float32)
            scores[1 - first if verdict == "B" else first] = 1.0
            found.append(Judgement(first, [verdict], scores, _tokens([reply]), _said([reply])))
        return found

    def figures(self, rows: Sequence[Mapping[str, Any]], right: Sequence[int]) -> dict[str, Any]:
        return paper_figures(rows, right)


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
        return [0] * len(comparisons)

    def judge(
        self, comparisons: Sequence[Comparison], firsts: Sequence[int], *, profile_posts: int
    ) -> list[Judgement]:
        asked = [
            default_messages(each, first, profile_posts=profile_posts, reason=self.reason)
            for each in comparisons
            for first in (0, 1)
        ]
        most = REASON_TOKENS if self.reason else LETTER_TOKENS
        replies = self.speaker.replies(asked, max_new_tokens=most)
        found = []
        for start in range(0, len(replies), 2):
            pair = replies[start : start + 2]
            verdicts = [default_verdict(reply.text) for reply in pair]
            for_first = [{"A": 1 - k, "B": k, None: 0.5}[verdict] for k, verdict in enumerate(verdicts)]
            share = float(np.mean(for_first)) if None not in verdicts else 0.5
            scores = np.asarray([share, 1 - share], np.float32)
            found.append(Judgement(0, verdicts, scores, _tokens(pair), _said(pair)))
        return found

    def figures(self, rows: Sequence[Mapping[str, Any]], right: Sequence[int]) -> dict[str, Any]:
        return default_figures(rows, right)


class JudgeScorer:
    """A judge of pairs as a scorer that `prb_jax.evaluate` takes.

    Attributes:
      way: how pairs are judged.
      out: the run folder, where its judgements are kept.
      usage: gives further figures: tokens and costs.
    """

    def __init__(
        self,
        way: Way,
        *,
        out: Path,
        name: str | None = None,
        usage: Callable[[Sequence[Mapping[str, Any]]], dict[str, Any]] = lambda rows: {},
    ) -> None:
        self.way, self.out, self.usage = way, out, usage
        identity = dict(way.identity())
        self._identity = identity | ({} if name is None else {"name": name})
        told = {key: value for key, value in identity.items() if key != "name"} or identity
        self._digest = hashlib.sha256(json.dumps(told, sort_keys=True).encode()).hexdigest()[:16]

    def identity(self) -> Mapping[str, Any]:
        """Everything that decides its judgements."""
        return self._identity

    def stream(
        self,
        comparisons: Sequence[Comparison],
        *,
        profile_posts: int,
        skip: Callable[[Sequence[int]], bool],
        **_: Any,
    ) -> Iterator[ScoredBatch]:
        """Judge every comparison once, some at a time; each judgement is on disk before its scores are given."""
        every = list(comparisons)
        for each in every:
            better(each)  # all are pairs
        firsts = self.way.firsts(every)
        with open_rows(
            self.out / JUDGEMENTS,
            what="a judge's run",
            key=lambda row: (row["judge"], row["id"]),
            fields=_FIELDS,
        ) as file:
            for start in range(0, len(every), TOGETHER):
                indices = range(start, min(start + TOGETHER, len(every)))
                if skip(indices):
                    continue
                part = every[start : indices.stop]
                found = self.way.judge(part, firsts[start : indices.stop], profile_posts=profile_posts)
                file.append(
                    {
                        "id": each.id,
                        "judge": self._digest,
                        "first": one.first,
                        "verdicts": list(one.verdicts),
                        "tokens": one.tokens,
                        **one.facts,
                    }
                    for each, one in zip(part, found, strict=True)
                )
                yield ScoredBatch(
                    indices,
                    [one.scores for one in found],
                    [one.tokens for one in found],
                    [Truncation(posts_dropped=one.posts_dropped) for one in found],
                )

    def judge_figures(self, comparisons: Sequence[Comparison]) -> dict[str, Any]:
        """Return the figures of all judgements.

        Raises:
          RunError: a judgement is missing.
        """
        path = self.out / JUDGEMENTS
        rows = read_rows(
            path, what="a judge's run", key=lambda row: (row["judge"], row["id"]), fields=_FIELDS
        )
        own = []
        for each in comparisons:
            row = rows.get((self._digest, each.id))
            if row is None:
                raise RunError(
                    f"{path}: the judgement of {quote(each.id)} is missing: start again in another folder"
                )
            own.append(row)
        right = [better(each) for each in comparisons]
        return self.way.figures(own, right) | self.usage(own)


def _tokens(replies: Sequence[Reply]) -> int:
    return sum((reply.prompt_tokens or 0) + (reply.completion_tokens or 0) for reply in replies)


def _said(replies: Sequence[Reply]) -> dict[str, Any]:
    return {
        "replies": [reply.text for reply in replies],
        "prompt_tokens": [reply.prompt_tokens for reply in replies],
        "completion_tokens": [reply.completion_tokens for reply in replies],
    }
