"""Texts that are nearly the same: MinHash finds candidates, and their similarity is then computed exactly."""

from __future__ import annotations

from typing import Final

from prb_jax.building.gates.words import runs, words_of

_SHINGLE: Final = 3
_PERMUTATIONS: Final = 128
_LOOK_FROM: Final = 0.8
"""Candidates are looked for from this share of the similarity on: MinHash estimates with an error."""


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
        from datasketch import MinHashLSH  # it is slow to import

        self._least = least
        self._index = MinHashLSH(threshold=max(0.05, least * _LOOK_FROM), num_perm=_PERMUTATIONS)
        self._texts: list[tuple[str, frozenset[str]]] = []

    def owners(self, text: str) -> list[str]:
        """Return who has a text near this one, sorted by name."""
        own = shingles(text)
        found = (self._texts[int(str(key))] for key in self._index.query(_sketch(own)))
        return sorted({owner for owner, other in found if similarity(own, other) >= self._least})

    def add(self, owner: str, text: str) -> None:
        """Keep a text."""
        own = shingles(text)
        self._index.insert(str(len(self._texts)), _sketch(own))
        self._texts.append((owner, own))


def _sketch(own: frozenset[str]):
    from datasketch import MinHash

    sketch = MinHash(num_perm=_PERMUTATIONS)
    sketch.update_batch([each.encode() for each in sorted(own)])
    return sketch
