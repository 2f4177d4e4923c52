"""Read a judge's reply: take off its thoughts, and find its verdict, A or B."""

from __future__ import annotations

import re
from typing import Final

from prb_jax.records.template_marks import without_end_marks

_THOUGHTS: Final = (
    (r"<think>", r"</think>"),
    (r"<thinking>", r"</thinking>"),
    (r"<thought>", r"</thought>"),
    (r"<reasoning>", r"</reasoning>"),
    (r"<reason>", r"</reason>"),
    (r"<analysis>", r"</analysis>"),
    (r"<scratchpad>", r"</scratchpad>"),
    (r"<reflection>", r"</reflection>"),
    (r"<seed:think>", r"</seed:think>"),
    (r"<longcat_think>", r"</longcat_think>"),
    (r"\[THINK\]", r"\[/THINK\]"),
    (r"◁think▷", r"◁/think▷"),
    (r"<\|START_THINKING\|>", r"<\|END_THINKING\|>"),
    (r"<\|begin_of_thought\|>", r"<\|end_of_thought\|>"),
    (r"<\|inner_prefix\|>", r"<\|inner_suffix\|>"),
    (r"<\|channel>thought", r"<channel\|>"),
    (r"<\|channel\|>", r"<\|channel\|>final<\|message\|>"),  # harmony: whatever is not final is a thought
    (r"\Aanalysis(?=[A-Z])", r"assistantfinal"),  # harmony without its special tokens
)
"""Marks before and behind the thoughts of models."""

_OPENED, _CLOSED = (re.compile("|".join(marks), re.IGNORECASE) for marks in zip(*_THOUGHTS, strict=True))

_ANSWER: Final = r"(?:answer|response|option|assistant)"
_EITHER = re.compile(r"\(?\b(?:between a and b|a ?(?:or|/|vs\.?|versus) ?b)\b\)?", re.IGNORECASE)
_DECIDED = re.compile(
    rf"\W*(?:(?:is|{_ANSWER})\b\W*)*([ab])(?![\w/'’])[*_`\"'\])}}]*\s*(?P<end>[.!;]|$|[-–—:(])",
    re.IGNORECASE,
)
_TIE = re.compile(
    r"\b(?:ties?|tied|draws?|drawn|equal(?:ly|s)?|same|neither|none|both|evenly|identical|equivalent|comparable|"
    r"indistinguishable|undecided|inconclusive|toss-?up|dead heat|(?:can't|can’t|cannot|unable to) (?:decide|say|tell)|"
    r"no (?:clear |real )?(?:winner|preference|difference|verdict)|"
    r"(?:worse|weaker|less \w+) than|inferior to|lo(?:st|ses) to)\b",
    re.IGNORECASE,
)
"""Words of a tie, and of comparisons that name the worse answer first."""
_OTHER = re.compile(rf"\b(?:not|than|over|against|beats|instead of)\s+(?:{_ANSWER}\s+)?[AB]\b")
_AGAINST = re.compile(
    r"(?<![\w/'’])[AB]\s+(?:(?:is|was|does|did|do|would|could|can|seems|looks)(?:n['’]t|\s+not)\b|cannot\b|can['’]t\b|"
    r"(?:is|was|seems|looks)\s+(?:[a-z]+\s+)?(?:worse|worst|weaker|inferior|less)\b|"
    r"gives less\b|(?:fails?|failed|loses|lost|lacks|misses|missed|ignores|ignored)\b)"
)
"""What speaks against the answer of the letter before it, and does not say that the other one is better."""
_ARTICLE = re.compile(
    r"\W*A\s+(?:(?!the\b|(?:w|c|sh)ould\b|will\b|can\b|did\b|does\b|may\b|might\b)[a-z]+(?:(?<!s)|(?<=ous))\s+){0,3}"
    r"(?:edge|lead|preference|advantage|win|victory|nod|vote|point|plus|call|choice|margin|majority)\b"
)
"""The A of "a slight edge to B", which is no letter of an answer."""
_AFTER_A = re.compile(
    r"\W*A\s+(?!(?:is|was|wins|has|and|but|because|since|as|for|by|due|with|though|although|better|fits|gives|does)\b)[a-z]"
)
"""An A that may be an article, or the subject of any verb: "A outperforms B" and "A step ahead: B" begin alike."""
_LETTER = re.compile(
    rf"\b{_ANSWER}\s+(?P<named>[abAB])\b|(?<![\w/'’])(?P<capital>[AB])(?![\w/'’])|"
    r"(?<![\w/'’])(?P<small>[ab])(?=[\s*_`\"'\])}]*(?:[.,;:!?]|$))"
)


def has_thoughts(reply: str) -> bool:
    """Return whether a reply holds a mark that begins or ends thoughts."""
    return bool(_OPENED.search(reply) or _CLOSED.search(reply))


def answer_start(reply: str) -> int | None:
    """Return where the answer behind the thoughts begins; None if a thought is not closed."""
    start = max((closed.end() for closed in _CLOSED.finditer(reply)), default=0)
    return None if _OPENED.search(reply, start) else start


def without_thoughts(reply: str) -> str | None:
    """Return a reply without its thoughts; None if a thought is not closed."""
    start = answer_start(reply)
    return None if start is None else without_end_marks(reply[start:])


def read_verdict(reply: str) -> str | None:
    """Return A or B: the whole reply, or the letter behind its last "verdict".

    Return None for a tie, for a line that names both letters, and if there is no letter.

    A thought that is not closed has no verdict.
    """
    answer = without_thoughts(reply)
    if answer is None:
        return None
    letter = answer.strip().strip("*`\"'.()[]: ").upper()
    if letter in ("A", "B"):
        return letter
    for told in reversed(list(re.finditer(r"\bverdict\b\W*", answer, re.IGNORECASE))):
        letters = _letters(answer[told.end() :].partition("\n")[0])
        if letters:
            return letters if len(letters) == 1 else None
    return None


def _letters(line: str) -> str:
    """Return the letters that a line names as the better answer, "AB" for a tie or where it cannot be told."""
    line = _EITHER.sub(" ", line)
    decided = _DECIDED.match(line)
    if decided and decided["end"] in (".", "!", ";", ""):
        return decided[1].upper()
    if _TIE.search(line):
        return "AB"
    if decided:
        return decided[1].upper()
    if _ARTICLE.match(line):
        line = line.replace("A", "", 1)
    elif _AFTER_A.match(line) or _AGAINST.search(line):
        return "AB"
    named = {found[found.lastgroup or 0].upper() for found in _LETTER.finditer(_OTHER.sub(" ", line))}
    return "".join(sorted(named))
