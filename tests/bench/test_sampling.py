"""`prb bench sample`: both ways continue the same prompts, and greedily with the same tokens."""

from __future__ import annotations

import json
import math
from pathlib import Path

from prb_jax.cli import main as prb
from tests.tiny_policies import write_policy

SMALL = (
    "--prompts",
    "2",
    "--prompt-tokens",
    "40",
    "--new-tokens",
    "8",
    "--rounds",
    "1",
    "--temperature",
    "0",
)


def test_both_ways_draw_the_same_tokens(tmp_path: Path, capsys) -> None:
    write_policy(tmp_path / "model", "qwen3", num_hidden_layers=2)
    report = tmp_path / "bench.json"
    arguments = [str(tmp_path / "model"), "--against", "transformers", "--json", str(report), *SMALL]
    assert prb(["bench", "sample", *arguments]) == 0
    (row,) = json.loads(report.read_text())
    assert row["equal_tokens"] == 1
    assert (row["prompts"], row["samples"], row["new_tokens"]) == (2, 1, 8)
    assert all(math.isfinite(value) for value in row.values() if isinstance(value, float))
    shown = capsys.readouterr().out
    for word in ("tokens/s", "speed-up", "equal tokens"):
        assert word in shown
    assert prb(["bench", "sample", str(tmp_path / "model"), "--against-prompts", "1", *SMALL]) == 2
