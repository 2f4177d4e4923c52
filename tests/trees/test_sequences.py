"""Sequences in batches: every one in a batch that holds it, few shapes, little padding, equal ones once."""

from __future__ import annotations

import itertools
from dataclasses import replace

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from prb_jax.trees.sequences import (
    GROUP,
    MOST_SAVED,
    STEP,
    SequenceOptions,
    SequencePlan,
    batch_of_trees,
    choose_lengths,
    make_sequence_batch,
    pack_sequences,
    plan_sequences,
)
from prb_jax.trees.tree import Tree, build_tree

OPTIONS = SequenceOptions(tokens=2048, limit=512)


def longest_first(lengths: np.ndarray) -> list[int]:
    return np.argsort(-lengths, kind="stable").tolist()


def padded(plan: SequencePlan) -> int:
    return sum(batch.rows * batch.length for batch in plan.batches)


def random_trees(count: int, *, seed: int = 0, longest: int = 250) -> list[Tree]:
    rng = np.random.default_rng(seed)
    trees = []
    for _ in range(count):
        prefix = rng.integers(5, 90, rng.integers(1, longest))
        responses = [rng.integers(5, 90, rng.integers(1, longest)) for _ in range(rng.integers(1, 5))]
        trees.append(build_tree([np.concatenate([prefix, response]) for response in responses]))
    return trees


@settings(deadline=None, max_examples=200, database=None)
@given(
    st.lists(st.integers(0, 700), max_size=300),
    st.integers(1, 4),
    st.integers(64, 4096),
    st.integers(0, 300),
    st.sampled_from([0, 200, 1 << 20]),
    st.booleans(),
)
def test_every_sequence_is_in_one_batch_that_holds_it(
    sizes: list[int], divisor: int, budget: int, slack: int, program_cost: int, is_sorted: bool
) -> None:
    limit = max(sizes, default=1) + slack + 1
    options = SequenceOptions(budget, limit, divisor, program_cost)
    lengths = np.asarray(sizes, np.int64)
    order = longest_first(lengths) if is_sorted else list(range(len(sizes)))
    batches = pack_sequences(lengths, order, options)
    assert [place for batch in batches for place in batch.members] == order
    for batch in batches:
        assert 0 < len(batch.members) <= batch.rows
        assert batch.rows % divisor == 0
        assert batch.length <= limit
        assert batch.rows == divisor or batch.rows * batch.length <= budget
        assert max(sizes[place] for place in batch.members) <= batch.length
    assert all(len(batch.members) == batch.rows for batch in batches[:-1])
    # One number of rows for each length, but perhaps for the last batch.
    assert len({(batch.rows, batch.length) for batch in batches[:-1]}) == len(
        {batch.length for batch in batches[:-1]}
    )
    if is_sorted:
        assert [batch.length for batch in batches] == sorted((b.length for b in batches), reverse=True)
    assert pack_sequences(lengths, order, options) == batches


@pytest.mark.parametrize("program_cost", [0, 30, 300, 3_000, 10**9])
def test_the_lengths_are_the_cheapest_there_are(program_cost: int) -> None:
    """Compared with every choice of lengths."""
    rng = np.random.default_rng(1)
    lengths = rng.choice([3, 16, 48, 80, 160, 240, 256, 400, 512], 60)
    options = replace(OPTIONS, program_cost=program_cost)
    tops = sorted({-(-int(length) // STEP) * STEP for length in lengths})
    least = max(program_cost, lengths.sum() / MOST_SAVED)

    def cost(chosen: tuple[int, ...] | list[int]) -> float:
        return sum(min(top for top in chosen if top >= length) for length in lengths) + least * len(chosen)

    choices = [(*some, tops[-1]) for n in range(len(tops)) for some in itertools.combinations(tops[:-1], n)]
    found = choose_lengths(lengths, options)
    assert cost(found) == pytest.approx(min(map(cost, choices)))
    assert program_cost < 10**9 or found == [512]


@pytest.mark.parametrize("count", [1, 10, 1_000, 100_000])
@pytest.mark.parametrize("limit", [512, 8192])
def test_the_programs_are_few_however_many_sequences_there_are(count: int, limit: int) -> None:
    lengths = np.random.default_rng(0).integers(1, limit + 1, count)
    chosen = choose_lengths(lengths, replace(OPTIONS, limit=limit))
    assert len(chosen) <= 20
    assert chosen[-1] <= limit
    if count >= 1_000:
        batches = pack_sequences(
            lengths, longest_first(lengths), replace(OPTIONS, limit=limit, tokens=16_384)
        )
        assert sum(batch.rows * batch.length for batch in batches) < 1.12 * lengths.sum()


def test_a_few_sequences_do_not_fill_a_batch_that_costs_more_than_a_program() -> None:
    cheap, dear = (replace(OPTIONS, program_cost=cost) for cost in (100, 10_000))
    assert [options.rows(128, 3) for options in (cheap, dear)] == [4, 16]
    assert [options.rows(128, 16) for options in (cheap, dear)] == [16, 16]
    assert replace(cheap, tokens=16_384, divisor=8).rows(128, 9) == 16
    assert replace(cheap, tokens=10, divisor=8).rows(128, 9) == 8  # never less than one row a shard
    fixed = replace(OPTIONS, fixed={64: (4, 32), 512: (1, 4)})
    assert [fixed.rows(64, waiting) for waiting in (1, 4, 5, 99)] == [4, 4, 32, 32]
    assert [(b.rows, b.length) for b in pack_sequences([70, 9, 8], [0, 1, 2], fixed)] == [(4, 512)]


@pytest.mark.parametrize("fixed", [False, True])
@pytest.mark.parametrize("count", [0, 1, 7, 400])
def test_groups_hold_every_tree_once_and_what_it_needs(count: int, fixed: bool) -> None:
    trees = random_trees(count)
    options = OPTIONS
    if fixed:  # as a server's, whose trees have one response each
        options = replace(OPTIONS, fixed={128: (4, 16), 512: (1, 4)})
        trees = [build_tree([tree.sequence(0)]) for tree in trees]
    plan = plan_sequences(trees, options)
    assert sorted(member for group in plan.groups for member in group.members) == list(range(count))
    assert sum(group.tokens for group in plan.groups) == plan.found.lengths.sum()
    holds = [set(batch.members) for batch in plan.batches]
    for number, group in enumerate(plan.groups):
        assert group.members
        computed = set().union(*(holds[batch] for batch in group.batches))
        for member in group.members:
            for k, place in enumerate(plan.found.places[member]):
                assert place in computed
                np.testing.assert_array_equal(plan.found.sequences[place], trees[member].sequence(k))
        if fixed:
            assert group.batches == (number,)
    assert (
        len(plan.groups) == len(plan.batches) if fixed else len(plan.groups) <= len(plan.batches) / GROUP + 2
    )
    if count == 400 and not fixed:
        assert len(plan.groups) > 5
        assert padded(plan) < 1.1 * plan.found.lengths.sum()
        # Each group needs its own batches, and at most those where it meets its neighbours.
        assert sum(len(group.batches) for group in plan.groups) <= len(plan.batches) + 2 * len(plan.groups)


def test_equal_sequences_are_computed_once() -> None:
    """Twenty answers to one question in every pair, as people's choices between them."""
    rng = np.random.default_rng(0)
    answers = [rng.integers(5, 90, rng.integers(5, 60)) for _ in range(20)]
    pairs = list(itertools.combinations(range(20), 2))
    trees = [build_tree([[1, 2, 3, *answers[a]], [1, 2, 3, *answers[b]]]) for a, b in pairs]
    plan = plan_sequences(trees, OPTIONS)
    assert len(plan.found.sequences) == 20
    assert padded(plan) < 0.2 * sum(len(tree.sequence(k)) for tree in trees for k in range(2))
    batch = batch_of_trees(trees[:3], OPTIONS)
    assert batch.places is not None
    assert np.shape(batch.tokens)[0] == 4
    for row, tree in zip(batch.places, trees, strict=False):
        for k, place in enumerate(row):
            ids = np.asarray(batch.tokens)[place, : batch.lengths[place]]
            np.testing.assert_array_equal(ids, tree.sequence(k))


def test_rows_without_a_sequence_are_empty() -> None:
    (packed,) = pack_sequences([3, 2], [0, 1], replace(OPTIONS, divisor=4))
    batch = make_sequence_batch([np.arange(1, 4), np.arange(7, 9)], packed)
    assert np.shape(batch.tokens) == (4, 8)
    assert np.asarray(batch.tokens)[:2].tolist() == [[1, 2, 3, 0, 0, 0, 0, 0], [7, 8, 0, 0, 0, 0, 0, 0]]
    assert np.asarray(batch.lengths).tolist() == [3, 2, 0, 0]
