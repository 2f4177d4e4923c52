"""What people judge: pairs with all that is known about the user, private fields included."""

from __future__ import annotations

import json
import random
from collections.abc import Iterable, Sequence
from dataclasses import dataclass
from hashlib import sha256
from typing import Any, Literal

from prb_jax.data.comparison import Comparison
from prb_jax.errors import DataError, quote, short_repr

Kind = Literal["item", "gold"]


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
    pairs = [("item", each) for each in comparisons]
    rng = random.Random(seed)
    if sample is not None:
        if sample > len(pairs):
            raise DataError(f"sample: {sample} of {len(pairs)} comparisons; expected at most {len(pairs)}")
        pairs = rng.sample(pairs, sample)
    rng.shuffle(pairs)
    checks = [("gold", each) for each in gold]
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
        "prompt": [{"role": each.role, "content": each.content} for each in comparison.prompt],
        "responses": [comparison.responses[better], comparison.responses[1 - better]],
        "profile": [{"category": post.category, "text": post.text} for post in comparison.profile],
        "aspects": [
            {"aspect": each.aspect, "evidence": each.evidence, "reason": each.reason}
            for each in comparison.rubric_aspects
        ],
        "narrative": comparison.narrative,
    }
