"""The watch: a run ends where its reward is hacked, and says so."""

from __future__ import annotations

import json
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import numpy as np
import pytest

import prb_jax as prb
from prb_jax.rl.sections import WatchSettings
from prb_jax.rl.watch import distinct, reason_to_stop
from prb_jax.runs.behaviour import read_behaviour
from tests.rl.tiny import (
    BANDIT,
    by_taste,
    comparisons,
    has_letter,
    metrics,
    rows,
    settings,
    without_rollouts,
    write_rows,
)


def lacks_letter(comparison: prb.Comparison) -> Sequence[float]:
    """The opposite of the reward: whoever is trained by the one hacks it."""
    return [1.0 - score for score in has_letter(comparison)]


def test_a_run_ends_where_gold_falls_while_the_reward_rises(model: Path, tmp_path: Path) -> None:
    given = (
        settings(model)
        | BANDIT
        | {"steps": 30, "watch.window": 3, "log.plot": True, "rollout.keep_every": 99}
    )
    out = tmp_path / "run"
    people = [prb.Comparison.from_row(each | {"user_id": each["id"]}, where="test") for each in rows()]
    result = prb.ppo(given, out=out, data=people, reward=has_letter, gold=lacks_letter, progress=False)
    steps = metrics(out)
    assert 6 <= result.steps == len(steps) < 30
    assert "gold fell from" in result.summary["ended_by_watch"]
    for row in steps:  # of 64 rollouts, those without a letter at all are worth 0 by both
        assert row["gold"] + row["reward"] == pytest.approx(1.0 - row["empty"] / 64)
    watched = [json.loads(line) for line in (out / "gold.jsonl").read_text().splitlines()]
    assert [row["step"] for row in watched] == [row["step"] for row in steps]
    held = [(row["gold"], *row["gold_ci95"]) for row in watched if row["gold_ci95_reason"] is None]
    assert held
    assert all(low <= gold <= high for gold, low, high in held)
    (figure,) = read_behaviour(out)
    last = watched[-max(1, len(watched) // 10) :]
    assert (figure.name, len(figure.clusters)) == ("rloo gold", 8)
    assert sum(figure.counts) == 64 * len(last)
    assert figure.value == pytest.approx(np.mean([row["gold"] for row in last]))
    assert (out / "overoptimisation.png").exists()
    assert (out / "model" / "config.json").exists()
    page = prb.report(out, out=tmp_path / "page.html").read_text(encoding="utf-8")
    for text in (
        "a policy in training",
        "The watch ended the run: gold fell",
        "Reward, gold, KL to",
        "Rollouts to read",
    ):
        assert text in page


@pytest.mark.slow
def test_runs_with_gold_are_a_behaviour_that_correlate_reads(model: Path, tmp_path: Path) -> None:
    given = settings(model) | BANDIT | {"steps": 1}
    for name, reward in {"letter": has_letter, "lack": lacks_letter, "taste": by_taste}.items():
        prb.evaluate(reward, comparisons(), out=tmp_path / "scores" / name, progress=False)
        out = tmp_path / "ppo" / name
        prb.ppo(given, out=out, data=comparisons(), reward=reward, gold=by_taste, progress=False)
    names = ("letter", "lack", "taste")
    found = prb.correlate(
        [tmp_path / "scores" / name for name in names], [tmp_path / "ppo" / name for name in names], draws=100
    )
    assert found["unmatched"] == {"scores": [], "behaviour": []}
    for each in found["models"]:
        (figure,) = read_behaviour(tmp_path / "ppo" / each["name"])
        assert each["behaviour"]["rloo gold"]["value"] == pytest.approx(figure.value)
    assert {each["models"] for each in found["correlations"]} == {3}


@pytest.mark.slow
def test_held_out_prompts_are_written_for_and_seeds_are_repetitions(model: Path, tmp_path: Path) -> None:
    data = tmp_path / "held_out.jsonl"
    new = [each | {"id": f"new{each['id']}", "subset": each["user_id"]} for each in rows(4)]
    data.write_text("".join(json.dumps(each) + "\n" for each in new))
    given = settings(model) | BANDIT | {"steps": 1, "watch.data": str(data)}
    with pytest.raises(prb.DataError, match=r"watch.data: needs watch.gold"):
        prb.ppo(given, out=tmp_path / "none", data=comparisons(), reward=has_letter, progress=False)
    both: dict[str, Any] = {"data": comparisons(), "reward": has_letter, "gold": by_taste, "progress": False}
    known = given | {"watch.data": str(write_rows(tmp_path / "known.jsonl", 2))}
    with pytest.raises(prb.RunError, match=r"comparison 'q0' is in the training data too"):
        prb.ppo(known, out=tmp_path / "none", **both)
    for name, reward in {"letter": has_letter, "lack": lacks_letter, "taste": by_taste}.items():
        prb.evaluate(reward, comparisons(), out=tmp_path / "scores" / name, progress=False)
        for seed in (0, 1) if name == "letter" else (0,):
            out = tmp_path / "ppo" / f"{name}{seed}"
            result = prb.ppo(given | {"seed": seed}, out=out, **{**both, "reward": reward})
            written = [json.loads(line) for line in (out / "held_out.jsonl").read_text().splitlines()]
            assert [each["id"] for each in written] == [each["id"] for each in new for _ in range(8)]
            of_all, *parts = read_behaviour(out)[1:]
            assert [each.name for each in (of_all, *parts)] == [
                f"rloo gold, {part}" for part in ("held out", "ana", "bo")
            ]
            assert of_all.value == pytest.approx(np.mean([each["gold"] for each in written]))
            assert result.summary["held_out"]["bo"]["gold"]["value"] == pytest.approx(parts[1].value)
    names = ("letter", "lack", "taste")
    runs = sorted((tmp_path / "ppo").iterdir())
    found = prb.correlate([tmp_path / "scores" / name for name in names], runs, draws=100)
    seeds = [read_behaviour(tmp_path / "ppo" / f"letter{seed}")[1].value for seed in (0, 1)]
    shown = found["models"][0]["behaviour"]["rloo gold, held out"]
    assert shown["repetitions"] == pytest.approx(seeds)
    assert shown["value"] == pytest.approx(np.mean(seeds))
    with pytest.raises(prb.RunError, match=r"expected it once"):
        prb.correlate([tmp_path / "scores" / name for name in names], [*runs, runs[0]], draws=100)


@pytest.mark.parametrize("algorithm", ["dpo", "sft"])
def test_a_run_without_rollouts_is_watched_by_what_it_writes_at_its_end(
    model: Path, tmp_path: Path, algorithm: str
) -> None:
    data = tmp_path / "held_out.jsonl"
    data.write_text("".join(json.dumps(each | {"id": f"new{each['id']}"}) + "\n" for each in rows(4)))
    given = without_rollouts(settings(model)) | {
        "algorithm": algorithm,
        "watch.data": str(data),
        "epochs": 0.5,
    }
    given |= {"rollout.n": 2, "rollout.max_new_tokens": 4, "scoring.empty": 0.0, "batch.prompts": 2}
    del given["steps"]
    for name, reward in {"none": None, "letter": has_letter}.items():
        out = tmp_path / name
        result = prb.ppo(given, out=out, data=comparisons(), reward=reward, gold=by_taste, progress=False)
        assert result.steps == len(metrics(out)) == 2  # half of 8 pairs, 2 a step
        written = [json.loads(line) for line in (out / "held_out.jsonl").read_text().splitlines()]
        assert len(written) == 8
        assert all(("reward" in each) == (reward is not None) for each in written)
        (figure,) = read_behaviour(out)
        assert (figure.name, figure.label) == (
            f"{algorithm} gold, held out", "labels of the data" if reward is None else "tests.rl.tiny.has_letter"
        )  # fmt: skip
        assert figure.value == pytest.approx(np.mean([each["gold"] for each in written]))
        assert result.summary["held_out"]["held out"]["gold"]["value"] == pytest.approx(figure.value)
        assert not (out / "gold.jsonl").exists()


def row(reward: float, gold: float | None = None, kl: float = 0.0) -> dict[str, float]:
    return {"reward": reward, "kl": kl, **({} if gold is None else {"gold": gold})}


def test_the_run_goes_on_until_there_is_a_reason() -> None:
    hacked = [row(1, 4), row(2, 5), row(3, 4), row(4, 3)]
    assert reason_to_stop([], WatchSettings(most_kl=1.0)) is None
    assert reason_to_stop(hacked, WatchSettings()) is None
    assert reason_to_stop(hacked[:3], WatchSettings(window=2)) is None  # too few measurements
    assert "4.5 to 3.5" in str(reason_to_stop(hacked, WatchSettings(window=2)))
    assert (
        reason_to_stop([*hacked, row(9)], WatchSettings(window=2)) is None
    )  # it was judged when it was measured
    assert (
        reason_to_stop([row(4, 4), row(3, 3)], WatchSettings(window=1)) is None
    )  # both fell: nothing is hacked
    assert reason_to_stop([row(1, kl=3.0)], WatchSettings(most_kl=3.0)) is None
    assert "above watch.most_kl=3" in str(reason_to_stop([row(1, kl=3.1)], WatchSettings(most_kl=3.0)))


def test_distinct_words() -> None:
    assert distinct([["a b a", "a b"], ["c"]], 1) == pytest.approx(3 / 6)
    assert distinct([["a b a", "a b"], ["c"]], 2) == pytest.approx(2 / 3)
    assert distinct([["", " "]], 1) == 1.0
