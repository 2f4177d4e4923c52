"""The first table."""

import json

import pytest

from prb_jax import RunError, cli, evaluate, read_comparisons
from prb_jax.quickstart import quickstart


@pytest.fixture(scope="module")
def result(tmp_path_factory):
    return quickstart(out=tmp_path_factory.mktemp("runs") / "a" / "quickstart")


def test_the_baselines_are_at_chance_on_personalised_pairs(result):
    models = result.summary["models"]
    assert list(models) == ["baseline:length", "baseline:random", "baseline:profile-overlap"]
    for name in ("baseline:length", "baseline:random"):
        for key in ("personalised_accuracy_seen", "personalised_accuracy_unseen"):
            assert 0.4 < models[name][key] < 0.6
            low, high = models[name][f"{key}_ci95"]
            assert low < models[name][key] < high
        assert 0 <= models[name]["coverage"] < 0.3
        assert models[name]["train_pairs"] == 0
        assert 0 < models[name]["ms_per_pair"] < 50


def test_the_bounds_are_those_of_the_benchmark(result):
    blind, aware = result.summary["bounds"].values()
    assert max(blind.values()) <= 0.62
    assert min(aware.values()) >= 0.95
    assert blind.keys() <= result.summary["models"]["baseline:length"].keys()


def test_the_file_is_the_summary(result):
    assert json.loads(result.path.read_text()) == result.summary


def test_an_evaluation_is_not_overwritten(tmp_path):
    pair = {"id": "1", "question": "?", "chosen": "a", "rejected": "b"}
    (tmp_path / "d.jsonl").write_text(json.dumps(pair))
    evaluate("baseline:length", tmp_path / "d.jsonl", out=tmp_path / "run", progress=False)
    with pytest.raises(RunError, match="holds another run"):
        quickstart(out=tmp_path / "run")


def test_from_the_command_line(tmp_path, capsys, monkeypatch):
    monkeypatch.setenv("COLUMNS", "160")
    assert cli.main(["quickstart", "--out", str(tmp_path / "q")]) == 0
    shown = capsys.readouterr().out
    for text in ("profile-overlap", "unseen personas", "best, user known", "summary.json"):
        assert text in shown


def test_the_benchmark_as_files(tmp_path, capsys):
    assert cli.main(["personas", "--out", str(tmp_path)]) == 0
    assert len(capsys.readouterr().out.splitlines()) == len(list(tmp_path.iterdir())) == 5
    assert read_comparisons(tmp_path / "test-unseen.jsonl.gz") == read_comparisons("personas:test-unseen")
