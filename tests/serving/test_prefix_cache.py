"""Beginnings are computed once, whoever asks and when; scores are those of a scorer that keeps nothing."""

from __future__ import annotations

import asyncio
from collections.abc import Sequence
from dataclasses import replace
from pathlib import Path
from types import SimpleNamespace
from typing import Any, cast

import numpy as np
import pytest

import prb_jax as prb
from prb_jax.errors import RunError
from prb_jax.models.continued import why_not_kept
from prb_jax.models.readouts.load_options import LoadOptions
from prb_jax.scoring.load import open_scorer
from prb_jax.serving import engine as engine_module
from prb_jax.serving.engine import Engine
from prb_jax.serving.items import RenderedItem
from prb_jax.serving.options import ServeOptions
from prb_jax.serving.prefix_cache import PrefixCache
from prb_jax.serving.serve import make_served
from prb_jax.serving.tree_scorer import TreeScorer, open_tree_scorer
from prb_jax.text.view import ViewOptions
from prb_jax.trees.continued import PAGE, Page
from prb_jax.trees.tree import build_tree
from tests.scoring.records import write_model

RANDOM = np.random.default_rng(0)
PROFILES = [RANDOM.integers(4, 90, size) for size in (150, 37, 300, 64)]
CONVERSATIONS = [
    np.concatenate([PROFILES[number % 4], RANDOM.integers(4, 90, 1 + 4 * number)]) for number in range(12)
]
# two that part within a page, and one that begins with all of another
CONVERSATIONS += [
    np.concatenate([PROFILES[2][:261], [95, 96]]),
    np.concatenate([PROFILES[2][:285], *[[97] * 40]]),
    np.concatenate([CONVERSATIONS[6], [98, 99, 98, 99]]),
]
ITEMS = [RenderedItem(tuple(ids.tolist()), special_tokens=False) for ids in CONVERSATIONS]


def opened(model: prb.RewardModel, *, held: int) -> TreeScorer:
    return open_tree_scorer(model, ViewOptions(), batch_tokens=512, prefix_cache=held)


def values(scorer: TreeScorer, places: Sequence[int]) -> np.ndarray:
    return np.asarray([cast(Any, score).value for score in scorer([ITEMS[place] for place in places])])


def computed(scorer: TreeScorer, places: Sequence[int]) -> int:
    trees = [build_tree([CONVERSATIONS[place]]) for place in places]
    return sum(batch.computed for batch in scorer.batcher(trees, range(len(trees))))


@pytest.mark.parametrize(
    ("family", "settings"),
    [
        ("qwen3", {}),
        ("gemma2", {"sliding_window": 70}),  # a softcap too, and layers of both kinds
    ],
)
def test_scores_do_not_depend_on_what_is_kept(family: str, settings: dict[str, Any], tmp_path: Path) -> None:
    model = prb.load(write_model(tmp_path, family, num_hidden_layers=2, **settings))
    plain = values(opened(model, held=0), range(len(ITEMS)))
    scorer = opened(model, held=10**8)
    program = cast(Any, scorer.program)
    before = program._cache_size()
    scorer.compile()
    for turn in range(2):
        order = np.random.default_rng(turn).permutation(len(ITEMS)).tolist()
        for start in range(0, len(order), 4):
            places = order[start : start + 4]
            np.testing.assert_allclose(values(scorer, places), plain[places], atol=1e-5, rtol=0)
    assert program._cache_size() - before == len(cast(Any, scorer.shapes).fixed)
    # Of each conversation only what its whole pages leave is computed, and its last token in any case.
    left = [(len(ids) - 1) % PAGE + 1 for ids in CONVERSATIONS]
    assert [computed(scorer, [place]) for place in range(len(ITEMS))] == left


def test_a_cache_that_holds_little_holds_what_was_asked_for_last(model: prb.RewardModel) -> None:
    plain = values(opened(model, held=0), range(len(ITEMS)))
    page = opened(model, held=10**6)
    values(page, [0])
    size = page.cache.bytes // len(page.cache) if page.cache else 0
    scorer = opened(model, held=6 * size)
    assert scorer.cache is not None
    for place in (0, 2, 6, 1, 5, 1):
        np.testing.assert_allclose(values(scorer, [place]), plain[place], atol=1e-5, rtol=0)
        assert scorer.cache.bytes <= 6 * size
        assert scorer.cache.bytes == size * len(scorer.cache)
    assert computed(scorer, [5]) == (len(CONVERSATIONS[5]) - 1) % PAGE + 1
    assert computed(scorer, [2]) > computed(scorer, [5]) + PAGE


def test_pages_go_from_the_end_of_a_beginning_and_none_is_held_without_those_before_it() -> None:
    def page(value: float = 0.0) -> Page:
        return Page(np.full((1, 1, PAGE, 2), value, np.float32), np.full((1, 1, 2, PAGE), value, np.float32))

    first = np.arange(4 * PAGE, dtype=np.int32)
    other = np.concatenate([first[:PAGE], first[: 2 * PAGE]])
    cache = PrefixCache(5 * page().bytes)
    cache.put(first, [page() for _ in range(4)])
    cache.put(other, [*cache.find(other, most=PAGE), page(), page()])
    assert (len(cache), cache.bytes) == (5, cache.most)
    assert [len(cache.find(ids, most=10**6)) for ids in (first, other)] == [3, 3]
    assert len(cache.find(first, most=PAGE + 1)) == 1
    assert len(cache.find(first[: PAGE - 1], most=10**6)) == 0
    broken = first[::-1].copy()
    cache.put(broken, [page(), page(np.nan), page()])
    assert len(cache.find(broken, most=10**6)) == 1
    long = np.arange(1000, 1000 + 9 * PAGE, dtype=np.int32)
    cache.put(long, [page() for _ in range(9)])  # more than it may hold
    assert len(cache.find(long, most=10**6)) == len(cache) == 5
    assert cache.bytes <= cache.most


def ask(engine: Any, places: Sequence[int], *, together: bool) -> list[float]:
    async def all_of_them() -> list[Any]:
        if together:
            return await asyncio.gather(*(engine.score([ITEMS[place]]) for place in places))
        return [await engine.score([ITEMS[place]]) for place in places]

    return [answer[0].value for answer in asyncio.run(all_of_them())]


@pytest.mark.parametrize("together", [False, True])
def test_a_profile_is_computed_once_whether_its_requests_wait_together_or_not(
    model: prb.RewardModel, monkeypatch: pytest.MonkeyPatch, together: bool
) -> None:
    monkeypatch.setattr(engine_module, "lanes", lambda mesh: 2)
    scorer, counts = opened(model, held=10**8), list[int]()
    scorer.compile()
    engine = Engine(scorer, most=100, count=counts.append)
    places = [2, 6, 10, 12, 13]  # of one person
    found = ask(engine, places, together=together)
    assert engine.close()
    np.testing.assert_allclose(found, values(opened(model, held=0), places), atol=1e-5, rtol=0)
    rest = sum(len(CONVERSATIONS[place]) for place in places) - len(places) * 261
    most = 261 + rest + (len(places) - 1) * 2 * PAGE  # a page that is begun is computed again
    assert 261 + rest - 3 * 39 <= sum(counts) <= most


def test_a_model_that_keeps_nothing_says_why(model: prb.RewardModel, tmp_path: Path) -> None:
    assert model.streams is not None
    config = model.decoder
    assert why_not_kept(config, model.mesh, model.streams) is None
    assert "cpu" in str(why_not_kept(config, model.mesh, replace(model.streams, table="keys")))
    gated = replace(config, head=cast(Any, SimpleNamespace(needs=(1, 2))))
    assert "reads other tokens" in str(why_not_kept(gated, model.mesh, model.streams))
    refused = replace(model, streams=replace(model.streams, table="keys"))
    with pytest.raises(
        RunError, match="keeps no keys and values of beginnings: they are kept on a single CPU"
    ):
        make_served(refused, ServeOptions(prefix_cache=1))
    with pytest.raises(RunError, match="is no reward model whose keys and values"):
        make_served(open_scorer("baseline:length", LoadOptions()), ServeOptions(prefix_cache=1))
