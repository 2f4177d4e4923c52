"""The pipeline: every comparison once, tokenised ahead, dispatched ahead, continued without a trace."""

from __future__ import annotations

import functools
import threading
from collections.abc import Generator, Sequence
from dataclasses import dataclass, field
from typing import Any, cast

import jax.numpy as jnp
import numpy as np
import pytest

from prb_jax.errors import DataError
from prb_jax.records.comparison import Comparison
from prb_jax.records.items import windows
from prb_jax.scoring.batching import (
    FIRST_WINDOW,
    WAITING,
    WINDOW,
    stream_scores,
)
from prb_jax.trees.streams import StreamBatch, StreamOptions
from prb_jax.trees.tree import ScoredBatch, Tree, Truncation, build_tree
from tests.trees.rankings import pairs_of_rankings

OPTIONS = StreamOptions(tokens=1024)


def windows_of(count: int) -> list[range]:
    some: Any = range(count)
    return [window.places for window in windows(some, first=FIRST_WINDOW, size=WINDOW)]


def comparison(number: int) -> Comparison:
    return Comparison(id=str(number), question="?", responses=["a"] * (2 + number % 3), labels=None)


@functools.cache
def tree_of(one: Comparison) -> Tree:
    """Lengths and tokens from the number alone; the score of a response is the sum of what it sees."""
    number = int(one.id)
    rng = np.random.default_rng(number)
    prefix = rng.integers(10, 100, rng.integers(0, 90))
    responses = [np.append(k, rng.integers(10, 100, rng.integers(0, 20))) for k in range(len(one.responses))]
    sequences = [np.concatenate([prefix, response]) for response in responses]
    return build_tree(sequences, truncation=Truncation(posts_dropped=number))


def sums(batch: StreamBatch) -> Any:
    """float32 [S, M]: the sum of the tokens that each read place sees."""
    place, read = np.arange(batch.tokens.shape[1]), batch.reads[:, :, None]
    seen = (place <= read) & (read < batch.until[:, None])
    return jnp.asarray((batch.tokens[:, None] * seen).sum(axis=2), jnp.float32)


def expected(one: Comparison) -> np.ndarray:
    tree = tree_of(one)
    return np.asarray([tree.sequence(k).sum() for k in range(len(tree.responses))], np.float32)


@dataclass
class Machine:
    """A tokenizer and a device that write down what they are asked, in order."""

    events: list[tuple[str, Any]] = field(default_factory=list)
    encoded: list[int] = field(default_factory=list)
    shapes: set[tuple[int, ...]] = field(default_factory=set)
    threads: set[str] = field(default_factory=set)

    def encode(self, comparisons: Sequence[Comparison]) -> list[Tree]:
        self.threads.add(threading.current_thread().name)
        self.encoded += [int(one.id) for one in comparisons]
        self.events.append(("encode", len(comparisons)))
        return [tree_of(one) for one in comparisons]

    def dispatch(self, batch: StreamBatch) -> Any:
        self.shapes.add((*batch.tokens.shape, *batch.reads.shape))
        self.events.append(("dispatch", len(batch.tokens)))
        return sums(batch)

    def stream(self, count: int, **options: Any) -> Generator[ScoredBatch]:
        settings = {"encode": self.encode, "dispatch": self.dispatch, "options": OPTIONS, **options}
        return cast(Any, stream_scores([comparison(number) for number in range(count)], **settings))

    def run(self, count: int, **options: Any) -> list[ScoredBatch]:
        return list(self.stream(count, **options))


def assert_scored(batches: Sequence[ScoredBatch], wanted: Sequence[int]) -> None:
    assert sorted(index for batch in batches for index in batch.indices) == list(wanted)
    for batch in batches:
        for index, row, tokens, cut in zip(
            batch.indices, batch.scores, batch.tokens, batch.truncation, strict=True
        ):
            np.testing.assert_array_equal(row, expected(comparison(index)))
            assert row.dtype == np.float32
            assert row.base is None  # keeps no whole batch alive
            assert tokens == tree_of(comparison(index)).tokens
            assert cut.posts_dropped == index


@pytest.mark.parametrize("count", [1, 2, 100, 512, 513, 1500])
def test_every_comparison_is_scored_and_tokenised_once(count: int) -> None:
    machine = Machine()
    assert_scored(machine.run(count), range(count))
    assert sorted(machine.encoded) == list(range(count))
    assert len(machine.shapes) == 1


def test_a_response_of_many_comparisons_is_computed_once() -> None:
    trees, tokens = pairs_of_rankings()
    batches = Machine().run(len(trees), encode=lambda some: [trees[int(one.id)] for one in some])
    assert sum(cast(int, batch.computed) for batch in batches) == tokens
    for batch in batches:
        for index, row, size in zip(batch.indices, batch.scores, batch.tokens, strict=True):
            assert row.tolist() == [trees[index].sequence(k).sum() for k in range(2)]
            assert size == trees[index].tokens


@pytest.mark.parametrize("count", [0, 1, 511, 512, 513, 4608, 4609, 16_953])
def test_windows_cover_the_input_in_order(count: int) -> None:
    parts = windows_of(count)
    assert [index for part in parts for index in part] == list(range(count))
    assert all(1 <= len(part) <= WINDOW for part in parts)
    if count > FIRST_WINDOW:
        assert len(parts[0]) == FIRST_WINDOW
        assert all(len(part) == WINDOW for part in parts[1:-1])


def test_longer_comparisons_than_those_of_the_first_window_still_fit() -> None:
    """One of 1,500 is longer than all that decide the length of streams."""
    machine = Machine()
    odd = 777
    long = build_tree([[*range(10, 900), 1], [*range(10, 900), 2, 3]])

    def encode(comparisons: Sequence[Comparison]) -> list[Tree]:
        trees = machine.encode(comparisons)
        return [long if int(one.id) == odd else tree for one, tree in zip(comparisons, trees, strict=True)]

    batches = machine.run(1500, encode=encode)
    scores = {index: row for batch in batches for index, row in zip(batch.indices, batch.scores, strict=True)}
    assert len(scores) == 1500
    assert scores[odd].tolist() == [sum(range(10, 900)) + 1, sum(range(10, 900)) + 5]


def test_batches_are_dispatched_ahead_of_their_results() -> None:
    machine = Machine()
    dispatched = [sum(kind == "dispatch" for kind, _ in machine.events) for _ in machine.stream(400)]
    total = dispatched[-1]
    under_way = 1 + WAITING
    assert total > 2 * under_way
    # When the n-th result is handed out, so many more are under way.
    assert dispatched == [min(n + 1 + under_way, total) for n in range(total)]


def test_lanes_compute_side_by_side_and_keep_the_order() -> None:
    """Two batches wait for each other in every pair, so neither would end if they ran one after another."""
    alone = Machine().run(400)
    machine, meeting, names = Machine(), threading.Barrier(2, timeout=300), list[str]()

    def dispatch(batch: StreamBatch) -> Any:
        scores, name = machine.dispatch(batch), threading.current_thread().name
        if name.startswith("compute"):
            names.append(name)
            if len(names) <= 2:
                meeting.wait()
        return scores

    together = machine.run(400, dispatch=dispatch, lanes=2)
    assert [batch.indices for batch in together] == [batch.indices for batch in alone]
    assert_scored(together, range(400))
    # The first batch of each shape is compiled by the caller's own thread, once.
    assert len(names) == len(together) - len(machine.shapes)
    assert len(set(names)) == 2
    assert not any(thread.name.startswith("compute") for thread in threading.enumerate())


def test_the_next_window_is_tokenised_while_this_one_is_scored() -> None:
    """In a thread: the first result of a window comes although the next window waits to be encoded."""
    count = 1500
    first, second = (len(part) for part in windows_of(count)[:2])
    machine, started, go_on = Machine(), threading.Event(), threading.Event()
    calls = 0

    def encode(comparisons: Sequence[Comparison]) -> list[Tree]:
        nonlocal calls
        calls += 1
        if calls == 2:  # the first window, which decides the shapes, then the second
            started.set()
            assert go_on.wait(timeout=300)
        return machine.encode(comparisons)

    stream = machine.stream(count, encode=encode)
    batches = [next(stream)]
    assert started.wait(timeout=300)
    assert batches[0].indices[-1] < first
    # The first window can be scored to its last dispatched batch before the second is tokenised.
    go_on.set()
    batches += stream
    assert_scored(batches, range(count))
    assert calls == len(windows_of(count))
    assert {name.rpartition("_")[0] for name in machine.threads} == {"", "tokenise"}
    assert second > first


def test_an_error_while_tokenising_reaches_the_caller() -> None:
    machine = Machine()

    def encode(comparisons: Sequence[Comparison]) -> list[Tree]:
        if any(one.id == "1400" for one in comparisons):
            raise DataError("comparison '1400': cannot be shown")
        return machine.encode(comparisons)

    scored: list[ScoredBatch] = []
    with pytest.raises(DataError, match="comparison '1400': cannot be shown"):
        scored.extend(machine.stream(1500, encode=encode))
    assert_scored(scored, sorted(index for batch in scored for index in batch.indices))
    assert len(scored) == sum(kind == "dispatch" for kind, _ in machine.events) - 1 - WAITING
    assert not any(thread.name.startswith("tokenise") for thread in threading.enumerate())


def test_leaving_early_stops_the_thread() -> None:
    stream = Machine().stream(1500)
    next(stream)
    stream.close()
    assert not any(thread.name.startswith("tokenise") for thread in threading.enumerate())


def test_the_rest_of_a_run_has_the_same_batches() -> None:
    """What is done is left out whole; the other batches are those of the whole run, in its order."""
    whole = Machine().run(1500)
    done = {index for batch in whole[::3] for index in batch.indices}
    rest = Machine().run(1500, skip=done.issuperset)
    others = [batch for number, batch in enumerate(whole) if number % 3]
    for batch, other in zip(rest, others, strict=True):
        assert batch.indices == other.indices
        for row, same in zip(batch.scores, other.scores, strict=True):
            np.testing.assert_array_equal(row, same)


def test_finished_windows_are_not_tokenised_again() -> None:
    """But for the first one, on which the shape of all streams depends."""
    count = 10_000
    first = windows_of(count)[:2]
    done = {index for part in first for index in part}
    machine = Machine()
    rest = machine.run(count, skip=done.issuperset)
    assert_scored(rest, range(first[-1].stop, count))
    again = [index for index in machine.encoded if index in done]
    assert again == list(first[0])
    assert len(machine.encoded) == len(set(machine.encoded))


@pytest.mark.parametrize(("count", "finished"), [(0, False), (1500, True)])
def test_with_nothing_to_score_nobody_is_asked(count: int, finished: bool) -> None:
    machine = Machine()
    assert machine.run(count, skip=lambda indices: finished) == []
    assert machine.events == []


def test_streams_score_every_comparison_once_and_share_what_begins_alike() -> None:
    """Over several windows, packed into streams; a continued run packs the same streams."""
    shared = list(range(10, 90))
    trees = {n: build_tree([[*shared, 90 + n % 7, n % 11, k] for k in range(2 + n % 2)]) for n in range(1100)}

    def run(skip: Any = lambda indices: False) -> list[ScoredBatch]:
        options = StreamOptions(tokens=1024, streams=2)

        def encode(some: Sequence[Comparison]) -> list[Tree]:
            return [trees[int(one.id)] for one in some]

        return Machine().run(1100, encode=encode, dispatch=sums, options=options, skip=skip)

    batches = run()
    assert sorted(index for batch in batches for index in batch.indices) == list(range(1100))
    for batch in batches:
        for index, row, tokens in zip(batch.indices, batch.scores, batch.tokens, strict=True):
            wanted = [trees[index].sequence(k).sum() for k in range(len(trees[index].responses))]
            np.testing.assert_array_equal(row, np.asarray(wanted, np.float32))
            assert tokens == trees[index].tokens
    computed = sum(batch.computed or 0 for batch in batches)
    assert computed < 0.2 * sum(tree.tokens for tree in trees.values())
    again = run(set(batches[0].indices).issuperset)
    assert [batch.indices for batch in again] == [batch.indices for batch in batches[1:]]
