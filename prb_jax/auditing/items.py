"""What people judge, pairs with all that is known about the user, private fields included; and what they answer.

An answer rates the general quality of A and B apart from their personal fit, and may have a comment.
"""

from __future__ import annotations

import json
import random
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import asdict, dataclass
from hashlib import sha256
from typing import Any, Final, Literal

from prb_jax.data import fields
from prb_jax.data.comparison import Comparison
from prb_jax.errors import DataError, quote, short_repr

Kind = Literal["item", "gold"]

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
    ratings = fields.mapping(answer.get("quality", {}), where, "answer.quality")
    for name in ratings:
        if name not in CRITERIA:
            fields.fail(where, f"answer.quality.{name}", f"unknown; expected {', '.join(CRITERIA)}")
    quality: dict[str, dict[str, Any]] = {}
    for criterion in CRITERIA:
        sides = fields.mapping(ratings.get(criterion, {}), where, f"answer.quality.{criterion}")
        quality[criterion] = {
            side: _choice(
                sides.get(side), (*POINTS, UNKNOWN), where, f"answer.quality.{criterion}.{side}", complete
            )
            for side in SIDES
        }
    fit = _choice(answer.get("fit"), (*SIDES, UNKNOWN), where, "answer.fit", complete)
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


def _choice(value: object, choices: tuple[Any, ...], where: str, name: str, needed: bool) -> Any:
    if value is None and not needed:
        return None
    for choice in choices:
        if type(value) is type(choice) and value == choice:
            return choice
    expected = ", ".join(map(str, choices))
    return fields.fail(where, name, f"expected one of {expected}; found {fields.found(value)}")


@dataclass(frozen=True)
class Item:
    """One pair.

    Attributes:
      number: its place in the order in which items are given out, from 1.
      id: of the comparison.
      kind: "gold" for a pair whose personal fit is known for certain, which shows whether annotators pay attention.
      shown: JSON-ready: user_id, prompt, responses (the one with the higher label first), profile, aspects, narrative.
    """

    number: int
    id: str
    kind: Kind
    shown: dict[str, Any]

    __repr__ = short_repr


def make_items(
    comparisons: Iterable[Comparison], gold: Iterable[Comparison], *, sample: int | None, seed: int
) -> list[Item]:
    """Return the items of an audit, in random order.

    Args:
      comparisons: pairs.
      gold: pairs whose personal fit is known for certain.
      sample: keep a random choice of so many of the comparisons.
      seed: of choice and order.

    Raises:
      DataError: a comparison without exactly two responses, fewer comparisons than the sample needs, or an id that
        stands in both.
    """
    pairs = [("item", comparison) for comparison in comparisons]
    rng = random.Random(seed)
    if sample is not None:
        if sample > len(pairs):
            raise DataError(f"sample: {sample} of {len(pairs)} comparisons; expected at most {len(pairs)}")
        pairs = rng.sample(pairs, sample)
    rng.shuffle(pairs)
    checks = [("gold", comparison) for comparison in gold]
    rng.shuffle(checks)
    items: list[Item] = []
    seen: set[str] = set()
    for kind, comparison in [*pairs, *checks]:
        if comparison.id in seen:
            raise DataError(f"comparison id {quote(comparison.id)} stands in the data and in the gold items")
        seen.add(comparison.id)
        items.append(Item(len(items) + 1, comparison.id, kind, _shown(comparison)))  # pyright: ignore[reportArgumentType]
    return items


def items_digest(rows: Sequence[Sequence[Any]]) -> str:
    """Return the digest of all rows (number, id, kind, text) of items."""
    digest = sha256()
    for row in rows:
        digest.update(json.dumps(list(row)).encode() + b"\n")
    return digest.hexdigest()


def is_swapped(seed: int, item: str, annotator: str, showing: int) -> bool:
    """Whether response A is the second one of an item, when an annotator is shown it for the n-th time, from 0."""
    key = json.dumps([seed, item, annotator, showing])
    return sha256(key.encode()).digest()[0] % 2 == 1


def is_rejected_first(seed: int, item: str) -> bool:
    """Whether the response with the lower label comes first in an order that is drawn by lot for each item."""
    return is_swapped(seed, item, "", 0)  # nobody has an empty name


def _shown(comparison: Comparison) -> dict[str, Any]:
    labels = comparison.labels
    if labels is None or len(comparison.responses) != 2:
        raise DataError(
            f"comparison {quote(comparison.id)}: {len(comparison.responses)} responses; people judge pairs: expected 2"
        )
    better = int(labels[1] > labels[0])
    return {
        "user_id": comparison.user_id,
        "subset": comparison.subset,
        "prompt": [{"role": turn.role, "content": turn.content} for turn in comparison.prompt],
        "responses": [comparison.responses[better], comparison.responses[1 - better]],
        "profile": [{"category": post.category, "text": post.text} for post in comparison.profile],
        "aspects": [asdict(aspect) for aspect in comparison.rubric_aspects],
        "narrative": comparison.narrative,
    }
