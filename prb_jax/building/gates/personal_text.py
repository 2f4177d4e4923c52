"""Nothing that is published has an address or a number by which somebody could be reached."""

from __future__ import annotations

import re
from collections.abc import Sequence
from itertools import chain
from typing import Final

from prb_jax.building.gates.gate import Pair
from prb_jax.data.comparison import Comparison

DEFINITION: Final = (
    "share of pairs with an e-mail address, a telephone, card, account or social security number, or an IP address in "
    "question, profile, aspects, narrative or answers"
)

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


def personal(text: str) -> str | None:
    """Return the kind of personal text that a text holds; None where it holds none."""
    for name, pattern in _PATTERNS.items():
        if pattern.search(text):
            return name
    cards = (re.sub(r"\D", "", found) for found in _CARD.findall(text))
    return "a card number" if any(map(_checks, cards)) else None


def _checks(digits: str) -> bool:
    """Whether digits end in their check digit, by Luhn's formula."""
    doubled = (int(d) * (2 if place % 2 else 1) for place, d in enumerate(reversed(digits)))
    return sum(value - 9 if value > 9 else value for value in doubled) % 10 == 0


def texts_of(comparison: Comparison) -> chain[str]:
    """Return every text of a comparison."""
    aspects = ((each.aspect, each.evidence, each.reason) for each in comparison.rubric_aspects)
    return chain(
        (turn.content for turn in comparison.prompt),
        comparison.responses,
        (comparison.narrative or "",),
        (post.text for post in comparison.profile),
        chain.from_iterable(aspects),
    )


def find(pairs: Sequence[Pair]) -> dict[str, str]:
    """Return the pairs with such a text, and its kind; not the text itself."""
    found = {}
    for pair in pairs:
        kind = next(filter(None, map(personal, texts_of(pair.comparison))), None)
        if kind is not None:
            found[pair.id] = f"{pair.id}: holds {kind}; --redact replaces most of it"
    return found
