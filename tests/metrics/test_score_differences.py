"""Differences between two sets of scores, against scipy and numbers counted by hand."""

import numpy as np
import pytest
from scipy import stats

from prb_jax.metrics.accuracy import ScoredRow
from prb_jax.metrics.paired import compare_rows


def rows(scores: np.ndarray) -> list[ScoredRow]:
    return [
        ScoredRow(str(i), None, f"u{i % 7}", row.tolist(), [1.0, *[0.0] * (len(row) - 1)])
        for i, row in enumerate(scores)
    ]


def pair(a: np.ndarray, b: np.ndarray) -> dict:
    """The figures of a pair in which "a" is the run with the higher accuracy."""
    (found,) = compare_rows({"a": rows(a), "b": rows(b)[::-1]})["pairs"]
    assert (found["a"], found["b"]) == ("a", "b")
    return found


def test_figures_are_those_of_the_formulas() -> None:
    rng = np.random.default_rng(0)
    theirs = rng.normal(size=(60, 3)).round(1)  # with ties among the ranks
    ours = theirs + rng.normal(size=(60, 3), scale=0.3)
    ours[:, 0] += 0.2
    found, difference = pair(ours, theirs), (ours - theirs).ravel()
    assert found["scores"] == pytest.approx(
        {
            "mean": difference.mean(),
            "rms": np.sqrt(np.mean(difference**2)),
            "max_abs": np.abs(difference).max(),
            "std_b": theirs.std(),
            "pearson": stats.pearsonr(ours.ravel(), theirs.ravel())[0],
            "spearman": stats.spearmanr(ours.ravel(), theirs.ravel())[0],
        }
    )
    margins = [scores[:, 0] - scores[:, 1:].max(axis=1) for scores in (ours, theirs)]
    assert found["flips"] == int((np.sign(margins[0]) != np.sign(margins[1])).sum()) > 0


def test_equal_scores_do_not_differ() -> None:
    scores = np.random.default_rng(1).normal(size=(20, 2))
    found = pair(scores, scores)
    assert [found["scores"][key] for key in ("mean", "rms", "max_abs")] == [0, 0, 0]
    assert (found["flips"], found["difference"]) == (0, 0)
    assert found["scores"]["pearson"] == pytest.approx(1)
    assert found["scores"]["spearman"] == pytest.approx(1)


def test_constant_scores_have_no_spread_and_no_correlation() -> None:
    found = pair(np.ones((5, 2)), np.zeros((5, 2)))["scores"]
    assert found == {"mean": 1, "rms": 1, "max_abs": 1, "std_b": 0, "pearson": None, "spearman": None}


def test_a_tie_that_becomes_a_win_is_another_verdict() -> None:
    found = pair(np.array([[1.0, 0.0], [2.0, 0.0]]), np.array([[1.0, 1.0], [1.0, 0.0]]))
    assert (found["flips"], found["difference"]) == (1, 0.5)
