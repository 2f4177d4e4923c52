"""Faults for which a gate drops a pair.

Answers refuse, are cut off, repeat an aspect, or nearly equal an answer of another pair; texts contain personal
contact data, or occur in a known test set. MinHash finds candidates for near-duplicates; their similarity is then
computed exactly.
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
from prb_jax.errors import DataError, quote
from prb_jax.platform.extras import need_extra
from prb_jax.records.comparison import Comparison, RubricAspect
from prb_jax.records.intake import each_row

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
"""Fewest words of an aspect's name for which its occurrence in an answer counts as copied."""

_SAME: Final = 0.95  # similarity from which a pair's two answers count as the same

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
_LEAST_KNOWN: Final = 4  # fewest words of a text shorter than a run that is compared as a whole
_WORD: Final = re.compile(r"[^\W_]+(?:[’'][^\W_]+)*")
_SHINGLE: Final = 3
_PERMUTATIONS: Final = 128
_LOOK_FROM: Final = 0.8
"""Share of the similarity at which MinHash selects candidates: its estimates have an error."""


def words_of(text: str) -> list[str]:
    """Return the words of a text, in lower case and without punctuation."""
    return [word.replace("’", "'") for word in _WORD.findall(text.casefold())]


def runs(words: Sequence[str], size: int) -> Iterator[tuple[str, ...]]:
    """Yield every run of ``size`` consecutive words; the whole text if it is shorter, nothing if it is empty."""
    for start in range(max(1, len(words) - size + 1) if words else 0):
        yield tuple(words[start : start + size])


def similarity(a: frozenset[str], b: frozenset[str]) -> float:
    """Return the Jaccard similarity of two sets; 0 if both are empty."""
    return len(a & b) / len(a | b) if a or b else 0.0


def shingles(text: str) -> frozenset[str]:
    """Return the word triples of a text; the whole text if it has fewer words."""
    return frozenset(" ".join(run) for run in runs(words_of(text), _SHINGLE))


class NearTexts:
    """Index of texts with their owners' names, searched by similarity.

    Args:
      least: Jaccard similarity of word triples from which two texts are near.
    """

    def __init__(self, least: float) -> None:
        need_extra("build", "near-duplicates")
        from datasketch import MinHashLSH  # slow to import

        self._least = least
        self._index = MinHashLSH(threshold=max(0.05, least * _LOOK_FROM), num_perm=_PERMUTATIONS)
        self._texts: list[tuple[str, frozenset[str]]] = []

    def owners(self, text: str) -> list[str]:
        """Return the owners of texts near this one, sorted by name."""
        triples = shingles(text)
        candidates = (self._texts[int(str(key))] for key in self._index.query(_sketch(triples)))
        return sorted({owner for owner, other in candidates if similarity(triples, other) >= self._least})

    def add(self, owner: str, text: str) -> None:
        """Add a text to the index."""
        triples = shingles(text)
        self._index.insert(str(len(self._texts)), _sketch(triples))
        self._texts.append((owner, triples))


def _sketch(triples: frozenset[str]):
    from datasketch import MinHash

    sketch = MinHash(num_perm=_PERMUTATIONS)
    sketch.update_batch([triple.encode() for triple in sorted(triples)])
    return sketch


def refusal(text: str) -> str | None:
    """Return how a text refuses to answer; None if it does not refuse."""
    if not text.strip():
        return "is empty"
    return "refuses" if _REFUSAL.match(text) else None


def truncation(text: str, finish: str | None) -> str | None:
    """Return how a text is cut off; None if it is complete. `finish` is the model's reason for the end."""
    if finish == "length":
        return "ran into the limit of tokens"
    if text.strip() and not text.rstrip().endswith(_ENDS):
        return "ends within a sentence"
    return None


def copied_words(text: str, aspects: Sequence[RubricAspect], *, question: str, words: int) -> str | None:
    """Return the words that an answer shares with an aspect but not with the question; None if there are none.

    A judge that sees the aspects would recognise such an answer without reading it. ``words`` consecutive words count
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
    """Return the pairs with an answer that refuses, and the answer."""
    return _find(pairs, lambda pair, text, finish: refusal(text))


def find_truncations(pairs: Sequence[Pair]) -> dict[str, str]:
    """Return the pairs with an answer that is cut off, and the answer."""
    return _find(pairs, lambda pair, text, finish: truncation(text, finish))


def find_copied_aspects(pairs: Sequence[Pair], *, words: int) -> dict[str, str]:
    """Return the pairs with an answer that repeats an aspect, and the words."""

    def fault(pair: Pair, text: str, finish: str | None) -> str | None:
        aspects, question = pair.comparison.rubric_aspects, pair.comparison.question
        run = copied_words(text, aspects, question=question, words=words)
        return None if run is None else f"has {run!r}"

    return _find(pairs, fault)


def _find(pairs: Sequence[Pair], fault: Callable[[Pair, str, str | None], str | None]) -> dict[str, str]:
    """Return, by pair, the first answer with a fault, and the fault."""
    reasons = {}
    for pair in pairs:
        for side, text, finish in zip(SIDES, pair.comparison.responses, pair.finishes, strict=True):
            if pair.id not in reasons and (reason := fault(pair, text, finish)):
                reasons[pair.id] = f"{pair.id}: the {side} answer {reason}"
    return reasons


def find_duplicates(pairs: Sequence[Pair], *, least: float) -> dict[str, str]:
    """Return the pairs to drop so that no two answers have similarity `least` or more; the earlier pair stays."""
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
    """Return the kind of personal text in a text; None if there is none."""
    for name, pattern in _PATTERNS.items():
        if pattern.search(text):
            return name
    for number in _CARD.findall(text):  # a card number ends in its check digit (Luhn's formula)
        digits = map(int, reversed(re.sub(r"\D", "", number)))
        doubled = (digit * (2 if place % 2 else 1) for place, digit in enumerate(digits))
        if sum(value - 9 if value > 9 else value for value in doubled) % 10 == 0:
            return "a card number"
    return None


def find_personal_texts(pairs: Sequence[Pair]) -> dict[str, str]:
    """Return the pairs with personal text anywhere, and its kind, but not the text itself."""
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
    """Texts of known test sets: digests of runs of ``words`` consecutive words, each with a source that contains it."""

    words: int
    sources: Mapping[bytes, str]

    def source(self, text: str) -> str | None:
        """Return the test set that shares a run of words with a text; None if there is none."""
        return next((self.sources[key] for key in run_keys(text, self.words) if key in self.sources), None)


def read_known_texts(sources: Sequence[str], *, words: int) -> KnownTexts:
    """Read the questions and answers of test sets; raise DataError if one cannot be read."""
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
        raise DataError(f"{', '.join(sources)}: found no texts to compare with")
    return KnownTexts(words, known)


def run_keys(text: str, size: int) -> Iterable[bytes]:
    """Yield a digest of every run of ``size`` words of a text."""
    words = words_of(text)
    if len(words) >= _LEAST_KNOWN:
        for run in runs(words, size):
            yield blake2b(" ".join(run).encode(), digest_size=8).digest()


def find_overlaps(pairs: Sequence[Pair], known: KnownTexts) -> dict[str, str]:
    """Return the pairs with a question or answer from a known test set, and the test set."""
    reasons: dict[str, str] = {}
    for pair in pairs:
        names = ("question", "chosen answer", "rejected answer")
        for name, text in zip(names, (pair.comparison.question, pair.chosen, pair.rejected), strict=True):
            if pair.id not in reasons and (source := known.source(text)):
                reasons[pair.id] = f"{pair.id}: the {name} occurs in {source}"
    return reasons
