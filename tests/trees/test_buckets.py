"""Buckets: every tree fits one, few compiles, least padding, and the same choice every time."""

from __future__ import annotations

import itertools

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from prb_jax.trees.bucket_search import Objective, split_by_k
from prb_jax.trees.buckets import Bucket, Buckets, balanced_batch, batch_size, cell_cost, choose_buckets

Shape = tuple[int, int, int]
shapes_strategy = st.lists(
    st.tuples(st.integers(0, 300), st.integers(1, 9), st.integers(1, 90)), min_size=1, max_size=40
)


def cost(shapes: list[Shape], chosen: Buckets, *, attention_length: int = 8192) -> float:
    return sum(
        float(cell_cost(b.prefix, b.responses, b.response_length, attention_length=attention_length))
        for b in (chosen.buckets[i] for i in chosen.assignment)
    )


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
def test_every_tree_fits_its_bucket(
    shapes: list[Shape], multiple: int, max_buckets: int, compile_cost: int, divisor: int
) -> None:
    options = {"multiple": multiple, "max_buckets": max_buckets, "divisor": divisor}
    chosen = choose_buckets(shapes, compile_cost_tokens=compile_cost, **options)
    assert 1 <= len(chosen.buckets) <= max_buckets
    assert list(chosen.buckets) == sorted(set(chosen.buckets))
    assert set(chosen.assignment.tolist()) == set(range(len(chosen.buckets)))  # none is unused
    for shape, number in zip(shapes, chosen.assignment, strict=True):
        assert chosen.buckets[number].fits(shape)
    for bucket in chosen.buckets:
        assert bucket.prefix % multiple == bucket.response_length % multiple == 0
        assert bucket.prefix >= multiple
    # The order of the rows decides nothing.
    backwards = choose_buckets(shapes[::-1], compile_cost_tokens=compile_cost, **options)
    assert backwards.buckets == chosen.buckets
    assert backwards.assignment.tolist() == chosen.assignment.tolist()[::-1]


def test_prefix_splits_are_the_best_there_are() -> None:
    # One K, one response length: compared with every way of choosing the tops.
    rng = np.random.default_rng(1)
    shapes = [(int(p), 2, 16) for p in rng.choice([16, 48, 80, 160, 240, 400, 416, 800], 60)]
    values = sorted({p for p, _, _ in shapes})
    for count in range(1, 6):
        best = min(
            sum(
                float(cell_cost(min(t for t in tops if t >= p), 2, 16, attention_length=8192))
                for p, _, _ in shapes
            )
            for tops in itertools.combinations(values, min(count, len(values)))
            if tops[-1] == values[-1]
        )
        # one row a batch, so that whole batches cost nothing extra
        chosen = choose_buckets(shapes, max_buckets=count, compile_cost_tokens=0, tokens_per_batch=1)
        assert cost(shapes, chosen) == pytest.approx(best)


@pytest.mark.parametrize("seed", range(3))
def test_close_to_the_best_for_two_sides_at_once(seed: int) -> None:
    rng = np.random.default_rng(seed)
    sides = [16, 64, 128, 320]
    shapes = [(int(p), 2, int(r)) for p, r in zip(rng.choice(sides, 40), rng.choice(sides, 40), strict=True)]
    tops = list(itertools.product(sides, sides))
    best = float("inf")
    for three in itertools.combinations(tops, 3):
        total = 0.0
        for p, _, r in shapes:
            fitting = [t for t in three if p <= t[0] and r <= t[1]]
            total += min(
                (float(cell_cost(a, 2, b, attention_length=8192)) for a, b in fitting), default=float("inf")
            )
        best = min(best, total)
    chosen = choose_buckets(shapes, max_buckets=3, compile_cost_tokens=0, tokens_per_batch=1)
    assert best <= cost(shapes, chosen) <= 1.03 * best


def test_the_descent_never_makes_it_worse() -> None:
    shapes = lognormal(600)
    objective = Objective(
        tokens_per_batch=16_384, divisor=1, attention_length=8192, compile_cost_tokens=32_768
    )
    cells, counts = np.unique(
        [(-(-p // 16) * 16, k, -(-r // 16) * 16) for p, k, r in shapes], axis=0, return_counts=True
    )
    tops = split_by_k(cells, counts, objective, 8)
    nested = objective.total(objective.row_costs(cells, tops), counts, tops)
    chosen = [(b.prefix, b.responses, b.response_length) for b in choose_buckets(shapes).buckets]
    assert objective.total(objective.row_costs(cells, chosen), counts, chosen) <= nested


def test_more_buckets_waste_less_and_few_rows_get_few_buckets() -> None:
    shapes = lognormal(2000)
    costs = [cost(shapes, choose_buckets(shapes, max_buckets=n, compile_cost_tokens=0)) for n in (1, 3, 8)]
    assert costs[0] > 1.8 * costs[1] > 1.8 * costs[2]
    counts = [len(choose_buckets(lognormal(n)).buckets) for n in (1, 10, 200, 2000)]
    assert counts == sorted(counts)
    assert counts[1] == 1
    assert counts[-1] > 3
    assert len(choose_buckets(shapes, compile_cost_tokens=10**9).buckets) == 1


def test_different_numbers_of_responses_are_kept_apart() -> None:
    shapes = [(100, 2, 20)] * 500 + [(100, 25, 20)] * 20
    chosen = choose_buckets(shapes, compile_cost_tokens=1000)
    assert chosen.buckets == (Bucket(112, 2, 32), Bucket(112, 25, 32))
    assert np.bincount(chosen.assignment).tolist() == [500, 20]
    # with one compile allowed, everything takes the larger one
    assert choose_buckets(shapes, max_buckets=1).buckets == (Bucket(112, 25, 32),)


def test_own_multiple_for_responses() -> None:
    assert choose_buckets([(100, 2, 20)], multiple=128, response_multiple=8).buckets == (Bucket(128, 2, 24),)


def test_a_prefix_of_no_tokens_still_has_a_column() -> None:
    assert choose_buckets([(0, 2, 5)]).buckets == (Bucket(16, 2, 16),)


def test_batches_within_a_token_budget() -> None:
    bucket = Bucket(900, 2, 50)
    assert bucket.tokens == 1000
    assert batch_size(bucket, tokens_per_batch=16_384) == 16
    assert batch_size(bucket, tokens_per_batch=16_384, divisor=5) == 15
    assert batch_size(bucket, tokens_per_batch=10, divisor=4) == 4  # never less than one row a shard
    # 17 rows are dealt as 9 + 8, not as 16 + 1
    assert balanced_batch(17, bucket, tokens_per_batch=16_384) == 9
    assert balanced_batch(3, bucket, tokens_per_batch=16_384) == 3
    assert balanced_batch(3, bucket, tokens_per_batch=16_384, divisor=4) == 4


@pytest.mark.parametrize(
    ("shapes", "options", "message"),
    [
        ([], {}, "at least one shape"),
        ([(1, 0, 1)], {}, "shapes"),
        ([(-1, 2, 1)], {}, "shapes"),
        ([(1, 2, 1)], {"max_buckets": 0}, "max_buckets: expected at least 1, found 0"),
        ([(1, 2, 1)], {"response_multiple": 0}, "response_multiple: expected at least 1, found 0"),
    ],
)
def test_bad_arguments(shapes: list[Shape], options: dict[str, int], message: str) -> None:
    with pytest.raises(ValueError, match=message):
        choose_buckets(shapes, **options)
