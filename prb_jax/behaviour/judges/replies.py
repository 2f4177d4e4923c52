"""Read a judge's reply: remove its thoughts, and find its verdict, A or B."""

from __future__ import annotations

import re
from typing import Final

from prb_jax.records.template_marks import without_end_marks

_WORDS: Final = "think|thought|reason|rationale|reflect|scratchpad|analysis|monologue"
_NAME: Final = rf"(?:[\w:.-]{{0,30}}(?:{_WORDS})[\w:.-]{{0,30}}|cot)"
"""Names with which models mark thoughts, e.g. `seed:think`, `internal_reasoning` and `chain_of_thought`."""
_THOUGHTS: Final = (
    (rf"<{_NAME}\s*>", rf"</{_NAME}\s*>"),
    (rf"<\|(?!/|end){_NAME}\|>", rf"<\|(?:/|end[_-]?){_NAME}\|>"),  # <|START_THINKING|>, <|end_of_thought|>
    (r"\[THINK(?:ING)?\]", r"\[/THINK(?:ING)?\]"),
    (r"\[(?:BEGIN|START)[ _]THOUGHTS?\]", r"\[END[ _]THOUGHTS?\]"),
    (r"◁think▷", r"◁/think▷"),
    (r"<\|inner_prefix\|>", r"<\|inner_suffix\|>"),
    (r"<\|channel>thought", r"<channel\|>"),
    (r"<unused94>thought", r"<unused95>"),
    (r"<\|channel\|>", r"<\|channel\|>final<\|message\|>"),  # harmony: all but `final`
    (r"\A(?:assistant)?analysis(?=[A-Z])", r"assistantfinal"),  # harmony without its special tokens
    (r"\AThinking\.\.\.\s", r"\.\.\.done thinking\."),
)
"""Marks before and after the thoughts of models."""

_OPENING_MARKS: Final = "|".join(opened for opened, _ in _THOUGHTS)
_OPENED, _CLOSED = (re.compile("|".join(marks), re.IGNORECASE) for marks in zip(*_THOUGHTS, strict=True))

_LETTER: Final = re.compile(r"(?:(?:answer|response|option|assistant)\s+)?([ab])(?![\w/'’])", re.IGNORECASE)
_QUOTED: Final = re.compile(r"['‘“]([AB])['’”](?!\w)", re.IGNORECASE)
_SHOWN: Final = re.compile(
    r"\b(?:answer|response|option|assistant)\s+[abAB]\b|(?<![\w/'’])[AB](?![\w/'’])|"
    r"(?<![\w/'’])[ab](?=\s*(?:[.,;:!?]|$))"
)
"""A letter that names an answer, as opposed to an article."""
_EITHER: Final = re.compile(
    r"\(?\b(?:between a and b|a ?(?:or|/|vs\.?|versus) ?b)\b\)?\s*[:?]?", re.IGNORECASE
)
_ECHO: Final = re.compile(r"\bverdict\W*A\W+or\W+verdict\W*B\b", re.IGNORECASE)  # the instruction, repeated
_MARKUP: Final = re.compile(
    r"\\boxed|</?(?:answer|verdict|output|final)>|<\|(?:START|END)_(?:RESPONSE|TEXT)\|>|```|[*_`\"{}$\[\]]",
    re.IGNORECASE,
)

_ADJECTIVE: Final = (
    r"(?:very|rather|slight|small|tiny|narrow|marginal|mild|modest|moderate|clear|strong|big|large|generous|close|"
    r"final|overall|better|best|preferred|stronger|superior|right)"
)
_NOUN: Final = (
    r"(?:edge|lead|preference|advantage|win|victory|nod|vote|point|plus|call|choice|pick|winner|decision|verdict|"
    r"one|answer|response|option)"
)
_ADVERB: Final = (
    r"(?:clearly|slightly|narrowly|marginally|easily|definitely|probably|overall|much|far|just|still|simply|a bit|"
    r"a lot|a little)"
)
_BEFORE: Final = re.compile(
    rf"(?:(?:(?:an?|the|my|our)\s+(?:{_ADJECTIVE}\s+)*{_NOUN}|{_ADVERB}|so|thus|hence|therefore|then|and|but|if forced|"
    r"is|it is|it['’]s|that|would be|must be|goes|go|going|to|for|with|(?:in )?favou?rs?(?: of)?|in|towards?|"
    r"i['’]d|i|we|the user|this user|user|would|will|prefers?|chooses?|chose|picks?|selects?)(?!\w)[\s:]*)+",
    re.IGNORECASE,
)
"""Words that may precede the letter of the better answer: all of them support the letter."""
_BETTER: Final = re.compile(
    rf"\s+(?:{_ADVERB}\s+)*(?:wins|won|prevails|is(?:\s+{_ADVERB})*\s+(?:preferred|preferable|superior|stronger|better|best|"
    rf"(?:the\s+)?(?:{_ADJECTIVE}\s+)*(?:winner|better|best|one|answer|response|option|choice|pick)))"
    rf"(?:\s+(?:here|overall|{_ADVERB}))*",
    re.IGNORECASE,
)
_OTHER: Final = re.compile(
    r"\b(?:not|than|over|instead of|rather than)\s+(?:answer\s+|response\s+|option\s+|assistant\s+)?[AB]\b(?:\s+but\b)?"
)
_REASON: Final = re.compile(
    r"(?:[.!;](?=\s|$)|\s[-–—]+\s|\s*[—(]|,?\s(?:because|since|due to|given|though|although)\b)",
    re.IGNORECASE,
)
"""Separates a verdict from its reason."""
_AGAIN: Final = re.compile(
    r"\b(?:wait|actually|correction|scratch that|on second thoughts?|hmm|sorry|i mean)\b|\bno\s*[,:;.!–—]",
    re.IGNORECASE,
)
"""Words of a judge that changes its mind."""
_WORSE: Final = re.compile(
    r"\W*(?:(?:is|the|clearly|much)\s+)*(?:worse|worst|weaker|inferior|rejected|loser|wrong)\b", re.I
)
_DENIED: Final = re.compile(
    r"(?:\b(?:no|without|cannot|never|not)\b|n['’]t\b)(?:\s+(?:give|reach|state|make|there|is|an?|any|clear|final|my))*\s*\Z",
    re.IGNORECASE,
)
"""Words before "verdict" that say there is none."""
_CONTRARY: Final = (
    r"^\W*(?:(?:answer|response|option|assistant)\s+)?(?-i:{letter})\W*$|"  # a line with only the other letter
    r"\b(?:vs\.?|versus)\s+(?-i:{letter})\b|"
    r"^\W*(?:edit|update|corrected|correction|final|revised|better|best|winner)\b[^.\n]{{0,40}}?(?:\bis|:)\s*"
    r"(?:(?:the|answer|response|option|assistant)\s+)*(?-i:{letter})\b|"
    r"\b(?:better|best|preferred|stronger|superior)\s+(?:one|answer|response|option|choice)\s+is\s+"
    r"(?:(?:answer|response|option|assistant)\s+)?(?-i:{letter})\b"
)
_CORRECTED: Final = re.compile(
    r"^\W*(?:edit|update|corrected|correction|revised)\b[^\n]{0,40}\d", re.IGNORECASE | re.MULTILINE
)
_CONCEDED: Final = re.compile(
    r"\b(?:although|though|while|whereas|even if|because|since|if|where)\b[^.;\n]*\Z", re.IGNORECASE
)
"""The beginning of a clause that does not decide."""
_UNDECIDED: Final = re.compile(
    r"\b(?:ties?|tied|draws?|drawn|equal(?:ly|s)?|same|neither|none|both|evenly|identical|equivalent|comparable|"
    r"indistinguishable|undecided|inconclusive|unsure|unclear|uncertain|toss-?up|dead heat|never|no|cannot)\b|"
    r"\bnot\b|n['’]t\b",
    re.IGNORECASE,
)


def has_thoughts(reply: str) -> bool:
    """Return whether a reply contains a mark that opens or closes thoughts."""
    return bool(_OPENED.search(reply) or _CLOSED.search(reply))


def opened_thoughts(prompt: str) -> str:
    """Return the mark at the end of a prompt that opens the model's thoughts, as in some chat templates; else ""."""
    opened = re.search(rf"(?:{_OPENING_MARKS})\s*\Z", prompt, re.IGNORECASE)
    return opened[0] if opened else ""


def answer_start(reply: str) -> int | None:
    """Return where the answer after the thoughts begins; None if a thought is not closed."""
    start = max((closed.end() for closed in _CLOSED.finditer(reply)), default=0)
    return None if _OPENED.search(reply, start) else start


def without_thoughts(reply: str) -> str | None:
    """Return a reply without its thoughts; None if a thought is not closed."""
    start = answer_start(reply)
    return None if start is None else without_end_marks(reply[start:])


def read_verdict(reply: str) -> str | None:
    """Return A or B: the whole reply, or the letter after its last "verdict".

    A line after "verdict" must have a form that can only mean its letter: only the letter, with supporting words before
    it ("a slight edge to B") or after it ("B is better than A"), and optionally a reason. Any other line that names a
    letter has no verdict. Neither have ties, retracted verdicts and unclosed thoughts.
    """
    answer = without_thoughts(reply)
    if answer is None:
        return None
    answer = _QUOTED.sub(r"\1", _ECHO.sub(" ", _MARKUP.sub(" ", answer)))
    letter = answer.strip(" \n\r\t'.():!").upper()
    if letter in ("A", "B"):
        return letter
    for found in reversed(list(re.finditer(r"\bverdict\b\W*", answer, re.IGNORECASE))):
        if _DENIED.search(answer[: found.start()].rpartition("\n")[2]):  # "No verdict. A"
            return None
        before = found[0].rstrip()
        line, _, after = answer[found.end() :].partition("\n")
        if before.endswith("("):  # "verdict (A or B): B"
            line = "(" + line
        line = _EITHER.sub(" ", line)
        decided = _decided_letter(line)
        if decided is not None:
            return None if not decided or is_withdrawn(decided, line, after) else decided
    return None


def is_changed(after: str) -> bool:
    """Return whether the text after a number takes it back: "Wait, ...", or a line "Corrected: 4"."""
    return bool(_AGAIN.search(after) or _CORRECTED.search(after))


def is_withdrawn(letter: str, line: str, after: str) -> bool:
    """Return whether the rest of a line with a verdict, or the text after it, takes the verdict back.

    It does if the judge changes its mind ("Wait, ..."), or if the text states the other letter ("Final answer: B").
    """
    if _AGAIN.search(after):
        return True
    other = "B" if letter == "A" else "A"
    if any(re.search(_CONTRARY.format(letter=other), text, re.I | re.M) for text in (after, line)):
        return True
    wins = re.compile(rf"(?<!\w)(?-i:{other}){_BETTER.pattern}\s*(?=[.!,;:)\n]|\Z)", re.IGNORECASE)
    reason = "".join(_REASON.split(line, maxsplit=1)[1:])
    return any(
        not _CONCEDED.search(text[: found.start()])
        for text in (reason, after)
        for found in wins.finditer(text)
    )


def _decided_letter(line: str) -> str | None:
    """Return the letter of the better answer; "" if the line decides nothing, None if it is not a verdict."""
    verdict, *reason = _REASON.split(line.lstrip(" ,:?").rstrip(" ,:"), maxsplit=1)
    if reason and (_AGAIN.search(reason[0]) or _WORSE.match(reason[0])):
        return ""
    letters: set[str] = set()
    for part in _OTHER.sub(" ", verdict).split(","):
        rest = part.strip()
        if before := _BEFORE.match(rest):
            rest = rest[before.end() :]
        named = _LETTER.match(rest)
        behind = rest[named.end() :] if named else ""
        if named and (not behind.strip(" :'") or _BETTER.fullmatch(behind.rstrip())):
            letters.add(named[1].upper())
        elif _UNDECIDED.search(part) or _SHOWN.search(rest):
            return ""
    if len(letters) == 1:
        return letters.pop()
    return "" if letters or _SHOWN.search(line) else None
