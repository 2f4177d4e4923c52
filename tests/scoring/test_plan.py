"""The plan of an evaluation: every comparison once, in shapes that depend on the input alone."""

from __future__ import annotations

import numpy as np
import pytest

from prb_jax.scoring.plan import (
    FIRST_WINDOW,
    SAMPLE,
    WINDOW,
    ShapeOptions,
    bucket_for,
    choose,
    plan_window,
    sample_indices,
    windows,
)
from prb_jax.trees.buckets import Bucket

Shape = tuple[int, int, int]
OPTIONS = ShapeOptions(tokens_per_batch=8192)


def shapes_of(count: int, *, seed: int = 0, longest: int = 2000) -> list[Shape]:
    rng = np.random.default_rng(seed)
    return [
        (int(rng.integers(0, longest)), int(rng.choice([2, 2, 2, 4])), int(rng.integers(1, 300)))
        for _ in range(count)
    ]


@pytest.mark.parametrize("count", [0, 1, 511, 512, 513, 4608, 4609, 16_953])
def test_windows_cover_the_input_in_order(count: int) -> None:
    parts = windows(count)
    assert [index for part in parts for index in part] == list(range(count))
    assert all(1 <= len(part) <= WINDOW for part in parts)
    if count > FIRST_WINDOW:
        assert len(parts[0]) == FIRST_WINDOW
        assert all(len(part) == WINDOW for part in parts[1:-1])


@pytest.mark.parametrize("count", [1, 2, 100, SAMPLE, SAMPLE + 1, 16_953])
def test_the_sample_is_spread_over_the_input(count: int) -> None:
    sample = sample_indices(count)
    assert sample == sorted(set(sample))
    assert len(sample) == min(count, SAMPLE)
    assert sample[0] == 0
    assert sample[-1] == count - 1
    assert max(np.diff([0, *sample])) <= count / min(count, SAMPLE) + 1


def test_the_cheapest_bucket_that_fits() -> None:
    buckets = [Bucket(64, 2, 32), Bucket(128, 2, 32), Bucket(128, 4, 64)]

    def bucket(shape: Shape) -> Bucket:
        return bucket_for(shape, buckets, multiple=16, attention_length=4096)

    assert bucket((64, 2, 32)) == buckets[0]
    assert bucket((65, 1, 1)) == buckets[1]
    assert bucket((10, 3, 1)) == buckets[2]


@pytest.mark.parametrize("multiple", [16, 128])
@pytest.mark.parametrize("seed", range(5))
def test_shapes_beyond_every_bucket_get_few_of_their_own(multiple: int, seed: int) -> None:
    """What the sample did not show still fits, on the grid, at little cost, in a handful of shapes."""
    rng = np.random.default_rng(seed)
    own = set()
    for _ in range(2000):
        shape = (int(rng.integers(2000, 8000)), int(rng.integers(1, 17)), int(rng.integers(1, 1000)))
        bucket = bucket_for(shape, [Bucket(1024, 2, 128)], multiple=multiple, attention_length=4096)
        assert bucket.fits(shape)
        assert bucket.prefix % multiple == bucket.response_length % multiple == 0
        assert bucket.prefix <= 1.25 * shape[0] + multiple
        assert bucket.response_length <= 1.25 * shape[2] + multiple
        assert bucket.responses < 2 * shape[1]
        own.add(bucket.prefix)
    assert len(own) <= 10
    assert bucket_for((0, 1, 1), [], multiple=multiple, attention_length=4096) == Bucket(
        multiple, 1, multiple
    )


@pytest.mark.parametrize(
    "options",
    [
        OPTIONS,
        ShapeOptions(tokens_per_batch=1),
        ShapeOptions(tokens_per_batch=65_536, divisor=8, multiple=128, max_buckets=3),
    ],
)
@pytest.mark.parametrize("whole", [True, False])
def test_every_comparison_is_in_one_batch_that_holds_it(options: ShapeOptions, whole: bool) -> None:
    sample = shapes_of(300)
    buckets = choose(sample, options=options).buckets
    assert len(buckets) <= options.max_buckets
    later = shapes_of(400, seed=1, longest=2600)
    plan = plan_window(later, buckets, start=1000, options=options, whole=whole)
    assert sorted(index for planned in plan for index in planned.indices) == list(range(1000, 1400))
    for planned in plan:
        assert planned.batch % options.divisor == 0
        assert 1 <= len(planned.indices) <= planned.batch
        assert all(planned.bucket.fits(later[index - 1000]) for index in planned.indices)
        assert (
            planned.batch * planned.bucket.tokens <= options.tokens_per_batch
            or planned.batch == options.divisor
        )
        assert list(planned.indices) == sorted(planned.indices)
    # One batch size a bucket: one compile.
    assert len({(planned.bucket, planned.batch) for planned in plan}) == len({p.bucket for p in plan})
    # The largest come first, so that what does not fit into memory shows at once.
    tokens = [planned.bucket.tokens for planned in plan]
    assert tokens == sorted(tokens, reverse=True)
    # Only the last batch of a bucket is not full; if the window is the whole input, none is far from it.
    for number, planned in enumerate(plan[:-1]):
        if plan[number + 1].bucket == planned.bucket:
            assert len(planned.indices) == planned.batch


def test_a_small_input_gets_batches_of_its_size() -> None:
    """Three comparisons are not padded to the two hundred rows that would fit."""
    shapes = [(20, 2, 10)] * 3
    plan = plan_window(shapes, [Bucket(32, 2, 16)], start=0, options=OPTIONS, whole=True)
    assert [(planned.batch, planned.indices) for planned in plan] == [(3, (0, 1, 2))]


def test_the_plan_is_the_same_every_time_and_in_every_process() -> None:
    shapes = shapes_of(300)
    first, second = (choose(shapes, options=OPTIONS).buckets for _ in range(2))
    assert first == second
    plans = [plan_window(shapes, first, start=0, options=OPTIONS, whole=False) for _ in range(2)]
    assert plans[0] == plans[1]
    assert choose(shapes[::-1], options=OPTIONS).buckets == first
