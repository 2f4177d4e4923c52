"""No answer is a refusal, or empty."""

from __future__ import annotations

import re
from collections.abc import Sequence
from typing import Final

from prb_jax.building.gates.gate import Pair

DEFINITION: Final = "share of pairs with an answer that refuses, or is empty"

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


def refusal(text: str) -> str | None:
    """Return how a text refuses to answer; None where it does not."""
    if not text.strip():
        return "is empty"
    return "refuses" if _REFUSAL.match(text) else None


def find(pairs: Sequence[Pair]) -> dict[str, str]:
    """Return the pairs with such an answer, and which one it is."""
    return {
        pair.id: f"{pair.id}: the {side} answer {fault}"
        for pair in pairs
        for side, text in (("rejected", pair.rejected), ("chosen", pair.chosen))
        if (fault := refusal(text))
    }
