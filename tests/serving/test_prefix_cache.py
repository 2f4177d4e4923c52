"""Beginnings are computed once, whoever asks and when; scores are those of a scorer that keeps nothing."""

from __future__ import annotations

import asyncio
import itertools
import re
from collections.abc import Sequence
from concurrent.futures import ThreadPoolExecutor
from dataclasses import asdict, replace
from pathlib import Path
from types import SimpleNamespace
from typing import Any, cast

import httpx
import jax
import jax.numpy as jnp
import numpy as np
import pytest
from flax import nnx

import prb_jax as prb
from prb_jax.errors import PrbWarning, RunError
from prb_jax.models.continued import make_fresh, why_not_kept
from prb_jax.models.readouts.load_options import LoadOptions
from prb_jax.scoring.open_scorer import open_scorer
from prb_jax.serving import engine as engine_module
from prb_jax.serving import serve as serve_module
from prb_jax.serving.engine import Engine
from prb_jax.serving.items import RenderedItem
from prb_jax.serving.options import ServeOptions
from prb_jax.serving.prefix_cache import PrefixCache
from prb_jax.serving.serve import make_served
from prb_jax.serving.tree_scorer import TreeScorer, open_tree_scorer
from prb_jax.text.view import ViewOptions
from prb_jax.trees.continued import PAGE, PAGES, BlockStore, CachedBlock, KeptPrefix, lay_behind
from prb_jax.trees.streams import PackedStream, StreamShape
from prb_jax.trees.tree import BLOCK, build_tree, common_run
from tests.scoring.records import text, write_model
from tests.serving.local_server import serving
from tests.tiny_models import FAMILIES

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
        ("qwen3", {"num_hidden_layers": 2}),
        ("gemma2", {"num_hidden_layers": 3, "sliding_window": 70}),  # a softcap too, and layers of both kinds
        ("gpt_oss", {"num_hidden_layers": 2, "sliding_window": 70}),  # attention sinks and experts
        ("qwen3_moe-lead", {"num_hidden_layers": 3}),  # the first layer has no experts
        *(pytest.param(family, {}, marks=pytest.mark.slow) for family in FAMILIES),
    ],
)
def test_scores_do_not_depend_on_what_is_kept(family: str, settings: dict[str, Any], tmp_path: Path) -> None:
    model = prb.load(write_model(tmp_path, family, **settings))
    if (why := why_not_kept(model.decoder, model.mesh, cast(Any, model.streams))) is not None:
        pytest.skip(why)
    plain = values(opened(model, held=0), range(len(ITEMS)))
    scorer = opened(model, held=10**8)
    programs = cast(Any, scorer.program.programs)
    parts = programs.begin, *programs.middle.values(), programs.last
    before = [part._cache_size() for part in parts]
    scorer.compile()
    for turn in range(2):
        order = np.random.default_rng(turn).permutation(len(ITEMS)).tolist()
        for start in range(0, len(order), 4):
            places = order[start : start + 4]
            np.testing.assert_allclose(values(scorer, places), plain[places], atol=1e-5, rtol=0)
    shapes = len(cast(Any, scorer.shapes).fixed)
    assert [part._cache_size() - held for part, held in zip(parts, before)] == [shapes] * len(parts)
    assert [computed(scorer, [place]) for place in range(len(ITEMS))] == [*map(left, CONVERSATIONS)]


def left(ids: np.ndarray) -> int:
    """The tokens that are computed of a conversation if all were computed before: those behind its whole pages, without
    what a page of another conversation has in common with them, and the last one in any case."""
    whole = (len(ids) - 1) // PAGE * PAGE
    others = [other for other in CONVERSATIONS if (len(other) - 1) // PAGE * PAGE > whole]
    return len(ids) - max(whole, *(common_run([ids[:-1], other]) for other in others), 0)


def compiled_layers(scorer: TreeScorer, shape: StreamShape) -> list[Any]:
    """Return the programs of a middle layer and of the last one, compiled for an empty cache."""
    model, program, store = scorer.model, cast(Any, scorer.program), scorer.store
    assert store is not None
    packed = PackedStream(shape, (0,), (0,), 2)
    laid = lay_behind([build_tree([[0, 0]])], packed, [KeptPrefix()], store)
    dtype, batch = jnp.dtype(model.dtype), laid.batch
    keys, values = make_fresh(model.decoder, model.mesh, dtype, shape.tokens)
    x, values, facts = program.programs.begin(model.params, batch, values)
    (middle,), last, layers = program.programs.middle.values(), program.programs.last, program.layers
    angles = facts.angles[False, True]
    of_middle = 0, batch, facts.real, facts.tables[False], angles
    of_last = batch, facts.real, facts.reads, angles
    return [
        middle.lower(layers[0], x, keys, values, *of_middle).compile(),
        last.lower(layers[-1], model.params, x, keys, values, *of_last).compile(),
    ]


def test_a_layer_is_a_view_of_the_stack_of_all_layers(model: prb.RewardModel) -> None:
    layers, stacks = opened(model, held=10**6).program.layers, model.params["layers"]
    aligned = 0
    for number, layer in enumerate(layers):
        for (name,), variable in nnx.to_flat_state(layer):
            row, stack = variable[...], stacks[name]
            np.testing.assert_array_equal(row, stack[number])
            if row.nbytes % 64 == 0:
                aligned += 1
                start = stack.unsafe_buffer_pointer() + number * row.nbytes
                assert row.unsafe_buffer_pointer() == start, name
    assert aligned > 2 * len(layers)


def test_in_bfloat16_keys_and_values_are_read_where_they_are(tmp_path: Path) -> None:
    """XLA for CPUs would convert a store of bfloat16, and all layers, to float32 for each batch."""
    model = prb.load(write_model(tmp_path, "qwen3", num_hidden_layers=2), dtype="bfloat16")
    plain = values(opened(model, held=0), range(len(ITEMS)))
    scorer = opened(model, held=10**7)
    for _ in range(2):
        found = [values(scorer, range(start, start + 5)) for start in range(0, len(ITEMS), 5)]
        # sums of attention are in another order, and bfloat16 has 8 bits
        np.testing.assert_allclose(np.concatenate(found), plain, atol=2**-7 * np.abs(plain).max(), rtol=0)
    shape, store = cast(Any, scorer.shapes).fixed[0], scorer.store
    assert store is not None
    assert store.keys.nbytes > 4e6
    for compiled in compiled_layers(scorer, shape):
        assert compiled.memory_analysis().temp_size_in_bytes < 1e6


@pytest.mark.slow
def test_a_batch_copies_no_keys_and_values_of_all_layers(tmp_path: Path) -> None:
    """Each chunk of tokens writes into them in place: copies would take several times as long as the layers."""
    scorer = opened(prb.load(write_model(tmp_path, "qwen3", num_hidden_layers=5)), held=10**6)
    shape = cast(Any, scorer.shapes).fixed[-1]
    sizes = (
        f"{scorer.model.decoder.head_dim},{shape.tokens}",
        f"{shape.tokens},{scorer.model.decoder.head_dim}",
    )
    for compiled in compiled_layers(scorer, shape):
        found = re.findall(rf"= f32\[5,2,(?:{sizes[0]}|{sizes[1]})\]\S* (\S+?)\(", compiled.as_text())
        assert "dynamic-update-slice" in found
        assert "copy" not in found


def test_scores_do_not_depend_on_the_old_contents_of_arrays(model: prb.RewardModel) -> None:
    plain = values(opened(model, held=0), range(len(ITEMS)))
    scorer = opened(model, held=10**8)
    scorer.compile()
    for place in range(len(ITEMS)):
        scorer.fresh[:] = [cast(Any, tuple(array * np.nan for array in fresh)) for fresh in scorer.fresh]
        np.testing.assert_allclose(values(scorer, [place]), plain[[place]], atol=1e-5, rtol=0)
        assert len(scorer.fresh) == 1


SHAPES = (
    jax.ShapeDtypeStruct((1, 1, BLOCK, 2), np.dtype(np.float32)),
    jax.ShapeDtypeStruct((1, 1, 2, BLOCK), np.dtype(np.float32)),
)


def test_a_row_is_used_again_once_nothing_refers_to_its_block() -> None:
    size = sum(2 * BLOCK * 4 for _ in SHAPES)
    store = BlockStore(SHAPES, most=3 * size, spare=1)
    blocks = [cast(CachedBlock, store.new()) for _ in range(4)]
    assert [(block.row, block.bytes) for block in blocks] == [(row, size) for row in range(4)]
    assert store.new() is None
    kept = KeptPrefix(blocks[1:3], 1)
    del blocks
    again = [store.new(), store.new()]
    assert {block.row for block in again if block} == {0, 3}
    assert store.new() is None
    assert [block.row for block in kept.blocks] == [1, 2]


@pytest.mark.parametrize("dtype", [np.dtype(np.float32), jnp.dtype(jnp.bfloat16)])
def test_a_prefix_is_cached_up_to_the_first_block_that_is_not_finite_or_has_no_memory(
    dtype: np.dtype,
) -> None:
    """Of float32, and of bfloat16 in bits."""
    kind = np.dtype(np.uint16) if dtype == jnp.bfloat16 else dtype
    shapes = tuple(jax.ShapeDtypeStruct(shape.shape, kind) for shape in SHAPES)
    size = sum(2 * BLOCK * kind.itemsize for _ in SHAPES)
    store = BlockStore((shapes[0], shapes[1]), most=4 * size, spare=0, dtype=dtype)
    ids = np.arange(4 * BLOCK + PAGE, dtype=np.int32)
    tree = build_tree([[*ids.tolist(), 1], [*ids.tolist(), 2]])
    shape = StreamShape(6 * BLOCK, 16, 0)
    laid = lay_behind([tree], PackedStream(shape, (0,), (0,), tree.tokens), [KeptPrefix()], store)
    keys = np.random.default_rng(0).normal(size=(1, 1, shape.tokens, 2)).astype(dtype).view(kind)
    values = np.ascontiguousarray(keys.swapaxes(2, 3))

    def cached(changed: float | None = None) -> int:
        given = values.copy()
        if changed is not None:
            given.view(dtype)[0, 0, 1, 2 * BLOCK + 5] = changed
        ((prefix, blocks),) = laid.blocks(keys, given)
        assert prefix is tree.prefix
        for number, block in enumerate(blocks[::PAGES]):
            at = slice(number * BLOCK, (number + 1) * BLOCK)
            np.testing.assert_array_equal(store.keys[block.row], keys[:, :, at])
            np.testing.assert_array_equal(store.values[block.row], given[..., at])
        return len(blocks)

    assert cached() == 4 * PAGES  # the fifth block has no memory
    assert [cached(broken) for broken in (np.nan, np.inf, -np.inf)] == [2 * PAGES] * 3
    held = store.new(), store.new()
    assert cached() == 2 * PAGES
    del held


def test_a_cache_that_holds_little_holds_what_was_asked_for_last(model: prb.RewardModel) -> None:
    plain = values(opened(model, held=0), range(len(ITEMS)))
    page = opened(model, held=10**8)
    values(page, [0])
    assert page.cache is not None
    size = page.cache.bytes // -(-len(page.cache) // PAGES)
    scorer = opened(model, held=2 * size)
    assert scorer.cache is not None
    for place in (0, 2, 6, 1, 5, 1):
        np.testing.assert_allclose(values(scorer, [place]), plain[place], atol=1e-5, rtol=0)
        assert scorer.cache.bytes <= 2 * size
        assert size * -(-len(scorer.cache) // PAGES) <= scorer.cache.bytes
    assert computed(scorer, [5]) == (len(CONVERSATIONS[5]) - 1) % PAGE + 1
    assert computed(scorer, [2]) > computed(scorer, [5]) + PAGE


def blocks_of(pages: int, first: int = 0) -> list[CachedBlock]:
    """A block of its own for each page: the cache counts blocks, not tokens."""
    return [CachedBlock(first + row, 100) for row in range(pages)]


def test_pages_go_from_the_end_of_a_beginning_and_none_is_held_without_those_before_it() -> None:
    first = np.arange(4 * PAGE, dtype=np.int32)
    other = np.concatenate([first[:PAGE], first[: 2 * PAGE]])
    cache = PrefixCache(500)
    cache.put(first, blocks_of(4))
    cache.put(other, [*cache.find(other, most=PAGE).blocks, *blocks_of(2)])
    assert (len(cache), cache.bytes) == (5, cache.most)
    assert [cache.find(ids, most=10**6).tokens for ids in (first, other)] == [3 * PAGE, 3 * PAGE]
    assert cache.find(first, most=PAGE + 1).tokens == PAGE + 1
    long = np.arange(1000, 1000 + 9 * PAGE, dtype=np.int32)
    cache.put(long, blocks_of(9))  # more than it may hold
    assert cache.find(long, most=10**6).tokens == PAGE * len(cache) == 5 * PAGE
    assert cache.bytes <= cache.most


def test_a_block_counts_once_until_its_last_page_is_evicted() -> None:
    (block, other), ids = blocks_of(2), np.arange(5 * PAGE, dtype=np.int32)
    cache = PrefixCache(200)
    cache.put(ids, [block] * PAGES)
    assert cache.bytes == 100
    cache.put(ids, [block] * PAGES + [other])
    assert cache.bytes == 200
    cache.put(ids + 1000, blocks_of(1, first=2))  # the last page of `ids` leaves
    assert (cache.bytes, len(cache)) == (200, PAGES + 1)
    cache.put(ids + 2000, blocks_of(2, first=3))  # its other pages too
    assert (cache.bytes, len(cache)) == (200, 2)


def test_a_page_that_only_begins_like_a_prefix_is_kept_as_far_as_it_is_alike() -> None:
    blocks = blocks_of(3)
    ids = np.arange(2 * PAGE, dtype=np.int32)
    other = np.concatenate([ids[: PAGE + 20], ids[:PAGE]])
    cache = PrefixCache(300)
    cache.put(ids, blocks[:2])
    cache.put(other, [blocks[0], blocks[2]])
    for wanted, most, tokens, row in (
        (np.concatenate([ids[: PAGE + 7], [99, 98]]), 10**6, PAGE + 7, 2),  # both begin alike: the latest one
        (np.concatenate([other[: PAGE + 25], [99]]), 10**6, PAGE + 25, 2),
        (np.concatenate([ids[: PAGE + 25], [99]]), 10**6, PAGE + 25, 1),
        (ids, PAGE + 5, PAGE + 5, 2),
        (ids[: PAGE // 2], 10**6, PAGE // 2, 0),
        (ids + 1, 10**6, 0, None),
    ):
        found = cache.find(wanted.astype(np.int32), most=most)
        assert found.tokens == tokens
        assert [block.row for block in found.blocks[-1:]] == [row] * (row is not None)
    cache.put(np.arange(500, 500 + 3 * PAGE, dtype=np.int32), blocks_of(3, first=3))  # and all others go
    assert [cache.find(some, most=10**6).tokens for some in (ids, other)] == [0, 0]


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


QUESTION = "What should I have on a rainy evening in the hills, and with what music?"
STATEMENTS = [text(RANDOM, 3, 8 + 3 * k) + "." for k in range(5)]
RANKINGS = [
    prb.Comparison(
        id=f"{person}-{first}-{second}", user_id=str(person), question=QUESTION,
        responses=[STATEMENTS[first], STATEMENTS[second]],
        profile=[{"text": f"{person} {words}"} for words in posts],
    )
    for person, posts in enumerate([text(RANDOM, 30, 60) for _ in range(3)] for _ in range(4))
    for first, second in itertools.combinations(range(len(STATEMENTS)), 2)
]  # fmt: skip
"""People rank the same statements; every ranking is turned into pairs."""


def distinct_tokens(model: prb.RewardModel) -> int:
    """The tokens of all conversations if each beginning of a person is computed once."""
    tokens = set[tuple[str | None, bytes]]()
    for one, tree in zip(RANKINGS, model.encode(RANKINGS), strict=True):
        for ids in (tree.sequence(k) for k in range(2)):
            tokens |= {(one.user_id, ids[: end + 1].tobytes()) for end in range(len(ids))}
    return len(tokens)


def request(url: str, one: prb.Comparison) -> list[float]:
    body = {
        "queries": QUESTION,
        "documents": list(one.responses),
        "user_id": one.user_id,
        "profile": [asdict(post) for post in one.profile],
    }
    answer = httpx.post(f"{url}/v1/score", json=body, timeout=300)
    return [entry["score"] for entry in answer.json()["data"]]


def figure(url: str, name: str) -> float:
    found = re.search(rf"^{name} (\S+)$", httpx.get(f"{url}/metrics").text, re.MULTILINE)
    assert found is not None
    return float(found[1])


def test_rankings_turned_into_pairs_are_computed_once_by_evaluation_and_server(
    model: prb.RewardModel,
) -> None:
    """In random order, one request after another and then all at once; as many tokens as a run of `evaluate`."""
    needed = distinct_tokens(model)
    assert sum(batch.computed or 0 for batch in model.stream(RANKINGS)) == needed
    expected = [row.tolist() for row in model.score(RANKINGS)]
    order = np.random.default_rng(3).permutation(len(RANKINGS)).tolist()
    with serving(model, batch_tokens=1024, prefix_cache=100) as url:
        entry = httpx.get(f"{url}/v1/models").json()["data"][0]
        assert entry["prefix_cache"] == {"bytes": 100_000_000, "reason": None}
        for place in order:
            assert request(url, RANKINGS[place]) == pytest.approx(expected[place], abs=1e-5)
        computed = figure(url, "prb_tokens_total")
        # A prompt that a response of before follows is computed behind its last whole page.
        assert needed <= computed <= needed + len(STATEMENTS) * 4 * PAGE
        with ThreadPoolExecutor(8) as clients:
            again = list(clients.map(lambda place: request(url, RANKINGS[place]), order))
        assert (
            figure(url, "prb_tokens_total") == computed
        )  # of conversations that were scored before, no token
        assert again == [pytest.approx(expected[place], abs=1e-5) for place in order]
    with serving(model, batch_tokens=1024, prefix_cache=100) as url:
        with ThreadPoolExecutor(8) as clients:
            found = list(clients.map(lambda place: request(url, RANKINGS[place]), order))
        assert found == [pytest.approx(expected[place], abs=1e-5) for place in order]
        assert (
            figure(url, "prb_tokens_total")
            < 2 * needed
            < 0.5 * sum(tree.tokens for tree in model.encode(RANKINGS))
        )


def test_a_server_whose_cache_is_too_small_for_its_people_gives_the_same_scores(
    model: prb.RewardModel, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(serve_module, "MEGABYTE", 10_000)
    some = RANKINGS[::3]
    with serving(model, batch_tokens=1024, prefix_cache=10) as url:
        for number in np.random.default_rng(1).permutation(len(some)).tolist():
            one = some[number]
            assert request(url, one) == pytest.approx(model.score(one).tolist(), abs=1e-5)
            assert figure(url, "prb_prefix_cache_bytes") <= 100_000
        assert figure(url, "prb_prefix_cache_bytes") > 80_000  # it is full
        assert figure(url, "prb_tokens_total") > distinct_tokens(
            model
        )  # profiles left, and were computed again


def test_a_model_that_keeps_nothing_says_why(model: prb.RewardModel, tmp_path: Path) -> None:
    assert model.streams is not None
    config = model.decoder
    assert why_not_kept(config, model.mesh, model.streams) is None
    assert "cpu" in str(why_not_kept(config, model.mesh, replace(model.streams, table="keys")))
    gated = replace(config, head=cast(Any, SimpleNamespace(needs=(1, 2))))
    assert "reads other tokens" in str(why_not_kept(gated, model.mesh, model.streams))
    refused = replace(model, streams=replace(model.streams, table="keys"))
    with pytest.raises(RunError, match="keeps no keys and values of prefixes: they are kept on a single CPU"):
        make_served(refused, ServeOptions(prefix_cache=1))
    with pytest.raises(RunError, match="is no reward model whose keys and values"):
        make_served(open_scorer("baseline:length", LoadOptions()), ServeOptions(prefix_cache=1))
    with pytest.warns(
        PrbWarning, match="keeps no keys and values of prefixes: they are kept on a single CPU"
    ):
        served = make_served(refused, ServeOptions(batch_tokens=256))
    assert served.close()
    assert served.facts["prefix_cache"]["bytes"] == 0
    assert "single CPU" in served.facts["prefix_cache"]["reason"]
