"""`prb bench guide`: it runs, and says what it ran."""

from __future__ import annotations

import json
import math
from pathlib import Path

import pytest

from prb_jax.cli import main as prb
from tests.tiny_policies import write_policy


def test_a_guided_token_is_timed(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    write_policy(tmp_path / "model", "qwen3", num_hidden_layers=1)
    report = tmp_path / "bench.json"
    small = (
        "--prompts",
        "2",
        "--prompt-tokens",
        "40",
        "--new-tokens",
        "4",
        "--rounds",
        "1",
        "--candidates",
        "3",
    )
    assert prb(["bench", "guide", str(tmp_path / "model"), "--json", str(report), *small]) == 0
    (row,) = json.loads(report.read_text())
    assert (row["prompts"], row["prompt_tokens"], row["new_tokens"], row["candidates"]) == (2, 40, 4, 3)
    assert all(
        math.isfinite(row[name]) and row[name] > 0
        for name in ("policy_ms", "reward_ms", "guided_ms", "ratio")
    )
    assert "guided / (policy + reward model)" in " ".join(capsys.readouterr().out.split())
