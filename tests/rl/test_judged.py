"""A judge as the reward of `prb ppo`: its ratings, nothing where it gives none, and options that it uses."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import numpy as np
import pytest

import prb_jax as prb
from prb_jax.judges.options import JudgeOptions, parse_judge
from prb_jax.remote import endpoint
from prb_jax.rl.rewards import Reward, check_scoring, open_reward
from prb_jax.rl.sections import JudgeSettings, ScoringSettings
from prb_jax.rl.settings import PpoSettings, load_ppo_settings
from tests.judges.stand_in import stand_in
from tests.rl.tiny import comparisons, has_letter, metrics, settings, write_rows

TEXTS = [["a", "bb", "a"], ["ccc", "d", "d"]]


def opened(name: str, out: Path, judge: dict[str, Any] | None = None, **scoring: Any) -> Reward:
    asked = ScoringSettings(judge=JudgeSettings(**judge or {}), **scoring)
    reward = open_reward(PpoSettings(scoring=asked), name, out=out)
    check_scoring(asked, [reward])
    return reward


def answer_of(text: str) -> str:
    return text.partition("Answer:\n")[2].split("\n\n")[0]


def test_ratings_of_an_endpoint_are_the_rewards(tmp_path: Path) -> None:
    """Equal texts are asked once, a run that starts again asks nothing, and the profile is in view."""

    def reply(text: str, _: int) -> str:
        return str(len(answer_of(text)) + 2 * ("yes yes" in text))

    with stand_in(reply) as server:
        reward = opened(f"judge:{server.url}#m", tmp_path, scale=0.5)
        reward.score(comparisons(2), TEXTS, step=1)
        found = reward.score(comparisons(2), TEXTS, step=1)
        np.testing.assert_array_equal(found.values, [[1.5, 2, 1.5], [1.5, 0.5, 0.5]])
        assert len(server.asked) == 4
        assert server.asked[0][1]["model"] == "m"
        identity = reward.identity()
        assert (identity["judge"], identity["endpoint"], identity["scale"]) == ("score", server.url, [1, 9])


def test_a_reply_without_a_number_and_an_endpoint_that_fails_stop_the_step_with_the_id(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(endpoint, "LONGEST_WAIT", 0.0)

    def reply(text: str, _: int) -> Any:
        answer = answer_of(text)
        return (500, b"later", {}) if answer == "zz" else "no idea" if answer == "d" else "5"

    with stand_in(reply) as server:
        reward = opened(f"judge:{server.url}#m", tmp_path / "a")
        with pytest.raises(
            prb.RunError, match=r"step 3: .*gave \[5.0, nan\] \(nan: no number in the reply\); .*'q1'"
        ):
            reward.score(comparisons(2), TEXTS, step=3)
        texts = [["a", "b"], ["zz", "b"]]
        with pytest.raises(
            prb.RunError, match=r"no reply after 6 tries; .*status 500.*'q1'. Nothing was updated"
        ):
            reward.score(comparisons(2), texts, step=3)
        allowed = opened(f"judge:{server.url}#m", tmp_path / "a", failed=0.0)
        found = allowed.score(comparisons(2), TEXTS, step=3)
        np.testing.assert_array_equal(found.values, [[5, 5, 5], [0, 0, 0]])
        assert found.failed == 3


@pytest.mark.slow
def test_a_policy_is_trained_by_a_judge_on_this_machine(model: Path, tmp_path: Path) -> None:
    """Its expected numbers are those of `prb judge --protocol score`; gold is a judge of the rubric."""
    data = write_rows(tmp_path / "rows.jsonl")
    rows = [json.loads(line) for line in data.read_text().splitlines()]
    for row in rows:
        row["rubric_aspects"] = [{"aspect": "tea", "evidence": "-", "reason": "-"}]
    data.write_text("".join(json.dumps(row) + "\n" for row in rows))
    given = settings(
        model, data=str(data), reward=f"judge:{model}", steps=2, algorithm="rloo",
        **{"watch.gold": f"rubric:{model}", "scoring.judge.lowest": 1, "scoring.judge.highest": 5, "rollout.n": 2,
           "scoring.profile_posts": 1, "rollout.keep_every": 1, "rollout.keep": 8, "rollout.max_new_tokens": 3},
    )  # fmt: skip
    out = tmp_path / "run"
    prb.ppo(given, out=out, progress=False)
    first = metrics(out)[0]
    kept = [json.loads(line) for line in (out / "rollouts.jsonl").read_text().splitlines()]
    pairs = [
        prb.Comparison.from_row(
            {**row, "responses": [own["text"] for own in of], "labels": [1, 0]}, where="t"
        )
        for row in ({k: v for k, v in each.items() if k not in ("chosen", "rejected")} for each in rows)
        if len(
            of := [own for own in kept if own["step"] == 1 and own["id"] == row["id"] and own["text"].strip()]
        )
        == 2
        and of[0]["text"] != of[1]["text"]
    ]
    options = JudgeOptions(protocol="score", scale=(1, 5), profile_posts=1)
    judged = prb.judge(str(model), pairs, out=tmp_path / "judged", options=options, progress=False)
    rewards = {(own["id"], own["text"]): own["reward"] for own in kept if own["step"] == 1}
    for row, pair in zip(judged.rows, pairs, strict=True):
        expected = [rewards[pair.id, text] for text in pair.responses]
        np.testing.assert_allclose(row.scores, expected, atol=1e-5)
    assert pairs
    assert 0 <= first["gold"] <= 2


def test_names_and_options_of_a_judge(tmp_path: Path) -> None:
    assert parse_judge("rubric:https://h/v1#a/b").model == "a/b"
    for name, message in (
        ("judge:", "expected judge:MODEL"),
        ("judge:http://h/v1", "expected judge:URL#NAME"),
        ("judge:baseline:length", "baseline:length"),
    ):
        with pytest.raises(prb.PrbError, match=message):
            opened(name, tmp_path)
    for judge, scoring, key in (
        ({"lowest": 0}, {}, "judge.lowest"),
        ({"template": __file__}, {}, "judge.template"),
        ({}, {"dtype": "bfloat16"}, "dtype"),
        ({}, {"max_length": 9}, "max_length"),
    ):
        with pytest.raises(prb.RunError, match=f"'scoring.{key}': of no use to m: leave it out"):
            opened("rubric:http://h/v1#m", tmp_path, judge, **scoring)
    with pytest.raises(prb.RunError, match=r"'scoring.judge.reason': of no use to .*has_letter"):
        check_scoring(
            ScoringSettings(judge=JudgeSettings(reason=True)), [open_reward(PpoSettings(), has_letter)]
        )
    with pytest.raises(
        prb.DataError, match=r"scoring.judge.highest: expected more than the lowest number, 1"
    ):
        load_ppo_settings({"scoring.judge.highest": 1}, complete=False)
