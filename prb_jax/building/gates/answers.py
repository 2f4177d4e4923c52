"""Faults of answers: they refuse, are cut off, repeat an aspect, or are nearly those of another pair."""

from __future__ import annotations

import re
from collections.abc import Callable, Sequence
from typing import Final

from prb_jax.building.gates.gate import Pair
from prb_jax.building.gates.words import NearTexts, runs, shingles, similarity, words_of
from prb_jax.data.comparison import RubricAspect

_DOING: Final = (
    "help|assist|provide|answer|comply|fulfil|fulfill|do that|write|create|generate|give|discuss|respond|continue|"
    "engage|offer|support"
)
_NOT: Final = r"(?:can(?:not|[’']t| not)|won[’']t|will not|(?:unable|not able) to)"
_REFUSAL: Final = re.compile(
    r"\A\W*(?:"
    rf"(?:i[’']m|i am|we[’']re|my apologies|apologies|sorry)\b.{{0,40}}?\b{_NOT}\s+(?:\w+\s+)?(?:{_DOING})\b"
    rf"|(?:unfortunately,? )?i (?:am )?{_NOT}\s+(?:\w+\s+)?(?:{_DOING})\b"
    r"|as an? (?:ai|artificial intelligence|(?:large )?language model)\b"
    r"|(?:i[’']m|i am) (?:just |only )?an? (?:ai|language model)\b"
    r")",
    re.IGNORECASE | re.DOTALL,
)
_ENDS: Final = tuple(".!?…。！？\"”’')]»*_`:)")
_LEAST_NAME: Final = 2
"""Words of the name of an aspect from which its occurrence in an answer counts as copied."""

_SAME: Final = 0.95
"""Similarity from which the two answers of a pair are the same."""


def refusal(text: str) -> str | None:
    """Return how a text refuses to answer; None where it does not."""
    if not text.strip():
        return "is empty"
    return "refuses" if _REFUSAL.match(text) else None


def truncation(text: str, finish: str | None) -> str | None:
    """Return how a text is cut; None where it is whole.

    Args:
      text: as it was written.
      finish: why it ends, as the model says.
    """
    if finish == "length":
        return "ran into the limit of tokens"
    if text.strip() and not text.rstrip().endswith(_ENDS):
        return "ends within a sentence"
    return None


def copied_words(text: str, aspects: Sequence[RubricAspect], *, question: str, words: int) -> str | None:
    """Return the words that a text has from an aspect; None where it has none.

    A judge who is shown the aspects would find such an answer without reading it.

    Args:
      text: an answer.
      aspects: of its record.
      question: whose words an answer may take up.
      words: how many consecutive ones count as copied.
    """
    answer, asked = words_of(text), words_of(question)
    answer_runs = set(runs(answer, words))

    def holds(run: tuple[str, ...], inside: Sequence[str]) -> bool:
        size = len(run)
        return any(tuple(inside[k : k + size]) == run for k in range(len(inside) - size + 1))

    for aspect in aspects:
        name = tuple(words_of(aspect.aspect))
        wanted = [name] if len(name) >= _LEAST_NAME else []
        for part in (aspect.aspect, aspect.evidence, aspect.reason):
            wanted += [run for run in runs(words_of(part), words) if len(run) == words]
        for run in wanted:
            if (run in answer_runs or (len(run) != words and holds(run, answer))) and not holds(run, asked):
                return " ".join(run)
    return None


def find_refusals(pairs: Sequence[Pair]) -> dict[str, str]:
    """Return the pairs with an answer that refuses, and which one it is."""
    return _find(pairs, lambda pair, text, finish: refusal(text))


def find_truncations(pairs: Sequence[Pair]) -> dict[str, str]:
    """Return the pairs with an answer that is cut off, and which one it is."""
    return _find(pairs, lambda pair, text, finish: truncation(text, finish))


def find_copied_aspects(pairs: Sequence[Pair], *, words: int) -> dict[str, str]:
    """Return the pairs with an answer that repeats an aspect, and the words."""

    def fault(pair: Pair, text: str, finish: str | None) -> str | None:
        of_pair = pair.comparison
        run = copied_words(text, of_pair.rubric_aspects, question=of_pair.question, words=words)
        return None if run is None else f"has {run!r}"

    return _find(pairs, fault)


def _find(pairs: Sequence[Pair], fault: Callable[[Pair, str, str | None], str | None]) -> dict[str, str]:
    """By pair, the first answer with a fault, and the fault."""
    reasons = {}
    for pair in pairs:
        for side, text, finish in zip(
            ("chosen", "rejected"), (pair.chosen, pair.rejected), pair.finishes, strict=True
        ):
            if pair.id not in reasons and (reason := fault(pair, text, finish)):
                reasons[pair.id] = f"{pair.id}: the {side} answer {reason}"
    return reasons


def find_duplicates(pairs: Sequence[Pair], *, least: float) -> dict[str, str]:
    """Return the pairs that are left out so that no two answers are that similar; the first of two stays.

    Args:
      pairs: in their order.
      least: similarity from which two answers are near-duplicates.
    """
    index, reasons = NearTexts(least), dict[str, str]()
    for pair in pairs:
        texts = (pair.chosen, pair.rejected)
        if similarity(shingles(pair.chosen), shingles(pair.rejected)) >= _SAME:
            reasons[pair.id] = f"{pair.id}: its two answers are the same"
        elif near := [owner for text in texts for owner in index.owners(text)]:
            reasons[pair.id] = f"{pair.id}: an answer is nearly that of {near[0]}"
        else:
            for text in texts:
                index.add(pair.id, text)
    return reasons
