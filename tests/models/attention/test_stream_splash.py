"""The kernel for TPUs over packed streams, its steps run by XLA, against the mask written down whole."""

from __future__ import annotations

import functools
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
import pytest

from prb_jax.models.attention.splash import splash_stream_attention, tree_sight
from prb_jax.trees.kernel_tables import KernelLayout, KernelTable, choose_unit
from prb_jax.trees.packing import StreamOptions, StreamShape, pack_streams
from prb_jax.trees.streams import StreamBatch, make_stream_batch
from prb_jax.trees.tree import Tree, build_tree
from tests.models.attention.test_streams import dense, gradients, off


def uneven_trees() -> list[Tree]:
    """One to five responses; one tree of several blocks, one without a prefix, equal responses."""
    rng = np.random.default_rng(0)

    def ids(count: int) -> list[int]:
        return rng.integers(1, 9, count).tolist()

    trees = []
    for prefix, responses in (
        (300, (40, 50)), (130, (20, 3, 60)), (7, (1, 2, 1, 2, 30)), (0, (9, 12)), (60, (33,)), (20, (150, 140)),
    ):  # fmt: skip
        shared = ids(prefix)
        trees.append(build_tree([[*shared, 10 + k, *ids(count - 1)] for k, count in enumerate(responses)]))
    shared = ids(10)
    trees.append(build_tree([[*shared, 1, 2], [*shared, 3, 4, 5], [*shared, 1, 2]]))
    return trees


def kernel_batch(
    trees: list[Tree], tokens: int, *, unit: int = 1, window: int | None = None, streams: int = 2
) -> StreamBatch:
    longest = max(tree.tokens for tree in trees)
    layout = KernelLayout(longest=longest, unit=unit, block=128)
    options = StreamOptions(tokens=tokens, streams=streams, window=window, kernel=layout)
    (packed,) = pack_streams(trees, StreamShape(tokens, 32), options)
    return make_stream_batch(trees, packed, options)


def table_of(batch: StreamBatch, window: int | None) -> KernelTable:
    table = batch.blocks if window is None else batch.window_blocks
    assert isinstance(table, KernelTable)
    return table


def real_tokens(batch: StreamBatch) -> np.ndarray:
    """bool [S, N]."""
    follows = np.asarray(batch.until) > np.arange(1, batch.until.shape[1] + 1)
    return (np.asarray(batch.previous) >= 0) | follows


@pytest.mark.parametrize("unit", [1, 8])
@pytest.mark.parametrize("window", [None, 30, 200])
def test_tables_say_who_sees_whom(unit: int, window: int | None) -> None:
    """The packed numbers and the trees' numbers give the streams' rule; each block in which anything is seen is visited
    once, in both tables, and nothing else; of padding every token sees itself."""
    batch = kernel_batch(uneven_trees(), 768, unit=unit, window=window)
    table = table_of(batch, window)
    place, blocks = np.arange(768), np.arange(6)
    sees = tree_sight(table.layout, 768, window)
    real = real_tokens(batch)
    assert real.sum() == sum(tree.tokens for tree in uneven_trees()) - 2  # one response is there twice
    for row in range(2):
        until, positions = np.asarray(batch.until[row]), np.asarray(batch.positions[row])
        expected = (place[None] <= place[:, None]) & (place[:, None] < until[None])
        if window is not None:
            expected &= positions[:, None] - positions[None] < window
        expected &= real[row][None] & real[row][:, None] | np.eye(768, dtype=bool)
        found = sees(np.asarray(table.packed[row])[:, None], place[None])
        found = found & (table.trees[row][:, None] == table.trees[row][None])
        np.testing.assert_array_equal(found, expected)
        meets = expected.reshape(6, 128, 6, 128).any(axis=(1, 3))
        by_query, by_key = np.zeros((2, 6, 6), np.int64)
        np.add.at(by_query, (blocks[:, None], table.keys[row]), table.key_steps[row])
        np.add.at(by_key, (table.queries[row], blocks[None]), table.query_steps[row])
        np.testing.assert_array_equal(by_query, meets)
        np.testing.assert_array_equal(by_key, meets)
        assert table.keys.shape[2] == table.queries.shape[1] == table.layout.width(768) < 6


@pytest.mark.parametrize(
    ("window", "softcap", "unit"),
    [(None, None, 1), (30, 3.0, 1), pytest.param(200, None, 8, marks=pytest.mark.slow)],
)
def test_output_and_gradients_equal_those_of_the_whole_mask(
    window: int | None, softcap: float | None, unit: int
) -> None:
    batch = kernel_batch(uneven_trees(), 768, unit=unit, window=window)
    rng = np.random.default_rng(1)
    q, k, v, towards = (
        jnp.asarray(rng.normal(size=(2, 768, heads, 32)), jnp.float32) / 2 for heads in (4, 2, 2, 4)
    )
    real = jnp.asarray(real_tokens(batch))
    options: dict[str, Any] = {"window": window, "softcap": softcap}
    ours = functools.partial(splash_stream_attention, batch=batch, interpret=True, **options)
    whole = functools.partial(dense, batch=batch, **options)
    out = jax.jit(ours)(q, k, v)
    assert np.isfinite(out).all()
    np.testing.assert_allclose(out[real], whole(q, k, v)[real], atol=1e-5)
    found, expected = (gradients(each, q, k, v, towards, real) for each in (ours, whole))
    for one, other in zip(found, expected, strict=True):
        assert np.isfinite(one).all()
        assert off(one, other) < 1e-5


def test_what_does_not_fit_32_bits_begins_at_multiples_of_a_unit() -> None:
    rng = np.random.default_rng(0)

    def tree(*lengths: int) -> Tree:
        return build_tree([[5, 5, 10 + k, *rng.integers(1, 9, size - 1)] for k, size in enumerate(lengths)])

    # 14 bits for the place leave nine for each of the others: fewer than 512 tokens.
    assert [choose_unit([tree(size, size)], 16384) for size in (400, 511, 512, 1022, 1024, 5000)] == [
        1, 1, 2, 2, 4, 16,
    ]  # fmt: skip
    assert choose_unit([tree(*[130] * 64)], 16384) == 32
    assert choose_unit([tree(9000)], 16384) == 1  # a single response hides nothing
    assert not KernelLayout(longest=1).fits(tree(600, 20), 16384)
    trees = [tree(700, 700)]
    with pytest.raises(ValueError, match="do not fit KernelLayout"):
        kernel_batch(trees, 16384, streams=1)
    table = table_of(kernel_batch(trees, 16384, unit=2, streams=1), None)
    place, own, hidden = table.layout.unpack(np.asarray(table.packed[0]), 16384)
    np.testing.assert_array_equal(place, np.arange(16384))
    second = np.asarray(table.packed[0])[702:1402]
    np.testing.assert_array_equal(own[702:1402], 702, err_msg=str(second[:4]))
    np.testing.assert_array_equal(hidden[702:1402], 700)
    assert (hidden[:702] == 0).all()
