"""`prb ppo` as a job of two processes: the numbers of one alone, and continued by one."""

from __future__ import annotations

import json
import shutil
from pathlib import Path

import pytest

import prb_jax as prb
from tests.behaviour.rl.tiny import metrics, settings, write_config, write_reward, write_rows
from tests.platform.processes.jobs import ended, job

pytestmark = pytest.mark.slow


def assert_same(folder: Path, expected: Path) -> None:
    rows, others = metrics(folder), metrics(expected)
    assert [row["step"] for row in rows] == [row["step"] for row in others] == [1, 2, 3, 4]
    for row, other in zip(rows, others, strict=True):
        for name, value in other.items():
            if name != "sampler_difference":  # rounding alone
                assert row[name] == pytest.approx(value, abs=1e-5, rel=1e-5), (row["step"], name)


@pytest.mark.parametrize("tuning", ["full", "lora"])
def test_processes_give_the_numbers_of_one_and_one_continues_them(
    model: Path, tmp_path: Path, tuning: str
) -> None:
    given = settings(model, data=write_rows(tmp_path / "data.jsonl"), reward=write_reward(tmp_path), steps=4)
    given |= {"batch.minibatch": 4, "tuning": tuning, "watch.most_kl": 1e6, "watch.gold": "baseline:length"}
    config = write_config(tmp_path, given)
    alone, together, continued = (tmp_path / name for name in ("alone", "together", "continued"))
    prb.ppo(config, out=alone, progress=False)
    command = ["-m", "prb_jax", "ppo", config, "--out", together, "--distributed", "--no-progress"]
    with job(command, count=2) as processes:
        first, second = ended(processes)
    assert first[0] == second[0] == 0, (first, second)
    assert "reward" in first[1]
    assert not [line for line in second[1].splitlines() if not line.startswith("[Gloo]")]
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
