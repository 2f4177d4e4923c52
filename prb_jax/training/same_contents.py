"""A warning about comparisons that are trained on and also measured, under two ids."""

from __future__ import annotations

import warnings
from collections.abc import Mapping
from typing import TYPE_CHECKING

from prb_jax.errors import PrbWarning, quote
from prb_jax.records.comparison import Comparison

if TYPE_CHECKING:
    from prb_jax.training.data import Examples


def tell_same_contents(train: Examples, others: Mapping[str, Examples]) -> None:
    """Warn of comparisons of another role that are training comparisons in everything but the id.

    People without a profile who judge the same responses are told apart by their names, all others by their profiles,
    because the same data may name a person in two ways. Data larger than memory are not compared.

    Args:
      train: Training data.
      others: Data that must be new to the model, by role.
    """
    parts = {role: part for role, part in others.items() if len(part) and part.comparisons.in_memory}
    if not parts or not train.comparisons.in_memory:
        return
    trained = {_contents(one): one.id for one in train.comparisons}
    for role, part in parts.items():
        same = [(one.id, trained[key]) for one in part.comparisons if (key := _contents(one)) in trained]
        if same:
            first, other = map(quote, same[0])
            warnings.warn(
                f"{len(same):,} of {len(part):,} {role} comparisons have the contents of a training comparison under "
                f"another id ({first} is {other}): the model has seen their labels",
                PrbWarning,
                stacklevel=2,
            )


def _contents(one: Comparison) -> int:
    assert one.labels is not None
    answers = frozenset(zip(one.responses, one.labels, strict=True))
    person = tuple(post.text for post in one.profile) or one.user_id
    return hash((one.prompt, answers, person))
