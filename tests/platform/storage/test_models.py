"""Models, checkpoints and samples at URLs: trained, continued on another machine, scored, sampled from."""

import json

import pytest

import prb_jax as prb
from prb_jax import cli
from prb_jax.platform.storage.urls import session
from prb_jax.training.config import default_config
from prb_jax.training.train import train
from tests.platform.storage.stores import below, contents, failing, files_in, put_folder
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
    assert all(name.startswith(".prb/") for name in below("gs://b/runs/t"))
    monkeypatch.setenv("PRB_JAX_STORAGE", str(tmp_path / "another machine"))
    done = prb.train(wanted, out="gs://b/runs/t", progress=False)
    assert "continued from the checkpoint of step 3" in capsys.readouterr().err
    stored = below("gs://b/runs/t")
    record = json.loads(stored["train.json"])
    assert len(record["sessions"]) == 2
    assert record["sessions"][0]["settings"]["model"] == "gs://b/in/tiny"
    for name in ("model.safetensors", "config.json", "tokenizer.json"):
        paths = [out / "model" / name for out in (local.out, done.out)]
        assert [path.read_bytes() for path in paths] == [stored[f"model/{name}"]] * 2
    assert {name.split("/")[0] for name in stored} == {name.split("/")[0] for name in files_in(local.out)}

    assert prb.load("gs://b/runs/t").name == "gs://b/runs/t"
    data_words = "--data gs://b/in/pairs.jsonl --limit 6 --out"
    sampling = "--n 2 --max-new-tokens 4"
    for words in (
        f"evaluate gs://b/runs/t {data_words} gs://b/runs/e",
        f"evaluate {local.out} {data_words} {tmp_path}/e",
        f"sample gs://b/in/policy {sampling} {data_words} gs://b/runs/s",
        f"sample {tmp_path}/in/policy {sampling} {data_words} {tmp_path}/s",
    ):
        assert cli.main(words.split()) == 0, capsys.readouterr().err
    for name in ("e/scores.jsonl", "s/samples.jsonl"):
        assert contents()[f"/b/runs/{name}"] == (tmp_path / name).read_bytes()
    assert json.loads(contents()["/b/runs/e/summary.json"])["model"] == "gs://b/runs/t"
