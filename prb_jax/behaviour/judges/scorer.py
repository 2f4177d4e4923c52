"""The scorer shared by all judges: it evaluates and records its judgements, or rates texts as a reward."""

from __future__ import annotations

import contextlib
import hashlib
import json
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass, replace
from functools import cached_property, partial
from operator import itemgetter
from pathlib import Path
from typing import Any, ClassVar, NamedTuple, NotRequired, Self, TypedDict, cast

import numpy as np

from prb_jax.errors import DataError, PrbError, RunError, quote
from prb_jax.records.comparison import Comparison, Message
from prb_jax.records.conversation import transcript
from prb_jax.records.schema import check_schema
from prb_jax.runs.evaluation import JUDGEMENTS
from prb_jax.runs.rows import Row, RowKind
from prb_jax.scoring.remote.endpoint import Endpoint, Reply
from prb_jax.scoring.scorer import Scorer
from prb_jax.text.view import ChosenView, TextProtocol, View, ViewOptions, visible
from prb_jax.trees.tree import ScoredBatch, Skip, Truncation, skip_nothing

TOGETHER = 64  # comparisons to judge at a time


class JudgementLine(TypedDict):
    """A line of ``judgements.jsonl``; the protocol adds more fields."""

    id: str
    judge: str
    tokens: int
    replies: NotRequired[list[str]]
    prompt_tokens: NotRequired[list[int | None]]
    completion_tokens: NotRequired[list[int | None]]
    finish: NotRequired[list[str | None]]  # why each reply in words ends
    seeds: NotRequired[list[int]]  # seed of each conversation, if replies are drawn


class VerdictLine(TypedDict):
    """The fields written by a judge that names A or B."""

    first: int
    verdicts: list[str | None]
    letter_mass: NotRequired[list[float]]
    share: NotRequired[float]  # share of votes for response 0: mean of both orders
    share_ci95: NotRequired[list[float] | None]


class RatingLine(TypedDict):
    """The fields written by a judge that rates each response."""

    ratings: list[float | None]
    failed_parses: NotRequired[int]
    number_mass: NotRequired[list[float | None]]


JUDGEMENT_ROWS = RowKind(JUDGEMENTS, "a judge's run", itemgetter("judge", "id"), JudgementLine)

Conversation = tuple[Message, ...]


@dataclass(frozen=True)
class Answer:
    """A model's answers to the conversations about one comparison."""

    tokens: int  # known tokens of prompts and replies
    posts_dropped: int  # posts that did not fit
    replies: Sequence[Reply] = ()  # replies in words; empty for a model read by logits
    # values, masses: float32 [conversations], for a model read by logits: its read-out, and the total probability
    # of the read-out's tokens among all tokens
    values: Sequence[float] = ()
    masses: Sequence[float] = ()
    seeds: Sequence[int] = ()  # seed of each conversation, if replies are drawn

    def __add__(self, other: Answer) -> Answer:
        """Return the answers to the conversations of both."""
        joined = {
            name: (*getattr(self, name), *getattr(other, name))
            for name in ("replies", "values", "masses", "seeds")
        }
        return Answer(self.tokens + other.tokens, max(self.posts_dropped, other.posts_dropped), **joined)

    @property
    def kept(self) -> dict[str, Any]:
        """Fields of the replies that a run records."""
        if not self.replies:
            return {}
        return {
            "replies": [reply.text for reply in self.replies],
            "prompt_tokens": [reply.prompt_tokens for reply in self.replies],
            "completion_tokens": [reply.completion_tokens for reply in self.replies],
            "finish": [reply.finish for reply in self.replies],
            **({"seeds": list(self.seeds)} if self.seeds else {}),
        }


class Judgement(NamedTuple):
    """A judge's result for a comparison."""

    scores: Any  # [K], scores of the responses
    details: dict[str, Any]  # other recorded fields: verdicts or ratings, probabilities
    answer: Answer


class JudgeProtocol:
    """How to ask a judge about a comparison, and how to read its answer: the base class of every protocol."""

    model: Any  # the model to ask: `prb_jax.behaviour.judges.chat.InWords` or `ByLogits`
    shows_profile: bool = True  # whether prompts can include posts of the user
    line: ClassVar[Any] = RatingLine  # the fields that the protocol adds to a judgement
    compares: ClassVar[bool] = (
        False  # whether the score of a response depends on the other responses of its comparison
    )

    def identity(self) -> Mapping[str, Any]:
        """Everything that determines the judgements, JSON-ready."""
        raise NotImplementedError

    def check(self, comparison: Comparison) -> None:
        """Raise DataError if this protocol cannot judge a comparison."""
        if comparison.labels is None:
            raise DataError(f"comparison {quote(comparison.id)}: has no labels")

    def firsts(self, comparisons: Sequence[Comparison]) -> list[int]:
        """Return the index of the response shown as A first in each comparison; 0 if one is shown at a time.

        Raises:
          DataError: this protocol cannot judge a comparison.
        """
        for comparison in comparisons:
            self.check(comparison)
        return [0] * len(comparisons)

    def ask(self, comparison: Comparison, first: int, posts: int) -> Sequence[Conversation]:
        """Return the conversations about a comparison, including ``posts`` posts of its profile."""
        raise NotImplementedError

    def judge(self, members: Sequence[tuple[Comparison, int]], *, posts: int) -> list[Judgement]:
        """Return the judgement of each comparison; the number beside it is the response to show as A first.

        Raises:
          DataError, RunError: errors of the model that is asked.
        """
        asks = [partial(self.ask, *member) for member in members]
        answers = self.model.answers([comparison for comparison, _ in members], asks, posts=posts)
        return [
            Judgement(*self.read(*member, answer), answer)
            for member, answer in zip(members, answers, strict=True)
        ]

    def with_max_length(self, length: int) -> Self:
        """Return the same protocol with a limit of ``length`` tokens for conversations."""
        return cast(Self, replace(cast(Any, self), model=replace(self.model, max_length=length)))

    def read(self, comparison: Comparison, first: int, answer: Answer) -> tuple[Any, dict[str, Any]]:
        """Return the scores [K] of the responses, and other fields to record: verdicts or ratings, probabilities."""
        raise NotImplementedError

    def figures(self, rows: Sequence[Row], comparisons: Sequence[Comparison]) -> dict[str, Any]:
        """Return statistics of the judgements of comparisons."""
        raise NotImplementedError


@dataclass(frozen=True, kw_only=True)
class JudgeScorer(Scorer):
    """A judge as a scorer.

    With a folder, `prb_jax.evaluate` accepts it, and its judgements are recorded there. Without one it is a reward: it
    needs no labels, its scores are the ratings, and a rating that cannot be read is NaN.
    """

    protocol: JudgeProtocol  # how the judge is asked; as a reward, its details must include "ratings"
    # number of posts that a reward shows by default; `prb_jax.evaluate` always sets it
    posts: int
    folder: Path | None = None  # where judgements are recorded
    # endpoint, which only one process asks; None for a model on this machine
    endpoint: Endpoint | None = None
    name: str | None = None  # name in tables; default: the model's name

    uses: ClassVar[tuple[str, ...]] = ("profile_posts", "protocol", "max_length")
    judges: ClassVar[bool] = True
    has_prompt: ClassVar[bool] = True

    @property
    def compares(self) -> bool:  # pyright: ignore[reportIncompatibleVariableOverride]
        """Whether the score of a response depends on the other responses of its comparison."""
        return self.protocol.compares

    @property
    def decided(self) -> str:
        """Why other options do not apply."""
        return "a judge is asked about one comparison at a time"

    @cached_property
    def _identity(self) -> Mapping[str, Any]:
        return self.protocol.identity()

    @cached_property
    def _digest(self) -> str:
        identity = self._identity
        deciding = {key: value for key, value in identity.items() if key != "name"} or identity
        return hashlib.sha256(json.dumps(deciding, sort_keys=True).encode()).hexdigest()[:16]

    def identity(self) -> Mapping[str, Any]:
        """Everything that determines the judgements."""
        return {**self._identity} | ({} if self.name is None else {"name": self.name})

    @property
    def has_max_length(self) -> bool:
        """Whether the length of conversations is limited: only for a model on this machine that is read at logits."""
        return hasattr(self.protocol.model, "max_length")

    def kept_in(self, folder: Path) -> JudgeScorer:
        """Return the same judge with another folder for its judgements."""
        return replace(self, folder=folder)

    def sees_users(self, comparisons: Sequence[Comparison], view: View) -> bool:
        """Return whether prompts contain posts; they never name a user."""
        return view.profile_posts > 0 and any(one.profile for one in comparisons)

    def choose_view(self, options: ViewOptions) -> ChosenView:
        """Return the view; a reward shows as many posts as it was opened with, unless the caller sets a number.

        Raises:
          RunError: a reward has an option set that judges do not have.
        """
        if self.folder is not None:
            return super().choose_view(options)
        if options.protocol not in (None, TextProtocol.DEFAULT):
            found = quote(options.protocol)
            raise RunError(f"protocol: a judge has prompts of its own: leave it out, found {found}")
        if options.max_length is not None and not self.has_max_length:
            raise RunError("max_length: a judge that replies in words has its own limit: leave it out")
        posts = self.posts if options.profile_posts is None else options.profile_posts
        return ChosenView(View(posts, max_length=options.max_length))

    def stream(
        self,
        comparisons: Sequence[Comparison],
        *,
        view: View | None = None,
        skip: Skip = skip_nothing,
        **_: Any,
    ) -> Iterator[ScoredBatch]:
        """Judge every comparison once, in parts; a recorded judgement is on disk before its scores are yielded.

        Raises:
          DataError: a comparison does not fit, or lacks a rubric that the protocol needs.
          RunError: an endpoint rejects a request, is down, or returns something malformed; or posts are requested from
            a judge that cannot show them. A reward yields the scores of all comparisons before the one that cannot be
            rated.
        """
        view = view or self.choose_view(ViewOptions()).view
        posts = view.profile_posts
        if self.folder is None:
            judge = self.protocol
            if view.max_length is not None:
                judge = self.protocol.with_max_length(view.max_length)
            firsts = [0] * len(comparisons)
            kept = contextlib.nullcontext()
        else:
            judge = self.protocol
            firsts = judge.firsts(comparisons)
            kept = JUDGEMENT_ROWS.open_together(self.folder)
        if posts and not judge.shows_profile:
            raise RunError(
                "profile_posts: the paper's judge is shown no profile: expected 0, or leave it out"
            )

        def judged(indices: Sequence[int]) -> ScoredBatch:
            part = [(comparisons[index], firsts[index]) for index in indices]
            judgements = judge.judge(part, posts=posts)
            answers = [judgement.answer for judgement in judgements]
            rows: list[Row] = []
            scores: list[np.ndarray] = []
            for member, (values, details, answer) in zip(part, judgements, strict=True):
                row = {
                    "id": member[0].id,
                    "judge": self._digest,
                    "tokens": answer.tokens,
                    **details,
                    **answer.kept,
                }
                rows.append(row)
                # None is NaN
                scores.append(np.asarray(values if file is not None else row["ratings"], np.float32))
            if file is not None:
                file.append(rows)
            truncation = [Truncation(posts_dropped=answer.posts_dropped) for answer in answers]
            return ScoredBatch(indices, scores, [answer.tokens for answer in answers], truncation)

        with kept as file:
            for start in range(0, len(comparisons), TOGETHER):
                indices = range(start, min(start + TOGETHER, len(comparisons)))
                if skip(indices):
                    continue
                try:
                    yield judged(indices)
                except PrbError:
                    if file is not None:
                        raise
                    # Retry one by one, which identifies the failing comparison; cached replies are reused.
                    for index in indices:
                        yield judged([index])

    def judge_figures(self, comparisons: Sequence[Comparison]) -> dict[str, Any]:
        """Return statistics of all recorded judgements, and for an endpoint its tokens and cost.

        Sorts the judgements into the order of the comparisons.

        Raises:
          RunError: a judgement is missing.
        """
        assert self.folder is not None
        path = self.folder / JUDGEMENTS
        keys = [(self._digest, comparison.id) for comparison in comparisons]
        with JUDGEMENT_ROWS.open(self.folder) as file:
            for key in keys:
                if key not in file.rows:
                    raise RunError(
                        f"{path}: the judgement of {quote(key[1])} is missing: start again in another folder"
                    )
                where = f"{path}: the judgement of {quote(key[1])}"
                check_schema(file.rows[key], self.protocol.line, where=where, error=RunError)
            # Merged parts are unsorted; a folder may also contain another judge's rows.
            rows = file.finish(keys) if len(file.rows) == len(keys) else [file.rows[key] for key in keys]
        figures = self.protocol.figures(rows, comparisons)
        if self.endpoint is None:
            return figures
        totals: dict[str, int | None] = {}
        for key in ("prompt_tokens", "completion_tokens"):
            counts = [count for row in rows for count in row.get(key, ())]
            totals[key] = None if None in counts else sum(counts)
        return {
            **figures,
            "requests": sum(len(row.get("replies", ())) for row in rows),
            **totals,
            "cost_dollars": self.endpoint.cost(totals["prompt_tokens"], totals["completion_tokens"]),
        }


def shown_texts(comparison: Comparison, *, profile_posts: int) -> tuple[str, tuple[str, ...]]:
    """Return the user's posts and request as one text, and the responses."""
    shown = visible(comparison, profile_posts=profile_posts, protocol=TextProtocol.DEFAULT)
    turns = shown.prefix_messages
    if len(turns) == 1 and not turns[0].context:
        return turns[0].content, shown.responses
    return transcript(turns), shown.responses


def random_order(comparison: Comparison, seed: int) -> list[int]:
    """Return the indices of the responses in random order; depends only on the seed, the id and the texts."""

    def drawn(place: int) -> bytes:
        text = f"{seed}/{comparison.id}/{comparison.responses[place]}"
        return hashlib.sha256(text.encode("utf-8", "surrogatepass")).digest()

    return sorted(range(len(comparison.responses)), key=drawn)


def cut_replies(rows: Sequence[Row]) -> dict[str, int]:
    """Return {"cut_replies": count} of replies that reached the token limit and have no verdict; empty if none."""
    cut = sum(row.get("finish", []).count("length") for row in rows)
    return {"cut_replies": cut} if cut else {}


def nothing_read(why: str = "replies could not be read", *, undefined: bool) -> dict[str, Any]:
    """Return the entries "warning" and "undefined" for a judge that judged no comparison.

    Args:
      why: Reason.
      undefined: Whether all scores are ties then, which leaves every figure of the run undefined.
    """
    problem = f"no comparison could be judged, for {why}"
    return {"warning": f"{problem}: see {JUDGEMENTS}", **({"undefined": problem} if undefined else {})}
