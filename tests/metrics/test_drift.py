"""Drift between two sets of scores, against scipy and numbers counted by hand."""

import numpy as np
import pytest
from scipy import stats

from prb_jax.errors import DataError
from prb_jax.metrics.accuracy import ScoredRow
from prb_jax.metrics.drift import score_drift
from prb_jax.metrics.uncertainty import paired_difference


def rows(scores: np.ndarray) -> list[ScoredRow]:
    return [
        ScoredRow(str(i), None, f"u{i % 7}", row.tolist(), [1.0, *[0.0] * (len(row) - 1)])
        for i, row in enumerate(scores)
    ]


def test_figures_are_those_of_the_formulas() -> None:
    rng = np.random.default_rng(0)
    theirs = rng.normal(size=(60, 3)).round(1)  # with ties among the ranks
    ours = theirs + rng.normal(size=(60, 3), scale=0.3)
    found = score_drift(rows(ours), rows(theirs)[::-1])
    difference = (ours - theirs).ravel()
    assert found["drift"] == pytest.approx(
        {
            "mean": difference.mean(),
            "rms": np.sqrt(np.mean(difference**2)),
            "max_abs": np.abs(difference).max(),
        }
    )
    spread = theirs.std()
    assert found["reference_std"] == pytest.approx(spread)
    assert found["relative_drift"]["rms"] == pytest.approx(np.sqrt(np.mean(difference**2)) / spread)
    assert found["pearson"] == pytest.approx(stats.pearsonr(ours.ravel(), theirs.ravel())[0])
    assert found["spearman"] == pytest.approx(stats.spearmanr(ours.ravel(), theirs.ravel())[0])
    margins = [scores[:, 0] - scores[:, 1:].max(axis=1) for scores in (ours, theirs)]
    assert found["flips"] == int((np.sign(margins[0]) != np.sign(margins[1])).sum()) > 0
    assert found["accuracy"] == np.mean(margins[0] > 0)
    assert found["reference_accuracy"] == np.mean(margins[1] > 0)
    assert (found["n"], found["scores"]) == (60, 180)
    paired = paired_difference(rows(ours), rows(theirs))
    assert (found["difference"], found["difference_ci95"]) == (paired["difference"], paired["ci95"])


def test_equal_scores_do_not_drift() -> None:
    scores = np.random.default_rng(1).normal(size=(20, 2))
    found = score_drift(rows(scores), rows(scores))
    assert found["drift"] == {"mean": 0, "rms": 0, "max_abs": 0}
    assert (found["flips"], found["difference"]) == (0, 0)
    assert found["pearson"] == pytest.approx(1)
    assert found["spearman"] == pytest.approx(1)


def test_constant_scores_have_no_spread_and_no_correlation() -> None:
    found = score_drift(rows(np.ones((5, 2))), rows(np.zeros((5, 2))))
    assert found["drift"] == {"mean": 1, "rms": 1, "max_abs": 1}
    assert found["relative_drift"] == {"mean": None, "rms": None, "max_abs": None}
    assert (found["pearson"], found["spearman"]) == (None, None)


def test_a_tie_that_becomes_a_win_is_another_verdict() -> None:
    found = score_drift(rows(np.array([[1.0, 0.0], [2.0, 0.0]])), rows(np.array([[1.0, 1.0], [1.0, 0.0]])))
    assert found["flips"] == 1
    assert found["difference"] == 0.5


def test_other_comparisons_are_refused() -> None:
    with pytest.raises(DataError, match="id '2' is in one of the two only"):
        score_drift(rows(np.eye(3)), rows(np.eye(3))[:2])
