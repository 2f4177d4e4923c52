"""Batches that run at the same time are about equal, and keep trees with common beginnings together."""

from __future__ import annotations

from collections.abc import Sequence

import numpy as np

from prb_jax.serving.shares import take_share
from prb_jax.trees.tree import Tree, build_tree


def conversations(sizes: Sequence[int], *, profile: int = 0, first: int = 0) -> list[Tree]:
    """Trees of these numbers of tokens, all of which begin with the same profile."""
    of_all = np.arange(profile)
    return [
        build_tree(
            [np.concatenate([of_all, 10_000 + 1000 * (first + k) + np.arange(size - profile)]).tolist()]
        )
        for k, size in enumerate(sizes)
    ]


def taken(trees: Sequence[Tree], share: float, **options: object) -> list[int]:
    given = {"kept": lambda tree: 0, **options}
    return take_share(range(len(trees)), trees.__getitem__, share=share, **given)  # pyright: ignore


def test_a_batch_takes_the_oldest_trees_of_its_share() -> None:
    trees = conversations([100] * 8)
    assert taken(trees, 400) == [0, 1, 2, 3]
    assert taken(trees, 410) == [0, 1, 2, 3, 4]
    assert taken(trees, 700) == [*range(8)]  # the rest would be small
    assert taken(trees, 100, first=[5, 7]) == [5, 7]
    assert taken(trees, 1) == [0]
    assert taken([], 10) == []


def test_common_beginnings_and_cached_tokens_are_counted_once_and_stay_together() -> None:
    person, other = conversations([260] * 3, profile=200), conversations([260] * 3, first=7)
    assert taken([*person, *other], 300) == [0, 1, 2]  # 380 tokens: the profile once
    assert taken([*other, *person], 300) == [0, 1]
    assert taken([*other, *person], 300, first=[4]) == [3, 4, 5]
    assert taken([*other, *person], 300, kept=lambda tree: 200) == [*range(6)]  # 360 tokens in all
