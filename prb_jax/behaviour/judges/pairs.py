"""The default protocol: which of two responses is better, in both orders, in words or by the logits of A and B."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import numpy as np

from prb_jax.behaviour.judges.chat import ByLogits, InWords, load_by_logits
from prb_jax.behaviour.judges.replies import read_verdict
from prb_jax.behaviour.judges.scorer import (
    Answer,
    Conversation,
    JudgeProtocol,
    VerdictLine,
    cut_replies,
    nothing_read,
    shown_texts,
)
from prb_jax.errors import DataError, quote
from prb_jax.metrics.votes import vote_share
from prb_jax.models.readouts.load_options import LoadOptions
from prb_jax.records.comparison import Comparison, Message
from prb_jax.runs.rows import Row

ONE_LETTER = "Which answer does this user prefer? Reply with one letter, A or B, and nothing else."
AFTER_REASONING = (
    "Which answer does this user prefer? Think about what the user wants, then end your reply with a line that says "
    '"Verdict: A" or "Verdict: B".'
)
LETTER_TOKENS = 16
REASON_TOKENS = 1024
MIN_MASS = 0.1  # default minimum probability of A and B together for a verdict
ONE_LETTER_SHARE, FEWEST_VERDICTS = 0.9, 8
"""Warn about a judge that names one letter in this share of its verdicts, given at least this many verdicts."""


def pair_messages(comparison: Comparison, first: int, *, profile_posts: int, reason: bool) -> Conversation:
    """Return the conversation that shows the user's posts, the prompt, and the response `first` as A."""
    prompt, responses = shown_texts(comparison, profile_posts=profile_posts)
    a, b = responses[first], responses[1 - first]
    question = AFTER_REASONING if reason else ONE_LETTER
    text = f"{prompt}\n\nTwo answers were given.\n\nAnswer A:\n{a}\n\nAnswer B:\n{b}\n\n{question}"
    return (Message("user", text),)


def better_response(comparison: Comparison) -> int:
    """Return the index of the better-labelled response of a pair.

    Raises:
      DataError: the comparison does not have two responses, or has no labels.
    """
    if len(comparison.responses) != 2:
        raise DataError(
            f"comparison {quote(comparison.id)}: a judge of pairs reads 2 responses, found {len(comparison.responses)}"
        )
    if comparison.labels is None:
        raise DataError(f"comparison {quote(comparison.id)}: has no labels")
    return int(comparison.labels[1] > comparison.labels[0])


@dataclass(frozen=True)
class PairJudge(JudgeProtocol):
    """Asks twice, with each response as A once.

    In words, the score of a response is its share of the votes, averaged over both orders: with one vote, a response
    that is preferred in both orders wins. By logits, the score is the mean of its probabilities in the two orders. If
    the probabilities of A and B sum to less than ``min_mass`` in one order, the model would reply something else: there
    is no verdict, and the pair counts as a tie.
    """

    model: InWords | ByLogits
    line = VerdictLine
    reason: bool = False  # whether the judge thinks in words before its verdict
    min_mass: float = MIN_MASS  # minimum probability of A and B together for a verdict

    def identity(self) -> Mapping[str, Any]:
        identity = {**self.model.identity(), "judge": "default"}
        if isinstance(self.model, InWords):
            return identity | {"way": "reason" if self.reason else "letter"}
        return identity | {"way": "logits", "min_mass": self.min_mass}

    def check(self, comparison: Comparison) -> None:
        better_response(comparison)

    def ask(self, comparison: Comparison, first: int, posts: int) -> list[Conversation]:
        orders = (first, 1 - first)
        return [pair_messages(comparison, one, profile_posts=posts, reason=self.reason) for one in orders]

    def read(self, comparison: Comparison, first: int, answer: Answer) -> tuple[Any, dict[str, Any]]:
        if answer.replies:
            verdicts = [None if reply.is_cut else self.verdict(reply.text) for reply in answer.replies]
            counts = votes_for_first(verdicts)
            share, bounds = vote_share(counts)
            details = {"share": share, "share_ci95": bounds} if len(verdicts) > 2 else {}
            return (share, 1 - share), {"first": first, "verdicts": verdicts, **details}
        letters = [
            None if mass < self.min_mass or of_a == 0.5 else "A" if of_a > 0.5 else "B"
            for of_a, mass in zip(answer.values, answer.masses, strict=True)
        ]
        of_first, of_second = np.asarray(answer.values, np.float32)
        share = (of_first + (1 - of_second)) / 2 if min(answer.masses) >= self.min_mass else np.float32(0.5)
        details = {"probability_of_a": answer.values, "letter_mass": answer.masses}
        return (share, 1 - share), {"first": first, "verdicts": letters, **details}

    def verdict(self, reply: str) -> str | None:
        """Return the verdict of a reply, A or B; None if it has no verdict."""
        return read_verdict(reply)

    def is_read(self, details: Mapping[str, Any]) -> bool:
        """Return whether the recorded details contain a readable verdict for both orders."""
        if "letter_mass" in details:
            return min(details["letter_mass"]) >= self.min_mass
        return all(total for _, total in votes_for_first(details["verdicts"]))

    def figures(self, rows: Sequence[Row], comparisons: Sequence[Comparison]) -> dict[str, Any]:
        """Return statistics of the verdicts: the first order shows response 0 as A, the second response 1."""
        verdicts = [row["verdicts"] for row in rows]
        counts = [votes_for_first(every) for every in verdicts]
        preferred = [_preferred(pair) for pair in counts]
        letters = [letter for every in verdicts for letter in every if letter is not None]
        right = sum(
            response == better_response(comparison)
            for response, comparison in zip(preferred, comparisons, strict=True)
        )
        a, b = letters.count("A"), letters.count("B")
        unparsable = sum(not all(total for _, total in pair) for pair in counts)
        judged = len(rows) if unparsable < len(rows) else 0
        figures = {
            **warn_of_one_letter(a, b),
            "n": len(rows),
            "order_consistent_accuracy": right / judged if judged else None,
            "consistent": sum(response is not None for response in preferred) / judged if judged else None,
            "position_bias": abs(2 * a / len(letters) - 1) if letters else None,
            "said_a": a,
            "said_b": b,
            "unparsable": unparsable,
            "unparsable_verdicts": sum(map(len, verdicts)) - len(letters),
            **cut_replies(rows),
        }
        if isinstance(self.model, ByLogits):
            masses = [row["letter_mass"] for row in rows]
            figures["mean_letter_mass"] = float(np.mean(masses))
            figures["low_letter_mass"] = sum(min(pair) < self.min_mass for pair in masses)
        if judged:
            return figures
        if figures.get("low_letter_mass") == len(rows):
            return figures | nothing_read(
                "the model would reply with neither A nor B, whose probability is "
                f"{figures['mean_letter_mass']:.2g} on average (--min-mass, --reason)",
                undefined=True,
            )
        return figures | nothing_read(undefined=True)


def votes_for_first(verdicts: Sequence[str | None]) -> list[tuple[int, int]]:
    """Return, for each order, the votes for the response shown as A in the first order, and all readable votes.

    Args:
      verdicts: Votes in the first order, followed by as many in the second one.
    """
    half = len(verdicts) // 2
    parts = ((verdicts[:half], "A"), (verdicts[half:], "B"))
    return [(part.count(letter), len(part) - part.count(None)) for part, letter in parts]


def _preferred(counts: Sequence[tuple[int, int]]) -> int | None:
    """The response with the majority of votes in both orders; None if the orders disagree or cannot be read."""
    if all(2 * votes > total for votes, total in counts):
        return 0
    return 1 if all(2 * votes < total for votes, total in counts) else None


def load_letters(model: str | Path, options: LoadOptions, *, max_length: int | None) -> ByLogits:
    """Load a causal language model that is read at the logits of A and B; raises the errors of `load_by_logits`."""
    return load_by_logits(
        model,
        options,
        "AB",
        readout=lambda tokens: f"vocabulary:{tokens['A']},{tokens['B']}",
        instead="judge with --reason, which reads the reply as text",
        max_length=max_length,
    )


def warn_of_one_letter(a: int, b: int) -> dict[str, Any]:
    """Return a warning about a judge that nearly always names the same letter, whatever it labels; else nothing.

    Args:
      a, b: How often each letter was named.
    """
    often, total = max(a, b), a + b
    if total < FEWEST_VERDICTS or often < ONE_LETTER_SHARE * total:
        return {}
    letter = "A" if a > b else "B"
    return {
        "warning": f"{letter} was named in {often:,} of {total:,} verdicts, whatever was shown as {letter}: the "
        "accuracy reflects the position of the better responses, not the judge's preference"
    }
