"""Items of an audit: pairs with everything known about the user, private fields included; and people's answers.

An answer rates the general quality of A and B separately from their personal fit, and may have a comment.
"""

from __future__ import annotations

import json
import random
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import asdict, dataclass
from hashlib import sha256
from typing import Any, Final

from prb_jax.errors import DataError, quote, short_repr
from prb_jax.records import fields
from prb_jax.records.comparison import Comparison

ITEM, GOLD = "item", "gold"
"""Kinds of items: "gold" items are pairs with a certain personal fit, which show who pays attention."""

CRITERIA: Final = ("correctness", "relevance", "helpfulness")
"""Criteria of general quality: how good a response is for any reader."""

SIDES: Final = ("a", "b")
POINTS: Final = (1, 2, 3, 4, 5)
UNKNOWN: Final = "unknown"  # in place of a rating or a choice: the annotator cannot tell

LONGEST_COMMENT: Final = 4000


def check_answer(value: object, *, where: str, complete: bool) -> dict[str, Any]:
    """Validate an answer, and return it in its stored form.

    Args:
      value: {"quality": {criterion: {"a": rating, "b": rating}}, "fit": "a", "b" or "unknown", "comment": text}, where
        a rating is a number from 1 to 5 or "unknown".
      where: Start of error messages.
      complete: If True, every field needs an answer other than null.

    Raises:
      DataError: the message names the field.
    """

    def known(value: object, name: str, names: Sequence[str]) -> Mapping[str, Any]:
        entries = fields.mapping(value, where, name)
        for unknown in entries.keys() - set(names):
            fields.fail(where, f"{name}.{unknown}", f"unknown; expected {', '.join(names)}")
        return entries

    def choice(value: object, name: str, choices: Sequence[Any]) -> Any:
        if value is None and not complete:
            return None
        if not any(type(value) is type(one) and value == one for one in choices):
            expected = ", ".join(map(str, choices))
            fields.fail(where, name, f"expected one of {expected}; found {fields.found(value)}")
        return value

    answer = known(value, "answer", ("quality", "fit", "comment"))
    ratings = known(answer.get("quality", {}), "answer.quality", CRITERIA)
    quality = {}
    for criterion in CRITERIA:
        name = f"answer.quality.{criterion}"
        sides = fields.mapping(ratings.get(criterion, {}), where, name)
        quality[criterion] = {
            side: choice(sides.get(side), f"{name}.{side}", (*POINTS, UNKNOWN)) for side in SIDES
        }
    fit = choice(answer.get("fit"), "answer.fit", (*SIDES, UNKNOWN))
    comment = fields.text(answer.get("comment", ""), where, "answer.comment")
    if len(comment) > LONGEST_COMMENT:
        most = f"{len(comment):,} characters; expected at most {LONGEST_COMMENT:,}"
        fields.fail(where, "answer.comment", most)
    return {"quality": quality, "fit": fit, "comment": comment}


@dataclass(frozen=True)
class Item:
    """One pair, of kind ``ITEM`` or ``GOLD``; ``number`` is its place in the order of assignment, from 1.

    ``shown`` is JSON-ready: user_id, prompt, responses (the one with the higher label first), profile, aspects,
    narrative.
    """

    number: int
    id: str
    kind: str
    shown: dict[str, Any]

    __repr__ = short_repr


def make_items(
    comparisons: Iterable[Comparison], gold: Iterable[Comparison], *, sample: int | None, seed: int
) -> list[Item]:
    """Return the items of an audit in random order: ``sample`` random comparisons (None: all), then gold.

    Raises:
      DataError: a comparison does not have exactly two responses, there are fewer comparisons than ``sample``, or an
        id occurs both in the data and in the gold items.
    """
    pairs = [(ITEM, comparison) for comparison in comparisons]
    rng = random.Random(seed)
    if sample is not None:
        if sample > len(pairs):
            raise DataError(f"sample: {sample} of {len(pairs)} comparisons; expected at most {len(pairs)}")
        pairs = rng.sample(pairs, sample)
    rng.shuffle(pairs)
    checks = [(GOLD, comparison) for comparison in gold]
    rng.shuffle(checks)
    items: dict[str, Item] = {}
    for kind, comparison in [*pairs, *checks]:
        if comparison.id in items:
            raise DataError(f"comparison id {quote(comparison.id)} is both in the data and in the gold items")
        items[comparison.id] = Item(len(items) + 1, comparison.id, kind, _shown(comparison))
    return list(items.values())


def items_digest(rows: Sequence[Sequence[Any]]) -> str:
    """Return the digest of all rows (number, id, kind, text) of items."""
    digest = sha256()
    for row in rows:
        digest.update(json.dumps(list(row)).encode() + b"\n")
    return digest.hexdigest()


def is_swapped(seed: int, item: str, annotator: str, showing: int) -> bool:
    """Return True if response A is the item's second one when an annotator sees it for the n-th time, from 0."""
    key = json.dumps([seed, item, annotator, showing])
    return sha256(key.encode()).digest()[0] % 2 == 1


def is_rejected_first(seed: int, item: str) -> bool:
    """Return True if the response with the lower label comes first in a random order fixed for each item."""
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
        "prompt": [
            *([{"role": "tools", "content": comparison.context}] if comparison.context else []),
            *({"role": turn.role, "content": turn.content} for turn in comparison.prompt),
        ],
        "responses": [comparison.responses[better], comparison.responses[1 - better]],
        "profile": [{"category": post.category, "text": post.text} for post in comparison.profile],
        "aspects": [asdict(aspect) for aspect in comparison.rubric_aspects],
        "narrative": comparison.narrative,
    }
