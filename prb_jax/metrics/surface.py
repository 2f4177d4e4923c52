"""The surface of a text: what the way of writing it to a file left on it, its length, and its layout."""

from __future__ import annotations

import math
import re
from collections.abc import Sequence
from typing import Final

import numpy as np

WRAPPERS: Final = {
    "a list bracket at the start": re.compile(r"\A\s*[\[(]['\"]"),
    "a list bracket at the end": re.compile(r"['\"][\])]\s*\Z"),
    "a bracket at the start": re.compile(r"\A[\[{<]"),
    "a bracket at the end": re.compile(r"[\]}>]\Z"),
    "a quotation mark at the start": re.compile(r"\A[\"'`“]"),
    "a quotation mark at the end": re.compile(r"[\"'`”]\Z"),
    "blanks at the start": re.compile(r"\A\s"),
    "blanks at the end": re.compile(r"\s\Z"),
    "the name of a role at the start": re.compile(
        r"\A\s*(assistant|user|system|human|bot|response [ab12]|answer)\s*:", re.I
    ),
    "a special token": re.compile(r"<\|[^|<>]{1,40}\|>|</?s>|\[/?INST\]"),
    "a written-out line break": re.compile(r"\\n"),
}
"""Parts of a text that come from the way in which it was written to a file, and not from its author."""


def wrapper_features(texts: Sequence[str]) -> np.ndarray:
    """Return which wrappers each text has, float32 [R, wrappers]."""
    return np.array([[bool(p.search(text)) for p in WRAPPERS.values()] for text in texts], np.float32)


_LAYOUT: Final = {
    "sentences": re.compile(r"[.!?…]+(?=\s|\Z)"),
    "paragraphs": re.compile(r"\n\s*\n"),
    "list items": re.compile(r"^\s*(?:[-*•]|\d+[.)])\s", re.M),
    "headings": re.compile(r"^\s*#{1,6}\s", re.M),
    "bold or italic words": re.compile(r"\*\*|__|(?<!\w)\*(?=\w)"),
    "code": re.compile(r"`"),
    "links": re.compile(r"https?://|\]\("),
    "questions": re.compile(r"\?"),
    "exclamations": re.compile(r"!"),
    "commas": re.compile(r","),
    "colons and semicolons": re.compile(r"[:;]"),
    "dashes": re.compile(r"[–—]| - "),
    "brackets": re.compile(r"[()\[\]{}]"),
    "quotation marks": re.compile(r"[\"“”]"),
    "digits": re.compile(r"\d"),
    "letters beyond ASCII": re.compile(r"[^\x00-\x7f]"),
    "words in capitals": re.compile(r"\b[A-Z]{2,}\b"),
}

SURFACE: Final = ("words", "letters of a word", *_LAYOUT, *WRAPPERS)
"""Names of the columns of `surface_features`."""


def count_words(text: str) -> int:
    """Return how many words a text has, as blanks part them."""
    return len(text.split())


def surface_features(texts: Sequence[str]) -> np.ndarray:
    """Return the surface of each text, float64 [R, len(SURFACE)]: logarithms of counts, and which wrappers it has."""
    layout = np.zeros((len(texts), 2 + len(_LAYOUT)))
    for row, text in enumerate(texts):
        words = count_words(text)
        layout[row, 0] = math.log1p(words)
        layout[row, 1] = math.log1p(len("".join(text.split())) / max(words, 1))
        layout[row, 2:] = [math.log1p(len(pattern.findall(text))) for pattern in _LAYOUT.values()]
    return np.concatenate([layout, wrapper_features(texts).reshape(len(texts), -1)], axis=1)
