"""The one scorer of all judges: it evaluates, and keeps its judgements, or it rates texts as a reward."""

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
from prb_jax.scoring.scorer import Scorer, Skip, skip_nothing
from prb_jax.text.view import ChosenView, View, ViewOptions
from prb_jax.text.visible import TextProtocol, visible
from prb_jax.trees.tree import ScoredBatch, Truncation

TOGETHER = 64  # comparisons that are judged at a time


class JudgementLine(TypedDict):
    """A line of ``judgements.jsonl``; the protocol adds fields of its own."""

    id: str
    judge: str
    tokens: int
    replies: NotRequired[list[str]]
    prompt_tokens: NotRequired[list[int | None]]
    completion_tokens: NotRequired[list[int | None]]
    finish: NotRequired[list[str | None]]  # of replies in words: why each ends
    seeds: NotRequired[list[int]]  # of each conversation, where replies are drawn


class VerdictLine(TypedDict):
    """The fields of a judge that names A or B."""

    first: int
    verdicts: list[str | None]
    letter_mass: NotRequired[list[float]]
    share: NotRequired[float]  # of the votes that are for response 0: the mean of both orders
    share_ci95: NotRequired[list[float] | None]


class RatingLine(TypedDict):
    """The fields of a judge that rates each response."""

    ratings: list[float | None]
    failed_parses: NotRequired[int]
    number_mass: NotRequired[list[float | None]]


JUDGEMENT_ROWS = RowKind(JUDGEMENTS, "a judge's run", itemgetter("judge", "id"), JudgementLine)

Conversation = tuple[Message, ...]


@dataclass(frozen=True)
class Answer:
    """What a model says to the conversations about one comparison."""

    tokens: int  # of prompts and replies, as far as they are known
    posts_dropped: int  # posts that did not fit
    replies: Sequence[Reply] = ()  # in words; none of a model that is read where its reply would begin
    # values, masses: float32 [conversations], of such a model: of its read-out, and the probability of the
    # read-out's tokens together, among all tokens
    values: Sequence[float] = ()
    masses: Sequence[float] = ()
    seeds: Sequence[int] = ()  # of each conversation, where replies are drawn

    def __add__(self, other: Answer) -> Answer:
        """Return what a model says to the conversations of both."""
        joined = {
            name: (*getattr(self, name), *getattr(other, name))
            for name in ("replies", "values", "masses", "seeds")
        }
        return Answer(self.tokens + other.tokens, max(self.posts_dropped, other.posts_dropped), **joined)

    @property
    def kept(self) -> dict[str, Any]:
        """What a run keeps of replies."""
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
    """What a judge finds of a comparison."""

    scores: Any  # [K], of the responses
    details: dict[str, Any]  # what else is kept: verdicts or ratings, probabilities
    answer: Answer


class JudgeProtocol:
    """How a judge is asked about a comparison, and how its answer is read: the base of every protocol."""

    model: Any  # that is asked: `prb_jax.behaviour.judges.chat.InWords` or `ByLogits`
    shows_profile: bool = True  # whether it can be shown posts of the user
    line: ClassVar[Any] = RatingLine  # the fields that it adds to a judgement
    compares: ClassVar[bool] = (
        False  # whether what a response is worth depends on the others of its comparison
    )

    def identity(self) -> Mapping[str, Any]:
        """Everything that decides the judgements, JSON-ready."""
        raise NotImplementedError

    def check(self, comparison: Comparison) -> None:
        """Raise DataError for a comparison that cannot be judged in this way."""
        if comparison.labels is None:
            raise DataError(f"comparison {quote(comparison.id)}: has no labels")

    def firsts(self, comparisons: Sequence[Comparison]) -> list[int]:
        """Return which response is shown as A at first in each of all comparisons; 0 where one is shown at a time.

        Raises:
          DataError: a comparison that cannot be judged in this way.
        """
        for comparison in comparisons:
            self.check(comparison)
        return [0] * len(comparisons)

    def ask(self, comparison: Comparison, first: int, posts: int) -> Sequence[Conversation]:
        """Return the conversations about a comparison, with ``posts`` posts of its profile."""
        raise NotImplementedError

    def judge(self, members: Sequence[tuple[Comparison, int]], *, posts: int) -> list[Judgement]:
        """Return the judgement of each comparison, of which the response with the second number is shown as A first.

        Raises:
          DataError, RunError: as the model that is asked.
        """
        asks = [partial(self.ask, *member) for member in members]
        answers = self.model.answers([comparison for comparison, _ in members], asks, posts=posts)
        return [
            Judgement(*self.read(*member, answer), answer)
            for member, answer in zip(members, answers, strict=True)
        ]

    def with_max_length(self, length: int) -> Self:
        """Return the same protocol, with conversations of at most so many tokens."""
        return cast(Self, replace(cast(Any, self), model=replace(self.model, max_length=length)))

    def read(self, comparison: Comparison, first: int, answer: Answer) -> tuple[Any, dict[str, Any]]:
        """Return the scores [K] of the responses, and what else is kept: verdicts or ratings, probabilities."""
        raise NotImplementedError

    def figures(self, rows: Sequence[Row], comparisons: Sequence[Comparison]) -> dict[str, Any]:
        """Return the figures of the judgements of comparisons."""
        raise NotImplementedError


@dataclass(frozen=True, kw_only=True)
class JudgeScorer(Scorer):
    """A judge as a scorer.

    With a folder it is what `prb_jax.evaluate` takes, and its judgements are kept there. Without one it is a reward: it
    needs no labels, its scores are the ratings, and a rating that cannot be read is NaN.
    """

    protocol: JudgeProtocol  # how the judge is asked; as a reward it has "ratings" among what it keeps
    # of the user that a reward shows where its caller does not say; `prb_jax.evaluate` always does
    posts: int
    folder: Path | None = None  # where judgements are kept
    # that is asked, so that one process alone asks; None for a model on this machine
    endpoint: Endpoint | None = None
    name: str | None = None  # in tables; that of the model if not given

    uses: ClassVar[tuple[str, ...]] = ("profile_posts", "protocol", "max_length")
    judges: ClassVar[bool] = True
    has_prompt: ClassVar[bool] = True

    @property
    def compares(self) -> bool:  # pyright: ignore[reportIncompatibleVariableOverride]
        """Whether what a response is worth depends on the others of its comparison."""
        return self.protocol.compares

    @property
    def decided(self) -> str:
        """Why it has no other options."""
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
        """Everything that decides its judgements."""
        return {**self._identity} | ({} if self.name is None else {"name": self.name})

    @property
    def has_max_length(self) -> bool:
        """Whether conversations have a longest length: those of a model on this machine that is read at logits."""
        return hasattr(self.protocol.model, "max_length")

    def kept_in(self, folder: Path) -> JudgeScorer:
        """Return the same judge, whose judgements are kept in another folder."""
        return replace(self, folder=folder)

    def sees_users(self, comparisons: Sequence[Comparison], view: View) -> bool:
        """Return whether posts are in a prompt, which names no user."""
        return view.profile_posts > 0 and any(one.profile for one in comparisons)

    def choose_view(self, options: ViewOptions) -> ChosenView:
        """Return the view; a reward shows as many posts as it was opened with, if the caller asks for none.

        Raises:
          RunError: for a reward, an option is set that judges do not have.
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
        """Judge every comparison once, some at a time; a judgement that is kept is on disk before its scores are given.

        Raises:
          DataError: a comparison that does not fit, or has no rubric where one is asked for.
          RunError: an endpoint refuses, is down, or answers with something malformed; or posts are asked of a judge
            that has no place for them. A reward has given the scores of all comparisons before the one that cannot be
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
                    # One after the other, so that the one at fault is known; replies that came are kept.
                    for index in indices:
                        yield judged([index])

    def judge_figures(self, comparisons: Sequence[Comparison]) -> dict[str, Any]:
        """Return the figures of all judgements that are kept, and of an endpoint its tokens and their price.

        The judgements are put into the order of the comparisons.

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
            # Those of parts that were merged have no order yet; a folder may hold another judge's too.
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
    """Return the user's request, behind the user's posts, as one text; and the responses."""
    shown = visible(comparison, profile_posts=profile_posts, protocol=TextProtocol.DEFAULT)
    turns = shown.prefix_messages
    if len(turns) == 1 and not turns[0].context:
        return turns[0].content, shown.responses
    return transcript(turns), shown.responses


def cut_replies(rows: Sequence[Row]) -> dict[str, int]:
    """Return the figure "cut_replies", how many reached the most tokens and have no verdict, if there are any."""
    cut = sum(row.get("finish", []).count("length") for row in rows)
    return {"cut_replies": cut} if cut else {}


def nothing_read(why: str = "replies could not be read", *, undefined: bool) -> dict[str, Any]:
    """Return the figures "warning" and "undefined" of a judge that judged no comparison.

    Args:
      why: Reason.
      undefined: Whether all scores are ties then, and no figure of the run is defined.
    """
    problem = f"no comparison could be judged, for {why}"
    return {"warning": f"{problem}: see {JUDGEMENTS}", **({"undefined": problem} if undefined else {})}
