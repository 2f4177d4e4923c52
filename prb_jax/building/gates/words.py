"""Texts as words: runs of words that occur in two places, and texts that are nearly the same.

MinHash finds candidates for texts that are nearly the same, and their similarity is then computed exactly.
"""

from __future__ import annotations

import re
from collections.abc import Iterator, Sequence
from typing import Final

from prb_jax.errors import need_extra

_WORD: Final = re.compile(r"[^\W_]+(?:[’'][^\W_]+)*")
_SHINGLE: Final = 3
_PERMUTATIONS: Final = 128
_LOOK_FROM: Final = 0.8
"""Candidates are looked for from this share of the similarity on: MinHash estimates with an error."""


def words_of(text: str) -> list[str]:
    """Return the words of a text, in lower case and without punctuation."""
    return [word.replace("’", "'") for word in _WORD.findall(text.casefold())]


def runs(words: Sequence[str], size: int) -> Iterator[tuple[str, ...]]:
    """Yield every run of so many consecutive words; the whole text where it has fewer, nothing where it has none."""
    for start in range(max(1, len(words) - size + 1) if words else 0):
        yield tuple(words[start : start + size])


def similarity(a: frozenset[str], b: frozenset[str]) -> float:
    """Return the Jaccard similarity of two sets; 0 where both are empty."""
    return len(a & b) / len(a | b) if a or b else 0.0


def shingles(text: str) -> frozenset[str]:
    """Return the word triples of a text; the whole text where it has fewer words."""
    return frozenset(" ".join(run) for run in runs(words_of(text), _SHINGLE))


class NearTexts:
    """An index of texts, each with the name of its owner.

    Args:
      least: Jaccard similarity of word triples from which two texts are near.
    """

    def __init__(self, least: float) -> None:
        need_extra("build", "near-duplicates")
        from datasketch import MinHashLSH  # it is slow to import

        self._least = least
        self._index = MinHashLSH(threshold=max(0.05, least * _LOOK_FROM), num_perm=_PERMUTATIONS)
        self._texts: list[tuple[str, frozenset[str]]] = []

    def owners(self, text: str) -> list[str]:
        """Return who has a text near this one, sorted by name."""
        triples = shingles(text)
        candidates = (self._texts[int(str(key))] for key in self._index.query(_sketch(triples)))
        return sorted({owner for owner, other in candidates if similarity(triples, other) >= self._least})

    def add(self, owner: str, text: str) -> None:
        """Keep a text."""
        triples = shingles(text)
        self._index.insert(str(len(self._texts)), _sketch(triples))
        self._texts.append((owner, triples))


def _sketch(triples: frozenset[str]):
    from datasketch import MinHash

    sketch = MinHash(num_perm=_PERMUTATIONS)
    sketch.update_batch([triple.encode() for triple in sorted(triples)])
    return sketch
