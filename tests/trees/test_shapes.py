"""Shapes: every tree fits one, few compiles, least padding, and the same choice and batches every time."""

from __future__ import annotations

import itertools
from dataclasses import replace
from typing import Any

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from prb_jax.trees.batches import Bucket
from prb_jax.trees.shape_search import split_by_k
from prb_jax.trees.shapes import PaddedBatch, ShapeOptions, Shapes, choose_shapes, fixed_shapes

OPTIONS = ShapeOptions(tokens_per_batch=16_384)
Shape = tuple[int, int, int]
shapes_strategy = st.lists(
    st.tuples(st.integers(0, 300), st.integers(1, 9), st.integers(1, 90)), min_size=1, max_size=40
)


def chosen_for(shapes: list[Shape], **options: Any) -> list[Bucket]:
    """The buckets, in ascending order."""
    return sorted(choose_shapes(shapes, options=replace(OPTIONS, **options)).rows)


def cost(shapes: list[Shape], buckets: list[Bucket]) -> float:
    """Of one row each, in the cheapest bucket that holds it."""
    return sum(min(float(OPTIONS.cell_cost(*b.sides)) for b in buckets if b.fits(shape)) for shape in shapes)


def lognormal(count: int, *, seed: int = 0) -> list[Shape]:
    rng = np.random.default_rng(seed)
    prefix = np.clip(rng.lognormal(6.2, 0.6, count), 1, 4000).astype(int)
    response = np.clip(rng.lognormal(4.5, 0.6, count), 1, 1000).astype(int)
    return [(int(p), 2, int(r)) for p, r in zip(prefix, response, strict=True)]


@settings(max_examples=150, deadline=None, database=None)
@given(
    shapes=shapes_strategy,
    multiple=st.sampled_from([1, 16, 128]),
    max_buckets=st.integers(1, 6),
    compile_cost=st.sampled_from([0, 5_000]),
    divisor=st.sampled_from([1, 8]),
)
def test_every_tree_fits_a_bucket(
    shapes: list[Shape], multiple: int, max_buckets: int, compile_cost: int, divisor: int
) -> None:
    options = ShapeOptions(16_384, divisor, multiple, max_buckets, compile_cost=compile_cost)
    everything = range(len(shapes))
    chosen = choose_shapes(shapes, options=options, together=[everything])
    assert 1 <= len(chosen.rows) <= max_buckets
    for bucket in chosen.rows:
        assert bucket.prefix % multiple == bucket.response_length % multiple == 0
        assert bucket.prefix >= multiple
    dealt = chosen.batches(shapes, everything)
    assert {batch.bucket: batch.rows for batch in dealt} == chosen.rows  # none is unused
    # The order of the trees decides nothing.
    assert choose_shapes(shapes[::-1], options=options, together=[everything]) == chosen


def test_prefix_splits_are_the_best_there_are() -> None:
    # One K, one response length: compared with every way of choosing the tops.
    rng = np.random.default_rng(1)
    shapes = [(int(p), 2, 16) for p in rng.choice([16, 48, 80, 160, 240, 400, 416, 800], 60)]
    values = sorted({p for p, _, _ in shapes})
    for count in range(1, 6):
        best = min(
            cost(shapes, [Bucket(top, 2, 16) for top in tops])
            for tops in itertools.combinations(values, min(count, len(values)))
            if tops[-1] == values[-1]
        )
        # one row a batch, so that whole batches cost nothing extra
        chosen = chosen_for(shapes, max_buckets=count, compile_cost=0, tokens_per_batch=1)
        assert cost(shapes, chosen) == pytest.approx(best)


@pytest.mark.parametrize("seed", range(3))
def test_close_to_the_best_for_two_sides_at_once(seed: int) -> None:
    rng = np.random.default_rng(seed)
    sides = [16, 64, 128, 320]
    shapes = [(int(p), 2, int(r)) for p, r in zip(rng.choice(sides, 40), rng.choice(sides, 40), strict=True)]
    tops = list(itertools.product(sides, [2], sides))
    best = min(
        cost(shapes, [Bucket(*top) for top in three])
        for three in itertools.combinations(tops, 3)
        if all(any(p <= top[0] and r <= top[2] for top in three) for p, _, r in shapes)
    )
    chosen = chosen_for(shapes, max_buckets=3, compile_cost=0, tokens_per_batch=1)
    assert best <= cost(shapes, chosen) <= 1.03 * best


def test_the_descent_never_makes_it_worse() -> None:
    shapes = lognormal(600)
    cells, counts = np.unique(
        [(-(-p // 16) * 16, k, -(-r // 16) * 16) for p, k, r in shapes], axis=0, return_counts=True
    )
    tops = split_by_k(cells, counts, OPTIONS)
    nested = OPTIONS.total(OPTIONS.row_costs(cells, tops), counts, tops)
    chosen = [bucket.sides for bucket in chosen_for(shapes)]
    assert OPTIONS.total(OPTIONS.row_costs(cells, chosen), counts, chosen) <= nested


def test_more_buckets_waste_less_and_few_rows_get_few_buckets() -> None:
    shapes = lognormal(2000)
    costs = [cost(shapes, chosen_for(shapes, max_buckets=n, compile_cost=0)) for n in (1, 3, 8)]
    assert costs[0] > 1.8 * costs[1] > 1.8 * costs[2]
    counts = [len(chosen_for(lognormal(n))) for n in (1, 10, 200, 2000)]
    assert counts == sorted(counts)
    assert counts[1] == 1
    assert counts[-1] > 3
    assert len(chosen_for(shapes, compile_cost=10**9)) == 1


def test_different_numbers_of_responses_are_kept_apart() -> None:
    shapes = [(100, 2, 20)] * 500 + [(100, 25, 20)] * 20
    chosen = choose_shapes(shapes, options=replace(OPTIONS, compile_cost=1000))
    assert sorted(chosen.rows) == [Bucket(112, 2, 32), Bucket(112, 25, 32)]
    members = {batch.bucket: batch.members for batch in chosen.batches(shapes, range(520))}
    assert members[Bucket(112, 25, 32)][-1] == 519
    assert max(members[Bucket(112, 2, 32)]) == 499
    # with one compile allowed, everything takes the larger one
    assert chosen_for(shapes, max_buckets=1) == [Bucket(112, 25, 32)]


def test_a_prefix_of_no_tokens_still_has_a_column() -> None:
    assert chosen_for([(0, 2, 5)]) == [Bucket(16, 2, 16)]


def test_batches_within_a_token_budget() -> None:
    assert OPTIONS.most_rows(1000) == 16
    assert replace(OPTIONS, divisor=5).most_rows(1000) == 15
    assert ShapeOptions(10, divisor=4).most_rows(1000) == 4  # never less than one row a shard
    # 17 rows are dealt as 9 + 8, not as 16 + 1
    assert OPTIONS.best_rows(1000, np.asarray([17])) == 9
    assert OPTIONS.best_rows(1000, np.asarray([3])) == 3
    assert replace(OPTIONS, divisor=4).best_rows(1000, np.asarray([3])) == 4
    # where a batch costs little, as 6 + 6 + 5, and for both counts as well as for one
    assert replace(OPTIONS, batch_cost=600).best_rows(1000, np.asarray([17, 12])) == 6


@pytest.mark.parametrize(
    ("shapes", "message"), [([], "at least one"), ([(1, 0, 1)], "shapes"), ([(-1, 2, 1)], "shapes")]
)
def test_shapes_that_do_not_exist(shapes: list[Shape], message: str) -> None:
    with pytest.raises(ValueError, match=message):
        choose_shapes(shapes, options=OPTIONS)


def test_options_must_be_positive() -> None:
    for name in ("tokens_per_batch", "divisor", "multiple", "max_buckets", "attention_length"):
        with pytest.raises(ValueError, match=f"{name}: expected at least 1, found 0"):
            replace(OPTIONS, **{name: 0})


def random_shapes(count: int, *, seed: int = 0, longest: int = 2000) -> list[Shape]:
    rng = np.random.default_rng(seed)
    return [
        (int(rng.integers(0, longest)), int(rng.choice([2, 2, 2, 4])), int(rng.integers(1, 300)))
        for _ in range(count)
    ]


def bucket_for(shape: Shape, buckets: list[Bucket], *, multiple: int = 16) -> Bucket:
    options = replace(OPTIONS, multiple=multiple, attention_length=4096)
    (batch,) = Shapes(dict.fromkeys(buckets, 1), options).batches([shape], [0])
    return batch.bucket


def test_the_cheapest_bucket_that_fits() -> None:
    buckets = [Bucket(64, 2, 32), Bucket(128, 2, 32), Bucket(128, 4, 64)]
    assert bucket_for((64, 2, 32), buckets) == buckets[0]
    assert bucket_for((65, 1, 1), buckets) == buckets[1]
    assert bucket_for((10, 3, 1), buckets) == buckets[2]


@pytest.mark.parametrize("multiple", [16, 128])
@pytest.mark.parametrize("seed", range(5))
def test_shapes_beyond_every_bucket_get_few_of_their_own(multiple: int, seed: int) -> None:
    """What nobody foresaw still fits, on the grid, at little cost, in a handful of shapes."""
    rng = np.random.default_rng(seed)
    prefixes = set()
    for _ in range(2000):
        shape = (int(rng.integers(2000, 8000)), int(rng.integers(1, 17)), int(rng.integers(1, 1000)))
        bucket = bucket_for(shape, [Bucket(1024, 2, 128)], multiple=multiple)
        assert bucket.fits(shape)
        assert bucket.prefix % multiple == bucket.response_length % multiple == 0
        assert bucket.prefix <= 1.25 * shape[0] + multiple
        assert bucket.response_length <= 1.25 * shape[2] + multiple
        assert bucket.responses < 2 * shape[1]
        prefixes.add(bucket.prefix)
    assert len(prefixes) <= 10
    assert bucket_for((0, 1, 1), [], multiple=multiple) == Bucket(multiple, 1, multiple)


@pytest.mark.parametrize(
    "options",
    [
        ShapeOptions(8192),
        ShapeOptions(tokens_per_batch=1),
        ShapeOptions(tokens_per_batch=65_536, divisor=8, multiple=128, max_buckets=3),
    ],
)
@pytest.mark.parametrize("fill", [False, True])
def test_every_tree_is_in_one_batch_that_holds_it(options: ShapeOptions, fill: bool) -> None:
    chosen = choose_shapes(random_shapes(300), options=options, fill=fill)
    assert len(chosen.rows) <= options.max_buckets
    later = random_shapes(400, seed=1, longest=2600)
    dealt = chosen.batches(later, range(1000, 1400))
    assert sorted(member for batch in dealt for member in batch.members) == list(range(1000, 1400))
    for batch in dealt:
        assert batch.rows % options.divisor == 0
        assert 1 <= len(batch.members) <= batch.rows
        assert all(batch.bucket.fits(later[member - 1000]) for member in batch.members)
        assert batch.rows * batch.bucket.tokens <= options.tokens_per_batch or batch.rows == options.divisor
        assert fill or list(batch.members) == sorted(batch.members)
    # One number of rows for each bucket: one compile.
    assert len({(batch.bucket, batch.rows) for batch in dealt}) == len({batch.bucket for batch in dealt})
    # The largest come first, so that what does not fit into memory shows at once.
    tokens = [batch.bucket.tokens for batch in dealt]
    assert tokens == sorted(tokens, reverse=True)
    # Only the last batch of a bucket is not full.
    for batch, following in itertools.pairwise(dealt):
        assert len(batch.members) == batch.rows or batch.bucket != following.bucket
    assert chosen.batches(later, range(1000, 1400)) == dealt


def test_a_small_input_gets_batches_of_its_size() -> None:
    """Three trees are not padded to the five hundred rows that would fit."""
    shapes = [(20, 2, 10)] * 3
    chosen = choose_shapes(shapes, options=OPTIONS, together=[range(3)])
    assert chosen.batches(shapes, range(3)) == [PaddedBatch(Bucket(32, 2, 16), 3, (0, 1, 2))]


def test_rows_left_over_in_a_large_shape_take_smaller_trees() -> None:
    large, small = Bucket(64, 2, 16), Bucket(16, 2, 16)
    shapes = Shapes({large: 4, small: 4}, OPTIONS, fill=True)
    lengths = [(60, 2, 5), (5, 2, 5), (6, 2, 5), (7, 2, 5)]
    assert shapes.batches(lengths, range(4)) == [PaddedBatch(large, 4, (0, 1, 2, 3))]
    assert replace(shapes, fill=False).batches(lengths, range(4)) == [
        PaddedBatch(large, 4, (0,)), PaddedBatch(small, 4, (1, 2, 3)),
    ]  # fmt: skip


def test_fixed_shapes_hold_what_they_promise() -> None:
    options = ShapeOptions(4096, divisor=4)
    fixed = fixed_shapes([128, 512], [2, 16], [64], options=options)
    assert fixed.rows == {
        Bucket(128, 2, 64): 16, Bucket(512, 2, 64): 4, Bucket(128, 16, 64): 4, Bucket(512, 16, 64): 4
    }  # fmt: skip
    rng = np.random.default_rng(0)
    lengths = np.stack([rng.integers(1, most, 200) for most in (513, 17, 65)], axis=1)
    dealt = fixed.batches(lengths, range(200))
    assert {(batch.bucket, batch.rows) for batch in dealt} == set(fixed.rows.items())
