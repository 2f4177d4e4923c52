"""Records become rows: aspects where there are none, a plan, and candidates for both sides of a pair."""

from __future__ import annotations

import hashlib
import json
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import asdict, dataclass, field
from functools import partial
from typing import Any, Final

from prb_jax.building.candidates import Candidate, fault_of
from prb_jax.building.gates.words import words_of
from prb_jax.building.models import Ask, Conversation, Writer
from prb_jax.building.prompts import CONTRADICTION, answer_messages, derive_messages, plan_messages
from prb_jax.building.records import Record, contradiction
from prb_jax.building.settings import SIDES, BuildSettings
from prb_jax.data.comparison import RubricAspect
from prb_jax.remote.endpoint import NoReplyError, Reply

PLANS: Final = ("content", "follow", "avoid")
_PLAN_OF: Final[Mapping[str, str]] = {"chosen": "follow", "rejected": "avoid"}


@dataclass
class _Draft:
    """A record while it is written.

    Attributes:
      record: the record.
      aspects: its own, or those of its narrative.
      plan: by kind.
      candidates: by side.
      replies: everything that was said for it.
      over: why there will be no pair.
      failure: why nothing was said.
    """

    record: Record
    aspects: tuple[RubricAspect, ...]
    plan: dict[str, str] = field(default_factory=dict)
    candidates: dict[str, list[Candidate]] = field(default_factory=lambda: {side: [] for side in SIDES})
    replies: list[Reply] = field(default_factory=list)
    over: str | None = None
    failure: NoReplyError | None = None

    @property
    def open(self) -> bool:
        return self.over is None and self.failure is None

    def lacks(self, side: str) -> bool:
        return all(candidate.fault is not None for candidate in self.candidates[side])


@dataclass(frozen=True)
class _Request:
    """One text that a draft needs: the conversation, the seed of its draw, and what it is."""

    draft: _Draft
    messages: Conversation
    seed: int
    what: str = ""


@dataclass(frozen=True)
class Written:
    """What came of some records.

    Attributes:
      rows: finished ones, JSON-ready, in the order of the records.
      failures: by id, why a record has no row; it is written again by the next call.
    """

    rows: list[dict[str, Any]]
    failures: dict[str, NoReplyError]


def write_rows(records: Sequence[Record], writer: Writer, settings: BuildSettings) -> Written:
    """Write candidates for some records, which are asked about together.

    Args:
      records: the same ones in the same order give the same rows.
      writer: the generator.
      settings: of the build.
    """
    drafts = [_Draft(record, record.aspects) for record in records]
    _derive(drafts, writer, settings)
    _plan(drafts, writer, settings)
    for number in range(settings.writing.rounds):
        _write(drafts, writer, settings, number)
    return Written(
        [_row(draft) for draft in drafts if draft.failure is None],
        {draft.record.id: draft.failure for draft in drafts if draft.failure is not None},
    )


def seed_of(seed: int, *names: object) -> int:
    """Return the seed of one draw: 31 bits of a digest of the run's seed and what is drawn."""
    digest = hashlib.sha256("\0".join(map(str, (seed, *names))).encode()).digest()
    return int.from_bytes(digest[:4], "big") >> 1


def _ask(
    writer: Writer, wanted: Sequence[_Request], *, tokens: int, settings: BuildSettings
) -> Iterator[tuple[_Request, Reply]]:
    """Ask, note what failed, and yield what was said."""
    asks = [Ask(request.messages, request.seed) for request in wanted]
    if not asks:
        return
    replies = writer.write(asks, temperature=settings.writing.temperature, max_new_tokens=tokens)
    for request, reply in zip(wanted, replies, strict=True):
        if isinstance(reply, NoReplyError):
            request.draft.failure = request.draft.failure or reply
        else:
            request.draft.replies.append(reply)
            yield request, reply


def _derive(drafts: Sequence[_Draft], writer: Writer, settings: BuildSettings) -> None:
    writing, faults = settings.writing, dict[str, str]()
    for number in range(writing.rounds):
        wanted = [
            _Request(
                draft,
                derive_messages(draft.record.comparison, most=writing.most_aspects),
                seed_of(settings.seed, draft.record.id, "aspects", number),
            )
            for draft in drafts
            if draft.open and not draft.aspects
        ]
        for request, reply in _ask(writer, wanted, tokens=writing.plan_tokens, settings=settings):
            narrative = request.draft.record.comparison.narrative or ""
            aspects = read_aspects(reply.text, narrative=narrative, most=writing.most_aspects)
            if isinstance(aspects, str):
                faults[request.draft.record.id] = aspects
            else:
                request.draft.aspects = aspects
    for draft in drafts:
        if draft.open and not draft.aspects:
            draft.over = f"no aspects: {faults[draft.record.id]}"


def read_aspects(reply: str, *, narrative: str, most: int) -> tuple[RubricAspect, ...] | str:
    """Return the aspects that a reply lists, or the fault for which there are none.

    An aspect stays only if its evidence stands in the narrative, word by word.

    Args:
      reply: of a model; the JSON list may stand within other text.
      narrative: that the aspects are of.
      most: so many are kept, the first ones.
    """
    start, end = reply.find("["), reply.rfind("]")
    try:
        listed = json.loads(reply[start : end + 1]) if 0 <= start < end else None
    except (ValueError, RecursionError):
        listed = None
    if not isinstance(listed, list) or not all(isinstance(aspect, Mapping) for aspect in listed):
        return "the reply is no JSON list of aspects"
    note = f" {' '.join(words_of(narrative))} "
    aspects = []
    for aspect in listed:
        parts = [aspect.get(name) for name in ("aspect", "evidence", "reason")]
        if not all(isinstance(part, str) for part in parts):
            return "an aspect lacks a text for aspect, evidence or reason"
        name, evidence, reason = map(str, parts)
        words = " ".join(words_of(evidence))
        if name.strip() and words and f" {words} " in note:
            aspects.append(RubricAspect(name.strip(), evidence.strip(), reason.strip()))
    aspects = aspects[:most]
    if not aspects:
        return "no aspect has evidence in the narrative"
    if contradicting := contradiction(aspects):
        return f"{contradicting[0]!r} and {contradicting[1]!r} contradict each other"
    return tuple(aspects)


def _plan(drafts: Sequence[_Draft], writer: Writer, settings: BuildSettings) -> None:
    posts, tokens = settings.writing.profile_posts, settings.writing.plan_tokens
    wanted = [
        _Request(draft, messages, seed_of(settings.seed, draft.record.id, "plan", kind), kind)
        for draft in drafts
        if draft.open
        for kind, messages in zip(
            PLANS, plan_messages(draft.record.comparison, draft.aspects, profile_posts=posts), strict=True
        )
    ]
    for request, reply in _ask(writer, wanted, tokens=tokens, settings=settings):
        request.draft.plan[request.what] = reply.text.strip()
    for draft in drafts:
        follow = draft.plan.get("follow", "")
        if draft.open and follow.startswith(CONTRADICTION):
            draft.over = f"aspects contradict each other: {follow.removeprefix(CONTRADICTION).strip()}"


def _write(drafts: Sequence[_Draft], writer: Writer, settings: BuildSettings, number: int) -> None:
    writing = settings.writing
    wanted = [
        _Request(
            draft,
            answer_messages(
                draft.record.comparison,
                content=draft.plan["content"],
                plan=draft.plan[_PLAN_OF[side]],
                profile_posts=writing.profile_posts,
                least=writing.least_words,
                most=writing.most_words,
            ),
            seed_of(settings.seed, draft.record.id, side, number, place),
            side,
        )
        for draft in drafts
        if draft.open
        for side in SIDES
        if draft.lacks(side)
        for place in range(writing.candidates)
    ]
    for request, reply in _ask(writer, wanted, tokens=writing.max_new_tokens, settings=settings):
        text = reply.text.strip()
        fault = fault_of(
            text,
            reply.finish,
            question=request.draft.record.comparison.question,
            aspects=request.draft.aspects,
            settings=settings,
        )
        request.draft.candidates[request.what].append(Candidate(text, request.seed, reply.finish, fault))


def _row(draft: _Draft) -> dict[str, Any]:
    replies = draft.replies
    return {
        "id": draft.record.id,
        "over": draft.over,
        "aspects": [asdict(aspect) for aspect in draft.aspects],
        "aspects_derived": bool(draft.aspects) and not draft.record.aspects,
        "plan": draft.plan,
        "candidates": {side: [asdict(candidate) for candidate in draft.candidates[side]] for side in SIDES},
        "requests": len(replies),
        "tries": sum(reply.tries for reply in replies),
        "prompt_tokens": total([reply.prompt_tokens for reply in replies]),
        "completion_tokens": total([reply.completion_tokens for reply in replies]),
    }


def total(counts: Sequence[int | None]) -> int | None:
    """Return a sum; None where a number is not known."""
    known = [count for count in counts if count is not None]
    return sum(known) if len(known) == len(counts) else None


def read_candidates(
    row: Mapping[str, Any], record: Record, settings: BuildSettings
) -> dict[str, list[Candidate]]:
    """Return the candidates of a row by side, with the faults that they have under these settings."""
    aspects = [RubricAspect(**aspect) for aspect in row["aspects"]]
    judge = partial(fault_of, question=record.comparison.question, aspects=aspects, settings=settings)
    return {
        side: [
            Candidate(**stored | {"fault": judge(stored["text"], stored["finish"])})
            for stored in row["candidates"][side]
        ]
        for side in SIDES
    }
