"""`prb train` and `prb convert`: told to stop, continued on another mesh, a full disk."""

import contextlib
import io
import json
import os
import signal
import subprocess
from pathlib import Path

import numpy as np
import pytest
from safetensors.numpy import load_file

from prb_jax.cli import main
from tests.plain_process import ROOT
from tests.platform.processes.jobs import ended, job, wait_for
from tests.training.tiny import curve, rows, write_rows

STEPS = 12
NUMBERS = ("loss", "accuracy", "margin", "grad_norm")


@pytest.fixture(scope="module")
def data(tmp_path_factory) -> Path:
    return write_rows(tmp_path_factory.mktemp("data") / "pairs.jsonl", rows(40))


def train(model: Path, data: Path, out: Path, *more: str) -> list[str]:
    """The words of a command of `prb`."""
    return [
        "train", "configs/bt_profile_context.py", f"model={model}", f"data={data}", f"steps={STEPS}",
        "batch.comparisons=8", "checkpoint.every=3", "validation.every=6", "optimizer.learning_rate=1e-3",
        "log.plot=false", "--out", str(out), *more,
    ]  # fmt: skip


def run_here(words: list[str]) -> subprocess.CompletedProcess[str]:
    """Run a command of `prb` in this process."""
    out, errors = io.StringIO(), io.StringIO()
    with contextlib.redirect_stdout(out), contextlib.redirect_stderr(errors):
        status = main(words)
    return subprocess.CompletedProcess(words, status, out.getvalue(), errors.getvalue())


def reached(out: Path, step: int) -> bool:
    path = out / "metrics.jsonl"
    lines = path.read_text().splitlines(keepends=True) if path.exists() else []
    return any(json.loads(line)["step"] >= step for line in lines if line.endswith("\n"))


@pytest.fixture(scope="module")
def whole(model, data, tmp_path_factory) -> Path:
    """An uninterrupted run on one device."""
    out = tmp_path_factory.mktemp("runs") / "whole"
    done = run_here(train(model, data, out))
    assert done.returncode == 0, done.stderr
    assert "the model of step 12 was exported" in " ".join(done.stdout.split())
    assert "12 of 12 steps (100%)" in done.stderr
    return out


@pytest.mark.slow
def test_two_processes_stop_together_and_another_mesh_continues_the_same_curve(model, data, whole, tmp_path):
    out = tmp_path / "two"
    shared = {"JAX_CPU_COLLECTIVES_IMPLEMENTATION": "gloo"}
    words = ["-m", "prb_jax", *train(model, data, out, "--distributed")]
    with job(words, count=2, environment=shared) as both:
        wait_for(lambda: reached(out, 4), both)
        both[1].send_signal(signal.SIGTERM)  # told to one of them only
        (first, _, said), (second, _, other) = ended(both)
    assert (first, second) == (75, 75), (said, other)
    assert "SIGTERM: saved at step" in said
    assert "the same command continues the run" in said
    assert not (out / "model").exists()
    with job([*words, "mesh=data=2,tensor=2"], count=2, devices=2, environment=shared) as both:
        ends = ended(both)
    assert [status for status, *_ in ends] == [0, 0], ends
    for name in NUMBERS:
        np.testing.assert_allclose(curve(out, name), curve(whole, name), rtol=1e-5, atol=1e-5)
    one, other = (load_file(path / "model" / "model.safetensors") for path in (whole, out))
    for name, tensor in one.items():
        np.testing.assert_allclose(other[name], tensor, atol=1e-5)
    assert (out / "model" / "tokenizer.json").exists()
    sessions = json.loads((out / "train.json").read_text())["sessions"]
    assert [session["devices"]["count"] for session in sessions] == [2, 4]


def test_a_run_is_a_model_for_evaluate_and_convert(data, whole, tmp_path):
    given = ["evaluate", whole, "--data", data, "--limit", 10, "--out", tmp_path / "e"]
    assert main([*map(str, given)]) == 0
    assert json.loads((tmp_path / "e" / "summary.json").read_text())["n"] == 10
    assert main(["convert", str(whole), str(tmp_path / "hf"), "--step", "last"]) == 0
    assert (tmp_path / "hf" / "model.safetensors").exists()


@pytest.mark.slow
@pytest.mark.skipif(os.geteuid() != 0, reason="mounting a small file system needs root")
def test_a_disk_that_is_full_is_one_clear_error_and_the_run_continues(model, data, tmp_path):
    small = tmp_path / "small"
    small.mkdir()
    command = ["mount", "-t", "tmpfs", "-o", "size=600k", "tmpfs", str(small)]
    mounted = subprocess.run(command, capture_output=True, text=True)
    if mounted.returncode != 0:
        pytest.skip(f"no small file system here: {mounted.stderr.strip()}")
    try:
        full = run_here(train(model, data, small / "run", "checkpoint.keep_last=20"))
        assert full.returncode == 2
        last = full.stderr.strip().splitlines()[-1]
        assert "no space left on the device" in last
        assert "the same command continues the run" in last
        assert "Traceback" not in full.stderr
        subprocess.run(["mount", "-o", "remount,size=50m", str(small)], check=True)
        done = run_here(train(model, data, small / "run", "checkpoint.keep_last=20"))
        assert done.returncode == 0, done.stderr
        assert (small / "run" / "summary.json").exists()
    finally:
        subprocess.run(["umount", str(small)])


def test_overrides_may_stand_behind_flags_and_the_config_is_shown(capsys, monkeypatch, tmp_path):
    monkeypatch.chdir(ROOT)
    words = f"train configs/bt_user_blind.py model=m --out {tmp_path}/run --show-config data=d seed=3"
    given = words.split()
    assert main(given) == 0
    shown = capsys.readouterr().out.splitlines()
    assert "    config.model = 'm'" in shown
    assert "    config.seed = 3" in shown
    with pytest.raises(SystemExit):
        main([*given, "--unknown"])
    capsys.readouterr()
    assert main(["train", "--show-config", "steps=3"]) == 0  # neither CONFIG nor --out nor a model
    about = "    # Optimiser updates; rerun with a larger number to lengthen the run."
    assert f"\n{about}\n    config.steps = 3\n" in capsys.readouterr().out
    assert main(["train", "--show-config", "optimizer.lr=1"]) == 2
    assert "did you mean 'optimizer.learning_rate'?" in capsys.readouterr().err
    for words, missing in ((["steps=3"], "CONFIG, --out"), (["configs/bt_user_blind.py"], "--out")):
        with pytest.raises(SystemExit) as ended:
            main(["train", *words])
        assert ended.value.code == 2
        assert f"the following arguments are required: {missing} (" in capsys.readouterr().err
