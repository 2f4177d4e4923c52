import numpy as np
import pytest
from scipy.special import expit, softmax

from prb_jax.errors import DataError
from prb_jax.metrics.calibration import calibration, length_bias
from prb_jax.metrics.rows import ScoredRow


def row(scores, labels, *, id="x"):
    return ScoredRow(id, None, None, scores, labels)


def test_a_pair_by_hand():
    curve = calibration([row([1, 0], [1, 0]), row([2, 1], [0, 1]), row([3, 3], [1, 0])])
    sure = 1 / (1 + np.exp(-1.0))
    assert [part["n"] for part in curve["bins"]] == [1, 2]
    assert curve["bins"][0] == {"low": 0.5, "high": 0.55, "n": 1, "confidence": 0.5, "right": 0.5}
    assert curve["bins"][1]["confidence"] == pytest.approx(sure, abs=1e-15)
    assert curve["right"] == pytest.approx(0.5)
    # of a right pick, a wrong one and a tie
    assert curve["brier"] == pytest.approx(((1 - sure) ** 2 + sure**2 + 0.25) / 3)
    assert curve["ece"] == pytest.approx(2 / 3 * abs(0.5 - sure), abs=1e-15)


def test_the_definition_on_random_scores():
    rng = np.random.default_rng(0)
    for k in (2, 4):
        scores = rng.normal(scale=2, size=(500, k)).round(1)
        labels = np.zeros((500, k))
        labels[np.arange(500), rng.integers(k, size=500)] = 1
        curve = calibration([row(list(s), list(y)) for s, y in zip(scores, labels)])
        probability = softmax(scores, axis=1).max(axis=1)
        if k == 2:
            assert probability == pytest.approx(expit(np.abs(scores[:, 0] - scores[:, 1])))
        best = scores == scores.max(axis=1, keepdims=True)
        right = (best * labels).sum(axis=1) / best.sum(axis=1)
        place = np.minimum(np.floor(probability * 20), 19)
        bins = [place == b for b in np.unique(place)]
        ece = sum(abs(right[b].mean() - probability[b].mean()) * b.mean() for b in bins)
        assert curve["ece"] == pytest.approx(ece, abs=1e-12)
        assert sum(part["n"] for part in curve["bins"]) == 500


def test_scores_that_are_not_finite_are_named():
    with pytest.raises(DataError, match=r"'odd'.*nan"):
        calibration([row([float("nan"), 0.0], [1.0, 0.0], id="odd")])


def test_length_bias_by_hand():
    rows = [
        row([1.0, 0.0], [1.0, 0.0]),  # longest preferred, picked
        row([0.0, 1.0], [1.0, 0.0]),  # longest preferred, not picked
        row([1.0, 0.0], [0.0, 1.0]),  # longest not preferred, picked
        row([1.0, 1.0], [0.0, 1.0]),  # longest not preferred, tie: neither picked nor won
        row([1.0, 0.0], [1.0, 0.0]),  # equal lengths
        row([0.0, 2.0, 1.0], [0.0, 1.0, 1.0]),  # longest is one of two preferred, not picked, won
    ]
    lengths = [[9, 2], [9, 2], [9, 2], [9, 2], [4, 4], [1, 2, 3]]
    assert length_bias(rows, lengths) == {
        "n": 5, "equal": 1, "preferred_is_longest": 3 / 5, "picks_longest": 2 / 5, "n_longest": 3,
        "accuracy_longest": 2 / 3, "n_shorter": 2, "accuracy_shorter": 0.0,
    }  # fmt: skip


def test_length_bias_without_a_longest_response_is_undefined():
    bias = length_bias([row([1.0, 0.0], [1.0, 0.0])], [[3, 3]])
    assert (bias["n"], bias["picks_longest"], bias["accuracy_longest"]) == (0, None, None)
    with pytest.raises(DataError, match="3 lengths for 2 scores"):
        length_bias([row([1.0, 0.0], [1.0, 0.0])], [[1, 2, 3]])
