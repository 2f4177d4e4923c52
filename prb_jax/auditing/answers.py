"""One judgement: general quality of A and B apart from personal fit, and a comment."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any, Final

from prb_jax.data import fields

CRITERIA: Final = ("correctness", "relevance", "helpfulness")
"""Of general quality: how good a response is for anybody."""

SIDES: Final = ("a", "b")
POINTS: Final = (1, 2, 3, 4, 5)
UNKNOWN: Final = "unknown"
"""In the place of a rating or a choice: the annotator cannot tell."""

LONGEST_COMMENT: Final = 4000

_FIELDS: Final = ("quality", "fit", "comment")


@dataclass(frozen=True)
class Judgement:
    """An answer by the responses of the item, whichever of them was A.

    Attributes:
      fit: 0 for the response with the higher label, 1 for the other one, None for "can't tell".
      quality: by criterion, the ratings of both responses in this order; None for "can't tell".
      comment: may be empty.
    """

    fit: int | None
    quality: Mapping[str, tuple[int | None, int | None]]
    comment: str


def check_answer(value: object, *, where: str, complete: bool) -> dict[str, Any]:
    """Return an answer as it is stored.

    Args:
      value: {"quality": {criterion: {"a": rating, "b": rating}}, "fit": "a", "b" or "unknown", "comment": text}, where
        a rating is a number from 1 to 5 or "unknown".
      where: what errors start with.
      complete: whether all must be answered; null is no answer.

    Raises:
      DataError: naming the field.
    """
    answer = fields.mapping(value, where, "answer")
    for name in answer:
        if name not in _FIELDS:
            fields.fail(where, f"answer.{name}", f"unknown; expected {', '.join(_FIELDS)}")
    given = fields.mapping(answer.get("quality", {}), where, "answer.quality")
    for name in given:
        if name not in CRITERIA:
            fields.fail(where, f"answer.quality.{name}", f"unknown; expected {', '.join(CRITERIA)}")
    quality: dict[str, dict[str, Any]] = {}
    for criterion in CRITERIA:
        sides = fields.mapping(given.get(criterion, {}), where, f"answer.quality.{criterion}")
        quality[criterion] = {
            side: _one_of(
                sides.get(side), (*POINTS, UNKNOWN), where, f"answer.quality.{criterion}.{side}", complete
            )
            for side in SIDES
        }
    fit = _one_of(answer.get("fit"), (*SIDES, UNKNOWN), where, "answer.fit", complete)
    comment = fields.text(answer.get("comment", ""), where, "answer.comment")
    if len(comment) > LONGEST_COMMENT:
        fields.fail(
            where,
            "answer.comment",
            f"{len(comment):,} characters; expected at most {LONGEST_COMMENT:,}",
        )
    return {"quality": quality, "fit": fit, "comment": comment}


def read_judgement(answer: Mapping[str, Any], *, swapped: bool) -> Judgement:
    """Return a complete answer by the responses of its item.

    Args:
      answer: as `check_answer` returns it.
      swapped: whether A was the second response.
    """
    order = SIDES[::-1] if swapped else SIDES
    known: dict[str, tuple[int | None, int | None]] = {}
    for criterion, sides in answer["quality"].items():
        first, second = (None if sides[side] == UNKNOWN else sides[side] for side in order)
        known[criterion] = (first, second)
    fit = None if answer["fit"] == UNKNOWN else order.index(answer["fit"])
    return Judgement(fit, known, answer["comment"])


def _one_of(value: object, choices: tuple[Any, ...], where: str, name: str, needed: bool) -> Any:
    if value is None and not needed:
        return None
    for choice in choices:
        if type(value) is type(choice) and value == choice:
            return choice
    expected = ", ".join(map(str, choices))
    return fields.fail(where, name, f"expected one of {expected}; found {fields.found(value)}")
