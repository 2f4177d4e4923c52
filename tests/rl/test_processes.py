"""`prb ppo` as a job of two processes: the numbers of one alone, and continued by one."""

from __future__ import annotations

import json
import shutil
from pathlib import Path
from typing import Any

import pytest

import prb_jax as prb
from tests.processes.jobs import ended, job
from tests.rl.tiny import LETTER, metrics, settings, write_rows

pytestmark = pytest.mark.slow


def assert_same(found: Path, expected: Path) -> None:
    rows, others = metrics(found), metrics(expected)
    assert [row["step"] for row in rows] == [row["step"] for row in others] == [1, 2, 3, 4]
    for row, other in zip(rows, others, strict=True):
        for name, value in other.items():
            if name != "sampler_difference":  # rounding alone
                assert row[name] == pytest.approx(value, abs=1e-5, rel=1e-5), (row["step"], name)


@pytest.mark.parametrize("tuning", ["full", "lora"])
def test_processes_give_the_numbers_of_one_and_one_continues_them(
    model: Path, tmp_path: Path, tuning: str
) -> None:
    (tmp_path / "reward.py").write_text(
        f"def score(one):\n    return [float({LETTER!r} in text) for text in one.responses]\n"
    )
    data = write_rows(tmp_path / "data.jsonl")
    given: dict[str, Any] = settings(model) | {
        "data": data,
        "reward": f"{tmp_path}/reward.py:score",
        "steps": 4,
    }
    given |= {"batch.minibatch": 4, "tuning": tuning, "watch.most_kl": 1e6, "watch.gold": "baseline:length"}
    config = tmp_path / "config.yaml"
    config.write_text("".join(f"{key}: {json.dumps(value, default=str)}\n" for key, value in given.items()))
    alone, together, continued = (tmp_path / name for name in ("alone", "together", "continued"))
    prb.ppo(config, out=alone, progress=False)
    command = ["-m", "prb_jax", "ppo", config, "--out", together, "--distributed", "--no-progress"]
    with job(command, count=2) as processes:
        found = ended(processes)
    assert [status for status, *_ in found] == [0, 0], found
    assert "reward" in found[0][1]
    assert not [line for line in found[1][1].splitlines() if not line.startswith("[Gloo]")]
    assert_same(together, alone)
    (session,) = json.loads((together / "train.json").read_text())["sessions"]
    assert (session["devices"]["count"], session["devices"]["processes"]) == (2, 2)

    # As if the job had been killed after its third step.
    shutil.copytree(together, continued)
    for name in ("model", "adapter", "checkpoints/4"):
        shutil.rmtree(continued / name, ignore_errors=True)
    for name in ("summary.json", "behaviour.json"):
        (continued / name).unlink()
    prb.ppo(config, overrides=["mesh=data=1"], out=continued, progress=False)
    assert_same(continued, alone)
    lines = [(folder / "metrics.jsonl").read_text().splitlines() for folder in (together, continued)]
    assert lines[0][:3] == lines[1][:3]  # seconds too: they were not made again
    assert lines[0][3] != lines[1][3]
    assert len((continued / "gold.jsonl").read_text().splitlines()) == 4
