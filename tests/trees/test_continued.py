"""Blocks of keys and values hold those of their tokens, wherever these are."""

from __future__ import annotations

from typing import Any, cast

import jax
import numpy as np

from prb_jax.trees.continued import PAGE, PAGES, BlockStore, KeptPrefix, LaidBehind
from prb_jax.trees.tree import BLOCK

LAYERS, HEADS, SIZE, KEPT, NEW = 2, 1, 3, 2 * BLOCK, 128


def test_a_block_has_the_keys_and_values_of_its_tokens() -> None:
    rng = np.random.default_rng(0)
    shapes = (LAYERS, HEADS, BLOCK, SIZE), (LAYERS, HEADS, SIZE, BLOCK)
    like = [jax.ShapeDtypeStruct(shape, np.dtype("float32")) for shape in shapes]
    bytes_of_block = 2 * 4 * LAYERS * HEADS * BLOCK * SIZE
    store = BlockStore((like[0], like[1]), most=5 * bytes_of_block, spare=0)
    held = [store.new() for _ in range(3)]
    rows = np.array([2, 0], np.int32)  # of the two cached blocks of the batch
    store.keys[:3] = rng.normal(size=(3, *shapes[0]))
    store.values[:3] = rng.normal(size=(3, *shapes[1]))
    keys = rng.normal(size=(LAYERS, HEADS, NEW, SIZE)).astype(np.float32)
    values = rng.normal(size=(LAYERS, HEADS, SIZE, NEW)).astype(np.float32)
    all_keys = np.concatenate([*store.keys[rows], keys], axis=2)
    all_values = np.concatenate([*store.values[rows], values], axis=3)
    columns = np.concatenate(
        [
            KEPT + np.arange(PAGE),  # computed
            np.arange(BLOCK - 10, BLOCK + 5), KEPT + 40 + np.arange(PAGE - 15),  # two blocks, then computed
            np.arange(KEPT - 9, KEPT), KEPT + np.arange(PAGE - 9),  # the last kept ones, then the first computed
            [7, 3, 200], KEPT + np.arange(PAGE - 3)[::-1],  # in no order
            KEPT + 50 + np.arange(PAGE),  # a page of the next block
            [1, 2, 3],  # no whole page
        ]
    )  # fmt: skip
    ids = np.arange(len(columns), dtype=np.int32)
    laid = LaidBehind(cast(Any, _Batch(rows)), store, [(ids, columns, KeptPrefix())])
    ((prefix, pages),) = laid.blocks(keys, values)
    assert prefix is ids
    assert len(pages) == PAGES + 1
    first, second = dict.fromkeys(pages)
    assert pages == [first] * PAGES + [second]
    assert len({block.row for block in (first, second, *held) if block is not None}) == 5
    for row, places in ((first.row, columns[:BLOCK]), (second.row, columns[BLOCK : BLOCK + PAGE])):
        np.testing.assert_array_equal(store.keys[row, :, :, : len(places)], all_keys[:, :, places])
        np.testing.assert_array_equal(store.values[row, ..., : len(places)], all_values[..., places])
    assert store.new() is None


class _Batch:
    def __init__(self, rows: np.ndarray) -> None:
        self.rows = rows
