"""The command line with a model: a checkpoint on disk, its record, and its page."""

import contextlib
import io
import json
import re
from pathlib import Path

import pytest

from prb_jax import cli
from tests.training.tiny import rows, write_rows

COUNT = 60


@pytest.fixture(scope="module")
def data(tmp_path_factory) -> Path:
    return write_rows(tmp_path_factory.mktemp("data") / "pairs.jsonl", rows(COUNT, users=30))


@pytest.fixture(scope="module")
def whole(model, data, tmp_path_factory) -> Path:
    out, shown, progress = tmp_path_factory.mktemp("runs") / "whole", io.StringIO(), io.StringIO()
    words = ["evaluate", model, "--data", data, "--out", out, "--batch-tokens", 1024]
    with contextlib.redirect_stdout(shown), contextlib.redirect_stderr(progress):
        assert cli.main(list(map(str, words))) == 0
    assert f"{COUNT} comparisons of 30 users" in shown.getvalue()
    assert "tokens/s" in progress.getvalue()
    return out


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
