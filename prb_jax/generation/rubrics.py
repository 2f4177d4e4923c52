"""Ratings by the true rubric: how well a response does each aspect that its user wants, 0, 1 or 2.

The rubric is private: a judge that is shown it tells how good a response is, and is no model of a user.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import ClassVar

from prb_jax.data.comparison import Comparison, Message
from prb_jax.errors import DataError, quote
from prb_jax.generation.ratings import PLACES, RatingTemplate, Scale
from prb_jax.generation.verdicts import shown_texts
from prb_jax.scoring.prompt_extras import aspect_text

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
        asked, responses = shown_texts(comparison, profile_posts=profile_posts)
        ends = {"low": str(scale.low), "high": str(scale.high)}
        return [
            self.filled({"prompt": asked, "answer": answer, "aspect": aspect_text(aspect), **ends})
            for answer in responses
            for aspect in comparison.rubric_aspects
        ]


def check_rubric(comparison: Comparison) -> None:
    """Raise DataError for a comparison without a rubric."""
    if not comparison.rubric_aspects:
        raise DataError(
            f"comparison {quote(comparison.id)}: has no rubric_aspects, by which responses could be rated"
        )
