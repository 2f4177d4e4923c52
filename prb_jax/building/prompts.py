"""Prompts of the generator and the judges. Their wording decides the result, so every row has their digest."""

from __future__ import annotations

import hashlib
import json
from collections.abc import Sequence
from typing import Final

from prb_jax.building.settings import WritingSettings
from prb_jax.records.comparison import Comparison, Message, RubricAspect
from prb_jax.records.conversation import transcript
from prb_jax.text.view import render_profile

WRITER: Final = "You help to build a benchmark of answers to people's questions. Do exactly as you are told."

DERIVE: Final = (
    "A user asked a question, and told in a note of their own what is behind it.\n\n{prompt}\n\nThe user's note:\n"
    "{narrative}\n\nList at most {most} aspects that this user wants an answer to have, and that another user might "
    "not want. Take each from the note alone. Reply with a JSON list and nothing else, as\n"
    '[{{"aspect": "a few words", "evidence": "words of the note, exactly as they stand there", "reason": "one '
    'sentence"}}]'
)

CONTENT: Final = (
    "A user asked:\n\n{prompt}\n\nList in at most five short points the facts and advice that every correct, relevant "
    "and helpful answer to this question must have, whoever asks. Write no answer."
)

FOLLOW: Final = (
    "A user asked a question.\n\n{profile}{prompt}\n\nThis is what the user wants of an answer:\n{aspects}\n\nSay in "
    "one short sentence for each of these wishes how an answer can serve it by what it says. Do not quote the wishes. "
    "If two of them cannot both be served, reply with {contradiction} and the two, and nothing else. Write no answer."
)

AVOID: Final = (
    "A user asked a question.\n\n{profile}{prompt}\n\nThis is what the user wants of an answer:\n{aspects}\n\nSome "
    "other user asks the same and does not want these things. Say in one short sentence for each wish what an answer "
    "can offer in its place, so that it is exactly as correct, relevant and helpful. Do not quote the wishes. Write no "
    "answer."
)

CONTRADICTION: Final = "CONTRADICTION:"

ANSWER: Final = (
    "Answer this user.\n\n{profile}{prompt}\n\nPoints that the answer has:\n{content}\n\nHow the answer is made:\n"
    "{plan}\n\nWrite the answer alone, as one piece of plain text without headings or lists, in {least} to {most} "
    "words, about {middle}. Be correct, relevant and helpful. Do not name the points or the plan, do not speak of the "
    "user's wishes, and do not say how the answer was made."
)

BLIND: Final = (
    "Somebody asked a question, and two answers were given.\n\n{prompt}\n\nAnswer A:\n{a}\n\nAnswer B:\n{b}\n\nWhich "
    "answer is better: more correct, more relevant and more helpful? Reply with one letter, A or B, and nothing else."
)

RUBRIC: Final = (
    "Somebody asked a question, and two answers were given.\n\n{prompt}\n\nThis is what they want of an answer:\n"
    "{aspects}\n\nAnswer A:\n{a}\n\nAnswer B:\n{b}\n\nWhich answer serves these wishes better? Reply with one letter, "
    "A or B, and nothing else."
)

_ALL: Final = {
    "system": WRITER, "derive": DERIVE, "content": CONTENT, "follow": FOLLOW, "avoid": AVOID, "answer": ANSWER,
    "blind": BLIND, "rubric": RUBRIC,
}  # fmt: skip


def prompt_digests() -> dict[str, str]:
    """Return the first 16 digits of the sha256 of each prompt."""
    return {name: hashlib.sha256(text.encode()).hexdigest()[:16] for name, text in _ALL.items()}


def prompts_digest() -> str:
    """Return one digest of all prompts."""
    return hashlib.sha256(json.dumps(prompt_digests(), sort_keys=True).encode()).hexdigest()[:16]


def _asked(comparison: Comparison) -> str:
    if len(comparison.prompt) == 1 and not comparison.context:
        return f"Question: {comparison.question}"
    return transcript(comparison.prompt)


def _profile(comparison: Comparison, posts: int) -> str:
    shown = render_profile(comparison.profile, posts)
    return f"What this user wrote before:\n{shown}\n\n" if shown else ""


def _listed(aspects: Sequence[RubricAspect]) -> str:
    return "\n".join(f"- {one.aspect}{f' ({one.reason})' if one.reason else ''}" for one in aspects)


def _told(text: str) -> tuple[Message, ...]:
    return Message("system", WRITER), Message("user", text)


def derive_messages(comparison: Comparison, *, most: int) -> tuple[Message, ...]:
    """Return the conversation that requests aspects of the narrative."""
    narrative = comparison.narrative or ""
    return _told(DERIVE.format(prompt=_asked(comparison), narrative=narrative, most=most))


def plan_messages(
    comparison: Comparison, aspects: Sequence[RubricAspect], *, profile_posts: int
) -> tuple[tuple[Message, ...], ...]:
    """Return the conversations that plan the common content, how to follow the aspects, and how to avoid them."""
    asked, wishes = _asked(comparison), _listed(aspects)
    profile = _profile(comparison, profile_posts)
    return (
        _told(CONTENT.format(prompt=asked)),
        _told(FOLLOW.format(prompt=asked, profile=profile, aspects=wishes, contradiction=CONTRADICTION)),
        _told(AVOID.format(prompt=asked, profile=profile, aspects=wishes)),
    )


def answer_messages(
    comparison: Comparison, writing: WritingSettings, *, content: str, plan: str
) -> tuple[Message, ...]:
    """Return the conversation that requests an answer; the two sides of a pair differ only in ``plan``."""
    asked, profile = _asked(comparison), _profile(comparison, writing.profile_posts)
    least, most = writing.least_words, writing.most_words
    words = {"least": least, "most": most, "middle": (least + most) // 2}
    return _told(ANSWER.format(prompt=asked, profile=profile, content=content, plan=plan, **words))


def judge_messages(template: str, pair: Comparison, first: int) -> tuple[Message, ...]:
    """Return the conversation that shows a pair by a template, BLIND or RUBRIC; response ``first`` is A."""
    a, b = pair.responses[first], pair.responses[1 - first]
    aspects = _listed(pair.rubric_aspects)
    return (Message("user", template.format(prompt=_asked(pair), aspects=aspects, a=a, b=b)),)
