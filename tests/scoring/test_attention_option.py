"""Which implementation of attention a user asks for: it reaches the program and the record, or is an error."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import jax
import jax.numpy as jnp
import pytest

import prb_jax as prb
from prb_jax import cli
from prb_jax.checkpoints.load import abstract_params
from prb_jax.errors import CheckpointError, RunError
from prb_jax.readouts.score_tree import make_score_fn
from prb_jax.scoring.reward_model import RewardModel
from prb_jax.sharding import make_mesh
from prb_jax.training.config import load_settings
from prb_jax.training.record import session_on
from tests.json_lines import write_lines
from tests.scoring.records import read_json
from tests.training.small_batches import batch_of, build, random_trees, small_config

PAIR = {"id": "a", "question": "?", "chosen": "yes", "rejected": "no"}
ON_A_CPU = "attention: there are kernels for TPUs and GPUs in bfloat16, found cpu in float32"


def only_on_cpus() -> None:
    if jax.default_backend() != "cpu":
        pytest.skip("about programs for CPUs")


def test_it_is_loaded_evaluated_and_recorded(folder: Path, model: RewardModel, tmp_path: Path) -> None:
    only_on_cpus()
    asked = prb.load(folder, attention="blockwise")
    assert asked.attention == model.attention == "block-wise XLA over packed streams"
    prb.evaluate(folder, [PAIR], out=tmp_path, attention="blockwise", progress=False)
    (session,) = read_json(tmp_path / "run.json")["sessions"]
    assert session["attention"] == "block-wise XLA over packed streams"


def test_it_reaches_the_program() -> None:
    """By itself a model of one layer computes attention from the places that are read, and nowhere else."""
    config, batch = small_config(num_hidden_layers=1), batch_of(random_trees(2))

    def program(attention: str) -> str:
        mesh = make_mesh(devices=jax.devices()[:1])
        run: Any = make_score_fn(config, mesh=mesh, dtype=jnp.dtype("float32"), attention=attention)
        return run.lower(abstract_params(config), batch).as_text()

    assert program("blockwise") != program("auto")


def test_it_is_a_setting_of_training() -> None:
    only_on_cpus()
    settings = load_settings({"model": "m", "data": "d", "attention": "blockwise"})
    session = session_on(make_mesh(devices=jax.devices()[:1]), settings, small_config())
    assert session["attention"] == "block-wise XLA, head by head"
    assert session["settings"]["attention"] == "blockwise"
    for unknown in ("flash", "streams"):
        with pytest.raises(RunError, match=r"'attention'.*kernel"):
            load_settings({"model": "m", "data": "d", "attention": unknown})
    with pytest.raises(CheckpointError, match=ON_A_CPU):
        build(small_config(num_hidden_layers=1), attention="kernel")


def test_what_it_cannot_be_is_one_line(
    folder: Path, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    only_on_cpus()
    with pytest.raises(CheckpointError, match=ON_A_CPU):
        prb.load(folder, attention="kernel")
    data = write_lines(tmp_path / "data.jsonl", [PAIR])
    arguments = [str(folder), "--data", data, "--out", str(tmp_path / "x"), "--attention", "kernel"]
    assert cli.main(["evaluate", *arguments]) == 2
    assert cli.main(["bench", "score", str(folder / "config.json"), "--attention", "kernel"]) == 2
    errors = capsys.readouterr().err.splitlines()
    assert len(errors) == 2
    assert all(ON_A_CPU in line for line in errors)
    assert cli.main(["evaluate", *arguments[:-1], "streams"]) == 2
    told = "attention: 'streams' is for TPUs and GPUs in bfloat16, found cpu in float32: use 'auto'"
    assert capsys.readouterr().err == f"prb: error: {told}\n"
    with pytest.raises(SystemExit):
        cli.main(["bench", "load", str(folder), "--attention", "blockwise"])
    assert "unrecognized arguments: --attention blockwise" in capsys.readouterr().err


def test_an_encoder_has_no_choice(tmp_path: Path) -> None:
    (tmp_path / "config.json").write_text(json.dumps({"model_type": "deberta-v2"}))
    with pytest.raises(CheckpointError, match=r"an encoder, .*: leave out attention"):
        prb.load(tmp_path, attention="blockwise")
