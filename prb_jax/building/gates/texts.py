"""Faults of any text of a pair: by which somebody could be reached, or that occurs in a known test set."""

from __future__ import annotations

import re
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass
from hashlib import blake2b
from itertools import chain
from typing import Final

from prb_jax.building.gates.gate import Pair
from prb_jax.building.gates.words import runs, words_of
from prb_jax.data.comparison import Comparison
from prb_jax.errors import DataError, quote
from prb_jax.sources.reading import each_row

_PATTERNS: Final = {
    "an e-mail address": re.compile(r"\b[\w.+-]+@[\w-]+\.[\w.-]*\w\b"),
    "a telephone number": re.compile(
        r"(?<![\w.])(?:\+\d{1,3}[ .-]?(?:\(?\d{1,4}\)?[ .-]?){2,5}\d{2,4}|\(\d{3}\) ?\d{3}[ .-]\d{4}|"
        r"\d{3}[.-]\d{3}[.-]\d{4})(?!\w)"
    ),
    "an account number": re.compile(r"\b[A-Z]{2}\d{2}(?: ?[A-Z0-9]{4}){3,7}(?: ?[A-Z0-9]{1,3})?\b"),
    "a social security number": re.compile(r"(?<![\w-])\d{3}-\d{2}-\d{4}(?![\w-])"),
    "an IP address": re.compile(
        r"(?<![\w.])(?:(?:25[0-5]|2[0-4]\d|1?\d?\d)\.){3}(?:25[0-5]|2[0-4]\d|1?\d?\d)(?![\w.])"
    ),
}
_CARD: Final = re.compile(r"(?<![\w-])\d(?:[ -]?\d){12,18}(?![\w-])")
_LEAST: Final = 4
"""Words that a text shorter than a run must have to count as a whole."""


def personal_text(text: str) -> str | None:
    """Return the kind of personal text that a text holds; None where it holds none."""
    for name, pattern in _PATTERNS.items():
        if pattern.search(text):
            return name
    numbers = (re.sub(r"\D", "", number) for number in _CARD.findall(text))
    return "a card number" if any(map(_ends_in_check_digit, numbers)) else None


def _ends_in_check_digit(digits: str) -> bool:
    """Luhn's formula."""
    doubled = (int(d) * (2 if place % 2 else 1) for place, d in enumerate(reversed(digits)))
    return sum(value - 9 if value > 9 else value for value in doubled) % 10 == 0


def find_personal_texts(pairs: Sequence[Pair]) -> dict[str, str]:
    """Return the pairs that hold personal text anywhere, and its kind; not the text itself."""
    reasons = {}
    for pair in pairs:
        comparison = pair.comparison
        texts = chain(
            (turn.content for turn in comparison.prompt),
            comparison.responses,
            (comparison.narrative or "",),
            (post.text for post in comparison.profile),
            *((aspect.aspect, aspect.evidence, aspect.reason) for aspect in comparison.rubric_aspects),
        )
        if kind := next(filter(None, map(personal_text, texts)), None):
            reasons[pair.id] = f"{pair.id}: holds {kind}; --redact replaces most of it"
    return reasons


@dataclass(frozen=True)
class KnownTexts:
    """The texts of known test sets.

    Attributes:
      words: how many consecutive words are looked at.
      sources: where each run of words occurs, by its digest.
    """

    words: int
    sources: Mapping[bytes, str]

    def source(self, text: str) -> str | None:
        """Return the test set that a text shares words with; None where there is none."""
        return next((self.sources[key] for key in run_keys(text, self.words) if key in self.sources), None)


def read_known_texts(sources: Sequence[str], *, words: int) -> KnownTexts:
    """Read the questions and answers of test sets.

    Raises:
      DataError: a source that cannot be read.
    """
    known: dict[bytes, str] = {}
    for source in sources:
        for row in each_row(source):
            for text in _questions_and_answers(row.value, row.where):
                for key in run_keys(text, words):
                    known.setdefault(key, source)
    if sources and not known:
        raise DataError(f"{', '.join(sources)}: no texts to compare with")
    return KnownTexts(words, known)


def _questions_and_answers(value: object, where: str) -> Iterable[str]:
    if isinstance(value, Mapping):
        answers = any(value.get(name) is not None for name in ("chosen", "rejected", "responses"))
        row = value if answers else {**value, "responses": ["-"]}
        value = Comparison.from_row(row, where=where, labelled=False)
    if not isinstance(value, Comparison):
        raise DataError(f"{where}: expected an object with fields, found {quote(value)}")
    return value.question, *value.responses


def run_keys(text: str, size: int) -> Iterable[bytes]:
    """Yield a digest of every run of so many words of a text."""
    words = words_of(text)
    if len(words) >= _LEAST:
        for run in runs(words, size):
            yield blake2b(" ".join(run).encode(), digest_size=8).digest()


def find_overlaps(pairs: Sequence[Pair], known: KnownTexts) -> dict[str, str]:
    """Return the pairs with a question or answer of a known test set, and the test set."""
    reasons = {}
    for pair in pairs:
        texts = {
            "question": pair.comparison.question,
            "chosen answer": pair.chosen,
            "rejected answer": pair.rejected,
        }
        for name, text in texts.items():
            if source := known.source(text):
                reasons[pair.id] = f"{pair.id}: the {name} occurs in {source}"
                break
    return reasons
