import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from prb_jax.errors import DataError
from prb_jax.metrics.accuracy import group_counts, margin, outcomes
from prb_jax.metrics.rows import ScoredRow

SMALLEST = np.nextafter(np.float32(0), np.float32(1))


def row(scores, labels):
    return ScoredRow("7", None, None, scores, labels)


@pytest.mark.parametrize(
    ("scores", "labels", "expected"),
    [
        ([2.0, 1.5], [0, 1], -0.5),
        ([1.5, 1.5], [1, 0], 0.0),
        ([3, 5, 4], [1, 1, 0], 1.0),  # the best of the right ones counts
        ([3, 5, 4], [2, 1, 0], -2.0),  # only the highest label is right
        ([-1, -2, -3, -4], [0, 0, 0, 1], -3.0),
        ([SMALLEST, 0], [1, 0], SMALLEST),
    ],
)
def test_margin(scores, labels, expected):
    assert margin(scores, labels, id="7") == expected
    assert margin(np.array(scores, np.float32), np.array(labels), id="7") == expected


@given(
    st.lists(st.tuples(st.floats(-1e6, 1e6, width=32), st.integers(0, 2)), min_size=2, max_size=6).filter(
        lambda pairs: len({label for _, label in pairs}) > 1
    )
)
def test_margin_is_its_definition(pairs):
    scores, labels = zip(*pairs)
    top = max(score for score, label in pairs if label == max(labels))
    rest = max(score for score, label in pairs if label != max(labels))
    result = outcomes([row(scores, labels), row(scores[::-1], labels[::-1])])
    assert result.margins.tolist() == [top - rest] * 2
    assert result.wins.tolist() == [top > rest] * 2
    assert result.ties.tolist() == [top == rest] * 2


@pytest.mark.parametrize(
    ("scores", "labels", "message"),
    [
        ([1.0, float("nan")], [0, 1], r"scores\[1\] is nan; expected a finite"),
        ([1.0, float("inf")], [0, 1], r"scores\[1\] is inf; expected a finite"),
        ([1.0, 2.0, -float("inf")], [0, 0, 1], r"scores\[2\] is -inf; expected a finite"),
        ([1, 2], [1], "2 scores for 1 labels"),
        ([1, 2, 3], [1, 0], "3 scores for 2 labels"),
        ([], [1, 0], "0 scores for 2 labels"),
        *(
            ([1.0] * len(labels), labels, "labels")
            for labels in ([1, 1], [0, 0, 0], [1], [], [float("nan"), 0])
        ),
    ],
)
def test_what_has_no_margin_is_named(scores, labels, message):
    with pytest.raises(DataError, match=f"row '7': {message}"):
        margin(scores, labels, id="7")


def test_group_counts():
    counts = group_counts(np.array([1, 0, 1, 1, 0]), ["u", "v", "u", None, None])
    assert counts.wins.tolist() == [2, 0, 1, 0]
    assert counts.rows.tolist() == [2, 1, 1, 1]
    assert counts.accuracy.tolist() == [1, 0, 1, 0]


def test_truncated_as_a_count_or_by_kind():
    def truncated(value):
        return ScoredRow("7", None, None, [1, 0], [1, 0], 5, value).is_truncated

    assert not any(map(truncated, (0, {}, {"posts": 0})))
    assert all(map(truncated, (3, {"posts": 0, "tokens": 2})))
