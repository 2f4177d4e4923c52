"""`prb bench sample`, `guide` and `ppo`: both sides get the same prompts, and each says what it ran."""

from __future__ import annotations

from pathlib import Path

import pytest

from tests.tiny_policies import write_policy

SMALL = "--prompts 2 --prompt-tokens 40 --rounds 1"


def test_both_ways_draw_the_same_tokens(tmp_path: Path, bench, capsys) -> None:
    write_policy(tmp_path / "model", "qwen3", num_hidden_layers=2)
    words = "--new-tokens 8 --temperature 0 --against transformers"
    (row,) = bench("sample", tmp_path / "model", SMALL, words)
    assert row["equal_tokens"] == 1
    assert (row["prompts"], row["samples"], row["new_tokens"]) == (2, 1, 8)
    shown = capsys.readouterr().out
    assert all(word in shown for word in ("tokens/s", "speed-up", "equal tokens"))


def test_a_guided_token_is_timed(tmp_path: Path, bench, capsys) -> None:
    write_policy(tmp_path / "model", "qwen3", num_hidden_layers=1)
    (row,) = bench("guide", tmp_path / "model", SMALL, "--new-tokens 4 --candidates 3")
    assert (row["prompts"], row["prompt_tokens"], row["new_tokens"], row["candidates"]) == (2, 40, 4, 3)
    assert all(row[name] > 0 for name in ("policy_ms", "reward_ms", "guided_ms", "ratio"))
    assert "guided / (policy + reward model)" in " ".join(capsys.readouterr().out.split())


@pytest.mark.slow
def test_rollout_and_update_beside_trl(tmp_path: Path, bench, capsys, monkeypatch) -> None:
    pytest.importorskip("trl.trainer.grpo_trainer", exc_type=ImportError)
    from prb_jax.measure.bench.rivals import trl

    steps = []
    run = trl.TrlPolicyTrainer.run
    monkeypatch.setattr(trl.TrlPolicyTrainer, "run", lambda self: steps.append(run(self)) or steps[-1])
    write_policy(tmp_path / "model", "qwen3", num_hidden_layers=1, eos=3)
    (row,) = bench("ppo", tmp_path / "model", SMALL, "--new-tokens 8 --samples 2 --against trl")
    assert (row["prompts"], row["samples"], row["new_tokens"]) == (2, 2, 8)
    assert len(steps) == 2
    assert steps[1].prompt_tokens == 2 * row["prompt_tokens"]  # their prompts are ours
    assert 0 < row["length"] <= 8
    assert 0 < row["against_length"] <= 8
    whole = row["against_rollout_seconds"] + row["against_update_seconds"]
    assert row["speedup"] == pytest.approx(whole / (row["rollout_seconds"] + row["update_seconds"]))
    shown = capsys.readouterr().out
    assert all(word in shown for word in ("rollout s", "update s", "speed-up"))
