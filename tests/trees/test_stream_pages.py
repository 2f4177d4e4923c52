"""The pages of streams, against the conversations that they hold."""

from __future__ import annotations

import numpy as np
import pytest

from prb_jax.trees.stream_tables import MOST_ENTRIES, most_sequences, page_size, page_table
from tests.trees.forests import random_forest


@pytest.mark.parametrize("seed", range(12))
def test_the_pages_of_a_sequence_hold_its_conversation(seed: int) -> None:
    forest = random_forest(seed, tokens=1024, longest=[30, 150, 400][seed % 3], trees=5)
    table = page_table(forest.previous, forest.positions, forest.used, runs=forest.leaves)
    starts, count = table["starts"], int(table["sequences"][0])
    assert 0 < count <= most_sequences(1024, forest.leaves)
    assert starts[0] == 0
    assert (starts[count:] == forest.used).all()
    taken = 0
    for number in range(count):
        path, place = [], int(starts[number + 1]) - 1
        while place >= 0:
            path.append(place)
            place = int(forest.previous[place])
        path.reverse()
        # Its queries are the last of its keys, and stand side by side.
        assert path[len(path) - int(starts[number + 1] - starts[number]) :] == [
            *range(starts[number], starts[number + 1])
        ]
        held = table["tokens"][table["pages"][number]].reshape(-1)
        assert held[: table["keys"][number]].tolist() == path
        taken += 1 + len(path) // 64
    used_pages = np.unique(
        np.concatenate([table["pages"][number, : -(-table["keys"][number] // 64)] for number in range(count)])
    )
    assert used_pages.tolist() == [*range(len(used_pages))]
    assert len(used_pages) <= min(taken, len(table["tokens"]))


def test_pages_are_shared_and_the_last_one_is_copied() -> None:
    """A beginning of 150 tokens and three responses of 10: the first continues the run, the others copy 22 tokens."""
    previous = np.arange(-1, 179, dtype=np.int32)
    previous[[160, 170]] = 149
    positions = np.concatenate([np.arange(160), 150 + np.arange(10), 150 + np.arange(10)]).astype(np.int32)
    table = page_table(previous, positions, 180, runs=4)
    assert table["starts"].tolist() == [0, 160, 170, 180, 180]
    assert table["keys"].tolist() == [160, 160, 160, 0]
    assert table["pages"].tolist() == [[0, 1, 2], [0, 1, 3], [0, 1, 4], [0, 0, 0]]
    assert table["tokens"][3, :32].tolist() == [*range(128, 150), *range(160, 170)]
    with pytest.raises(ValueError, match="3 runs of tokens do not fit a table of 2"):
        page_table(previous, positions, 180, runs=2)


def test_padding_alone_has_no_pages() -> None:
    table = page_table(np.full(128, -1, np.int32), np.zeros(128, np.int32), 0, runs=2)
    assert (table["sequences"].tolist(), table["starts"].tolist(), table["keys"].tolist()) == (
        [0],
        [0, 0, 0],
        [0, 0],
    )


def test_tables_stay_small() -> None:
    assert (page_size(8192, 64), page_size(8192, 512)) == (64, 128)
    for tokens, runs in ((8192, 1024), (65_536, 400), (1_000_000, 64)):
        assert most_sequences(tokens, runs) * -(-tokens // page_size(tokens, runs)) <= MOST_ENTRIES


def test_a_long_run_is_cut_so_that_few_keys_are_visited_in_vain() -> None:
    """A conversation of 1,200 tokens behind one of 100: cut at 512 and 1,024 places, over the same pages."""
    previous = np.arange(-1, 1407, dtype=np.int32)
    previous[100] = previous[1300:] = -1
    positions = np.concatenate([np.arange(100), np.arange(1200), np.zeros(108)]).astype(np.int32)
    table = page_table(previous, positions, 1300, runs=2)
    assert table["starts"].tolist() == [0, 100, 512, 1024, 1300]
    assert table["keys"].tolist() == [100, 412, 924, 1200]
    assert (table["pages"][1] == table["pages"][3]).all()
