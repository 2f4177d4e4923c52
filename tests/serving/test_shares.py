"""Batches that run at the same time are about equal, and keep trees with common beginnings together."""

from __future__ import annotations

import asyncio
from collections.abc import Sequence
from typing import Any

import numpy as np
import pytest

import prb_jax as prb
from prb_jax.serving import engine as engine_module
from prb_jax.serving.engine import Engine
from prb_jax.serving.items import RenderedItem
from prb_jax.serving.shares import take_share
from prb_jax.serving.tree_scorer import open_tree_scorer
from prb_jax.text.view import ViewOptions
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


def engine_of(
    model: prb.RewardModel, monkeypatch: pytest.MonkeyPatch, *, lanes: int
) -> tuple[Engine, list[int]]:
    """An engine, and the number of trees of each batch that it starts."""
    started, start = list[int](), Engine._start

    def counted(self: Engine, planned: Any, trees: list[Any]) -> None:
        started.append(len(trees))
        start(self, planned, trees)

    monkeypatch.setattr(engine_module, "lanes", lambda mesh: lanes)
    monkeypatch.setattr(Engine, "_start", counted)
    scorer = open_tree_scorer(model, ViewOptions(), batch_tokens=1024, prefix_cache=10**7)
    scorer.compile()
    return Engine(scorer, most=100, count=lambda tokens: None), started


def distinct_items(count: int) -> list[RenderedItem]:
    return [RenderedItem(tuple(range(4 + k, 64 + k)), special_tokens=False) for k in range(count)]


def test_requests_that_wait_together_are_divided_among_the_cores(
    model: prb.RewardModel, monkeypatch: pytest.MonkeyPatch
) -> None:
    engine, started = engine_of(model, monkeypatch, lanes=2)
    asyncio.run(engine.score(distinct_items(8)))
    assert engine.close()
    assert started == [4, 4]


def test_clients_that_were_answered_go_along_with_the_next_batch(
    model: prb.RewardModel, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Without a hold, one of four clients would be alone in every second batch."""
    monkeypatch.setattr(engine_module, "HOLD", 0.5)
    monkeypatch.setattr(engine_module, "LONGEST_HOLD", 0.5)
    engine, started = engine_of(model, monkeypatch, lanes=1)

    async def client(items: Sequence[RenderedItem]) -> None:
        for item in items:
            await engine.score([item])

    async def clients() -> None:
        items = distinct_items(16)
        await asyncio.gather(*(client(items[place::4]) for place in range(4)))

    asyncio.run(clients())
    assert engine.close()
    assert sum(started) == 16
    assert len(started) <= 6  # 8 without a hold
