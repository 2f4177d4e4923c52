"""`prb evaluate` and `prb train` as jobs of four processes: killed, continued by two, and equal to one alone."""

from __future__ import annotations

import json
from pathlib import Path

import numpy as np
import pytest

from tests.json_lines import read_lines
from tests.platform.processes.jobs import SOON, ended, job, lines, run_job, wait_for
from tests.training.tiny import curve, rows, write_model, write_rows

pytestmark = pytest.mark.slow


@pytest.fixture(scope="module")
def model(tmp_path_factory) -> Path:
    return write_model(tmp_path_factory.mktemp("model") / "tiny")


def prb(*arguments: object, distributed: bool = True) -> list[object]:
    return ["-m", "prb_jax", *arguments, *(["--distributed"] if distributed else [])]


def run_and_kill(*command: object, out: Path, file: str, least: int, devices: int) -> None:
    """One of four processes is killed when a file has so many lines, which ends the others."""
    with job(prb(*command, out), count=4, devices=devices) as processes:
        wait_for(lambda: lines(out / file) >= least, processes)
        processes[2].kill()
        results = ended(processes, seconds=SOON)
    assert all(status != 0 for status, *_ in results)
    assert "process 2 of 4" in results[0][2]
    assert not (out / "summary.json").exists()


def test_evaluate(model: Path, tmp_path: Path) -> None:
    data = write_rows(tmp_path / "pairs.jsonl", rows(1500))
    command = ("evaluate", model, "--data", data, "--batch-tokens", 2048, "--out")
    run_job(prb(*command, tmp_path / "one", distributed=False), count=1)
    out = tmp_path / "many"
    run_and_kill(*command, out=out, file="scores.jsonl", least=100, devices=2)
    assert 100 <= lines(out / "scores.jsonl") < 1500
    run_job(prb(*command, out), count=2, devices=2)
    one, many = (read_lines(folder / "scores.jsonl") for folder in (tmp_path / "one", out))
    assert [row["id"] for row in many] == [row["id"] for row in one]
    for row, expected in zip(many, one, strict=True):
        np.testing.assert_allclose(row["scores"], expected["scores"], atol=1e-5, rtol=0)
    sessions = json.loads((out / "run.json").read_text())["sessions"]
    devices = [session["devices"] for session in sessions]
    assert [(used["count"], used["processes"]) for used in devices] == [(8, 4), (4, 2)]


def test_train(model: Path, tmp_path: Path) -> None:
    data = write_rows(tmp_path / "pairs.jsonl", rows(40))
    command = (
        "train", "configs/bt_profile_context.py", f"model={model}", f"data={data}", "steps=12", "batch.comparisons=8",
        "checkpoint.every=3", "validation.every=6", "optimizer.learning_rate=1e-3", "log.plot=false", "--out",
    )  # fmt: skip
    run_job(prb(*command, tmp_path / "one", distributed=False), count=1)
    out = tmp_path / "many"
    run_and_kill(*command, out=out, file="metrics.jsonl", least=5, devices=1)
    run_job(prb(*command, out), count=2, devices=2)
    for name in ("loss", "accuracy", "margin", "grad_norm", "validation_loss"):
        np.testing.assert_allclose(
            curve(out, name), curve(tmp_path / "one", name), rtol=1e-5, atol=1e-5, err_msg=name
        )
