"""Batches: layout, plan, padding, and the share of each process."""

from __future__ import annotations

import jax
import numpy as np
import pytest

from prb_jax.errors import MeshError
from prb_jax.trees.batches import (
    PlannedBatch,
    TreeBatch,
    make_batch,
    padding_waste,
    plan_batches,
    process_slice,
)
from prb_jax.trees.buckets import Bucket, choose_buckets
from prb_jax.trees.tree import Tree, build_tree


def trees(count: int, *, seed: int = 0) -> list[Tree]:
    rng = np.random.default_rng(seed)
    made = []
    for _ in range(count):
        shared = rng.integers(1, 50, rng.integers(1, 300))
        tails = [
            np.append(50 + k, rng.integers(1, 50, rng.integers(0, 40))) for k in range(rng.integers(2, 5))
        ]
        made.append(build_tree([np.concatenate([shared, tail]) for tail in tails]))
    return made


def test_prefix_right_aligned_responses_left_aligned() -> None:
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


def test_every_tree_can_be_read_back() -> None:
    made = trees(20)
    bucket = Bucket(320, 4, 64)
    batch = make_batch(made, bucket, batch=24)
    for row, tree in enumerate(made):
        prefix = batch.prefix[row, bucket.prefix - int(batch.prefix_lengths[row]) :]
        for k in range(len(tree.responses)):
            response = batch.responses[row, k, : int(batch.response_lengths[row, k])]
            np.testing.assert_array_equal(np.concatenate([prefix, response]), tree.sequence(k))
            assert batch.read[row, k] == tree.read[k]


def test_an_empty_prefix_is_allowed() -> None:
    batch = make_batch([build_tree([[1, 2], [3]])], Bucket(2, 2, 2), batch=1)
    assert batch.prefix.tolist() == [[0, 0]]
    assert batch.prefix_lengths.tolist() == [0]


def test_what_does_not_fit_is_refused() -> None:
    tree = build_tree([[1, 2, 3], [1, 2, 4]])
    for bucket in (Bucket(1, 2, 1), Bucket(2, 1, 1)):
        with pytest.raises(
            ValueError, match=r"row 0: a tree of shape \(p, K, r\) = \(2, 2, 1\) does not fit"
        ):
            make_batch([tree], bucket, batch=1)
    with pytest.raises(ValueError, match="2 trees do not fit a batch of 1 rows"):
        make_batch([tree, tree], Bucket(2, 2, 1), batch=1)


def test_a_batch_is_a_pytree() -> None:
    batch = make_batch(trees(3), Bucket(320, 4, 64), batch=4)
    assert len(jax.tree.leaves(batch)) == 5
    doubled = jax.jit(lambda b: jax.tree.map(lambda leaf: 2 * leaf, b))(batch)
    assert isinstance(doubled, TreeBatch)
    np.testing.assert_array_equal(doubled.prefix, 2 * np.asarray(batch.prefix))


@pytest.mark.parametrize("divisor", [1, 4])
def test_the_plan_holds_every_row_once(divisor: int) -> None:
    made = trees(300)
    shapes = [tree.shape for tree in made]
    plan = plan_batches(shapes, tokens_per_batch=4096, divisor=divisor)
    assert sorted(index for planned in plan for index in planned.indices) == list(range(300))
    for planned in plan:
        assert planned.batch % divisor == 0
        assert 0 < len(planned.indices) <= planned.batch
        assert planned.batch * planned.bucket.tokens <= max(4096, divisor * planned.bucket.tokens)
        assert list(planned.indices) == sorted(planned.indices)
        assert all(planned.bucket.fits(shapes[index]) for index in planned.indices)
        make_batch([made[index] for index in planned.indices], planned.bucket, batch=planned.batch)
    # one batch size for each bucket, so that there are no more compiles than buckets; large ones first
    assert len({(p.bucket, p.batch) for p in plan}) == len({p.bucket for p in plan})
    sizes = [planned.bucket.tokens for planned in plan]
    assert sizes == sorted(sizes, reverse=True)
    assert plan == plan_batches(shapes, tokens_per_batch=4096, divisor=divisor)


def test_plan_with_buckets_of_ones_own() -> None:
    shapes = [tree.shape for tree in trees(50)]
    chosen = choose_buckets(shapes, multiple=128, max_buckets=2, compile_cost_tokens=0)
    plan = plan_batches(shapes, buckets=chosen)
    assert {planned.bucket for planned in plan} == set(chosen.buckets)
    with pytest.raises(ValueError, match="buckets were chosen for 50 trees, found 49"):
        plan_batches(shapes[1:], buckets=chosen)
    assert plan_batches([]) == []


def test_padding_waste_counts_padding_rows_too() -> None:
    plan = [PlannedBatch(Bucket(8, 2, 1), 2, (0,)), PlannedBatch(Bucket(8, 2, 1), 2, (1, 2))]
    assert padding_waste([10, 5, 5], plan) == pytest.approx(1 - 20 / 40)
    assert padding_waste([], []) == 0


def test_processes_feed_contiguous_rows() -> None:
    planned = PlannedBatch(Bucket(8, 2, 1), 12, tuple(range(12)))
    rows = [list(range(12))[process_slice(planned, index, 4)] for index in range(4)]
    assert rows == [[0, 1, 2], [3, 4, 5], [6, 7, 8], [9, 10, 11]]
    assert process_slice(planned, 0, 1) == slice(0, 12)
    with pytest.raises(MeshError, match="a batch of 12 rows does not divide by 5 processes"):
        process_slice(planned, 0, 5)
    with pytest.raises(ValueError, match=r"process index 4 is outside 0\.\.3"):
        process_slice(planned, 4, 4)
