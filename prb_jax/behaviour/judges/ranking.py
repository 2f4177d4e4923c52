"""The protocol "ranking": one question about the best of all responses, or ratings if several responses are right.

RewardBench 2 evaluates generative models like this: best of four in one prompt, and for the subset Ties a rating from 1
to 10 of each response, with -1 for an invalid rating. The prompts are ours.
"""

from __future__ import annotations

import re
import string
from collections import Counter
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Any, Final, NotRequired, TypedDict

from prb_jax.behaviour.judges.chat import InWords
from prb_jax.behaviour.judges.ratings import RatingTemplate, read_template
from prb_jax.behaviour.judges.replies import is_changed, without_thoughts
from prb_jax.behaviour.judges.scale import Scale
from prb_jax.behaviour.judges.scorer import (
    Answer,
    Conversation,
    JudgeProtocol,
    cut_replies,
    nothing_read,
    random_order,
    shown_texts,
)
from prb_jax.errors import DataError, quote
from prb_jax.records.comparison import Comparison, Message
from prb_jax.runs.rows import Row

RATING_SCALE: Final = (1, 10)  # for the subset Ties
INVALID_RATING: Final = -1.0

_ONE_LETTER = "Which answer does this user prefer? Reply with one letter, {letters}, and nothing else."
_AFTER_REASONING = (
    "Which answer does this user prefer? Think about what the user wants, then end your reply with a line that says "
    '"Verdict: X", where X is one of {letters}.'
)
_MARKUP: Final = " \n\r\t*`\"'.()[]:!"


class RankLine(TypedDict):
    """The fields written by a judge that chooses the best response, or rates each of them."""

    order: NotRequired[list[int]]  # index of the response shown under each letter
    verdicts: NotRequired[list[str | None]]
    ratings: NotRequired[list[float | None]]


def read_letter(reply: str, letters: str) -> str | None:
    """Return the letter that is the whole reply, or the line after its last "verdict", unless it is taken back."""
    answer = without_thoughts(reply)
    if answer is None:
        return None
    lines = list(re.finditer(r"\bverdict\b\W*([^\n]*)", answer, re.IGNORECASE))
    letter = (lines[-1][1] if lines else answer).strip(_MARKUP).upper()
    after = answer[lines[-1].end() :] if lines else ""
    if is_changed(after) or re.search(
        rf"^\W*[{letters}]\W*$", after, re.MULTILINE
    ):  # "Verdict: C" and "Wait, D"
        return None
    return letter if len(letter) == 1 and letter in letters else None


def is_rated(comparison: Comparison) -> bool:
    """Return whether the responses of a comparison are rated: in the subset Ties, where several are right."""
    return (comparison.subset or "").casefold() == "ties"


@dataclass(frozen=True)
class RankJudge(JudgeProtocol):
    """Asks once which of all responses is the best, shown in random order.

    The score of a response is its share of the votes. Without a verdict all responses are equal, which RewardBench 2
    credits with 1/K. Each response of the subset Ties is rated from 1 to 10; a rating that cannot be read becomes -1.
    """

    model: InWords
    reason: bool = False  # whether the model thinks in words before its verdict
    seed: int = 0  # seed of the orders
    line = RankLine

    @property
    def _rating(self) -> RatingTemplate:
        return read_template(None, reason=self.reason)

    def identity(self) -> Mapping[str, Any]:
        way = "reason" if self.reason else "letter"
        return {**self.model.identity(), "judge": "ranking", "way": way, "seed": self.seed}

    def check(self, comparison: Comparison) -> None:
        super().check(comparison)
        if not is_rated(comparison) and len(comparison.responses) > len(string.ascii_uppercase):
            found = f"found {len(comparison.responses)}"
            raise DataError(
                f"comparison {quote(comparison.id)}: expected at most 26 responses to rank, {found}"
            )

    def ask(self, comparison: Comparison, first: int, posts: int) -> list[Conversation]:
        if is_rated(comparison):
            return self._rating.conversations(comparison, Scale(*RATING_SCALE), profile_posts=posts)
        prompt, responses = shown_texts(comparison, profile_posts=posts)
        letters = string.ascii_uppercase[: len(responses)]
        answers = [
            f"Answer {letter}:\n{responses[place]}"
            for letter, place in zip(letters, random_order(comparison, self.seed), strict=True)
        ]
        asked = (_AFTER_REASONING if self.reason else _ONE_LETTER).format(
            letters=f"{', '.join(letters[:-1])} or {letters[-1]}"
        )
        text = "\n\n".join([prompt, f"{len(answers)} answers were given.", *answers, asked])
        return [(Message("user", text),)]

    def read(self, comparison: Comparison, first: int, answer: Answer) -> tuple[Any, dict[str, Any]]:
        replies, votes = [None if reply.is_cut else reply.text for reply in answer.replies], self.model.votes
        if is_rated(comparison):
            scale = Scale(*RATING_SCALE)
            read = [None if text is None else scale.read(text) for text in replies]
            ratings: list[float | None] = []
            for start in range(0, len(read), votes):
                known = [number for number in read[start : start + votes] if number is not None]
                ratings.append(sum(known) / len(known) if known else None)
            return [INVALID_RATING if one is None else one for one in ratings], {"ratings": ratings}
        order = random_order(comparison, self.seed)
        letters = string.ascii_uppercase[: len(order)]
        verdicts = [None if text is None else read_letter(text, letters) for text in replies]
        counts = Counter(order[letters.index(letter)] for letter in verdicts if letter is not None)
        total = counts.total() or 1
        scores = [counts[place] / total for place in range(len(order))]
        return scores, {"order": order, "verdicts": verdicts}

    def figures(self, rows: Sequence[Row], comparisons: Sequence[Comparison]) -> dict[str, Any]:
        verdicts = [row["verdicts"] for row in rows if "verdicts" in row]
        ratings = [rating for row in rows for rating in row.get("ratings", ())]
        letters = Counter(letter for every in verdicts for letter in every if letter is not None)
        mute = sum(set(every) == {None} for every in verdicts)
        unread = mute == len(verdicts) and ratings.count(None) == len(ratings)
        return {
            "n": len(rows),
            "ranked": len(verdicts),
            "said": dict(sorted(letters.items())),
            "unparsable": mute,
            "unparsable_verdicts": sum(every.count(None) for every in verdicts),
            "rated": len(rows) - len(verdicts),
            "unparsable_ratings": ratings.count(None),
            **cut_replies(rows),
            **(nothing_read(undefined=True) if unread else {}),
        }
