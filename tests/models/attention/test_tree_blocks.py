"""The tables of blocks that meet, against the mask itself."""

from __future__ import annotations

import numpy as np
import pytest

from prb_jax.models.attention.tree_blocks import key_ranges, query_ranges, visited_blocks
from prb_jax.trees.mask import TreeLayout, TreeMask


def meeting(mask: TreeMask, queries: int, keys: int) -> np.ndarray:
    """bool [blocks of queries, blocks of keys]: whether any query of the one sees a key of the other."""
    tokens = mask.layout.tokens
    index = np.arange(tokens)
    sees = np.pad(mask.sees(index[:, None], index[None]), ((0, -tokens % queries), (0, -tokens % keys)))
    return np.any(sees.reshape(len(sees) // queries, queries, -1, keys), axis=(1, 3))


@pytest.mark.parametrize("seed", range(4))
def test_the_tables_are_the_blocks_that_the_mask_has_anything_in(seed: int) -> None:
    rng = np.random.default_rng(seed)
    for _ in range(60):
        layout = TreeLayout(int(rng.integers(0, 70)), int(rng.integers(1, 6)), int(rng.integers(1, 40)))
        window = [None, 1, 3, 10, 30, 200][rng.integers(6)]
        queries, keys = (int(size) for size in rng.choice([4, 8, 16, 32], 2))
        mask = TreeMask(layout, window)
        met = meeting(mask, queries, keys)
        for table, expected in (
            (key_ranges(mask, queries=queries, keys=keys), met),
            (query_ranges(mask, queries=queries, keys=keys), met.T),
        ):
            visits = np.zeros(expected.shape, int)
            for held, ranges in enumerate(table):
                for low, high in ranges:
                    visits[held, low:high] += 1
            np.testing.assert_array_equal(visits, expected)
            assert visited_blocks(table) == met.sum()


def test_counted_by_hand() -> None:
    # 30 blocks of 128 in the prefix, on and below the diagonal; each response sees them and itself.
    long = TreeMask(TreeLayout(3840, 2, 128))
    assert visited_blocks(key_ranges(long, queries=128, keys=128)) == 30 * 31 // 2 + 2 * 31
    # 8 responses of a block each, the prefix's 2, and never a sibling's.
    siblings = TreeLayout(256, 8, 128)
    assert visited_blocks(key_ranges(TreeMask(siblings), queries=128, keys=128)) == 1 + 2 + 8 * 3
    windowed = TreeMask(siblings, window=128)
    assert visited_blocks(key_ranges(windowed, queries=128, keys=128)) == 1 + 2 + 8 * 2
    assert visited_blocks(query_ranges(windowed, queries=128, keys=128)) == 1 + 2 + 8 * 2
