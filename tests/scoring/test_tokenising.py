"""Several processes: each tokenises its part once, and all score the same as one alone."""

from __future__ import annotations

import numpy as np
import pytest

from prb_jax.scoring.encode_together import encode_by_processes, packed_trees, unpacked_trees
from tests.platform.processes.jobs import ended, job
from tests.scoring.slow_scorer import comparisons
from tests.scoring.tokenising_process import Counting, digest

PROGRAM = ("-m", "tests.scoring.tokenising_process")
COUNT = 1200  # three windows, so that one is tokenised while another is scored


def last_lines(count: int, *arguments: object) -> list[str]:
    with job([*PROGRAM, *arguments], count=count) as processes:
        outcomes = ended(processes)
    assert [status for status, *_ in outcomes] == [0] * count, outcomes
    return [output.splitlines()[-1] for _, output, _ in outcomes]


@pytest.mark.parametrize("processes", [2, pytest.param(4, marks=pytest.mark.slow)])
def test_processes_share_the_work_and_score_alike(processes: int) -> None:
    alone = Counting()
    expected = digest(COUNT, alone)
    assert alone.seen == COUNT
    seen, digests, together, trees = zip(*(line.split() for line in last_lines(processes, COUNT)))
    assert digests == (expected,) * processes
    for counts in (list(map(int, seen)), list(map(int, together))):
        assert sum(counts) == COUNT
        assert max(counts) - min(counts) <= 3  # one for each exchange
    assert trees == (str(COUNT),) * processes


@pytest.mark.slow
def test_what_one_process_cannot_tokenise_all_refuse() -> None:
    first, second = last_lines(2, 40, "c3")
    assert first == "refused comparison 'c3' cannot be tokenised"
    assert second == "refused process 0: comparison 'c3' cannot be tokenised"


def test_trees_survive_the_way() -> None:
    trees = Counting()(comparisons(9))
    for one, two in zip(trees, unpacked_trees(packed_trees(trees)), strict=True):
        assert (one.read, one.truncation, one.shape) == (two.read, two.truncation, two.shape)
        for k in range(len(one.responses)):
            np.testing.assert_array_equal(one.sequence(k), two.sequence(k))
            assert two.responses[k].dtype == np.int32
    assert unpacked_trees(packed_trees([])) == []


def test_one_process_exchanges_nothing() -> None:
    some = comparisons(5)[::-4]
    trees = Counting()(some), encode_by_processes(some, Counting())
    assert [tree.shape for tree in trees[0]] == [tree.shape for tree in trees[1]]
