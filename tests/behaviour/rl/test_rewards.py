"""Scores of rollouts: what is asked, and what happens where there is no score."""

from __future__ import annotations

from typing import Any

import numpy as np
import pytest

import prb_jax as prb
from prb_jax.behaviour.rl.rewards import open_reward
from prb_jax.behaviour.rl.sections import ScoringSettings
from prb_jax.behaviour.rl.settings import PpoSettings
from tests.behaviour.rl.tiny import comparisons

TEXTS = [["a", "bb", "a", " bb"], ["ccc", "", "d", "d"]]


def score(function: Any, **scoring: Any) -> Any:
    reward = open_reward(PpoSettings(scoring=ScoringSettings(**scoring)), function)
    return reward.score(comparisons(2), TEXTS, step=4)


def length(comparison: prb.Comparison) -> list[float]:
    return [float(len(text)) for text in comparison.responses]


def test_equal_texts_are_asked_once_and_texts_equal_but_for_blanks_apart() -> None:
    asked: list[tuple[str, ...]] = []

    def noted(comparison: prb.Comparison) -> list[float]:
        asked.append(comparison.responses)
        return length(comparison)

    scores = score(noted, empty=-2.0, scale=0.5)
    np.testing.assert_allclose(scores.values, [[0.5, 1.0, 0.5, 1.5], [1.5, -1.0, 0.5, 0.5]])
    assert asked == [("a", "bb"), (" bb",), ("ccc", "d")]
    assert (scores.empty, scores.failed) == (1, 0)


def test_nothing_is_made_up() -> None:
    def not_a_number(comparison: prb.Comparison) -> list[float]:
        return [float("nan")] * len(comparison.responses)

    def fails(comparison: prb.Comparison) -> list[float]:
        if comparison.id == "q1":
            raise TimeoutError("60 s")
        return length(comparison)

    with pytest.raises(prb.RunError, match=r"step 4: comparison 'q1': rollout 1 has no letter"):
        score(length)
    with pytest.raises(prb.RunError, match=r"step 4: .*score: 'q0'"):
        score(not_a_number, empty=0.0)
    with pytest.raises(prb.RunError, match=r"step 4: .*TimeoutError: 60 s; .*score: 'q1'"):
        score(fails, empty=0.0)
    scores = score(
        fails, empty=0.0, failed=5.0, scale=0.1
    )  # as the paper's callback does, if it is asked for
    np.testing.assert_allclose(scores.values[1], [0.5, 0.0, 0.5, 0.5])
    assert scores.failed == 3
