"""Streams for a kernel have about equal work in attention, in the same tokens."""

from __future__ import annotations

from dataclasses import replace

import numpy as np
import pytest

from prb_jax.measure.plan.streams import BatchShape, drawn_trees
from prb_jax.trees.even_work import with_even_pairs
from prb_jax.trees.kernel_tables import StepTable, for_kernel
from prb_jax.trees.packing import Unit, balanced, first_fit, pack_streams, pack_together, token_pairs
from prb_jax.trees.streams import StreamOptions, StreamShape, make_stream_batch

PEOPLE = BatchShape(batch=256, prefix=1900, responses=2, response_length=130, spread=0.45)


def squared(unit: Unit) -> float:
    return float(unit.tokens**2)


@pytest.mark.parametrize("seed", range(8))
def test_every_unit_stays_in_a_stream_that_has_room(seed: int) -> None:
    """Whatever the room for tokens and reads; and no stream has more pairs than the fullest one had."""
    rng = np.random.default_rng(seed)
    lengths = np.exp(rng.normal(5, 0.7, 60)).astype(int) + 1
    units = [
        Unit(place, place + 1, int(tokens), int(rng.integers(1, 4))) for place, tokens in enumerate(lengths)
    ]
    shape = StreamShape(int(max(lengths.max(), lengths.sum() // rng.integers(3, 9))), 40)
    given = balanced(first_fit(units, shape), shape)
    even = with_even_pairs(given, shape, squared)
    assert len(even) == len(given)
    assert sorted(unit.start for units in even for unit in units) == list(range(60))
    for units in even:
        assert sum(unit.tokens for unit in units) <= shape.tokens
        assert sum(unit.reads for unit in units) <= shape.reads
    most, before = (max(sum(map(squared, units)) for units in bins) for bins in (even, given))
    assert most <= before


def test_streams_of_peoples_lengths_have_equal_pairs() -> None:
    """256 pairs in 16 streams of 99 % tokens: the fullest has 1 % more pairs than the mean. By tokens alone it has
    twice as many."""
    trees = drawn_trees(PEOPLE, longest=40_960)
    options = for_kernel(StreamOptions(32_768, streams=16))

    def work(options: StreamOptions) -> tuple[float, int]:
        packed = pack_together(trees, options)
        pairs = [sum(token_pairs(trees[member]) for member in stream.members) for stream in packed]
        assert sorted(member for stream in packed for member in stream.members) == list(range(256))
        return max(pairs) / np.mean(pairs), packed[0].shape.tokens

    by_pairs, tokens = work(options)
    by_tokens, same_tokens = work(replace(options, kernel=False))
    assert tokens == same_tokens
    assert by_pairs < 1.02
    assert by_tokens > 1.9


@pytest.mark.parametrize(
    ("changed", "most"),
    [
        ({"batch": 64}, 0.18),
        ({}, 0.15),
        ({"batch": 64, "responses": 16}, 0.20),
        ({"batch": 64, "responses": 64}, 0.21),
    ],
)
def test_few_pairs_are_computed_in_vain(changed: dict[str, int], most: float) -> None:
    """With the lengths of people less than a fifth, on 16 chips of which 15 wait for the last one."""
    trees = drawn_trees(replace(PEOPLE, **changed), longest=40_960)
    options = for_kernel(StreamOptions(32_768, streams=16))
    batch = make_stream_batch(trees, pack_together(trees, options), options)
    assert isinstance(batch.blocks, StepTable)
    computed = batch.blocks.computed_pairs()
    seen = float(sum((row[row > 0] + 1.0).sum() for row in batch.positions))
    assert 0.1 < 1 - seen / (computed.max() * computed.size) < most


def test_streams_without_a_kernel_are_balanced_by_tokens() -> None:
    trees = drawn_trees(replace(PEOPLE, batch=64), longest=40_960)
    shape, options = StreamShape(10_240, 64), StreamOptions(10_240)
    by_tokens = pack_streams(trees, shape, options)
    filled = [stream.tokens for (stream,) in by_tokens]
    assert max(filled) - min(filled) < 700
    assert pack_streams(trees, shape, replace(options, kernel=True)) != by_tokens
