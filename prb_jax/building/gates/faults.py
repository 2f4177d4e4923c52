"""Faults of pairs, by which a gate leaves one out.

Answers refuse, are cut off, repeat an aspect, or are nearly those of another pair; a text tells how somebody could be
reached, or occurs in a known test set. MinHash finds candidates for texts that are nearly the same, and their
similarity is then computed exactly.
"""

from __future__ import annotations

import re
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from hashlib import blake2b
from itertools import chain
from typing import Final

from prb_jax.building.gates.gate import Pair
from prb_jax.building.settings import SIDES
from prb_jax.errors import DataError, need_extra, quote
from prb_jax.records.comparison import Comparison, RubricAspect
from prb_jax.records.sources.reading import each_row

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
_ENDS: Final = tuple(".!?…。！？\"”’')]»*_`:)")
_LEAST_NAME: Final = 2
"""Words of the name of an aspect from which its occurrence in an answer counts as copied."""

_SAME: Final = 0.95  # similarity from which the two answers of a pair are the same

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
_LEAST_KNOWN: Final = 4  # words that a text shorter than a run must have to count as a whole
_WORD: Final = re.compile(r"[^\W_]+(?:[’'][^\W_]+)*")
_SHINGLE: Final = 3
_PERMUTATIONS: Final = 128
_LOOK_FROM: Final = 0.8
"""Candidates are looked for from this share of the similarity on: MinHash estimates with an error."""


def words_of(text: str) -> list[str]:
    """Return the words of a text, in lower case and without punctuation."""
    return [word.replace("’", "'") for word in _WORD.findall(text.casefold())]


def runs(words: Sequence[str], size: int) -> Iterator[tuple[str, ...]]:
    """Yield every run of ``size`` consecutive words; the whole text where it is shorter, nothing for an empty one."""
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


def refusal(text: str) -> str | None:
    """Return how a text refuses to answer; None where it does not."""
    if not text.strip():
        return "is empty"
    return "refuses" if _REFUSAL.match(text) else None


def truncation(text: str, finish: str | None) -> str | None:
    """Return how a text is cut; None where it is whole. `finish` is why it ends, as the model says."""
    if finish == "length":
        return "ran into the limit of tokens"
    if text.strip() and not text.rstrip().endswith(_ENDS):
        return "ends within a sentence"
    return None


def copied_words(text: str, aspects: Sequence[RubricAspect], *, question: str, words: int) -> str | None:
    """Return the words that an answer has from an aspect and not from the question; None where it has none.

    A judge who is shown the aspects would find such an answer without reading it. So many consecutive ``words`` count
    as copied.
    """
    answer, asked = words_of(text), words_of(question)
    answer_runs = set(runs(answer, words))

    def holds(run: tuple[str, ...], inside: Sequence[str]) -> bool:
        size = len(run)
        return any(tuple(inside[k : k + size]) == run for k in range(len(inside) - size + 1))

    for aspect in aspects:
        name = tuple(words_of(aspect.aspect))
        wanted = [name] if len(name) >= _LEAST_NAME else []
        for part in (aspect.aspect, aspect.evidence, aspect.reason):
            wanted += [run for run in runs(words_of(part), words) if len(run) == words]
        for run in wanted:
            if (run in answer_runs or (len(run) != words and holds(run, answer))) and not holds(run, asked):
                return " ".join(run)
    return None


def find_refusals(pairs: Sequence[Pair]) -> dict[str, str]:
    """Return the pairs with an answer that refuses, and which one it is."""
    return _find(pairs, lambda pair, text, finish: refusal(text))


def find_truncations(pairs: Sequence[Pair]) -> dict[str, str]:
    """Return the pairs with an answer that is cut off, and which one it is."""
    return _find(pairs, lambda pair, text, finish: truncation(text, finish))


def find_copied_aspects(pairs: Sequence[Pair], *, words: int) -> dict[str, str]:
    """Return the pairs with an answer that repeats an aspect, and the words."""

    def fault(pair: Pair, text: str, finish: str | None) -> str | None:
        aspects, question = pair.comparison.rubric_aspects, pair.comparison.question
        run = copied_words(text, aspects, question=question, words=words)
        return None if run is None else f"has {run!r}"

    return _find(pairs, fault)


def _find(pairs: Sequence[Pair], fault: Callable[[Pair, str, str | None], str | None]) -> dict[str, str]:
    """By pair, the first answer with a fault, and the fault."""
    reasons = {}
    for pair in pairs:
        for side, text, finish in zip(SIDES, pair.comparison.responses, pair.finishes, strict=True):
            if pair.id not in reasons and (reason := fault(pair, text, finish)):
                reasons[pair.id] = f"{pair.id}: the {side} answer {reason}"
    return reasons


def find_duplicates(pairs: Sequence[Pair], *, least: float) -> dict[str, str]:
    """Return the pairs that are left out so that no two answers are `least` similar or more; the first of two stays."""
    index, reasons = NearTexts(least), dict[str, str]()
    for pair in pairs:
        texts = (pair.chosen, pair.rejected)
        if similarity(shingles(pair.chosen), shingles(pair.rejected)) >= _SAME:
            reasons[pair.id] = f"{pair.id}: its two answers are the same"
        elif near := [owner for text in texts for owner in index.owners(text)]:
            reasons[pair.id] = f"{pair.id}: an answer is nearly that of {near[0]}"
        else:
            for text in texts:
                index.add(pair.id, text)
    return reasons


def personal_text(text: str) -> str | None:
    """Return the kind of personal text that a text holds; None where it holds none."""
    for name, pattern in _PATTERNS.items():
        if pattern.search(text):
            return name
    for number in _CARD.findall(text):  # one that ends in its check digit, by Luhn's formula
        digits = map(int, reversed(re.sub(r"\D", "", number)))
        doubled = (digit * (2 if place % 2 else 1) for place, digit in enumerate(digits))
        if sum(value - 9 if value > 9 else value for value in doubled) % 10 == 0:
            return "a card number"
    return None


def find_personal_texts(pairs: Sequence[Pair]) -> dict[str, str]:
    """Return the pairs that hold personal text anywhere, and its kind; not the text itself."""
    reasons = {}
    for pair in pairs:
        comparison = pair.comparison
        texts = chain(
            (turn.content for turn in comparison.prompt),
            comparison.responses,
            (comparison.narrative or "",),
            (post.text for post in comparison.profile),
            *((aspect.aspect, aspect.evidence, aspect.reason) for aspect in comparison.rubric_aspects),
        )
        if kind := next(filter(None, map(personal_text, texts)), None):
            reasons[pair.id] = f"{pair.id}: holds {kind}; --redact replaces most of it"
    return reasons


@dataclass(frozen=True)
class KnownTexts:
    """The texts of known test sets: the one in which each run of so many consecutive words occurs, by its digest."""

    words: int
    sources: Mapping[bytes, str]

    def source(self, text: str) -> str | None:
        """Return the test set that a text shares words with; None where there is none."""
        return next((self.sources[key] for key in run_keys(text, self.words) if key in self.sources), None)


def read_known_texts(sources: Sequence[str], *, words: int) -> KnownTexts:
    """Read the questions and answers of test sets; DataError where one cannot be read."""
    known: dict[bytes, str] = {}
    for source in sources:
        for row in each_row(source):
            value = row.value
            if isinstance(value, Mapping):
                answers = any(value.get(name) is not None for name in ("chosen", "rejected", "responses"))
                fields = value if answers else {**value, "responses": ["-"]}
                value = Comparison.from_row(fields, where=row.where, labelled=False)
            if not isinstance(value, Comparison):
                raise DataError(f"{row.where}: expected an object with fields, found {quote(value)}")
            for text in (value.question, *value.responses):
                for key in run_keys(text, words):
                    known.setdefault(key, source)
    if sources and not known:
        raise DataError(f"{', '.join(sources)}: no texts to compare with")
    return KnownTexts(words, known)


def run_keys(text: str, size: int) -> Iterable[bytes]:
    """Yield a digest of every run of ``size`` words of a text."""
    words = words_of(text)
    if len(words) >= _LEAST_KNOWN:
        for run in runs(words, size):
            yield blake2b(" ".join(run).encode(), digest_size=8).digest()


def find_overlaps(pairs: Sequence[Pair], known: KnownTexts) -> dict[str, str]:
    """Return the pairs with a question or answer of a known test set, and the test set."""
    reasons: dict[str, str] = {}
    for pair in pairs:
        names = ("question", "chosen answer", "rejected answer")
        for name, text in zip(names, (pair.comparison.question, pair.chosen, pair.rejected), strict=True):
            if pair.id not in reasons and (source := known.source(text)):
                reasons[pair.id] = f"{pair.id}: the {name} occurs in {source}"
    return reasons
