"""No answer is cut off."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Final

from prb_jax.building.gates.gate import Pair

DEFINITION: Final = (
    "share of pairs with an answer that ran into the limit of tokens, or ends within a sentence"
)

_ENDS: Final = tuple(".!?…。！？\"”’')]»*_`:)")


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


def find(pairs: Sequence[Pair]) -> dict[str, str]:
    """Return the pairs with such an answer, and which one it is."""
    return {
        pair.id: f"{pair.id}: the {side} answer {fault}"
        for pair in pairs
        for side, text, finish in (
            ("rejected", pair.rejected, pair.finishes[1]),
            ("chosen", pair.chosen, pair.finishes[0]),
        )
        if (fault := truncation(text, finish))
    }
