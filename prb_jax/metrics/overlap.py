"""How much of a reference text another text repeats: ROUGE-1 and ROUGE-L (Lin 2004), without stemming.

Words are runs of ASCII letters and digits in lower case, as in the package rouge-score.
"""

from __future__ import annotations

import re
from collections import Counter

_WORD = re.compile(r"[a-z0-9]+")


def words(text: str) -> list[str]:
    """Return the words of a text."""
    return _WORD.findall(text.lower())


def rouge_1(text: str, reference: str) -> float:
    """Return the F1 of the words that both have, counted as often as in both; 0 where one has none."""
    own, other = words(text), words(reference)
    return _f1(sum((Counter(own) & Counter(other)).values()), len(own), len(other))


def rouge_l(text: str, reference: str) -> float:
    """Return the F1 of the longest common subsequence of words; 0 where one has none."""
    own, other = words(text), words(reference)
    row = [0] * (len(other) + 1)
    for word in own:
        before = row
        row = [0]
        for place, expected in enumerate(other):
            row.append(before[place] + 1 if word == expected else max(before[place + 1], row[place]))
    return _f1(row[-1], len(own), len(other))


def _f1(common: int, own: int, other: int) -> float:
    return 2 * common / (own + other) if common else 0.0
