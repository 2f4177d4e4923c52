"""The keys before each block of a stream, against who sees whom; and how much of them is padding."""

from __future__ import annotations

from dataclasses import replace

import numpy as np
import pytest

from prb_jax.scoring.batching import choose_stream_shape
from prb_jax.trees.kernel_tables import KEY_COLUMNS, KeyLayout, KeyTable, for_keys, key_table, with_key_layout
from prb_jax.trees.packing import pack_streams
from prb_jax.trees.streams import StreamOptions, StreamShape, make_stream_batch
from prb_jax.trees.tree import Tree, build_tree
from tests.trees.test_streams import people, who_sees


@pytest.mark.parametrize("window", [None, 1, 40, 300])
@pytest.mark.parametrize("profile", [10, 60, 200, 500])
def test_a_block_has_the_keys_that_its_queries_see(profile: int, window: int | None) -> None:
    """Of people with shared beginnings, and of conversations without any."""
    trees = [
        *people(4, 3, seed=profile, profile=profile),
        *(build_tree([[5], [6, token]]) for token in range(9)),
    ]
    layout = KeyLayout(longest=1024, response=400, queries=128)
    options = with_key_layout(StreamOptions(tokens=1024, window=window), layout)
    for packed in pack_streams(trees, StreamShape(1024, 64), options):
        batch = make_stream_batch(trees, packed, options)
        table, (sees,) = batch.table(window), who_sees(batch, window)
        assert isinstance(table, KeyTable)
        for block, start in enumerate(range(0, 1024, 128)):
            keys = table.keys[0, block, : table.counts[0, block]]
            np.testing.assert_array_equal(keys, np.flatnonzero(sees[start : start + 128, :start].any(axis=0)))


def test_tables_have_room_for_usual_conversations_and_are_doubled_for_longer_ones() -> None:
    layout = KeyLayout(longest=300, response=50, queries=128)
    assert layout.width(1024, None) == 320
    assert layout.width(1024, 100) == 192  # 99 of a window, 50 of a sibling
    assert layout.width(1024, 1) == KEY_COLUMNS
    assert (layout.width(256, None), layout.width(128, None)) == (128, 0)
    widths = []
    for length in (300, 400, 700, 1024):
        positions = np.concatenate([np.arange(length), np.zeros(1024 - length, int)])[None]
        until = np.where(np.arange(1024) < length, length, np.arange(1024) + 1)[None]
        table = key_table(until, positions, layout=layout, window=None)
        assert table.counts[0].tolist() == [at if at < length else 0 for at in range(0, 1024, 128)]
        widths.append(table.keys.shape[2])
    assert widths == [320, 640, 640, 896]


def test_longer_conversations_have_longer_blocks() -> None:
    queries = {longest: KeyLayout.of(longest, 10).queries for longest in (1, 130, 500, 2_000, 8_000, 60_000)}
    assert queries == {1: 128, 130: 128, 500: 128, 2_000: 256, 8_000: 512, 60_000: 1024}


def profiles(count: int, *, responses: int, questions: int = 1, seed: int = 0) -> list[Tree]:
    """Trees with profiles of about 2,000 tokens and responses of about 130, log-normal."""
    rng = np.random.default_rng(seed)

    def ids(mean: float) -> np.ndarray:
        return rng.integers(3, 60, max(1, round(mean * rng.lognormal(-0.1, 0.45))))

    trees = []
    for _ in range(count):
        profile = ids(2000)
        for _ in range(questions):
            asked = np.concatenate([profile, ids(40)])
            trees.append(build_tree([np.concatenate([asked, ids(130)]) for _ in range(responses)]))
    return trees


@pytest.mark.parametrize(
    ("count", "responses", "questions", "pairs"),
    [(96, 2, 1, 1.4), (32, 16, 1, 1.3), (40, 2, 15, 1.3)],
)
def test_little_is_padding(count: int, responses: int, questions: int, pairs: float) -> None:
    """Streams are full, blocks compute few pairs in vain, and one shape of tables serves all."""
    trees = profiles(count, responses=responses, questions=questions)
    options = for_keys(StreamOptions(tokens=32_768), trees, whole=True)
    shape = choose_stream_shape(trees, options, whole=True)
    packed = pack_streams(trees, shape, options)
    batches = [make_stream_batch(trees, streams, options) for streams in packed]
    assert len(batches) > 2
    tables = [table for batch in batches if isinstance(table := batch.blocks, KeyTable)]
    assert len({table.keys.shape for table in tables}) == 1
    computed = 0  # pairs of a query and a key, masked ones too
    for table in tables:
        queries = shape.tokens // table.counts.shape[1]
        computed += int((queries * (queries + table.counts)).sum())
    until = np.concatenate([np.asarray(batch.until) for batch in batches])
    seen = int((until - np.arange(until.shape[1])).sum())  # by another or itself, padding too
    assert computed < pairs * seen
    real = sum(stream.tokens for streams in packed for stream in streams)
    assert real > 0.95 * until.size


def test_rare_long_conversations_do_not_widen_all_tables() -> None:
    trees = [build_tree([np.arange(3, 203 + number % 50)]) for number in range(400)]
    options, long = StreamOptions(tokens=2048), build_tree([np.arange(3, 1800)])

    def longest(trees: list[Tree]) -> int:
        keys = for_keys(options, trees, whole=True).keys
        assert keys is not None
        return keys.longest

    assert 240 < longest(trees) <= 250
    assert 240 < longest([*trees, long]) <= 250
    assert longest([*trees, *[long] * 80]) == 1797
    # Of the first of many others may be a little longer; streams are whole blocks.
    more = for_keys(replace(options, tokens=2000), trees, whole=False)
    assert more.keys is not None
    assert (more.keys.longest, more.block, more.tokens) == (256, more.keys.queries, 2048)
