"""Turn records into rows: derive missing aspects, plan, and write candidates for both sides of a pair.

The two most similar candidates become the pair.
"""

from __future__ import annotations

import hashlib
import json
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import asdict, dataclass, field
from typing import Final, TypedDict

import numpy as np

from prb_jax.building.gates.faults import copied_words, refusal, truncation, words_of
from prb_jax.building.models import Conversation, Writer
from prb_jax.building.prompts import CONTRADICTION, answer_messages, derive_messages, plan_messages
from prb_jax.building.records import Record, contradiction
from prb_jax.building.settings import SIDES, BuildSettings
from prb_jax.metrics.texts import count_words, surface_features
from prb_jax.records.comparison import RubricAspect
from prb_jax.runs.rows import Row
from prb_jax.scoring.remote.endpoint import NoReplyError, Reply

PLANS: Final = ("content", "follow", "avoid")
_PLAN_OF: Final[Mapping[str, str]] = {"chosen": "follow", "rejected": "avoid"}

_LENGTH: Final = 20.0
"""Weight of the difference of log word counts; every other column has weight 1."""

_BALANCE: Final = 0.1  # weight of the sum of differences so far: differences cancel over the pairs


@dataclass(frozen=True)
class Candidate:
    """One written answer, and the fault that makes it unusable; None if it is usable."""

    text: str
    seed: int
    finish: str | None
    fault: str | None


class _AspectFields(TypedDict):
    aspect: str
    evidence: str
    reason: str


class _CandidateFields(TypedDict):
    text: str
    seed: int
    finish: str | None
    fault: str | None


class _Sides(TypedDict):
    chosen: list[_CandidateFields]
    rejected: list[_CandidateFields]


class WrittenLine(TypedDict):
    """A line of ``rows.jsonl``: everything that a build wrote for one record."""

    id: str
    over: str | None
    aspects: list[_AspectFields]
    aspects_derived: bool
    plan: dict[str, str]
    candidates: _Sides
    requests: int
    tries: int
    prompt_tokens: int | None
    completion_tokens: int | None


@dataclass
class _Draft:
    """A record during writing: plans by kind, candidates by side, and all replies."""

    record: Record
    aspects: tuple[RubricAspect, ...]
    plan: dict[str, str] = field(default_factory=dict)
    candidates: dict[str, list[Candidate]] = field(default_factory=lambda: {side: [] for side in SIDES})
    replies: list[Reply] = field(default_factory=list)
    over: str | None = None  # reason why the record gives no pair
    failure: NoReplyError | None = None  # reason why a reply is missing

    @property
    def open(self) -> bool:
        return self.over is None and self.failure is None


@dataclass(frozen=True)
class _Request:
    """One text that a draft needs: its kind, the conversation, and the seed of its draw."""

    draft: _Draft
    kind: str
    messages: Conversation
    seed: int


def write_rows(
    records: Sequence[Record], writer: Writer, settings: BuildSettings
) -> dict[str, Row | NoReplyError]:
    """Write candidates for some records with joint requests; the same records in the same order give the same rows.

    Returns:
      By id, the finished row (JSON-ready), or the error for which a later call must write the record again.
    """
    drafts = [_Draft(record, record.aspects) for record in records]
    _derive(drafts, writer, settings)
    _plan(drafts, writer, settings)
    for number in range(settings.writing.rounds):
        _write(drafts, writer, settings, number)
    rows: dict[str, Row | NoReplyError] = {}
    for draft in drafts:
        name, replies = draft.record.id, draft.replies
        rows[name] = draft.failure or {
            "id": name,
            "over": draft.over,
            "aspects": [asdict(aspect) for aspect in draft.aspects],
            "aspects_derived": bool(draft.aspects) and not draft.record.aspects,
            "plan": draft.plan,
            "candidates": {side: list(map(asdict, draft.candidates[side])) for side in SIDES},
            "requests": len(replies),
            "tries": sum(reply.tries for reply in replies),
            "prompt_tokens": total([reply.prompt_tokens for reply in replies]),
            "completion_tokens": total([reply.completion_tokens for reply in replies]),
        }
    return rows


def seed_of(seed: int, *names: object) -> int:
    """Return the seed of one draw: 31 bits of a digest of the run's seed and the names of the draw."""
    digest = hashlib.sha256("\0".join(map(str, (seed, *names))).encode()).digest()
    return int.from_bytes(digest[:4], "big") >> 1


def _ask(
    writer: Writer, requests: Sequence[_Request], *, tokens: int, settings: BuildSettings
) -> Iterator[tuple[_Request, Reply]]:
    """Send the requests, record failures, and yield the replies."""
    if not requests:
        return
    replies = writer.write(
        [request.messages for request in requests],
        seeds=[request.seed for request in requests],
        temperature=settings.writing.temperature,
        max_new_tokens=tokens,
    )
    for request, reply in zip(requests, replies, strict=True):
        if isinstance(reply, NoReplyError):
            request.draft.failure = request.draft.failure or reply
        else:
            request.draft.replies.append(reply)
            yield request, reply


def _derive(drafts: Sequence[_Draft], writer: Writer, settings: BuildSettings) -> None:
    most, tokens, faults = settings.writing.most_aspects, settings.writing.plan_tokens, dict[str, str]()
    for number in range(settings.writing.rounds):
        wanted: list[_Request] = []
        for draft in drafts:
            if draft.open and not draft.aspects:
                messages = derive_messages(draft.record.comparison, most=most)
                seed = seed_of(settings.seed, draft.record.id, "aspects", number)
                wanted.append(_Request(draft, "aspects", messages, seed))
        for request, reply in _ask(writer, wanted, tokens=tokens, settings=settings):
            draft = request.draft
            narrative = draft.record.comparison.narrative or ""
            aspects = read_aspects(reply.text, narrative=narrative, most=most)
            if isinstance(aspects, str):
                faults[draft.record.id] = aspects
            else:
                draft.aspects = aspects
    for draft in drafts:
        if draft.open and not draft.aspects:
            draft.over = f"no aspects: {faults[draft.record.id]}"


def read_aspects(reply: str, *, narrative: str, most: int) -> tuple[RubricAspect, ...] | str:
    """Return the first aspects in a reply, or the reason why there are none.

    The JSON list may be surrounded by other text. An aspect is kept only if the narrative contains its evidence
    word for word.
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
        name, evidence, reason = (str(part).strip() for part in parts)
        words = " ".join(words_of(evidence))
        if name and words and f" {words} " in note:
            aspects.append(RubricAspect(name, evidence, reason))
    aspects = aspects[:most]
    if not aspects:
        return "no aspect has evidence in the narrative"
    if contradicting := contradiction(aspects):
        return f"{contradicting[0]!r} and {contradicting[1]!r} contradict each other"
    return tuple(aspects)


def _plan(drafts: Sequence[_Draft], writer: Writer, settings: BuildSettings) -> None:
    posts, tokens = settings.writing.profile_posts, settings.writing.plan_tokens
    wanted: list[_Request] = []
    for draft in drafts:
        if draft.open:
            asked = plan_messages(draft.record.comparison, draft.aspects, profile_posts=posts)
            for kind, messages in zip(PLANS, asked, strict=True):
                seed = seed_of(settings.seed, draft.record.id, "plan", kind)
                wanted.append(_Request(draft, kind, messages, seed))
    for request, reply in _ask(writer, wanted, tokens=tokens, settings=settings):
        request.draft.plan[request.kind] = reply.text.strip()
    for draft in drafts:
        follow = draft.plan.get("follow", "")
        if draft.open and follow.startswith(CONTRADICTION):
            draft.over = f"aspects contradict each other: {follow.removeprefix(CONTRADICTION).strip()}"


def _write(drafts: Sequence[_Draft], writer: Writer, settings: BuildSettings, number: int) -> None:
    writing = settings.writing
    wanted: list[_Request] = []
    for draft in (draft for draft in drafts if draft.open):
        for side in SIDES:
            if any(candidate.fault is None for candidate in draft.candidates[side]):
                continue
            content, plan = draft.plan["content"], draft.plan[_PLAN_OF[side]]
            messages = answer_messages(draft.record.comparison, writing, content=content, plan=plan)
            for place in range(writing.candidates):
                seed = seed_of(settings.seed, draft.record.id, side, number, place)
                wanted.append(_Request(draft, side, messages, seed))
    for request, reply in _ask(writer, wanted, tokens=writing.max_new_tokens, settings=settings):
        draft, text = request.draft, reply.text.strip()
        fault = _fault(text, reply.finish, draft.record, draft.aspects, settings)
        draft.candidates[request.kind].append(Candidate(text, request.seed, reply.finish, fault))


def total(counts: Sequence[int | None]) -> int | None:
    """Return the sum of the counts; None if any count is unknown."""
    known = [count for count in counts if count is not None]
    return sum(known) if len(known) == len(counts) else None


def read_candidates(row: Row, record: Record, settings: BuildSettings) -> dict[str, list[Candidate]]:
    """Return the candidates of a row by side, with their faults under these settings."""
    aspects = [RubricAspect(one["aspect"], one["evidence"], one["reason"]) for one in row["aspects"]]
    return {
        side: [
            Candidate(
                stored["text"],
                stored["seed"],
                stored["finish"],
                _fault(stored["text"], stored["finish"], record, aspects, settings),
            )
            for stored in row["candidates"][side]
        ]
        for side in SIDES
    }


def _fault(
    text: str, finish: str | None, record: Record, aspects: Sequence[RubricAspect], settings: BuildSettings
) -> str | None:
    """Return why an answer is unusable; None if it is usable. Relaxed gates rule out no answer."""
    if not text.strip():
        return "is empty"
    writing, relax = settings.writing, settings.relax
    if "refusals" not in relax and (fault := refusal(text)):
        return fault
    if "truncations" not in relax and (fault := truncation(text, finish)):
        return fault
    words = count_words(text)
    if words < writing.least_words:
        return f"has {words} words, expected at least {writing.least_words}"
    if words > writing.most_words:
        return f"has {words} words, expected at most {writing.most_words}"
    if "copied-aspects" in relax:
        return None
    run = copied_words(text, aspects, question=record.comparison.question, words=settings.gates.copied_words)
    return None if run is None else f"has words of an aspect: {run}"


def lacking(candidates: Mapping[str, Sequence[Candidate]]) -> str | None:
    """Return the sides without a usable answer, each with its last fault; None if both sides have one."""
    faults = {
        side: (written[-1].fault if written else "was not written")
        for side, written in candidates.items()
        if all(candidate.fault is not None for candidate in written)
    }
    return "; ".join(f"no {side} answer: {fault}" for side, fault in faults.items()) or None


def match_pairs(
    rows: Sequence[Mapping[str, Sequence[Candidate]]],
) -> list[tuple[Candidate, Candidate] | None]:
    """Return the most similar chosen and rejected answers of each row; None if a side has none.

    Similarity covers words, layout and wrappers. Among nearly equal choices, differences that cancel those of earlier
    rows win: over the whole data neither side should be longer or have more lists.

    Args:
      rows: Candidates by side, "chosen" and "rejected", in the order of the data.
    """
    total: np.ndarray | float = 0.0
    matched: list[tuple[Candidate, Candidate] | None] = []
    for row in rows:
        chosen, rejected = (
            [candidate for candidate in row[side] if candidate.fault is None] for side in SIDES
        )
        if not chosen or not rejected:
            matched.append(None)
            continue
        columns = [surface_features([candidate.text for candidate in side]) for side in (chosen, rejected)]
        deltas = columns[0][:, None] - columns[1][None, :]
        deltas[..., 0] *= _LENGTH
        costs = np.abs(deltas).sum(-1) + _BALANCE * np.abs(total + deltas).sum(-1)
        # identical answers are not a pair
        same = np.array([[a.text == b.text for b in rejected] for a in chosen])
        place = np.unravel_index(int(np.argmin(np.where(same, np.inf, costs))), costs.shape)
        total = total + deltas[place]
        matched.append((chosen[int(place[0])], rejected[int(place[1])]))
    return matched
