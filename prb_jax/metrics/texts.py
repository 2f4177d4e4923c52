"""How near a text is to the text that a person wrote: ROUGE and BLEU of the packages that the field uses."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from functools import cache
from typing import Any, Final

KINDS: Final = ("rouge1", "rouge2", "rougeL")
STEMMED: Final = "_stemmed"

TEXT_FIGURES: Final = (*KINDS, *(kind + STEMMED for kind in KINDS), "bleu", "length_ratio")
"""The figures of a text, in the order in which they are shown."""

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
"""What a table calls the figures, each with its range."""


def text_figures(text: str, reference: str) -> dict[str, float]:
    """Return the figures of a text beside a reference: each of ``TEXT_FIGURES``.

    Args:
      text: may be empty.
      reference: with at least one word.
    """
    from sacrebleu.metrics.bleu import BLEU

    found: dict[str, float] = {}
    for stemmed in (False, True):
        scores = _scorer(stemmed).score(reference, text)
        found |= {kind + STEMMED * stemmed: float(scores[kind].fmeasure) for kind in KINDS}
    found["bleu"] = float(BLEU(effective_order=True).sentence_score(text, [reference]).score)
    found["length_ratio"] = len(text.split()) / max(len(reference.split()), 1)
    return found


def rouge_l(text: str, reference: str) -> float:
    """Return the F1 of the longest common subsequence of words, without stemming; 0 where one has none."""
    return float(_scorer(False).score(reference, text)["rougeL"].fmeasure)


def corpus_bleu(texts: Sequence[str], references: Sequence[str]) -> float:
    """Return the BLEU of all texts together, each with one reference, 0 to 100."""
    from sacrebleu.metrics.bleu import BLEU

    return float(BLEU().corpus_score(list(texts), [list(references)]).score)


@cache
def _scorer(stemmed: bool) -> Any:
    from rouge_score.rouge_scorer import RougeScorer

    return RougeScorer(list(KINDS), use_stemmer=stemmed)
