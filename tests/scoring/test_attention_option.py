"""Which implementation of attention a user asks for: it reaches the program and the record, or is an error."""

from __future__ import annotations

import json
from pathlib import Path

import jax
import pytest

import prb_jax as prb
from prb_jax import cli
from prb_jax.errors import CheckpointError, RunError
from prb_jax.platform.meshes import make_mesh
from prb_jax.scoring.reward_model import RewardModel
from prb_jax.training.config import load_settings
from prb_jax.training.record import session_on
from tests.json_lines import write_lines
from tests.scoring.records import read_json
from tests.training.small_batches import small_config

PAIR = {"id": "a", "question": "?", "chosen": "yes", "rejected": "no"}


def only_on_cpus() -> None:
    if jax.default_backend() != "cpu":
        pytest.skip("about programs for CPUs")


def test_it_is_loaded_evaluated_and_recorded(folder: Path, model: RewardModel, tmp_path: Path) -> None:
    only_on_cpus()
    asked = prb.load(folder, attention="xla")
    assert asked.attention == model.attention == "block-wise XLA over packed streams"
    prb.evaluate(folder, [PAIR], out=tmp_path, attention="xla", progress=False)
    (session,) = read_json(tmp_path / "run.json")["sessions"]
    assert session["attention"] == "block-wise XLA over packed streams"


def test_it_is_a_setting_of_training() -> None:
    only_on_cpus()
    settings = load_settings({"model": "m", "data": "d", "attention": "xla"})
    session = session_on(make_mesh(devices=jax.devices()[:1]), settings, small_config())
    assert session["attention"] == "block-wise XLA over packed streams"
    assert session["settings"]["attention"] == "xla"
    for unknown in ("flash", "blockwise", "kernel", "streams"):
        with pytest.raises(RunError, match=r"'attention'.*auto.*xla"):
            load_settings({"model": "m", "data": "d", "attention": unknown})


def test_what_it_cannot_be_is_one_line(
    folder: Path, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    """Names of earlier versions too."""
    for name in ("kernel", "streams", "blockwise"):
        with pytest.raises(CheckpointError, match=f"attention: expected auto or xla, found '{name}'"):
            prb.load(folder, attention=name)
    data = write_lines(tmp_path / "data.jsonl", [PAIR])
    arguments = [
        "evaluate",
        str(folder),
        "--data",
        data,
        "--out",
        str(tmp_path / "x"),
        "--attention",
        "kernel",
    ]
    with pytest.raises(SystemExit):
        cli.main(arguments)
    assert "invalid choice: 'kernel' (choose from" in capsys.readouterr().err
    with pytest.raises(SystemExit):
        cli.main(["bench", "load", str(folder), "--attention", "xla"])
    assert "unrecognized arguments: --attention xla" in capsys.readouterr().err


def test_an_encoder_has_no_choice(tmp_path: Path) -> None:
    (tmp_path / "config.json").write_text(json.dumps({"model_type": "deberta-v2"}))
    with pytest.raises(CheckpointError, match=r"an encoder, .*: leave out attention"):
        prb.load(tmp_path, attention="xla")
