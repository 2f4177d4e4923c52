"""Batches of trees: the layout of their arrays."""

from __future__ import annotations

import jax
import numpy as np
import pytest

from prb_jax.trees.batches import Bucket, make_batch
from prb_jax.trees.tree import build_tree
from tests.trees.test_streams import people


def test_prefix_right_aligned_responses_left_aligned_and_their_positions() -> None:
    pair = build_tree([[7, 8, 9, 1], [7, 8, 9, 2, 3]], read=[3, 3])
    single = build_tree([[4, 5, 6]])
    batch = make_batch([pair, single], Bucket(5, 3, 4), batch=3)
    assert batch.prefix.tolist() == [[0, 0, 7, 8, 9], [0, 0, 0, 4, 5], [0] * 5]
    assert batch.prefix_lengths.tolist() == [3, 2, 0]
    assert batch.responses.tolist() == [
        [[1, 0, 0, 0], [2, 3, 0, 0], [0] * 4],
        [[6, 0, 0, 0], [0] * 4, [0] * 4],
        [[0] * 4] * 3,
    ]
    assert batch.response_lengths.tolist() == [[1, 2, 0], [1, 0, 0], [0, 0, 0]]
    assert batch.read.tolist() == [[0, 0, 0], [0, 0, 0], [0, 0, 0]]
    assert all(leaf.dtype == np.int32 for leaf in jax.tree.leaves(batch))
    assert batch.tokens[0].tolist() == [0, 0, 7, 8, 9, 1, 0, 0, 0, 2, 3, 0, 0, 0, 0, 0, 0]
    assert batch.positions.tolist() == [
        [0, 0, 0, 1, 2, *[3, 4, 5, 6] * 3],
        [0, 0, 0, 0, 1, *[2, 3, 4, 5] * 3],
        [0, 0, 0, 0, 0, *[0, 1, 2, 3] * 3],
    ]


def test_every_tree_can_be_read_back() -> None:
    trees, bucket = people(4, 3), Bucket(320, 4, 64)
    batch = make_batch(trees, bucket, batch=32)
    for row, tree in enumerate(trees):
        prefix = batch.prefix[row, bucket.prefix - int(batch.prefix_lengths[row]) :]
        for k in range(len(tree.responses)):
            response = batch.responses[row, k, : int(batch.response_lengths[row, k])]
            np.testing.assert_array_equal(np.concatenate([prefix, response]), tree.sequence(k))
            assert batch.read[row, k] == tree.read[k]


def test_what_does_not_fit_is_refused() -> None:
    tree = build_tree([[1, 2, 3], [1, 2, 4]])
    for bucket in (Bucket(1, 2, 1), Bucket(2, 1, 1)):
        with pytest.raises(ValueError, match=r"row 0: a tree of shape \(p, K, r\) = \(2, 2, 1\) does not"):
            make_batch([tree], bucket, batch=1)
    with pytest.raises(ValueError, match="2 trees do not fit a batch of 1 rows"):
        make_batch([tree, tree], Bucket(2, 2, 1), batch=1)
