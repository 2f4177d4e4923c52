"""The numbers that a judge rates with, and how one is found in a reply."""

from __future__ import annotations

import math
import re
from collections.abc import Sequence
from dataclasses import dataclass
from typing import Final

from prb_jax.behaviour.judges.replies import answer_start, is_changed, without_thoughts
from prb_jax.errors import RunError

_DECIMAL: Final = (
    r"[-+]?\d+(?:\.\d+|,\d{1,2})?(?![.,]?\w)"  # at most two digits after a decimal comma, so 1,000 fails
)
_NUMBER = re.compile(rf"(?<![\w.,]){_DECIMAL}")
_SCORE = re.compile(rf"(?:score|rating)[^\w.!?]{{0,99}}?({_DECIMAL})", re.IGNORECASE)
_ANOTHER: Final = re.compile(  # behind a number: it belongs to another scale, or to several numbers
    r"\s*(?:[%~+±/]|out of\b|of\s+\d|\d)|\s*,?\s*(?:[-–−]|to|or|and|maybe)\s*(?:\w+\s+)?\d|,\s*\d",
    re.IGNORECASE,
)
_STATED: Final = re.compile(  # before a number in a sentence
    r"(?:\A|\b(?:an?|is|it|at|as|be|rate|rated|give|gives|gave|assign|say|deserves?|earns?|gets?|with|answer|number|"
    r"verdict|grade|solid|strong)|[:=])\W*\Z",
    re.IGNORECASE,
)
_GOES_ON: Final = re.compile(
    r"\s*(?:points?\b|because\b|since\b|[-–—(:;,!]|[.](?!\s*\w)|\W*\Z)", re.IGNORECASE
)
_REFUSAL: Final = re.compile(
    r"\b(?:cannot|unable|refuse|error|failed|no (?:score|rating|number))\b|n['’]t\b|\bnot\b", re.IGNORECASE
)


@dataclass(frozen=True)
class Scale:
    """Whole numbers that a judge rates with, from the worst to the best.

    Raises:
      RunError: low is not below high.
    """

    low: int = 1
    high: int = 9

    def __post_init__(self) -> None:
        if not self.low < self.high:
            raise RunError(f"--scale: expected LOW below HIGH, found {self.low} and {self.high}")

    @property
    def numbers(self) -> range:
        """All numbers of the scale."""
        return range(self.low, self.high + 1)

    @property
    def middle(self) -> float:
        """Score of every response if a reply of the comparison cannot be read: a tie, which never counts as a win."""
        return (self.low + self.high) / 2

    def read(self, reply: str) -> float | None:
        """Return the number in a reply; None if it names no number of the scale, or several.

        This is the last number after "score" or "rating", or else the only one, if the reply states it. A number of
        another scale ("7 out of 10", "7 %"), one that the judge takes back, one of several, and unclosed thoughts give
        None.
        """
        found = self.find(reply)
        return None if found is None else found[0]

    def find(self, reply: str) -> tuple[float, int] | None:
        """Return the number that :meth:`read` returns, and its place in the reply."""
        start, answer = answer_start(reply), without_thoughts(reply)
        if start is None or answer is None:
            return None
        low, high = rf"(?<![\w.]){self.low}\b", rf"\b{self.high}\b"
        ends = rf"{low}\s*(?:-|–|to)\s*{high}"  # "Score (1-9): 7", and "7 (on a scale from 1 to 9)"
        echo = (  # the scale, repeated
            rf"[(\[][^()\[\]\n]*{low}[^()\[\]\n]*{high}[^()\[\]\n]*[)\]]|\(\s*(?:out )?of {high}\s*\)|"
            rf"(?<!\d)\s*\b(?:out )?of {high}(?=\s*:)|(?:\bon an?\s+)?\b(?:from|scale of|scale(?: from)?)\s+{ends}|"
            rf"{ends}(?=\s*:)|\\boxed"
        )
        answer = re.sub(echo, _blanks, answer, flags=re.IGNORECASE)
        # "7/9", "7 out of 9"
        answer = re.sub(rf"(?<=\d)\s*(?:/|\b(?:out )?of)\s*{high}(?!\s*/)", _blanks, answer)
        if scores := list(_SCORE.finditer(answer)):
            number, place = scores[-1][1], scores[-1].start(1)
            after = answer[scores[-1].end() :]
            if _ANOTHER.match(after) or is_changed(after):
                return None
        else:
            numbers = list(_NUMBER.finditer(answer))
            if len(numbers) != 1 or not _is_stated(answer, numbers[0]):
                return None
            number, place = numbers[0][0], numbers[0].start()
        value = float(number.replace(",", "."))
        return (value, start + place) if self.low <= value <= self.high else None

    def expected(self, alternatives: Sequence[tuple[str, float]]) -> tuple[float, float] | None:
        """Return the expected number, given tokens with log-probabilities, and the total probability of all numbers.

        None if no token is a number of the scale.
        """
        known = {str(number): number for number in self.numbers}
        masses: dict[int, float] = {}
        for token, logprob in alternatives:
            if (number := known.get(token.strip())) is not None:
                masses[number] = masses.get(number, 0.0) + math.exp(logprob)
        total = sum(masses.values())
        if not total:
            return None
        return sum(number * mass for number, mass in masses.items()) / total, total


def _blanks(found: re.Match[str]) -> str:
    """Return as many blanks as a match has characters, so that the places of the rest stay."""
    return " " * len(found[0])


def _is_stated(answer: str, number: re.Match[str]) -> bool:
    """Return whether the only number of a reply is its rating, as opposed to "3 problems" or "error 5"."""
    before = re.split(r"[\n.!?;]", answer[: number.start()])[-1].strip(" *_`\"'([<{\t")
    after = answer[number.end() :].partition("\n")[0].lstrip(" *_`\"')]>}\t")
    if _ANOTHER.match(answer, number.end()) or _REFUSAL.search(answer[: number.start()]):
        return False
    return bool(_STATED.search(before)) and bool(_GOES_ON.match(after)) and not is_changed(after)
