"""Models, checkpoints and samples at URLs: trained, continued on another machine, scored, sampled from."""

import json

import pytest

import prb_jax as prb
from prb_jax import cli
from prb_jax.storage.urls import session
from prb_jax.training.config import default_config
from prb_jax.training.train import train
from tests.storage.stores import contents, failing, put_folder
from tests.training.tiny import rows, stopped_at, write_causal_model, write_model, write_rows


def config(model: object, data: object):
    chosen = default_config()
    chosen.model, chosen.data, chosen.steps = str(model), str(data), 4
    chosen.batch.comparisons = 8
    chosen.checkpoint.every, chosen.validation.every = 2, 4
    chosen.log.plot = False
    return chosen


@pytest.mark.slow
def test_models_are_trained_continued_and_used_at_urls(tmp_path, store, monkeypatch, capsys):
    model, data = write_model(tmp_path / "in" / "tiny"), tmp_path / "in" / "pairs.jsonl"
    write_rows(data, rows(40))
    write_causal_model(tmp_path / "in" / "policy")
    put_folder(tmp_path / "in", "gs://b/in")
    store.fail = staticmethod(failing(0.05))
    monkeypatch.setenv("PRB_JAX_PUSH_SECONDS", "0.1")
    local = train(config(model, data), out=tmp_path / "local", progress=False)

    wanted = config("gs://b/in/tiny", "gs://b/in/pairs.jsonl")
    with stopped_at(monkeypatch, 3), session() as storage:
        storage.finish = False  # as of a command that SIGTERM stopped
        assert prb.train(wanted, out="gs://b/runs/t", progress=False).stopped_by == "SIGTERM"
    assert all("/.prb/" in path for path in contents() if path.startswith("/b/runs/t"))
    monkeypatch.setenv("PRB_JAX_STORAGE", str(tmp_path / "another machine"))
    done = prb.train(wanted, out="gs://b/runs/t", progress=False)
    assert "continued from the checkpoint of step 3" in capsys.readouterr().err
    record = json.loads(contents()["/b/runs/t/train.json"])
    assert len(record["sessions"]) == 2
    assert record["sessions"][0]["settings"]["model"] == "gs://b/in/tiny"
    for name in ("model.safetensors", "config.json", "tokenizer.json"):
        stored = contents()[f"/b/runs/t/model/{name}"]
        assert stored == (local.out / "model" / name).read_bytes() == (done.out / "model" / name).read_bytes()
    assert not any("/.prb/" in path for path in contents())
    names = {path.relative_to(local.out).parts[0] for path in local.out.rglob("*") if path.is_file()}
    assert {path.split("/")[4] for path in contents() if path.startswith("/b/runs/t/")} == names

    assert prb.load("gs://b/runs/t").name == "gs://b/runs/t"
    data_words = ["--data", "gs://b/in/pairs.jsonl", "--limit", "6"]
    for verb, out in (
        (["evaluate", "gs://b/runs/t"], "gs://b/runs/e"),
        (["evaluate", str(local.out)], str(tmp_path / "e")),
        (["sample", "gs://b/in/policy", "--n", "2", "--max-new-tokens", "4"], "gs://b/runs/s"),
        (
            ["sample", str(tmp_path / "in" / "policy"), "--n", "2", "--max-new-tokens", "4"],
            str(tmp_path / "s"),
        ),
    ):
        assert cli.main([*verb, *data_words, "--out", out]) == 0, capsys.readouterr().err
    for name in ("e/scores.jsonl", "s/samples.jsonl"):
        assert contents()[f"/b/runs/{name}"] == (tmp_path / name).read_bytes()
    assert json.loads(contents()["/b/runs/e/summary.json"])["model"] == "gs://b/runs/t"

    words = [
        "best-of-n",
        "--samples",
        "gs://b/runs/s",
        "--rewards",
        "gs://b/runs/t",
        "--out",
        "gs://b/runs/b",
    ]
    assert cli.main(words) == 0, capsys.readouterr().err
    assert cli.main(["distil", "gs://b/runs/b", "--out", "gs://b/distilled"]) == 0, capsys.readouterr().err
    assert cli.main(["convert", "gs://b/runs/t", "gs://b/converted"]) == 0, capsys.readouterr().err
    assert contents()["/b/converted/model.safetensors"]
    words = ["features", "gs://b/runs/t", *data_words[:2], "--out", "gs://b/features"]
    assert cli.main(words) == 0, capsys.readouterr().err
    assert cli.main(["inspect", "gs://b/runs/t"]) == 0
