"""A language model as a judge: a scorer as any other, whose judgements are kept beside its scores."""

from __future__ import annotations

import hashlib
import json
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any, Protocol

import numpy as np

from prb_jax.data.comparison import Comparison
from prb_jax.errors import RunError, quote
from prb_jax.generation.endpoint import Reply
from prb_jax.runs.rows import open_rows, read_rows
from prb_jax.trees.batches import ScoredBatch
from prb_jax.trees.tree import Truncation

JUDGEMENTS = "judgements.jsonl"
"""In the run folder: what the judge was shown first, and what it said, a row for each comparison."""

TOGETHER = 64
"""Comparisons that are judged at a time."""

_FIELDS = ("id", "judge", "tokens")


@dataclass(frozen=True)
class Judgement:
    """What a judge said of one comparison.

    Attributes:
      scores: float32 [K], of the responses.
      tokens: of prompts and replies, as far as they are known.
      facts: what else is kept: verdicts or ratings, replies, probabilities.
      posts_dropped: posts that did not fit.
    """

    scores: np.ndarray
    tokens: int
    facts: Mapping[str, Any]
    posts_dropped: int = 0


class Way(Protocol):
    """A way to judge comparisons."""

    def identity(self) -> Mapping[str, Any]:
        """Everything that decides the judgements, JSON-ready."""
        ...

    def firsts(self, comparisons: Sequence[Comparison]) -> list[int]:
        """Return which response is shown as A at first in each of all comparisons; 0 where one is shown at a time.

        Raises:
          DataError: a comparison that cannot be judged in this way.
        """
        ...

    def judge(
        self, comparisons: Sequence[Comparison], firsts: Sequence[int], *, profile_posts: int
    ) -> list[Judgement]:
        """Return the judgement of each comparison, which shows the response of `firsts` as A."""
        ...

    def figures(self, rows: Sequence[Mapping[str, Any]], comparisons: Sequence[Comparison]) -> dict[str, Any]:
        """Return the figures of the judgements of comparisons."""
        ...


class JudgeScorer:
    """A judge as a scorer that `prb_jax.evaluate` takes.

    Attributes:
      way: how comparisons are judged.
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
        self.way, self.out, self.usage, self._name = way, out, usage, name
        identity = dict(way.identity())
        self._identity = identity | ({} if name is None else {"name": name})
        told = {key: value for key, value in identity.items() if key != "name"} or identity
        self._digest = hashlib.sha256(json.dumps(told, sort_keys=True).encode()).hexdigest()[:16]

    def identity(self) -> Mapping[str, Any]:
        """Everything that decides its judgements."""
        return self._identity

    def kept_in(self, folder: Path) -> JudgeScorer:
        """Return the same judge, whose judgements are kept in another folder."""
        return JudgeScorer(self.way, out=folder, name=self._name, usage=self.usage)

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
        return self.way.figures(own, comparisons) | self.usage(own)


def tokens_of(replies: Sequence[Reply]) -> int:
    """Return the tokens of prompts and replies, as far as they are known."""
    return sum((reply.prompt_tokens or 0) + (reply.completion_tokens or 0) for reply in replies)


def said(replies: Sequence[Reply]) -> dict[str, Any]:
    """Return the replies and their tokens, as a row of judgements keeps them."""
    return {
        "replies": [reply.text for reply in replies],
        "prompt_tokens": [reply.prompt_tokens for reply in replies],
        "completion_tokens": [reply.completion_tokens for reply in replies],
    }
