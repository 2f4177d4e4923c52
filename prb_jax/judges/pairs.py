"""The default protocol: which of two responses is better, in both orders, in words or by the logits of A and B."""

from __future__ import annotations

import re
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import numpy as np

from prb_jax.data.comparison import Comparison, Message
from prb_jax.errors import CheckpointError, DataError, quote
from prb_jax.judges.chat import ChatModel, fit_conversations
from prb_jax.judges.logits import load_token_model, read_replies, reply_tokens
from prb_jax.judges.scorer import Judgement, check_labels, shown_texts, spoken, without_thoughts
from prb_jax.readouts.load_options import LoadOptions
from prb_jax.runs.rows import Row
from prb_jax.scoring.reward_model import RewardModel

ONE_LETTER = "Which answer does this user prefer? Reply with one letter, A or B, and nothing else."
AFTER_REASONING = (
    "Which answer does this user prefer? Think about what the user wants, then end your reply with a line that says "
    '"Verdict: A" or "Verdict: B".'
)
LETTER_TOKENS = 16
REASON_TOKENS = 1024
MIN_MASS = 0.1
"""Least probability of A and B together that makes a verdict, where it is not said."""
ONE_LETTER_SHARE, FEWEST_VERDICTS = 0.9, 8
"""A judge is warned of that names one letter in this share of its verdicts, of which there are at least so many."""

_LAST_VERDICT = re.compile(r"verdict\W+([ab])\b", re.IGNORECASE)


def pair_messages(
    comparison: Comparison, first: int, *, profile_posts: int, reason: bool
) -> tuple[Message, ...]:
    """Return the conversation that shows the response `first` as A, behind the user's posts and the prompt."""
    prompt, responses = shown_texts(comparison, profile_posts=profile_posts)
    a, b = responses[first], responses[1 - first]
    question = AFTER_REASONING if reason else ONE_LETTER
    text = f"{prompt}\n\nTwo answers were given.\n\nAnswer A:\n{a}\n\nAnswer B:\n{b}\n\n{question}"
    return (Message("user", text),)


def read_verdict(reply: str) -> str | None:
    """Return A or B: the reply is that letter, or the last verdict that it names; None where there is neither.

    A thought that is not closed has no verdict.
    """
    answer = without_thoughts(reply)
    if answer is None:
        return None
    letter = answer.strip().strip("*`\"'.()[]: ").upper()
    if letter in ("A", "B"):
        return letter
    verdicts = _LAST_VERDICT.findall(answer)
    return verdicts[-1].upper() if verdicts else None


def better_response(comparison: Comparison) -> int:
    """Return which of two responses is labelled the better one.

    Raises:
      DataError: not two responses, or no labels.
    """
    if len(comparison.responses) != 2:
        raise DataError(
            f"comparison {quote(comparison.id)}: a judge of pairs reads 2 responses, found {len(comparison.responses)}"
        )
    check_labels(comparison)
    assert comparison.labels is not None
    return int(comparison.labels[1] > comparison.labels[0])


class _BothOrders:
    """The parts of the protocol that are the same in words and by logits."""

    def firsts(self, comparisons: Sequence[Comparison]) -> list[int]:
        for comparison in comparisons:
            better_response(comparison)  # all are pairs
        return [0] * len(comparisons)

    def figures(self, rows: Sequence[Row], comparisons: Sequence[Comparison]) -> dict[str, Any]:
        """Return the figures of verdicts: the first order shows response 0 as A, the second response 1."""
        verdicts = [tuple(row["verdicts"]) for row in rows]
        preferred = [{("A", "B"): 0, ("B", "A"): 1}.get(pair) for pair in verdicts]
        letters = [letter for pair in verdicts for letter in pair if letter is not None]
        right = sum(
            response == better_response(comparison)
            for response, comparison in zip(preferred, comparisons, strict=True)
        )
        a, b = letters.count("A"), letters.count("B")
        return {
            **warn_of_one_letter(a, b),
            "n": len(rows),
            "order_consistent_accuracy": right / len(rows),
            "consistent": sum(response is not None for response in preferred) / len(rows),
            "position_bias": abs(2 * a / len(letters) - 1) if letters else None,
            "said_a": a,
            "said_b": b,
            "unparsable": sum(None in pair for pair in verdicts),
            "unparsable_verdicts": 2 * len(rows) - len(letters),
        }


@dataclass(frozen=True)
class PairsInWords(_BothOrders):
    """Asks twice, with each response as A once; a response that is preferred in both orders wins.

    Attributes:
      chat: the model.
      reason: whether it thinks in words before it names its verdict.
    """

    chat: ChatModel
    reason: bool = False

    def identity(self) -> Mapping[str, Any]:
        return {**self.chat.identity(), "judge": "default", "way": "reason" if self.reason else "letter"}

    def judge(
        self, comparisons: Sequence[Comparison], firsts: Sequence[int], *, profile_posts: int
    ) -> list[Judgement]:
        def ask(comparison: Comparison, posts: int) -> list[tuple[Message, ...]]:
            return [
                pair_messages(comparison, first, profile_posts=posts, reason=self.reason) for first in (0, 1)
            ]

        most = REASON_TOKENS if self.reason else LETTER_TOKENS
        conversations, dropped = fit_conversations(
            self.chat, comparisons, ask, posts=profile_posts, max_new_tokens=most
        )
        replies = self.chat.replies(conversations, max_new_tokens=most)
        judgements = []
        for number, lost in enumerate(dropped):
            pair = replies[2 * number : 2 * number + 2]
            verdicts = [read_verdict(reply.text) for reply in pair]
            share = 1.0 if verdicts == ["A", "B"] else 0.0 if verdicts == ["B", "A"] else 0.5
            scores = np.asarray([share, 1 - share], np.float32)
            judgements.append(spoken(scores, pair, {"first": 0, "verdicts": verdicts}, lost))
        return judgements


@dataclass(frozen=True)
class PairsByLogits(_BothOrders):
    """Reads the probability of A against B where the reply would begin, in both orders: nothing is sampled.

    A response's score is the mean of its probabilities in the two orders. Where A and B together are less probable than
    ``min_mass`` in one of the orders, the model would reply with something else: that is no verdict, and a tie.

    Attributes:
      model: a language model whose values are the probability of A among A and B, and that of both among all tokens.
      max_length: longest conversation in tokens.
      min_mass: least probability of A and B together that makes a verdict.
    """

    model: RewardModel
    max_length: int | None = None
    min_mass: float = MIN_MASS

    def identity(self) -> Mapping[str, Any]:
        return {**self.model.identity(), "judge": "default", "way": "logits", "min_mass": self.min_mass}

    def judge(
        self, comparisons: Sequence[Comparison], firsts: Sequence[int], *, profile_posts: int
    ) -> list[Judgement]:
        def ask(comparison: Comparison, posts: int) -> list[tuple[Message, ...]]:
            return [pair_messages(comparison, first, profile_posts=posts, reason=False) for first in (0, 1)]

        judgements = []
        for read in read_replies(
            self.model, comparisons, ask, posts=profile_posts, max_length=self.max_length
        ):
            letters = [
                None if mass < self.min_mass or of_a == 0.5 else "A" if of_a > 0.5 else "B"
                for of_a, mass in zip(read.values.tolist(), read.masses.tolist(), strict=True)
            ]
            share = (np.float32(read.values[0]) + (1 - np.float32(read.values[1]))) / 2
            if (read.masses < self.min_mass).any():
                share = np.float32(0.5)
            details = {
                "first": 0,
                "verdicts": letters,
                "probability_of_a": read.values.astype(float).tolist(),
                "letter_mass": read.masses.astype(float).tolist(),
            }
            scores = np.asarray([share, 1 - share], np.float32)
            judgements.append(Judgement(scores, read.tokens, details, read.posts_dropped))
        return judgements

    def figures(self, rows: Sequence[Row], comparisons: Sequence[Comparison]) -> dict[str, Any]:
        masses = [mass for row in rows for mass in row["letter_mass"]]
        return super().figures(rows, comparisons) | {
            "mean_letter_mass": float(np.mean(masses)),
            "low_letter_mass": sum(min(row["letter_mass"]) < self.min_mass for row in rows),
        }


def load_pairs_by_logits(
    model: str | Path, options: LoadOptions, *, max_length: int | None = None, min_mass: float | None = None
) -> PairsByLogits:
    """Load a causal language model as a judge that is read at the logits of A and B.

    Raises:
      CheckpointError: it cannot be loaded, or its tokenizer has no token of its own for A or B at the start of a reply.
    """
    tokens = reply_tokens(model, options, "AB")
    for letter in "AB":
        if letter not in tokens:
            raise CheckpointError(
                f"{model}: the tokenizer has no token of its own for {letter} at the start of a reply: judge with "
                "--reason, which reads the reply as text"
            )
    loaded = load_token_model(model, options, f"vocabulary:{tokens['A']},{tokens['B']}")
    return PairsByLogits(loaded, max_length, MIN_MASS if min_mass is None else min_mass)


def warn_of_one_letter(a: int, b: int) -> dict[str, Any]:
    """Return a warning about a judge that names nearly always one letter, whatever is shown under it; else nothing.

    Args:
      a, b: how often each letter was named.
    """
    often, total = max(a, b), a + b
    if total < FEWEST_VERDICTS or often < ONE_LETTER_SHARE * total:
        return {}
    letter = "A" if a > b else "B"
    return {
        "warning": f"{letter} was named in {often:,} of {total:,} verdicts, whatever was shown as {letter}: the "
        "accuracy says where the better responses stood, and nothing of the judge's taste"
    }
