"""No question and no answer occurs in a known test set."""

from __future__ import annotations

from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass
from hashlib import blake2b
from typing import Final

from prb_jax.building.gates.gate import Pair
from prb_jax.building.gates.words import runs, words_of
from prb_jax.data.comparison import Comparison
from prb_jax.errors import DataError, quote
from prb_jax.sources.reading import each_row

DEFINITION: Final = (
    "share of pairs whose question or answer shares so many consecutive words with a known test set, or is one of its "
    "texts as a whole"
)

_LEAST: Final = 4
"""Words that a shorter text must have to count as a whole."""


@dataclass(frozen=True)
class Known:
    """The texts of known test sets.

    Attributes:
      words: how many consecutive words are looked at.
      found: where each run of words occurs, by its digest.
    """

    words: int
    found: Mapping[bytes, str]

    def source(self, text: str) -> str | None:
        """Return the test set that a text shares words with; None where there is none."""
        return next((self.found[key] for key in _keys(text, self.words) if key in self.found), None)


def read_known(sources: Sequence[str], *, words: int) -> Known:
    """Read the questions and answers of test sets.

    Raises:
      DataError: a source that cannot be read.
    """
    found: dict[bytes, str] = {}
    for source in sources:
        for row in each_row(source):
            for text in _texts(row.value, row.where):
                for key in _keys(text, words):
                    found.setdefault(key, source)
    if sources and not found:
        raise DataError(f"{', '.join(sources)}: no texts to compare with")
    return Known(words, found)


def _texts(value: object, where: str) -> Iterable[str]:
    if isinstance(value, Mapping):
        answers = any(value.get(name) is not None for name in ("chosen", "rejected", "responses"))
        row = value if answers else {**value, "responses": ["-"]}
        value = Comparison.from_row(row, where=where, labelled=False)
    if not isinstance(value, Comparison):
        raise DataError(f"{where}: expected an object with fields, found {quote(value)}")
    return value.question, *value.responses


def _keys(text: str, size: int) -> Iterable[bytes]:
    words = words_of(text)
    if len(words) >= _LEAST:
        for run in runs(words, size):
            yield blake2b(" ".join(run).encode(), digest_size=8).digest()


def find(pairs: Sequence[Pair], known: Known) -> dict[str, str]:
    """Return the pairs with such a text, and the test set."""
    found = {}
    for pair in pairs:
        comparison = pair.comparison
        named = (
            ("question", comparison.question),
            ("chosen answer", pair.chosen),
            ("rejected answer", pair.rejected),
        )
        for name, text in named:
            if source := known.source(text):
                found[pair.id] = f"{pair.id}: the {name} occurs in {source}"
                break
    return found
