"""Streams of trees in their order: they fit, hold every tree once, and their length leaves little empty."""

from __future__ import annotations

from dataclasses import replace

import numpy as np
import pytest

from prb_jax.trees.in_order import choose_length, fitting, full_streams, pack_in_order
from prb_jax.trees.packing import packed_stream, sort_trees
from prb_jax.trees.streams import StreamOptions, StreamShape, make_stream_batch
from tests.trees.test_streams import people

OPTIONS = StreamOptions(tokens=1024)


@pytest.mark.parametrize("streams", [1, 3])
def test_every_tree_is_in_one_stream_and_all_have_one_length(streams: int) -> None:
    trees = people(6, 4)
    options = replace(OPTIONS, streams=streams)
    batches = list(pack_in_order(sort_trees(trees, options), options, most=options.tokens))
    members = [member for batch in batches for stream in batch for member in stream.members]
    assert sorted(members) == list(range(len(trees)))
    assert {len(batch) for batch in batches} == {streams}
    assert len({stream.shape for batch in batches for stream in batch}) == 1
    for batch in batches:
        laid = make_stream_batch(trees, batch, options)
        used = (np.asarray(laid.tokens) != 0).sum(axis=1)
        assert (used <= [stream.tokens for stream in batch]).all()


def test_what_fits_is_counted_with_shared_beginnings_in_any_order() -> None:
    ordered = sort_trees(people(6, 4, seed=1), OPTIONS)
    rng = np.random.default_rng(2)
    for tokens in (300, 700, 2000):
        places = rng.permutation(len(ordered.order)).tolist()
        taken = fitting(ordered, places, tokens)
        assert taken == sorted(places[: len(taken)])
        shape = StreamShape(tokens, tokens)
        assert packed_stream(ordered, taken, shape).tokens <= tokens
        if len(taken) < len(places):
            more = sorted(places[: len(taken) + 1])
            assert packed_stream(ordered, more, shape).tokens > tokens


def test_the_length_is_the_one_that_computes_least() -> None:
    ordered = sort_trees(people(8, 4, seed=3), OPTIONS)
    largest = int(ordered.tokens.max())

    def computed(length: int) -> int:
        return length * len(full_streams(ordered, length))

    chosen = choose_length([ordered], OPTIONS, largest=largest, most=4096)
    assert largest <= chosen <= 4096
    assert chosen % OPTIONS.multiple == 0
    others = range(-(-largest // 128) * 128, 2048, 128)
    assert computed(chosen) <= 1.05 * min(map(computed, others))
