"""Scores of rollouts: what is asked, and what happens where there is no score."""

from __future__ import annotations

import json
from dataclasses import replace
from pathlib import Path
from typing import Any

import numpy as np
import pytest

import prb_jax as prb
from prb_jax.behaviour.rl.ppo import ppo
from prb_jax.behaviour.rl.rewards import check_scoring, open_reward
from prb_jax.behaviour.rl.sections import ScoringSettings
from prb_jax.behaviour.rl.settings import PpoSettings
from tests.behaviour.rl.tiny import comparisons, settings, write_rows, write_tiny_policy

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


def test_a_policy_with_a_reference_gives_its_implicit_reward(model: Path, tmp_path: Path) -> None:
    write_tiny_policy(tmp_path / "trained", seed=7)
    trained, reference = str(tmp_path / "trained"), str(model)
    chosen = PpoSettings(scoring=ScoringSettings(reference=reference, beta=0.5, empty=0.0, scale=2.0))
    reward, texts = open_reward(chosen, trained), [["here", "sun"], ["no", "here"]]
    check_scoring(chosen.scoring, [reward])
    asked = [
        replace(one, responses=of_one, labels=None) for one, of_one in zip(comparisons(2), texts, strict=True)
    ]
    expected = prb.load(trained, reference=reference, beta=0.5).score(asked)
    np.testing.assert_allclose(
        reward.score(comparisons(2), texts, step=0).values, 2.0 * np.stack(expected), atol=1e-5
    )
    with pytest.raises(prb.CheckpointError, match="score head"):
        open_reward(chosen, trained, trains=False)  # as gold, which is no policy
    length = open_reward(chosen, "baseline:length")
    with pytest.raises(prb.RunError, match=r"'scoring.reference': not used by baseline:length"):
        check_scoring(chosen.scoring, [length])
    data = write_rows(tmp_path / "tastes.jsonl")
    implicit = {"reward": trained, "scoring.reference": reference, "scoring.beta": 0.5}
    given = settings(model, data=str(data), steps=1, **implicit)
    done = ppo(given, out=tmp_path / "run", progress=False)
    recorded = json.loads((done.out / "train.json").read_text())["inputs"]["reward"]
    assert (recorded["readout"], recorded["beta"]) == ("implicit", 0.5)
    assert "files" in recorded["reference"]
