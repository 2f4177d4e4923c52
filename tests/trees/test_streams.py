"""Packed streams: every conversation is a path, who sees whom is one comparison, and no tree is lost."""

from __future__ import annotations

from dataclasses import replace

import numpy as np
import pytest

from prb_jax.scoring.batching import choose_stream_shape
from prb_jax.trees.packing import divide, pack_streams, sort_trees
from prb_jax.trees.streams import BlockTable, StreamBatch, StreamOptions, StreamShape, make_stream_batch
from prb_jax.trees.tree import BLOCK, LEAST_SHARED, Tree, build_tree, with_equal_splits
from tests.trees.rankings import pairs_of_rankings


def people(users: int, questions: int, *, seed: int = 0, profile: int = 200) -> list[Tree]:
    """Trees of people who have several questions each, in no order; some have two with the same question."""
    rng = np.random.default_rng(seed)
    trees = []
    for _ in range(users):
        shown = rng.integers(3, 60, rng.integers(profile // 2, profile))
        for _ in range(questions):
            prompt = np.concatenate([shown, rng.integers(3, 60, rng.integers(1, 90))])
            for _ in range(rng.integers(1, 3)):
                parts = [rng.integers(3, 60, rng.integers(1, 40)) for _ in range(rng.integers(1, 4))]
                trees.append(build_tree([np.concatenate([prompt, part]) for part in parts]))
    return [trees[index] for index in rng.permutation(len(trees))]


def who_sees(batch: StreamBatch, window: int | None = None) -> np.ndarray:
    """bool [S, N, N] of queries and keys, by the statement in the module."""
    place, until, positions = (
        np.arange(batch.tokens.shape[1]),
        np.asarray(batch.until),
        np.asarray(batch.positions),
    )
    sees = (place <= place[:, None]) & (place[:, None] < until[:, None])
    return sees if window is None else sees & (positions[:, :, None] - positions[:, None] < window)


@pytest.mark.parametrize("share", [True, False])
@pytest.mark.parametrize("streams", [1, 3])
def test_every_conversation_is_what_its_last_token_sees(share: bool, streams: int) -> None:
    trees = [*people(6, 3), build_tree([[5]]), build_tree([[5, 6], [7]])]
    options = StreamOptions(tokens=1024, streams=streams, share=share)
    members: list[int] = []
    for packed in pack_streams(trees, StreamShape(1024, 48), options):
        batch = make_stream_batch(trees, packed, options)
        assert batch.tokens.shape == (streams, 1024)
        sees = who_sees(batch)
        for stream, packed_stream in enumerate(packed):
            read = 0
            for member in packed_stream.members:
                tree = trees[member]
                members.append(member)
                for k, offset in enumerate(tree.read):
                    path = np.flatnonzero(sees[stream, batch.ends[stream, read]])
                    np.testing.assert_array_equal(batch.tokens[stream, path], tree.sequence(k))
                    np.testing.assert_array_equal(batch.positions[stream, path], np.arange(len(path)))
                    np.testing.assert_array_equal(batch.previous[stream, path], [-1, *path[:-1]])
                    assert batch.reads[stream, read] == path[len(tree.prefix) + offset]
                    read += 1
    assert sorted(members) == list(range(len(trees)))


def test_what_begins_alike_is_computed_once() -> None:
    """Whatever the order, and whoever asks: a person of 15 pairs needs their profile once."""
    rng = np.random.default_rng(1)
    profile = rng.integers(3, 60, 500)
    trees = []
    for number in range(15):
        question = np.concatenate([profile, [60 + number], rng.integers(3, 60, 19)])
        trees.append(build_tree([np.append(question, [k, 9, 9]) for k in range(2)]))
    (batch,) = pack_streams(trees, StreamShape(2048, 32), StreamOptions(tokens=2048))
    assert batch[0].tokens == 500 + 15 * (20 + 2 * 3)
    alone = pack_streams(trees, StreamShape(2048, 32), StreamOptions(tokens=2048, share=False))
    assert sum(stream.tokens for packed in alone for stream in packed) == sum(tree.tokens for tree in trees)
    # Longer than a stream: the profile is repeated, once a stream.
    short = pack_streams(trees, StreamShape(768, 32), StreamOptions(tokens=768))
    split = [stream for packed in short for stream in packed]
    assert sum(stream.tokens for stream in split) == len(split) * 500 + 15 * (20 + 2 * 3)
    assert len(split) == 2


def test_equal_conversations_are_one() -> None:
    """So that equal responses tie exactly, also those of two comparisons with one short prompt."""
    trees = [build_tree([[5, 6, 7], [5, 6, 8, 9], [5, 6, 7]]), build_tree([[5, 6, 8, 9], [5, 6, 3]])]
    options = StreamOptions(tokens=128)
    (packed,) = pack_streams(trees, StreamShape(128, 16), options)
    assert packed[0].tokens == 2 + 1 + 2 + 1
    batch = make_stream_batch(trees, packed, options)
    assert packed[0].members == (0, 1)
    first, second, third, fourth, fifth = batch.reads[0, :5].tolist()
    assert (first, second) == (third, fourth)
    assert len({first, second, fifth}) == 3
    assert batch.tokens[0, :7].tolist() == [5, 6, 7, 8, 9, 3, 0]


def test_a_conversation_of_several_comparisons_is_computed_once_in_a_stream() -> None:
    """Also where comparisons part from the prompt at different places; and once each where streams cut them apart."""
    trees, tokens = pairs_of_rankings()
    alike = with_equal_splits(trees)
    assert [tree.sequence(1).tolist() for tree in alike] == [tree.sequence(1).tolist() for tree in trees]
    options = StreamOptions(tokens=512)
    (packed,) = pack_streams(alike, StreamShape(512, 64), options)
    assert packed[0].tokens == tokens
    assert choose_stream_shape(alike, options, whole=True).tokens == 256  # two, for two cores
    for shape in (StreamShape(512, 64), StreamShape(128, 16), StreamShape(512, 7)):
        for packed in pack_streams(alike, shape, options):
            batch = make_stream_batch(alike, packed, options)
            assert (batch.tokens > 0).sum() == sum(stream.tokens for stream in packed)
            sees, read = who_sees(batch)[0], 0
            for member in packed[0].members:
                for k in range(2):
                    path = np.flatnonzero(sees[batch.reads[0, read]])
                    np.testing.assert_array_equal(batch.tokens[0, path], trees[member].sequence(k))
                    read += 1


def test_trees_that_part_far_from_each_other_stay_divided_as_they_are() -> None:
    """What a pair of long responses has in common is worth more than one response of another pair."""
    first, second = (
        build_tree([[*range(10, 90), k] for k in (1, 2)]),
        build_tree([[*range(10, 90), 1], [10, 9]]),
    )
    assert with_equal_splits([first, second]) == [first, second]
    near = build_tree([[*range(10, 90), 1], [*range(10, 60), 9]])
    moved, same = with_equal_splits([first, near])
    assert same is near
    assert (len(moved.prefix), moved.read) == (50, (30, 30))
    assert [moved.sequence(k).tolist() for k in range(2)] == [first.sequence(k).tolist() for k in range(2)]


def test_a_short_common_opening_is_not_worth_it() -> None:
    opening = list(range(3, 3 + LEAST_SHARED - 1))
    trees = [build_tree([[*opening, n, n, 1], [*opening, n, n, 2]]) for n in range(70, 74)]
    assert not sort_trees(trees, StreamOptions(tokens=1024)).shared.any()


def test_no_unit_is_larger_than_a_stream_unless_a_tree_is() -> None:
    trees = [*people(3, 40, profile=300), *people(1, 1, profile=3000)]
    units = divide(sort_trees(trees, StreamOptions(tokens=1024)), most_tokens=1024, most_reads=24)
    assert [place for unit in units for place in range(unit.start, unit.stop)] == list(range(len(trees)))
    for unit in units:
        assert unit.stop - unit.start == 1 or (unit.tokens <= 1024 and unit.reads <= 24)
    alone = sum(tree.tokens for tree in trees)
    assert sum(unit.tokens for unit in units) < 0.6 * alone


def test_a_tree_larger_than_a_stream_gets_one_of_its_own() -> None:
    long = build_tree([[*range(3, 60)] * 30 + [k] for k in range(40)])
    trees = [*people(2, 2), long]
    options = StreamOptions(tokens=384, streams=2)
    assert choose_stream_shape(trees, options, whole=True).tokens < 1536
    assert choose_stream_shape([long], options, whole=True) == StreamShape(384, 16)
    batches = pack_streams(trees, StreamShape(512, 16), options)
    assert [stream.members for stream in batches[0]] == [(len(trees) - 1,)]
    assert batches[0][0].shape > StreamShape(1750, 40)
    assert {stream.shape for packed in batches[1:] for stream in packed} == {StreamShape(512, 16)}


def test_shapes_fit_the_data_and_the_same_data_give_the_same_streams() -> None:
    trees = people(40, 4)
    options = StreamOptions(tokens=4096, streams=2)
    shape = choose_stream_shape(trees, options, whole=True)
    batches = pack_streams(trees, shape, options)
    assert batches == pack_streams(trees, shape, options)
    assert {stream.shape for packed in batches for stream in packed} == {shape}
    computed = len(batches) * shape.tokens * options.streams
    used = sum(stream.tokens for packed in batches for stream in packed)
    assert used > 0.9 * computed
    # One of many windows: longer ones may follow, so that there is room for them.
    more = choose_stream_shape(trees, options, whole=False)
    assert more.tokens >= options.tokens
    assert more.reads > shape.reads
    fixed = replace(options, fixed=(StreamShape(1024, 32), StreamShape(4096, 128)))
    batches = pack_streams(trees[:3], fixed.fixed[-1], fixed)
    assert {stream.shape for packed in batches for stream in packed} == {StreamShape(1024, 32)}


@pytest.mark.parametrize("window", [None, 1, 100, 600])
def test_the_tables_list_every_block_that_is_seen(window: int | None) -> None:
    trees = [*people(5, 4), *people(1, 2, profile=1500, seed=2)]
    options = StreamOptions(tokens=4096, streams=1, window=window)
    for packed in pack_streams(trees, StreamShape(4096, 128), options):
        batch = make_stream_batch(trees, packed, options)
        table = batch.table(window)
        assert isinstance(table, BlockTable)
        blocks = who_sees(batch, window)[0].reshape(4096 // BLOCK, BLOCK, -1, BLOCK)
        real = 0
        for query, (whole, partly) in enumerate(table.counts[0]):
            listed = table.keys[0, query, : whole + partly]
            assert len(set(listed.tolist())) == len(listed)
            assert blocks[query, :, listed[:whole]].all() or not whole
            needed = np.flatnonzero(blocks[query].any(axis=(0, 2)))
            real += bool(whole + partly)
            if whole + partly:
                assert set(needed) <= set(listed.tolist())
                assert len(listed) <= len(needed) + (0 if window is None else 4)
            else:
                assert set(needed) <= {query}  # padding sees itself
        assert (table.counts[0, :real].sum(axis=1) > 0).all()


def unequal() -> list[Tree]:
    """Four comparisons of sixteen responses each: 775, 1,234, 955 and 2,207 tokens."""
    rng = np.random.default_rng(0)
    trees = []
    for tokens in (775, 1234, 955, 2207):
        lengths = np.full(16, 40)
        shared = rng.integers(100, 6000, tokens - lengths.sum())
        trees.append(
            build_tree([[*shared, k, *rng.integers(100, 6000, n - 1)] for k, n in enumerate(lengths)])
        )
    return trees


@pytest.mark.parametrize(
    ("program_cost", "lengths"), [(None, [3072, 3072]), (700, [3072, 2304]), (800, [3072, 3072])]
)
def test_a_stream_that_is_less_full_is_shorter_where_that_pays(
    program_cost: int | None, lengths: list[int]
) -> None:
    """The largest tree stands alone, though the streams of first fit have fewer responses than the others together."""
    trees, options = unequal(), StreamOptions(8192, program_cost=program_cost)
    shape = choose_stream_shape(trees, options, whole=True)
    streams = [stream for batch in pack_streams(trees, shape, options) for stream in batch]
    assert [stream.shape.tokens for stream in streams] == lengths
    assert sorted(map(sorted, (stream.members for stream in streams))) == [[0, 1, 2], [3]]
    computed, needed = sum(lengths), sum(tree.tokens for tree in trees)
    assert needed / computed > (0.96 if 2304 in lengths else 0.84)
    assert all(stream.tokens <= stream.shape.tokens for stream in streams)


def test_many_streams_have_one_length() -> None:
    trees = people(60, 1, profile=400)
    options = StreamOptions(1024, program_cost=0)
    shape = choose_stream_shape(trees, options, whole=True)
    batches = pack_streams(trees, shape, options)
    assert len(batches) > 8
    assert {stream.shape for batch in batches for stream in batch} == {shape}
