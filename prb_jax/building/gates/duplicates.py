"""No two answers are nearly the same."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Final

from prb_jax.building.gates.gate import Pair
from prb_jax.building.gates.similar import NearTexts, shingles, similarity

DEFINITION: Final = (
    "share of pairs with an answer that is nearly the same as one of an earlier pair (Jaccard similarity of word "
    "triples), or whose two answers are the same"
)

_SAME: Final = 0.95


def find(pairs: Sequence[Pair], *, least: float) -> dict[str, str]:
    """Return the pairs that are left out so that no two answers are that similar; the first of two stays.

    Args:
      pairs: in their order.
      least: similarity from which two answers are near-duplicates.
    """
    index, found = NearTexts(least), dict[str, str]()
    for pair in pairs:
        texts = (pair.chosen, pair.rejected)
        if similarity(shingles(pair.chosen), shingles(pair.rejected)) >= _SAME:
            found[pair.id] = f"{pair.id}: its two answers are the same"
        elif near := [owner for text in texts for owner in index.owners(text)]:
            found[pair.id] = f"{pair.id}: an answer is nearly that of {near[0]}"
        else:
            for text in texts:
                index.add(pair.id, text)
    return found
