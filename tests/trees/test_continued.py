"""Pages of keys and values hold those of their tokens, wherever these are."""

from __future__ import annotations

from typing import Any, cast

import numpy as np

from prb_jax.trees.continued import PAGE, KeptPrefix, LaidBehind
from prb_jax.trees.tree import BLOCK

LAYERS, HEADS, SIZE, KEPT, NEW = 2, 1, 3, 2 * BLOCK, 128


def test_a_page_has_the_keys_and_values_of_its_tokens() -> None:
    rng = np.random.default_rng(0)
    old_keys = rng.normal(size=(KEPT // BLOCK, LAYERS, HEADS, BLOCK, SIZE)).astype(np.float32)
    old_values = rng.normal(size=(KEPT // BLOCK, LAYERS, HEADS, SIZE, BLOCK)).astype(np.float32)
    keys = rng.normal(size=(LAYERS, HEADS, NEW, SIZE)).astype(np.float32)
    values = rng.normal(size=(LAYERS, HEADS, SIZE, NEW)).astype(np.float32)
    all_keys = np.concatenate([np.moveaxis(old_keys, 0, 2).reshape(LAYERS, HEADS, KEPT, SIZE), keys], axis=2)
    all_values = np.concatenate(
        [np.moveaxis(old_values, 0, 3).reshape(LAYERS, HEADS, SIZE, KEPT), values], axis=3
    )
    columns = np.concatenate(
        [
            KEPT + np.arange(PAGE),  # computed
            np.arange(BLOCK - 10, BLOCK + 5), KEPT + 40 + np.arange(PAGE - 15),  # two blocks, then computed
            np.arange(KEPT - 9, KEPT), KEPT + np.arange(PAGE - 9),  # the last kept ones, then the first computed
            [7, 3, 200], KEPT + np.arange(PAGE - 3)[::-1],  # in no order
            [1, 2, 3],  # no whole page
        ]
    )  # fmt: skip
    ids, batch = np.arange(len(columns), dtype=np.int32), cast(Any, _Kept(old_keys, old_values))
    ((prefix, pages),) = LaidBehind(batch, [(ids, columns, KeptPrefix())]).pages(keys, values)
    assert prefix is ids
    assert len(pages) == 4
    for number, page in enumerate(pages):
        places = columns[number * PAGE : (number + 1) * PAGE]
        np.testing.assert_array_equal(page.keys, all_keys[:, :, places])
        np.testing.assert_array_equal(page.values, all_values[..., places])
        assert page.keys.base is None  # a copy, which the cache may keep


class _Kept:
    def __init__(self, keys: np.ndarray, values: np.ndarray) -> None:
        self.keys, self.values = keys, values
