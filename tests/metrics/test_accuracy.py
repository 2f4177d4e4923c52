import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from prb_jax.errors import DataError
from prb_jax.metrics.accuracy import ScoredRow, group_counts, margin, outcomes


def row(scores, labels, id="7", user=None):
    return ScoredRow(id, None, user, scores, labels)


@pytest.mark.parametrize(
    ("scores", "labels", "expected"),
    [
        ([2.0, 1.5], [1, 0], 0.5),
        ([2.0, 1.5], [0, 1], -0.5),
        ([1.5, 1.5], [1, 0], 0.0),
        ([3, 1, 2], [1, 0, 0], 1.0),
        ([3, 1, 4], [1, 0, 0], -1.0),
        ([3, 5, 4], [1, 1, 0], 1.0),  # the best of the right ones counts
        ([3, 5, 4], [2, 1, 0], -2.0),  # only the highest label is right
        ([3, 3, 1], [2, 1, 0], 0.0),
        ([-1, -2, -3, -4], [0, 0, 0, 1], -3.0),
        ([np.nextafter(np.float32(0), np.float32(1)), 0], [1, 0], np.nextafter(np.float32(0), np.float32(1))),
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
    top = [s for s, label in pairs if label == max(labels)]
    rest = [s for s, label in pairs if label != max(labels)]
    result = outcomes([row(scores, labels)])
    assert result.margins[0] == max(top) - max(rest)
    assert result.wins[0] == (max(top) > max(rest))
    assert result.ties[0] == (max(top) == max(rest))
    assert outcomes([row(scores[::-1], labels[::-1])]).margins[0] == result.margins[0]


def test_wins_ties_and_margins_of_many():
    result = outcomes([row([2, 1], [1, 0]), row([1, 2], [1, 0]), row([1, 1], [1, 0]), row([1, 2], [0, 1])])
    assert result.margins.tolist() == [1, -1, 0, 1]


@pytest.mark.parametrize("bad", [float("nan"), float("inf"), -float("inf")])
@pytest.mark.parametrize("others", [[1.0], [1.0, 2.0]])
def test_scores_that_are_not_finite_are_named(bad, others):
    expected = rf"row '7': scores\[{len(others)}\] is .*(nan|inf); expected a finite"
    with pytest.raises(DataError, match=expected):
        margin([*others, bad], [0.0] * len(others) + [1.0], id="7")


@pytest.mark.parametrize(("scores", "labels"), [([1, 2], [1]), ([1, 2, 3], [1, 0]), ([], [1, 0])])
def test_as_many_scores_as_labels(scores, labels):
    with pytest.raises(DataError, match=f"row '7': {len(scores)} scores for {len(labels)} labels"):
        margin(scores, labels, id="7")


@pytest.mark.parametrize("labels", [[1, 1], [0, 0, 0], [1], [], [float("nan"), 0]])
def test_labels_that_prefer_nothing(labels):
    with pytest.raises(DataError, match="row '7': labels"):
        margin([1.0] * len(labels), labels, id="7")


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
