"""The pages of streams, against the conversations that they hold."""

from __future__ import annotations

import numpy as np
import pytest

from prb_jax.trees.stream_pages import MOST_ENTRIES, page_size, page_table
from tests.trees.forests import random_forest


@pytest.mark.parametrize("seed", range(12))
def test_the_pages_of_a_run_hold_its_conversation(seed: int) -> None:
    forest = random_forest(seed, tokens=1024, longest=[30, 150, 400][seed % 3], trees=5)
    table = page_table(forest.previous, forest.positions, forest.used, runs=forest.leaves)
    starts, count = table["starts"], int(table["runs"][0])
    assert 0 < count <= forest.leaves
    assert starts[0] == 0
    assert (starts[count:] == forest.used).all()
    taken = 0
    for run in range(count):
        path, place = [], int(starts[run + 1]) - 1
        while place >= 0:
            path.append(place)
            place = int(forest.previous[place])
        path.reverse()
        # Its queries are the last of its keys, and stand side by side.
        assert path[len(path) - int(starts[run + 1] - starts[run]) :] == [
            *range(starts[run], starts[run + 1])
        ]
        held = table["tokens"][table["pages"][run]].reshape(-1)
        assert held[: table["keys"][run]].tolist() == path
        taken += 1 + len(path) // 64
    used_pages = np.unique(
        np.concatenate([table["pages"][run, : -(-table["keys"][run] // 64)] for run in range(count)])
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
    assert (table["runs"].tolist(), table["starts"].tolist(), table["keys"].tolist()) == (
        [0],
        [0, 0, 0],
        [0, 0],
    )


def test_tables_stay_small() -> None:
    assert page_size(8192, 128) == page_size(8192, 512) == 64
    for tokens, runs in ((8192, 1024), (65_536, 400), (1_000_000, 64)):
        assert runs * -(-tokens // page_size(tokens, runs)) <= MOST_ENTRIES
