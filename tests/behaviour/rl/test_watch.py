"""The watch: a run ends where its reward is hacked, and says so."""

from __future__ import annotations

from collections.abc import Sequence
from pathlib import Path
from typing import Any

import numpy as np
import pytest

import prb_jax as prb
from prb_jax.behaviour.rl.rollouts import distinct
from prb_jax.behaviour.rl.sections import WatchSettings
from prb_jax.behaviour.rl.watch import reason_to_stop
from prb_jax.runs.behaviour import read_behaviour
from tests.behaviour.rl.tiny import (
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
from tests.json_lines import read_lines, write_lines
from tests.sweeps import sweep


def lacks_letter(comparison: prb.Comparison) -> Sequence[float]:
    """The opposite of the reward: whoever is trained by the one hacks it."""
    return [1.0 - score for score in has_letter(comparison)]


REWARDS = {"letter": has_letter, "lack": lacks_letter, "taste": by_taste}


def test_a_run_ends_where_gold_falls_while_the_reward_rises(model: Path, tmp_path: Path) -> None:
    changes = {"steps": 30, "watch.window": 3, "log.plot": True, "rollout.keep_every": 99}
    given, out = settings(model) | BANDIT | changes, tmp_path / "run"
    people = [prb.Comparison.from_row(row | {"user_id": row["id"]}, where="test") for row in rows()]
    result = prb.ppo(given, out=out, data=people, reward=has_letter, gold=lacks_letter, progress=False)
    steps = metrics(out)
    assert 6 <= result.steps == len(steps) < 30
    assert "gold fell from" in result.summary["ended_by_watch"]
    for row in steps:  # of 64 rollouts, those without a letter at all are worth 0 by both
        assert row["gold"] + row["reward"] == pytest.approx(1.0 - row["empty"] / 64)
    watched = read_lines(out / "gold.jsonl")
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
    shown = (
        "a policy in training",
        "The watch ended the run: gold fell",
        "Reward, gold, KL to",
        "Rollouts to read",
    )
    assert all(text in page for text in shown)


@pytest.mark.slow
def test_held_out_prompts_are_written_for_and_correlate_takes_seeds_as_repetitions(
    model: Path, tmp_path: Path
) -> None:
    new = [row | {"id": f"new{row['id']}", "subset": row["user_id"]} for row in rows(4)]
    data = write_lines(tmp_path / "held_out.jsonl", new)
    given = settings(model) | BANDIT | {"steps": 1, "watch.data": data}
    with pytest.raises(prb.DataError, match=r"watch.data: needs watch.gold"):
        prb.ppo(given, out=tmp_path / "none", data=comparisons(), reward=has_letter, progress=False)
    both: dict[str, Any] = {"data": comparisons(), "reward": has_letter, "gold": by_taste, "progress": False}
    known = given | {"watch.data": str(write_rows(tmp_path / "known.jsonl", 2))}
    with pytest.raises(prb.RunError, match=r"comparison 'q0' is in the training data too"):
        prb.ppo(known, out=tmp_path / "none", **both)
    for name, reward in REWARDS.items():
        prb.evaluate(reward, comparisons(), out=tmp_path / "scores" / name, progress=False)
        for seed in (0, 1) if name == "letter" else (0,):
            out = tmp_path / "ppo" / f"{name}{seed}"
            result = prb.ppo(given | {"seed": seed}, out=out, **{**both, "reward": reward})
            written = read_lines(out / "held_out.jsonl")
            assert [row["id"] for row in written] == [f"newq{n}" for n in range(4) for _ in range(8)]
            of_all, *parts = read_behaviour(out)[1:]
            assert of_all.name == "rloo gold, held out"
            assert [part.name for part in parts] == ["rloo gold, ana", "rloo gold, bo"]
            assert of_all.value == pytest.approx(np.mean([row["gold"] for row in written]))
            assert result.summary["held_out"]["bo"]["gold"]["value"] == pytest.approx(parts[1].value)
    scores, runs = [tmp_path / "scores" / name for name in REWARDS], sorted((tmp_path / "ppo").iterdir())
    correlated = prb.correlate(scores, runs, draws=100)
    assert correlated["unmatched"] == {"scores": [], "behaviour": []}
    assert {correlation["models"] for correlation in correlated["correlations"]} == {3}
    for reward_model in correlated["models"][1:]:
        gold = read_behaviour(tmp_path / "ppo" / f"{reward_model['name']}0")[0]
        assert reward_model["behaviour"]["rloo gold"]["value"] == pytest.approx(gold.value)
    seeds = [read_behaviour(tmp_path / "ppo" / f"letter{seed}")[1].value for seed in (0, 1)]
    shown = correlated["models"][0]["behaviour"]["rloo gold, held out"]
    assert shown["repetitions"] == pytest.approx(seeds)
    assert shown["value"] == pytest.approx(np.mean(seeds))
    with pytest.raises(prb.RunError, match=r"expected it once"):
        prb.correlate(scores, [*runs, runs[0]], draws=100)


@pytest.mark.parametrize("algorithm", sweep(["dpo", "sft"], few=(1,)))
def test_a_run_without_rollouts_is_watched_by_what_it_writes_at_its_end(
    model: Path, tmp_path: Path, algorithm: str
) -> None:
    data = write_lines(tmp_path / "held_out.jsonl", [row | {"id": f"new{row['id']}"} for row in rows(4)])
    given = without_rollouts(settings(model)) | {"algorithm": algorithm, "watch.data": data, "epochs": 0.5}
    given |= {"rollout.n": 2, "rollout.max_new_tokens": 4, "scoring.empty": 0.0, "batch.prompts": 2}
    del given["steps"]
    for name, reward in {"none": None, "letter": has_letter}.items():
        out = tmp_path / name
        result = prb.ppo(given, out=out, data=comparisons(), reward=reward, gold=by_taste, progress=False)
        assert result.steps == len(metrics(out)) == 2  # half of 8 pairs, 2 a step
        written = read_lines(out / "held_out.jsonl")
        assert len(written) == 8
        assert all(("reward" in row) == (reward is not None) for row in written)
        (figure,) = read_behaviour(out)
        label = "labels of the data" if reward is None else "tests.behaviour.rl.tiny.has_letter"
        assert (figure.name, figure.label) == (f"{algorithm} gold, held out", label)
        assert figure.value == pytest.approx(np.mean([row["gold"] for row in written]))
        assert result.summary["held_out"]["held out"]["gold"]["value"] == pytest.approx(figure.value)
        assert not (out / "gold.jsonl").exists()


def numbers(reward: float, gold: float | None = None, kl: float = 0.0) -> dict[str, float]:
    return {"reward": reward, "kl": kl, **({} if gold is None else {"gold": gold})}


def test_the_run_goes_on_until_there_is_a_reason() -> None:
    hacked = [numbers(1, 4), numbers(2, 5), numbers(3, 4), numbers(4, 3)]
    assert reason_to_stop([], WatchSettings(most_kl=1.0)) is None
    assert reason_to_stop(hacked, WatchSettings()) is None
    assert reason_to_stop(hacked[:3], WatchSettings(window=2)) is None  # too few measurements
    assert "4.5 to 3.5" in str(reason_to_stop(hacked, WatchSettings(window=2)))
    later = [*hacked, numbers(9)]
    assert reason_to_stop(later, WatchSettings(window=2)) is None  # it was judged when it was measured
    both_fell = [numbers(4, 4), numbers(3, 3)]
    assert reason_to_stop(both_fell, WatchSettings(window=1)) is None  # nothing is hacked
    assert reason_to_stop([numbers(1, kl=3.0)], WatchSettings(most_kl=3.0)) is None
    above = reason_to_stop([numbers(1, kl=3.1)], WatchSettings(most_kl=3.0))
    assert "above watch.most_kl=3" in str(above)


def test_distinct_words() -> None:
    assert distinct([["a b a", "a b"], ["c"]], 1) == pytest.approx(3 / 6)
    assert distinct([["a b a", "a b"], ["c"]], 2) == pytest.approx(2 / 3)
    assert distinct([["", " "]], 1) == 1.0
