"""The command line with a model: a checkpoint on disk, scored by real processes that are killed."""

import json
import re
from functools import partial
from pathlib import Path

import pytest

from prb_jax import cli
from tests.commands.conftest import killed
from tests.json_lines import read_lines
from tests.plain_process import prb, prb_command
from tests.training.tiny import rows, write_rows

COUNT = 600
"""Comparisons: more than a window of the stream, so that a run has two."""


@pytest.fixture(scope="module")
def data(tmp_path_factory) -> Path:
    return write_rows(tmp_path_factory.mktemp("data") / "pairs.jsonl", rows(COUNT, users=30))


def programs(environment: dict[str, str]) -> set[Path]:
    """The compiled programs that are kept for the next process."""
    return set(Path(environment["PRB_JAX_CACHE"]).rglob("*-cache"))


@pytest.fixture(scope="module")
def whole(model, data, environment, tmp_path_factory) -> Path:
    """An uninterrupted run."""
    out = tmp_path_factory.mktemp("runs") / "whole"
    done = prb("evaluate", model, "--data", data, "--out", out, "--batch-tokens", 1024, env=environment)
    assert done.returncode == 0, done.stderr
    assert f"{COUNT} comparisons of 30 users" in done.stdout
    assert "tokens/s" in done.stderr
    return out


@pytest.mark.parametrize("moments", [(150,), pytest.param((0, 150, 550), marks=pytest.mark.slow)])
def test_killed_at_any_moment_the_same_command_ends_with_the_same_bytes_and_compiles_nothing(
    model, data, environment, whole, tmp_path, moments
):
    out, compiled = tmp_path / "killed", programs(environment)
    assert compiled
    words = ("evaluate", model, "--data", data, "--out", out, "--batch-tokens", 1024)
    scores = out / "scores.jsonl"

    def reached(scored: int) -> bool:
        return scores.exists() and scores.read_bytes().count(b"\n") >= scored

    for scored in moments:
        assert killed(prb_command(*words), when=partial(reached, scored), environment=environment)
    assert not (out / "summary.json").exists()
    done = prb(*words, env=environment)
    assert done.returncode == 0, done.stderr
    assert programs(environment) == compiled
    for name in ("scores.jsonl", "summary.json"):
        assert (out / name).read_bytes() == (whole / name).read_bytes()
    assert [row["id"] for row in read_lines(out / "scores.jsonl")] == [f"p{i}" for i in range(COUNT)]


def test_run_json_names_the_weights_and_refuses_others(model, data, whole, capsys):
    run = json.loads((whole / "run.json").read_text())
    assert set(run["inputs"]["model"]["files"]) >= {"config.json", "model.safetensors", "tokenizer.json"}
    assert re.fullmatch("sha256:[0-9a-f]{64}", run["inputs"]["model"]["template"])
    (session,) = run["sessions"]
    assert session["devices"]["platform"] == "cpu"
    assert session["mesh"]
    assert session["batch_tokens"] == 1024
    changed = ["--dtype", "bfloat16", "--profile-posts", "2"]
    assert cli.main(["evaluate", str(model), "--data", str(data), "--out", str(whole), *changed]) == 2
    said = capsys.readouterr().err
    assert 'model.dtype: "float32" -> "bfloat16"' in said
    assert "profile_posts: 10 -> 2" in said


def test_inspect_says_what_the_checkpoint_is(model, capsys):
    assert cli.main(["inspect", str(model)]) == 0
    said = capsys.readouterr().out
    for fact in ("Qwen3ForSequenceClassification", "score.weight", "2,048 tokens", "sha256:"):
        assert fact in said
