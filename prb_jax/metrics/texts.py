"""Figures of texts: surface features, and similarity to a reference by the field's standard ROUGE and BLEU."""

from __future__ import annotations

import math
import re
from collections.abc import Mapping, Sequence
from functools import cache
from typing import Any, Final

import numpy as np

KINDS: Final = ("rouge1", "rouge2", "rougeL")
STEMMED: Final = "_stemmed"

TEXT_FIGURES: Final = (*KINDS, *(kind + STEMMED for kind in KINDS), "bleu", "length_ratio")
"""The figures of a text, in display order."""

TEXT_DEFINITIONS: Final[Mapping[str, str]] = {
    "rouge1": "F1 of words (rouge-score), without stemming; rouge2 of pairs of words, rougeL of the longest common "
    "subsequence",
    "rouge1_stemmed": "the same with the Porter stemmer",
    "bleu": "sentence BLEU of sacreBLEU with effective order, 0 to 100",
    "corpus_bleu": "BLEU of all texts together",
    "length_ratio": "words of the text / words of the person's own text",
}

TEXT_LABELS: Final[Mapping[str, str]] = {
    **{
        kind + stemmed: f"ROUGE-{kind.removeprefix('rouge')} F1{', stemmed' if stemmed else ''} (0 to 1)"
        for stemmed in ("", STEMMED)
        for kind in KINDS
    },
    "bleu": "BLEU (0 to 100)",
    "length_ratio": "length / length of the preferred response",
    "corpus_bleu": "BLEU of all texts together (0 to 100)",
}
"""Labels of the figures in tables, each with its range."""


def text_figures(text: str, reference: str) -> dict[str, float]:
    """Return the figures ``TEXT_FIGURES`` of a text, which may be empty, compared with a reference of at least one
    word."""
    from sacrebleu.metrics.bleu import BLEU

    figures: dict[str, float] = {}
    for stemmed in (False, True):
        scores = _scorer(stemmed).score(reference, text)
        figures |= {kind + STEMMED * stemmed: float(scores[kind].fmeasure) for kind in KINDS}
    figures["bleu"] = float(BLEU(effective_order=True).sentence_score(text, [reference]).score)
    figures["length_ratio"] = len(text.split()) / max(len(reference.split()), 1)
    return figures


def rouge_l(text: str, reference: str) -> float:
    """Return the F1 of the longest common subsequence of words, without stemming; 0 if a text has no words."""
    return float(_scorer(False).score(reference, text)["rougeL"].fmeasure)


def corpus_bleu(texts: Sequence[str], references: Sequence[str]) -> float:
    """Return the BLEU of all texts together, each with one reference, 0 to 100."""
    from sacrebleu.metrics.bleu import BLEU

    return float(BLEU().corpus_score(list(texts), [list(references)]).score)


@cache
def _scorer(stemmed: bool) -> Any:
    from rouge_score.rouge_scorer import RougeScorer

    return RougeScorer(list(KINDS), use_stemmer=stemmed)


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
"""Parts of a text that come from how it was written to a file, and not from its author."""


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
    """Return the number of whitespace-separated words of a text."""
    return len(text.split())


def surface_features(texts: Sequence[str]) -> np.ndarray:
    """Return surface features of each text, float64 [R, len(SURFACE)]: logarithms of counts, and wrapper flags."""
    layout = np.zeros((len(texts), 2 + len(_LAYOUT)))
    for row, text in enumerate(texts):
        words = count_words(text)
        layout[row, 0] = math.log1p(words)
        layout[row, 1] = math.log1p(len("".join(text.split())) / max(words, 1))
        layout[row, 2:] = [math.log1p(len(pattern.findall(text))) for pattern in _LAYOUT.values()]
    return np.concatenate([layout, wrapper_features(texts).reshape(len(texts), -1)], axis=1)
