"""A judge as the reward of `prb ppo`: its ratings, nothing where it gives none, and options that it uses."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import numpy as np
import pytest

import prb_jax as prb
from prb_jax.behaviour.judges.options import JudgeOptions, parse_judge
from prb_jax.behaviour.rl.rewards import Reward, check_scoring, open_reward
from prb_jax.behaviour.rl.sections import ScoringJudgeSettings, ScoringSettings
from prb_jax.behaviour.rl.settings import PpoSettings, load_ppo_settings
from prb_jax.scoring.remote import endpoint
from tests.behaviour.judges.stand_in import stand_in
from tests.behaviour.judges.test_groups import shown
from tests.behaviour.rl.tiny import comparisons, has_letter, metrics, rows, settings
from tests.json_lines import read_lines, write_lines

TEXTS = [["a", "bb", "a"], ["ccc", "d", "d"]]


def opened(name: str, out: Path, judge: dict[str, Any] | None = None, **scoring: Any) -> Reward:
    asked = ScoringSettings(judge=ScoringJudgeSettings(**judge or {}), **scoring)
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
        again = reward.score(comparisons(2), TEXTS, step=1)
        np.testing.assert_array_equal(again.values, [[1.5, 2, 1.5], [1.5, 0.5, 0.5]])
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
        unread = r"step 3: .*gave \[5.0, nan\] \(nan: no number in the reply, or no verdict\); .*'q1'"
        with pytest.raises(prb.RunError, match=unread):
            reward.score(comparisons(2), TEXTS, step=3)
        gone = r"no reply after 6 tries; .*status 500.*'q1'. Nothing was updated"
        with pytest.raises(prb.RunError, match=gone):
            reward.score(comparisons(2), [["a", "b"], ["zz", "b"]], step=3)
        allowed = opened(f"judge:{server.url}#m", tmp_path / "a", failed=0.0)
        scores = allowed.score(comparisons(2), TEXTS, step=3)
        np.testing.assert_array_equal(scores.values, [[5, 5, 5], [0, 0, 0]])
        assert scores.failed == 3


@pytest.mark.slow
def test_a_policy_is_trained_by_a_judge_on_this_machine(model: Path, tmp_path: Path) -> None:
    """Its expected numbers are those of `prb judge --protocol score`; gold is a judge of the rubric."""
    aspects = [{"aspect": "tea", "evidence": "-", "reason": "-"}]
    pairs = [{**row, "rubric_aspects": aspects} for row in rows()]
    data = write_lines(tmp_path / "rows.jsonl", pairs)
    given = settings(
        model, data=data, reward=f"judge:{model}", steps=2, algorithm="rloo",
        **{"watch.gold": f"rubric:{model}", "scoring.judge.lowest": 1, "scoring.judge.highest": 5, "rollout.n": 2,
           "scoring.profile_posts": 1, "rollout.keep_every": 1, "rollout.keep": 8, "rollout.max_new_tokens": 3},
    )  # fmt: skip
    out = tmp_path / "run"
    prb.ppo(given, out=out, progress=False)
    kept = [row for row in read_lines(out / "rollouts.jsonl") if row["step"] == 1 and row["text"].strip()]
    rewards = {(row["id"], row["text"]): row["reward"] for row in kept}
    asked = []
    for pair in pairs:
        texts = [row["text"] for row in kept if row["id"] == pair["id"]]
        if len(set(texts)) == 2:
            bare = {name: value for name, value in pair.items() if name not in ("chosen", "rejected")}
            asked.append(prb.Comparison.from_row({**bare, "responses": texts, "labels": [1, 0]}, where="t"))
    assert asked
    options = JudgeOptions(protocol="score", scale=(1, 5), profile_posts=1)
    judged = prb.judge(str(model), asked, out=tmp_path / "judged", options=options, progress=False)
    for row, pair in zip(judged.rows, asked, strict=True):
        expected = [rewards[pair.id, text] for text in pair.responses]
        np.testing.assert_allclose(row.scores, expected, atol=1e-5)
    assert 0 <= metrics(out)[0]["gold"] <= 2


@pytest.mark.slow
def test_a_policy_is_trained_by_a_judge_of_pairs(model: Path, tmp_path: Path) -> None:
    """It prefers the longer text: each reward is the share of the other rollouts of its prompt that are shorter."""

    def longer(text: str, _: int) -> str:
        a, b = shown(text)
        return "A" if len(a.strip()) >= len(b.strip()) else "B"  # equal ones: each wins once, as A

    data = write_lines(tmp_path / "rows.jsonl", rows(4))
    with stand_in(longer) as server:
        given = settings(
            model, data=data, reward=f"pairs:{server.url}#m", steps=2, algorithm="rloo",
            **{"rollout.n": 3, "batch.prompts": 4, "rollout.keep_every": 1, "rollout.keep": 12,
               "rollout.max_new_tokens": 3},
        )  # fmt: skip
        prb.ppo(given, out=tmp_path / "run", progress=False)
        assert any("yes yes" in str(body) for _, body in server.asked)  # the profile is in view
    kept = [row for row in read_lines(tmp_path / "run" / "rollouts.jsonl") if row["step"] == 1]
    assert len(kept) == 12
    assert len({row["reward"] for row in kept}) > 1
    for row in kept:
        size = len(row["text"].strip())
        others = [len(one["text"].strip()) for one in kept if one["id"] == row["id"] and one is not row]
        expected = np.mean([(size > other) + (size == other) / 2 for other in others]) if size else 0.0
        assert row["reward"] == pytest.approx(expected, abs=1e-6)
    assert [row["step"] for row in metrics(tmp_path / "run")] == [1, 2]


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
        with pytest.raises(prb.RunError, match=f"'scoring.{key}': not used by m; remove it"):
            opened("rubric:http://h/v1#m", tmp_path, judge, **scoring)
    reasons, letters = (
        ScoringSettings(judge=ScoringJudgeSettings(reason=True)),
        open_reward(PpoSettings(), has_letter),
    )
    with pytest.raises(prb.RunError, match=r"'scoring.judge.reason': not used by .*has_letter"):
        check_scoring(reasons, [letters])
    with pytest.raises(prb.DataError, match=r"judge.highest: expected more than the lowest number, 1"):
        load_ppo_settings({"scoring.judge.highest": 1}, complete=False)
