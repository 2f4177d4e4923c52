"""`prb bench ppo`: both sides train the same model by the same prompts, and the split is printed."""

from __future__ import annotations

import json
import math
from pathlib import Path

import pytest

from prb_jax.cli import main as prb
from tests.tiny_policies import write_policy

SMALL = (
    "--prompts", "2", "--samples", "2", "--prompt-tokens", "40", "--new-tokens", "8", "--rounds", "1",
)  # fmt: skip


def test_rollout_and_update_beside_trl(tmp_path: Path, capsys, monkeypatch: pytest.MonkeyPatch) -> None:
    pytest.importorskip("trl.trainer.grpo_trainer", exc_type=ImportError)
    from prb_jax.bench.rivals import trl_policy

    steps = []
    run = trl_policy.TrlPolicyTrainer.run
    monkeypatch.setattr(trl_policy.TrlPolicyTrainer, "run", lambda self: steps.append(run(self)) or steps[-1])
    write_policy(tmp_path / "model", "qwen3", num_hidden_layers=1, eos=3)
    report = tmp_path / "bench.json"
    arguments = [str(tmp_path / "model"), "--against", "trl", "--json", str(report), *SMALL]
    assert prb(["bench", "ppo", *arguments]) == 0
    (row,) = json.loads(report.read_text())
    assert (row["prompts"], row["samples"], row["new_tokens"]) == (2, 2, 8)
    assert all(math.isfinite(value) for value in row.values() if isinstance(value, float))
    assert len(steps) == 2
    assert steps[1].prompt_tokens == 2 * row["prompt_tokens"]  # their prompts are ours
    assert 0 < row["length"] <= 8
    assert 0 < row["against_length"] <= 8
    whole = row["against_rollout_seconds"] + row["against_update_seconds"]
    assert row["speedup"] == pytest.approx(whole / (row["rollout_seconds"] + row["update_seconds"]))
    shown = capsys.readouterr().out
    for word in ("rollout s", "update s", "speed-up"):
        assert word in shown
    assert prb(["bench", "ppo", str(tmp_path / "model"), "--against-rows", "1", *SMALL]) == 2
    assert prb(["bench", "ppo", "qwen3-40m", *SMALL]) == 2
