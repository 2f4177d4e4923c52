"""The kernel for TPUs over packed streams, its steps run by XLA, against the mask written down whole; and the program
that is compiled for a TPU."""

from __future__ import annotations

import functools
import itertools
from dataclasses import replace
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from jax.sharding import Mesh, NamedSharding, PartitionSpec

from prb_jax.measure.plan.chips import describe_slice
from prb_jax.models.attention import stream_kernel
from prb_jax.models.attention.stream_kernel import kernel_attention
from prb_jax.trees.kernel_tables import AREA, FIRST, LAST, OFFSET, StepTable, for_kernel
from prb_jax.trees.packing import pack_streams
from prb_jax.trees.step_areas import SEEN, TILE, step_areas
from prb_jax.trees.streams import StreamBatch, StreamOptions, StreamShape, make_stream_batch, query_order
from prb_jax.trees.tree import Tree, build_tree
from tests.models.attention.test_streams import (
    assert_scores_are_those_of_trees,
    dense,
    gradients,
    inputs,
    off,
)
from tests.sweeps import sweep
from tests.training.small_batches import random_trees, small_config
from tests.trees.test_streams import people, who_sees

BLOCK = 128


def uneven_trees() -> list[Tree]:
    """People with profiles that their comparisons share; one to five responses; one tree of several blocks, one without
    a prefix, equal responses."""
    rng = np.random.default_rng(0)

    def ids(count: int) -> list[int]:
        return rng.integers(1, 9, count).tolist()

    trees = people(2, 2)
    for prefix, responses in (
        (300, (40, 50)), (130, (20, 3, 60)), (7, (1, 2, 1, 2, 30)), (0, (9, 12)), (60, (33,)), (20, (150, 140)),
    ):  # fmt: skip
        shared = ids(prefix)
        trees.append(build_tree([[*shared, 10 + k, *ids(count - 1)] for k, count in enumerate(responses)]))
    shared = ids(10)
    trees.append(build_tree([[*shared, 1, 2], [*shared, 3, 4, 5], [*shared, 1, 2]]))
    return trees


def long_tree(tokens: int) -> Tree:
    rng = np.random.default_rng(0)
    return build_tree([rng.integers(1, 9, tokens), rng.integers(1, 9, 20)])


def kernel_batch(
    trees: list[Tree],
    tokens: int,
    *,
    window: int | None = None,
    streams: int = 2,
    parts: int = 1,
    block: int = BLOCK,
) -> StreamBatch:
    options = StreamOptions(tokens, streams=streams, window=window, kernel=True, block=block, parts=parts)
    (packed,) = pack_streams(trees, StreamShape(tokens, 64), options)
    return make_stream_batch(trees, packed, options)


@pytest.mark.parametrize(("parts", "block"), [(1, 128), (2, 128), (4, 128), (1, 512), (2, 256)])
@pytest.mark.parametrize("window", [None, 30, 200])
def test_the_steps_are_the_blocks_that_meet_and_no_others(window: int | None, parts: int, block: int) -> None:
    """Each pair of blocks in which anything is seen is one step, in both orders, masked unless all is seen. A block
    of keys of which no query of a part sees anything has one step there, by key."""
    batch = kernel_batch(uneven_trees(), 1024, window=window, parts=parts, block=block)
    table, blocks, seen = batch.table(window), 1024 // block, who_sees(batch, window)
    assert isinstance(table, StepTable)
    order = query_order(blocks, parts)
    assert sorted(order.reshape(-1)) == list(range(blocks))
    room = max((order + 1).sum(axis=1)) + (blocks if parts > 1 else 0)
    assert table.by_query.shape == table.by_key.shape == (2, parts, 4, room)
    for row, part in itertools.product(range(2), range(parts)):
        sees = seen[row].reshape(blocks, block, blocks, block)[order[part]]
        meets, whole = sees.any(axis=(1, 3)), sees.all(axis=(1, 3))
        unseen = int((~meets.any(axis=0)).sum())
        both = (table.by_query[row, part], 0, 0), (table.by_key[row, part], 1, unseen)
        for steps, outer, more in both:
            count = int(table.counts[row, part, outer])
            assert count == meets.sum() + more
            queries, keys, flags, places = np.asarray(steps)[:, :count]
            np.testing.assert_array_equal(places, order[part][queries])
            assert len({*zip(queries.tolist(), keys.tolist(), strict=True)}) == count
            assert (~meets[queries, keys]).sum() == more
            np.testing.assert_array_equal(flags % OFFSET // AREA == SEEN, whole[queries, keys])
            runs = [list(run) for _, run in itertools.groupby(range(count), steps[outer].__getitem__)]
            assert len(runs) == (blocks if outer else blocks // parts)  # those of one block stand together
            np.testing.assert_array_equal(np.flatnonzero(flags & FIRST), [run[0] for run in runs])
            np.testing.assert_array_equal(np.flatnonzero(flags & LAST), [run[-1] for run in runs])
            assert not np.asarray(steps)[:, count:].any()


def areas_of(batch: StreamBatch, window: int | None) -> set[int]:
    """The areas of all steps of a batch."""
    table = batch.table(window)
    assert isinstance(table, StepTable)
    steps = zip(table.by_query[:, 0, 2], table.counts[:, 0, 0], strict=True)
    return {int(flags) % OFFSET // AREA for row, count in steps for flags in row[:count]}


def covered(area: int, offset: int, tiles: int) -> np.ndarray:
    """bool [tiles, tiles]: the tiles of queries and keys that an area computes, each once."""
    found = np.zeros((tiles, tiles), int)
    for part in step_areas(tiles)[area]:
        assert offset + part.keys <= tiles
        found[part.query : part.query + part.queries, offset : offset + part.keys] += 1
    assert found.max() == 1
    return found > 0


@pytest.mark.parametrize("window", [None, 200])
@pytest.mark.parametrize("block", [128, 256, 512])
def test_a_step_computes_the_smallest_area_with_all_that_is_seen(block: int, window: int | None) -> None:
    batch = kernel_batch([long_tree(1400), *uneven_trees()], 2048, window=window, block=block)
    tiles, table = block // TILE, batch.table(window)
    assert isinstance(table, StepTable)
    for row, seen in enumerate(who_sees(batch, window)):
        fine = seen.reshape(2048 // TILE, TILE, 2048 // TILE, TILE).any(axis=(1, 3))
        computed = 0
        for _, key, flags, query in table.by_query[row, 0].T[: table.counts[row, 0, 0]]:
            area, offset = int(flags) % OFFSET // AREA, int(flags) // OFFSET
            meets = fine[query * tiles : (query + 1) * tiles, key * tiles : (key + 1) * tiles]
            assert not (meets & ~covered(area, offset, tiles)).any()
            for other, parts in enumerate(step_areas(tiles)):
                longest = max(part.keys for part in parts)
                for start in range(tiles - longest + 1):
                    smaller = covered(other, start, tiles)
                    assert (meets & ~smaller).any() or smaller.sum() >= covered(area, offset, tiles).sum()
            computed += int(covered(area, offset, tiles).sum()) * TILE**2
        assert table.computed_pairs()[row, 0] == computed
    assert len(areas_of(batch, window)) >= min(tiles, 3)


@pytest.mark.parametrize(
    ("window", "softcap", "block"),
    sweep(
        [(None, None, 128), (30, 3.0, 128), (200, None, 256), (None, 3.0, 512), (700, None, 512)], few=(1, 3)
    ),
)
def test_output_and_gradients_equal_those_of_the_whole_mask(
    window: int | None, softcap: float | None, block: int
) -> None:
    """Steps of one tile, and of several, of which many areas are computed."""
    tokens = max(1536, 4 * block)
    batch = kernel_batch([long_tree(700), *uneven_trees()], tokens, window=window, block=block)
    if (block, window) == (256, None):
        assert areas_of(batch, window) == set(range(len(step_areas(block // TILE))))
    q, k, v, towards = (x / 2 for x in inputs(tokens, heads=4, size=32))
    real = jnp.asarray(batch.tokens > 0)
    options: dict[str, Any] = {"window": window, "softcap": softcap}
    if block == 256:
        options["sinks"] = jnp.linspace(-1.0, 2.0, 4)
    ours = functools.partial(kernel_attention, batch=batch, interpret=True, **options)
    whole = functools.partial(dense, batch=batch, **options)
    out = jax.jit(ours)(q, k, v)
    assert np.isfinite(out).all()
    np.testing.assert_allclose(out[real], whole(q, k, v)[real], atol=1e-5)
    gradients_of = (gradients(attend, q, k, v, towards, real) for attend in (ours, whole))
    for one, other in zip(*gradients_of, strict=True):
        assert np.isfinite(one).all()
        assert off(one, other) < 1e-5


def test_bfloat16_is_as_good_as_rounding_allows() -> None:
    batch = kernel_batch(uneven_trees(), 1024)
    qkv = [x / 2 for x in inputs(1024, jnp.bfloat16, heads=4, size=32)[:3]]
    exact = dense(*(x.astype(jnp.float32) for x in qkv), batch, None, None)
    out = jax.jit(functools.partial(kernel_attention, batch=batch, interpret=True))(*qkv)
    assert out.dtype == jnp.bfloat16
    error = np.abs(np.asarray(out, np.float32) - np.asarray(exact))[batch.tokens > 0]
    # Outputs of size one are rounded to 8 bits, and the products of bfloat16 factors are exact in float32.
    assert error.max() < 2**-7


def test_one_program_serves_streams_with_any_number_of_steps() -> None:
    """The number of steps is data: a stream of one long tree has many times as many as one of small trees."""
    rng = np.random.default_rng(0)
    batches = [kernel_batch(trees, 1024, streams=1) for trees in (people(1, 2), [long_tree(1000)])]
    counts = [int(batch.blocks.counts[0, 0, 0]) for batch in batches]
    assert counts[1] > 3 * counts[0]
    attend = jax.jit(lambda q, k, v, batch: kernel_attention(q, k, v, batch=batch, interpret=True))
    q, k, v = (jnp.asarray(rng.normal(size=(1, 1024, 2, 32)), jnp.float32) for _ in range(3))
    for batch in batches:
        real = batch.tokens > 0
        expected = np.asarray(dense(q, k, v, batch, None, None))
        np.testing.assert_allclose(np.asarray(attend(q, k, v, batch))[real], expected[real], atol=1e-5)
    assert attend._cache_size() == 1


def test_streams_are_whole_blocks_of_the_kernel() -> None:
    assert for_kernel(StreamOptions(tokens=100)) == StreamOptions(tokens=128, block=128, kernel=True)
    assert for_kernel(StreamOptions(tokens=5000)) == StreamOptions(tokens=5120, block=512, kernel=True)
    split = StreamOptions(tokens=5000, parts=4)
    assert for_kernel(split) == replace(split, tokens=8192, block=512, kernel=True)
    short = replace(split, tokens=4000)
    assert for_kernel(short) == replace(short, tokens=4096, block=128, kernel=True)


@pytest.mark.parametrize("chip", sweep(["v5e", "v6e"], few=(0,)))
def test_the_compiler_for_tpus_takes_the_kernels(chip: str) -> None:
    """Forward, by queries and by keys."""
    pytest.importorskip("libtpu")
    whole = NamedSharding(Mesh(np.array(describe_slice(f"{chip}:2x2").devices[:1]), ("x",)), PartitionSpec())
    for window, softcap, head_dim in ((None, None, 128), (300, 30.0, 64)):
        options = for_kernel(StreamOptions(2048, window=window))
        (packed,) = pack_streams(people(2, 2), StreamShape(2048, 64), options)
        batch = make_stream_batch(people(2, 2), packed, options)
        given = jax.tree.map(lambda x: jax.ShapeDtypeStruct(x.shape, x.dtype, sharding=whole), batch)
        q, k = (jax.ShapeDtypeStruct((1, 2048, n, head_dim), jnp.bfloat16, sharding=whole) for n in (8, 2))

        def gradient(q: jax.Array, k: jax.Array, v: jax.Array, batch: StreamBatch, **options: Any) -> Any:
            attend = functools.partial(kernel_attention, batch=batch, **options)
            out, back = jax.vjp(attend, q, k, v)
            return back(out)

        program = jax.jit(functools.partial(gradient, window=window, softcap=softcap))
        compiled = program.lower(q, k, k, given).compile()
        assert compiled.as_text().count('custom_call_target="tpu_custom_call"') == 3


@pytest.mark.parametrize(
    "windows", [{}, {"sliding_window": 24, "use_sliding_window": True, "max_window_layers": 1}]
)
def test_a_decoder_with_it_scores_as_over_trees(windows: dict, monkeypatch: pytest.MonkeyPatch) -> None:
    """Two trees that begin alike and one that does not, in one stream; every second layer with a window."""
    config = small_config(**windows)
    trees = random_trees(2)
    trees.append(build_tree([[*trees[0].prefix[:9], *ids] for ids in ([20, 21], [30], [31, 32])]))
    options = for_kernel(StreamOptions(tokens=128, window=config.sliding_window))
    (packed,) = pack_streams(trees, StreamShape(128, 16), options)
    by_xla = functools.partial(kernel_attention, interpret=True)
    monkeypatch.setattr(stream_kernel, "kernel_attention", by_xla)
    assert_scores_are_those_of_trees(config, trees, make_stream_batch(trees, packed, options), packed)
