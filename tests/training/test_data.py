"""The order of the data, and the shapes a step is computed in."""

import numpy as np
import pytest

from prb_jax.training.data import Examples, shapes_of_steps
from prb_jax.training.order import Order, permutation
from prb_jax.trees.shapes import Bucket, PaddedBatch, ShapeOptions
from prb_jax.trees.tree import Tree
from tests.training.tiny import comparisons


def tree(prefix: int, *responses: int) -> Tree:
    return Tree(
        np.arange(prefix, dtype=np.int32),
        tuple(np.arange(1, n + 1, dtype=np.int32) for n in responses),
        tuple(n - 1 for n in responses),
    )


@pytest.mark.parametrize(("count", "per_step"), [(10, 4), (10, 10), (3, 8), (7, 1)])
def test_every_epoch_sees_every_comparison_once(count, per_step):
    order = Order(count, per_step, seed=3)
    seen = np.concatenate([order.step(step) for step in range(5 * count)])
    for epoch in range(len(seen) // count):
        assert sorted(seen[epoch * count : (epoch + 1) * count]) == list(range(count))
    assert order.epoch_of(count) == per_step


def test_a_step_is_a_function_of_seed_and_number_alone():
    order = Order(50, 8, seed=1)
    late = order.step(40)
    [order.step(step) for step in range(40)]
    np.testing.assert_array_equal(order.step(40), late)
    assert not np.array_equal(Order(50, 8, seed=2).step(40), late)
    assert not np.array_equal(permutation(50, 1, 0), permutation(50, 1, 1))
    # Fixed for all time: a run must be continued by later versions too.
    np.testing.assert_array_equal(permutation(8, 0, 0), [0, 2, 1, 5, 4, 3, 6, 7])


def test_dealing_puts_every_member_into_one_row_of_a_shape_that_holds_it():
    rng = np.random.default_rng(0)
    trees = [tree(int(rng.integers(0, 90)), *(int(n) for n in rng.integers(1, 40, 2))) for _ in range(60)]
    order = Order(60, 16, seed=0)
    options = ShapeOptions(1024, divisor=4, max_buckets=3)
    shapes = shapes_of_steps(trees, order, steps=100, options=options)
    assert 1 <= len(shapes.rows) <= 3
    real = computed = 0
    for step in range(12):
        members = order.step(step).tolist()
        dealt = shapes.batches([trees[member].shape for member in members], members)
        assert sorted(member for one in dealt for member in one.members) == sorted(members)
        for one in dealt:
            assert one.rows == shapes.rows[one.bucket]
            assert len(one.members) <= one.rows
            assert one.rows % 4 == 0
            assert one.rows * one.bucket.tokens <= 1024 or one.rows == 4
            assert all(one.bucket.fits(trees[member].shape) for member in one.members)
            computed += one.rows * one.bucket.tokens
        real += sum(trees[member].tokens for member in members)
    assert 0 < 1 - real / computed < 0.6


def test_a_longer_run_affords_more_shapes():
    trees = [tree(16 * length, 5, 5) for length in range(1, 9)]
    options, order = ShapeOptions(512, max_buckets=4), Order(8, 8, seed=0)
    numbers = [len(shapes_of_steps(trees, order, steps=n, options=options).rows) for n in (1, 10, 1000)]
    assert numbers == [1, 1, 4]


def test_a_batch_masks_what_only_fills_up():
    found = comparisons(3)
    trees = [tree(4, 3, 2), tree(2, 1, 6), tree(0, 2, 2)]
    examples = Examples(found, trees, np.asarray([1.0, 2.0, 3.0], np.float32), np.zeros(3, np.int32))
    batch, extras = examples.batch(PaddedBatch(Bucket(8, 3, 8), 4, (2, 0)), slots={0: 1, 2: 0})
    assert batch.prefix.shape == (4, 8)
    np.testing.assert_array_equal(batch.prefix_lengths, [0, 4, 0, 0])
    np.testing.assert_array_equal(extras.mask.sum(axis=1), [2, 2, 0, 0])
    np.testing.assert_array_equal(extras.labels[0], [1, 0, 0])
    np.testing.assert_array_equal(extras.weights, [3, 1, 0, 0])
    np.testing.assert_array_equal(extras.users, [0, 1, 0, 0])
