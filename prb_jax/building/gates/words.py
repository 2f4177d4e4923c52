"""Texts as words, for gates that look for the same words in two places."""

from __future__ import annotations

import re
from collections.abc import Iterator, Sequence

_WORD = re.compile(r"[^\W_]+(?:[’'][^\W_]+)*")


def words_of(text: str) -> list[str]:
    """Return the words of a text, in lower case and without punctuation."""
    return [word.replace("’", "'") for word in _WORD.findall(text.casefold())]


def runs(words: Sequence[str], size: int) -> Iterator[tuple[str, ...]]:
    """Yield every run of so many consecutive words; the whole text where it has fewer, nothing where it has none."""
    if not words:
        return
    for start in range(max(1, len(words) - size + 1)):
        yield tuple(words[start : start + size])
