"""The split in token space: prefix plus response is the whole conversation, always."""

from __future__ import annotations

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from prb_jax.trees.tree import Tree, Truncation, build_tree

ids = st.lists(st.integers(0, 3), min_size=1, max_size=12)


@settings(max_examples=300, deadline=None, database=None)
@given(
    shared=st.lists(st.integers(0, 3), max_size=8),
    tails=st.lists(ids, min_size=1, max_size=6),
    data=st.data(),
)
def test_concatenation_gives_every_sequence_back(
    shared: list[int], tails: list[list[int]], data: st.DataObject
) -> None:
    sequences = [shared + tail for tail in tails]
    read = data.draw(
        st.none() | st.tuples(*(st.integers(0, len(sequence) - 1) for sequence in sequences)).map(list)
    )
    tree = build_tree(sequences, read=read)
    for k, sequence in enumerate(sequences):
        assert tree.sequence(k).tolist() == sequence
        assert len(tree.responses[k]) >= 1
        position = len(sequence) - 1 if read is None else read[k]
        assert len(tree.prefix) + tree.read[k] == position
        assert 0 <= tree.read[k] < len(tree.responses[k])
    # The prefix cannot be longer: one token more is no longer shared, or would swallow a read position.
    length = len(tree.prefix)
    assert len({sequence[length] for sequence in sequences}) > 1 or 0 in tree.read
    assert tree.tokens == length + sum(len(sequence) - length for sequence in sequences)
    assert tree.shape == (length, len(sequences), max(len(sequence) - length for sequence in sequences))
    assert {ids.dtype for ids in (tree.prefix, *tree.responses)} == {np.dtype(np.int32)}


def test_a_tree_owns_its_arrays() -> None:
    source = np.asarray([1, 2, 3], np.int32)
    tree = build_tree([source, np.asarray([1, 2, 4], np.int32)])
    source[:] = 0
    assert tree.sequence(0).tolist() == [1, 2, 3]


@pytest.mark.parametrize(
    ("sequences", "read", "message"),
    [
        ([], None, "at least one sequence"),
        ([[1], []], None, "sequence 1: expected a non-empty list"),
        ([[1, 2], [3]], [1, 1], "sequence 1: read position 1 is outside its 1 tokens"),
        ([[1, 2], [3]], [1], "expected 2 read positions, found 1"),
    ],
)
def test_impossible_trees(sequences: list[list[int]], read: list[int] | None, message: str) -> None:
    with pytest.raises(ValueError, match=message):
        build_tree(sequences, read=read)


def test_truncation_knows_whether_anything_was_lost() -> None:
    assert not Truncation().any
    assert all(
        truncation.any for truncation in (Truncation(posts_dropped=1), Truncation(0, 1), Truncation(0, 0, 1))
    )
    assert isinstance(build_tree([[1]]), Tree)
