"""The texts that ask for a number about one response, and how the number is read from a reply."""

from __future__ import annotations

import hashlib
import math
import re
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import ClassVar

from prb_jax.data.comparison import Comparison, Message
from prb_jax.errors import DataError, RunError, quote
from prb_jax.judges.scorer import shown_texts, without_thoughts
from prb_jax.scoring.prompt_extras import aspect_text

ONE_NUMBER = (
    "{prompt}\n\nAn answer was given.\n\nAnswer:\n{answer}\n\nHow well does this answer give this user what the user "
    "wants? Reply with one number from {low} (not at all) to {high} (in every respect), and nothing else."
)
NUMBER_AFTER_REASONING = (
    "{prompt}\n\nAn answer was given.\n\nAnswer:\n{answer}\n\nHow well does this answer give this user what the user "
    'wants? Think about what the user wants, then end your reply with a line that says "Score: N", where N is a number '
    "from {low} (not at all) to {high} (in every respect)."
)
RUBRIC_SCALE = (0, 2)
"""Absent, partly there, and there in every respect."""

ONE_ASPECT = (
    "{prompt}\n\nAn answer was given.\n\nAnswer:\n{answer}\n\nThis user wants the following of an answer."
    "\n\n{aspect}\n\n"
    "How well does this answer do it? Reply with one number, {low} (not at all), 1 (partly) or {high} (very well), and "
    "nothing else."
)
ASPECT_AFTER_REASONING = (
    "{prompt}\n\nAn answer was given.\n\nAnswer:\n{answer}\n\nThis user wants the following of an answer."
    "\n\n{aspect}\n\n"
    'How well does this answer do it? Think about it, then end your reply with a line that says "Score: N", where N is '
    "{low} (not at all), 1 (partly) or {high} (very well)."
)

PLACES = ("prompt", "answer", "low", "high")
"""All places that a template may have: the question behind the profile, one response, and the ends of the scale."""
NEEDED_PLACES = ("prompt", "answer")
"""Those of them that a rating depends on."""

PLACE = re.compile(r"\{([A-Za-z_]+)\}")
_NUMBER = re.compile(r"(?<![\w.,])[-+]?\d+(?:\.\d+)?(?!\.?\w)")
_SCORE = re.compile(r"(?:score|rating)\W{0,6}?([-+]?\d+(?:\.\d+)?)(?!\.?\w)(?:\s*/\s*(\d+))?", re.IGNORECASE)


@dataclass(frozen=True)
class Scale:
    """Whole numbers that a judge rates with, from the worst to the best one.

    Raises:
      RunError: not two numbers in this order.
    """

    low: int = 1
    high: int = 9

    def __post_init__(self) -> None:
        if not self.low < self.high:
            raise RunError(f"--scale: expected LOW below HIGH, found {self.low} and {self.high}")

    @property
    def numbers(self) -> range:
        """All of them."""
        return range(self.low, self.high + 1)

    @property
    def middle(self) -> float:
        """The score of every response of a comparison with a reply that cannot be read: a tie, which is no win."""
        return (self.low + self.high) / 2

    def read(self, reply: str) -> float | None:
        """Return the number in a reply; None where it names none of the scale, or several.

        It is the last one after "score" or "rating", or else the only one. A thought that is not closed has none.
        """
        answer = without_thoughts(reply)
        if answer is None:
            return None
        if scores := _SCORE.findall(answer):
            number, of = scores[-1]
            if of and int(of) != self.high:
                return None
        else:
            answer = re.sub(rf"(?:/|\bout of)\s*{self.high}\b", "", answer)  # "7/9", "7 out of 9"
            numbers = _NUMBER.findall(answer)
            if len(numbers) != 1:
                return None
            number = numbers[0]
        value = float(number)
        return value if self.low <= value <= self.high else None

    def expected(self, alternatives: Sequence[tuple[str, float]]) -> tuple[float, float] | None:
        """Return the expected number of tokens and their log-probabilities, and the probability of all numbers.

        None where none of the tokens is a number of the scale.
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


@dataclass(frozen=True)
class RatingTemplate:
    """The text that asks for a number.

    Attributes:
      text: with the places {prompt} and {answer}, and perhaps {low} and {high}.
      where: it is from, for messages.
      system: text of a system turn before it; None for no such turn.
      kind: of ratings, as a run folder names it.
      own: the project's own texts, without and with reasons.
      needed: places that it must have.
      places: all that it may have.

    Raises:
      RunError: a place is missing, or unknown.
    """

    text: str
    where: str = "template"
    system: str | None = None
    kind: ClassVar[str] = "score"
    own: ClassVar[tuple[str, str]] = (ONE_NUMBER, NUMBER_AFTER_REASONING)
    needed: ClassVar[tuple[str, ...]] = NEEDED_PLACES
    places: ClassVar[tuple[str, ...]] = PLACES

    def __post_init__(self) -> None:
        check_places(self.text, self.where, needed=self.needed, places=self.places)

    @property
    def digest(self) -> str:
        """The beginning of the sha256 of the text, and of the system turn's."""
        parts = [self.text] if self.system is None else [self.system, self.text]
        return hashlib.sha256("\0".join(parts).encode()).hexdigest()[:16]

    def questions(self, comparison: Comparison) -> int:
        """Return how many numbers are asked for of each response; its score is their mean."""
        return 1

    def conversations(
        self, comparison: Comparison, scale: Scale, *, profile_posts: int
    ) -> list[tuple[Message, ...]]:
        """Return the conversations about each response, one after the other, behind the user's posts and the prompt."""
        prompt, responses = shown_texts(comparison, profile_posts=profile_posts)
        ends = {"low": str(scale.low), "high": str(scale.high)}
        return [self.filled({"prompt": prompt, "answer": answer, **ends}) for answer in responses]

    def filled(self, texts: Mapping[str, str]) -> tuple[Message, ...]:
        """Return the conversation with texts in all places at once, so that a place within a text stays."""
        asked = Message("user", fill_places(self.text, texts))
        return (asked,) if self.system is None else (Message("system", self.system), asked)


@dataclass(frozen=True)
class RubricTemplate(RatingTemplate):
    """The text that asks how well a response does one aspect; every aspect of the rubric is asked for by itself."""

    kind: ClassVar[str] = "rubric"
    own: ClassVar[tuple[str, str]] = (ONE_ASPECT, ASPECT_AFTER_REASONING)
    needed: ClassVar[tuple[str, ...]] = ("answer", "aspect")
    places: ClassVar[tuple[str, ...]] = (*PLACES, "aspect")

    def questions(self, comparison: Comparison) -> int:
        """Return the number of aspects.

        Raises:
          DataError: there is none.
        """
        check_rubric(comparison)
        return len(comparison.rubric_aspects)

    def conversations(
        self, comparison: Comparison, scale: Scale, *, profile_posts: int
    ) -> list[tuple[Message, ...]]:
        """Return the conversations about the aspects of the first response, then those of the second one.

        Raises:
          DataError: there is no aspect.
        """
        check_rubric(comparison)
        prompt, responses = shown_texts(comparison, profile_posts=profile_posts)
        ends = {"low": str(scale.low), "high": str(scale.high)}
        return [
            self.filled({"prompt": prompt, "answer": answer, "aspect": aspect_text(aspect), **ends})
            for answer in responses
            for aspect in comparison.rubric_aspects
        ]


def check_rubric(comparison: Comparison) -> None:
    """Raise DataError for a comparison without a rubric."""
    if not comparison.rubric_aspects:
        raise DataError(
            f"comparison {quote(comparison.id)}: has no rubric_aspects, by which responses could be rated"
        )


def fill_places(template: str, texts: Mapping[str, str]) -> str:
    """Return a template with texts in all places {name} at once.

    A place within a text stays as it is, so that a response that contains ``{Response_B}`` is not given the other one.
    The paper's scripts put in one text after another, and replace such a place too: this quirk is not copied.
    """
    return PLACE.sub(lambda place: texts.get(place[1], place[0]), template)


def check_places(text: str, where: str, *, needed: Sequence[str], places: Sequence[str]) -> None:
    """Raise RunError for a template without a place that is needed, or with one that is not known."""
    places_in_text = set(PLACE.findall(text))
    for name in needed:
        if name not in places_in_text:
            raise RunError(f"{where}: expected a place {{{name}}}: the rating would not depend on the {name}")
    if unknown := sorted(places_in_text - set(places)):
        known = ", ".join(f"{{{name}}}" for name in places)
        raise RunError(f"{where}: unknown place {{{unknown[0]}}}: expected {known}")


def read_text(path: str | Path, option: str) -> str:
    """Return the text of a file of an option, without blanks around it.

    Raises:
      RunError: it cannot be read, or is empty; names the option.
    """
    try:
        text = Path(path).read_text(encoding="utf-8").strip()
    except (OSError, ValueError) as error:
        raise RunError(f"{path}: cannot be read: {error}: {option} takes a text file") from error
    if not text:
        raise RunError(f"{path}: is empty: {option} takes a text file")
    return text


def read_template(
    path: str | Path | None,
    *,
    reason: bool,
    system: str | Path | None = None,
    kind: type[RatingTemplate] = RatingTemplate,
) -> RatingTemplate:
    """Return the template in a file, or the project's own one.

    Args:
      path: the file; None for the project's own one.
      reason: whether the project's own one asks for reasons first.
      system: a file with the text of a system turn, if there is one.
      kind: of template.

    Raises:
      RunError: a file cannot be read, or is no template.
    """
    before = None if system is None else read_text(system, "--system")
    if path is None:
        return kind(kind.own[reason], system=before)
    return kind(read_text(path, "--template"), str(path), before)
