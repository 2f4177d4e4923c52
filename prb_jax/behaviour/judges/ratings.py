"""The protocols "score" and "rubric": a number for one response at a time, in words or by the logits of a scale."""

from __future__ import annotations

import hashlib
import itertools
import re
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any, Final

import numpy as np

from prb_jax.behaviour.judges.chat import ByLogits, InWords, load_by_logits
from prb_jax.behaviour.judges.scale import Scale
from prb_jax.behaviour.judges.scorer import (
    Answer,
    Conversation,
    JudgeProtocol,
    cut_replies,
    nothing_read,
    shown_texts,
)
from prb_jax.errors import DataError, RunError, quote
from prb_jax.models.readouts.load_options import LoadOptions
from prb_jax.records.comparison import Comparison, Message
from prb_jax.runs.rows import Row
from prb_jax.scoring.prompt_extras import aspect_text
from prb_jax.scoring.remote.endpoint import Reply

_ANSWER = "{prompt}\n\nAn answer was given.\n\nAnswer:\n{answer}\n\n"
_WISHES = _ANSWER + "How well does this answer give this user what the user wants? "
_ASPECT = (
    _ANSWER + "This user wants the following of an answer.\n\n{aspect}\n\nHow well does this answer do it? "
)
ONE_NUMBER = _WISHES + (
    "Reply with one number from {low} (not at all) to {high} (in every respect), and nothing else."
)
NUMBER_AFTER_REASONING = _WISHES + (
    'Think about what the user wants, then end your reply with a line that says "Score: N", where N is a number from '
    "{low} (not at all) to {high} (in every respect)."
)
ONE_ASPECT = _ASPECT + (
    "Reply with one number, {low} (not at all), 1 (partly) or {high} (very well), and nothing else."
)
ASPECT_AFTER_REASONING = _ASPECT + (
    'Think about it, then end your reply with a line that says "Score: N", where N is {low} (not at all), 1 (partly) '
    "or {high} (very well)."
)
RUBRIC_SCALE: Final = (0, 2)  # absent, partly present, fully present

PLACE = re.compile(r"\{([A-Za-z_]+)\}")


@dataclass(frozen=True)
class RatingTemplate:
    """The text that asks for a number.

    Raises:
      RunError: a place is missing or unknown.
    """

    # contains the place {answer}, and {prompt} or, for a rubric, {aspect}; optionally {low} and {high}, the
    # ends of the scale
    text: str
    where: str = "template"  # source of the text, for messages
    system: str | None = None  # text of a preceding system turn; None for no such turn
    rubric: bool = False  # asks for a number for each aspect of the true rubric; else one for each response

    def __post_init__(self) -> None:
        needed = ("answer", "aspect") if self.rubric else ("prompt", "answer")
        places = ("prompt", "answer", "low", "high", *(("aspect",) if self.rubric else ()))
        check_places(self.text, self.where, needed=needed, places=places)

    @property
    def digest(self) -> str:
        """The first digits of the sha256 of the text and the system turn."""
        parts = [self.text] if self.system is None else [self.system, self.text]
        return hashlib.sha256("\0".join(parts).encode()).hexdigest()[:16]

    def questions(self, comparison: Comparison) -> int:
        """Return how many numbers are asked for about each response; its score is their mean.

        Raises:
          DataError: the comparison has no aspects but the template needs them.
        """
        if self.rubric:
            check_rubric(comparison)
        return len(comparison.rubric_aspects) if self.rubric else 1

    def conversations(
        self, comparison: Comparison, scale: Scale, *, profile_posts: int
    ) -> list[Conversation]:
        """Return the conversations about each response in turn, one for each question."""
        prompt, responses = shown_texts(comparison, profile_posts=profile_posts)
        texts = {"prompt": prompt, "low": str(scale.low), "high": str(scale.high)}
        asked = (
            [{"aspect": aspect_text(aspect)} for aspect in comparison.rubric_aspects] if self.rubric else [{}]
        )
        before = () if self.system is None else (Message("system", self.system),)
        return [
            (*before, Message("user", fill_places(self.text, {**texts, "answer": answer, **aspect})))
            for answer in responses
            for aspect in asked
        ]


def check_rubric(comparison: Comparison) -> None:
    """Raise DataError if a comparison has no rubric."""
    if not comparison.rubric_aspects:
        raise DataError(
            f"comparison {quote(comparison.id)}: has no rubric_aspects, which rating a rubric requires"
        )


def fill_places(template: str, texts: Mapping[str, str]) -> str:
    """Return a template with all places {name} filled at once.

    Places within the texts stay unchanged, so a response that contains ``{Response_B}`` does not pull in the other one.
    The paper's scripts fill places one by one, which also replaces such a place; this quirk is not copied.
    """
    return PLACE.sub(lambda place: texts.get(place[1], place[0]), template)


def check_places(text: str, where: str, *, needed: Sequence[str], places: Sequence[str]) -> None:
    """Raise RunError if a template lacks a needed place, or has an unknown one."""
    places_in_text = set(PLACE.findall(text))
    for name in needed:
        if name not in places_in_text:
            raise RunError(f"{where}: expected a place {{{name}}}: the rating would not depend on the {name}")
    if unknown := sorted(places_in_text - set(places)):
        known = ", ".join(f"{{{name}}}" for name in places)
        raise RunError(f"{where}: unknown place {{{unknown[0]}}}: expected {known}")


def read_text(path: str | Path, option: str) -> str:
    """Return the stripped text of a file given by an option.

    Raises:
      RunError: the file cannot be read or is empty; names the option.
    """
    try:
        text = Path(path).read_text(encoding="utf-8").strip()
    except (OSError, ValueError) as error:
        raise RunError(f"{path}: cannot be read: {error}: {option} takes a text file") from error
    if not text:
        raise RunError(f"{path}: is empty: {option} takes a text file")
    return text


def read_template(
    path: str | Path | None, *, reason: bool, system: str | Path | None = None, rubric: bool = False
) -> RatingTemplate:
    """Return the template from a file, or the project's own one.

    Args:
      path: File with the template; None for the project's own one.
      reason: Whether the project's own template asks for reasons first.
      system: File with the text of a system turn, if any.
      rubric: Whether the template asks for a number for each aspect.

    Raises:
      RunError: a file cannot be read, or is not a template.
    """
    before = None if system is None else read_text(system, "--system")
    if path is not None:
        return RatingTemplate(read_text(path, "--template"), str(path), before, rubric)
    formats = (ONE_ASPECT, ASPECT_AFTER_REASONING) if rubric else (ONE_NUMBER, NUMBER_AFTER_REASONING)
    return RatingTemplate(formats[reason], system=before, rubric=rubric)


@dataclass(frozen=True)
class Ratings(JudgeProtocol):
    """Asks for a number for every response.

    In words, the number is read from the reply, or is the expected value over the most probable tokens that an endpoint
    returns. By logits, it is the expected value at the start of the reply, with probabilities normalised over the
    scale's tokens. A comparison with a reply that cannot be read is a tie, which never counts as a win.

    Raises:
      RunError: alternatives are used with numbers of several digits, where one number may begin another.
    """

    model: InWords | ByLogits
    template: RatingTemplate  # the text that asks
    scale: Scale
    reason: bool = False  # whether the model thinks in words before it names the number

    def __post_init__(self) -> None:
        if self._alternatives is not None and not 0 <= self.scale.low < self.scale.high <= 9:
            raise RunError(
                f"--scale {self.scale.low} {self.scale.high}: with --top-logprobs expected numbers of one digit"
            )

    @property
    def _alternatives(self) -> int | None:
        return self.model.alternatives if isinstance(self.model, InWords) else None

    @property
    def _votes(self) -> int:
        return self.model.votes if isinstance(self.model, InWords) else 1

    def identity(self) -> Mapping[str, Any]:
        in_words = isinstance(self.model, InWords)
        way = "reason" if self.reason else "number" if in_words else "logits"
        return {
            **self.model.identity(),
            "judge": "rubric" if self.template.rubric else "score",
            "way": way if self._alternatives is None else f"{way}, top {self._alternatives}",
            "scale": [self.scale.low, self.scale.high],
            # for a model on this machine, "template" is already the digest of the chat template
            ("template" if in_words else "rating_template"): self.template.digest,
        }

    def check(self, comparison: Comparison) -> None:
        super().check(comparison)
        self._questions(comparison)

    def _questions(self, comparison: Comparison) -> int:
        """Return how many numbers are asked for about each response."""
        return self.template.questions(comparison)

    def ask(self, comparison: Comparison, first: int, posts: int) -> list[Conversation]:
        self.template.questions(comparison)
        return self.template.conversations(comparison, self.scale, profile_posts=posts)

    def read(self, comparison: Comparison, first: int, answer: Answer) -> tuple[Any, dict[str, Any]]:
        read: list[tuple[float | None, float | None]] = [self._read(reply) for reply in answer.replies]
        read = read or list(zip(answer.values, answer.masses, strict=True))
        questions, votes = self._questions(comparison), self._votes
        numbers = [_mean_vote(read[start : start + votes]) for start in range(0, len(read), votes)]
        values = [number for number, _ in numbers]
        groups = [values[start : start + questions] for start in range(0, len(values), questions)]
        details: dict[str, Any] = {"ratings": values}
        if questions > 1:
            details["ratings"] = [None if None in group else float(np.mean(group)) for group in groups]  # pyright: ignore[reportArgumentType, reportCallIssue]
            details["numbers"] = groups
        if votes > 1:
            details["votes"] = [
                [number for number, _ in read[start : start + votes]] for start in range(0, len(read), votes)
            ]
        if self._alternatives is not None or not answer.replies:
            details["number_mass"] = [mass for _, mass in numbers]
        unread = None in details["ratings"]
        return [self.scale.middle] * len(groups) if unread else details["ratings"], details

    def _read(self, reply: Reply) -> tuple[float | None, float | None]:
        """Return the number of a reply, and the probability of all numbers at its position."""
        if reply.is_cut:
            return None, None
        if self._alternatives is None:
            return self.scale.read(reply.text), None
        assert reply.alternatives is not None
        found = self.scale.find("".join(token for token, _ in reply.alternatives))
        if found is None:
            return None, None
        value, place = found
        ends = itertools.accumulate(len(token) for token, _ in reply.alternatives)
        token, others = next(one for one, end in zip(reply.alternatives, ends, strict=True) if end > place)
        if token.strip() != f"{value:g}":  # a part of a decimal number, or more than the number
            return None, None
        return self.scale.expected(others) or (None, None)

    def figures(self, rows: Sequence[Row], comparisons: Sequence[Comparison]) -> dict[str, Any]:
        better: list[float] = []
        others: list[float] = []
        for row, comparison in zip(rows, comparisons, strict=True):
            labels = comparison.labels or ()
            for number, label in zip(row["ratings"], labels, strict=True):
                if number is not None:
                    (better if label == max(labels) else others).append(number)
        ratings = [number for row in rows for number in row["ratings"]]
        masses = [mass for row in rows for mass in row.get("number_mass", ()) if mass is not None]
        return {
            "n": len(rows),
            "scale": [self.scale.low, self.scale.high],
            "mean_rating": _mean(better + others),
            "mean_rating_of_better": _mean(better),
            "mean_rating_of_others": _mean(others),
            "ratings": len(ratings),
            "unparsable": sum(None in row["ratings"] for row in rows),
            "unparsable_ratings": ratings.count(None),
            **cut_replies(rows),
            **({"mean_number_mass": _mean(masses)} if masses else {}),
            **(nothing_read(undefined=True) if all(None in row["ratings"] for row in rows) else {}),
        }


def load_numbers(
    model: str | Path, options: LoadOptions, scale: Scale, *, max_length: int | None
) -> ByLogits:
    """Load a causal language model that is read at the logits of numbers; raises the errors of `load_by_logits`."""
    texts = [str(number) for number in scale.numbers]
    return load_by_logits(
        model,
        options,
        texts,
        readout=lambda tokens: "vocabulary:" + ",".join(f"{tokens[text]}={text}" for text in texts),
        instead="choose a --scale of numbers that have one (1 9), or --reason, which reads the reply as text",
        max_length=max_length,
    )


def _mean_vote(votes: Sequence[tuple[float | None, float | None]]) -> tuple[float | None, float | None]:
    """Return the mean number of the readable votes; a single vote is returned unchanged."""
    if len(votes) == 1:
        return votes[0]
    return _mean([number for number, _ in votes if number is not None]), None


def _mean(numbers: Sequence[float]) -> float | None:
    return float(np.mean(numbers)) if numbers else None
