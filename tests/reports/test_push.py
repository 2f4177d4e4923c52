"""`prb push`: the files and the card that a hub gets, by a stand-in of its HTTP interface."""

import contextlib
import json
import os
import re
import shutil
import subprocess
import sys
from pathlib import Path

import pytest
import yaml
from huggingface_hub import parse_eval_result_entries

from prb_jax import cli
from prb_jax.errors import RunError
from prb_jax.reports.push import prepare_push, push
from tests.json_lines import write_lines
from tests.reports.conftest import evaluate
from tests.reports.hub_stand_in import TOKEN, hub
from tests.tiny_models import write_model_without_torch
from tests.tiny_tokenizer import write_tokenizer


def prb(*arguments: object, cwd: Path, **variables: str) -> subprocess.CompletedProcess[str]:
    command = [sys.executable, "-m", "prb_jax", *map(str, arguments)]
    environment = {name: os.environ[name] for name in os.environ.keys() - {"HF_HUB_OFFLINE", "HF_TOKEN"}}
    environment |= {"PYTHONPATH": os.getcwd(), "HF_HOME": str(cwd / "home"), "HF_HUB_DISABLE_XET": "1"}
    return subprocess.run(
        command, capture_output=True, text=True, cwd=cwd, env=environment | variables, timeout=200
    )


@pytest.fixture(scope="module")
def folder(tmp_path_factory):
    """A model, a run that scored it, and a finished training run that it came from."""
    folder = tmp_path_factory.mktemp("push")
    trained = folder / "trained"
    write_tokenizer(write_model_without_torch(trained / "model", "qwen3", vocab_size=512))
    settings = {"steps": 7, "method": "user_blind"}
    record = {
        "kind": "prb_jax training",
        "command": ["prb", "train", "c.py", "data=my file.jsonl", "--out", "trained"],
        "model": "org/base",
        "inputs": {"settings": settings, "model": {"revision": "abc"}, "data": {"train": 9}},
        "sessions": [{"settings": {"data": ["my file.jsonl"], "model": "org/base"}}],
    }
    write_lines(trained / "train.json", [record])
    last = {"loss": 0.5, "accuracy": 0.75, "margin": 0.25}
    counts = ("pairs_seen", "tokens_seen", "parameters", "trained_parameters", "validation_comparisons")
    summary = dict.fromkeys(counts, 7) | {"steps": 7, "exported_step": 7, "train_comparisons": 9}
    write_lines(trained / "summary.json", [summary | {"last_tenth": last, "validation": None}])
    pair = {"question": "a | b", "rejected": "so"}
    words = ({"id": str(i), "user_id": f"u{i % 9}", "chosen": "word " * (1 + i % 3)} for i in range(18))
    write_lines(folder / "pairs|.jsonl", (pair | row for row in words))
    with contextlib.chdir(folder):
        assert cli.main(["evaluate", "trained", "--data", "pairs|.jsonl", "--out", "scored"]) == 0
    return folder


def test_a_run_is_published_with_its_card(folder):
    with hub() as server:
        variables = {"HF_ENDPOINT": server.address, "HF_TOKEN": TOKEN}
        done = prb("push", "scored", "people/first", "--private", cwd=folder, **variables)
        assert done.returncode == 0, done.stderr
        assert done.stdout.splitlines()[-1].startswith(f"published at {server.address}/people/first/commit/")
        assert server.private == {"people/first": True}
        ((repository, _, files),) = server.commits
        assert repository == "people/first"
        model = folder / "trained" / "model"
        card = files.pop("README.md").decode()
        assert files == {path.name: path.read_bytes() for path in model.iterdir()}

        summary = json.loads((folder / "scored" / "summary.json").read_text())
        header, body = re.fullmatch("---\n(.*?)---\n(.*)", card, flags=re.DOTALL).groups()
        told = yaml.safe_load(header)
        assert (told["library_name"], told["base_model"]) == ("prb_jax", "org/base")
        assert f"| this model | 18 | {summary['accuracy']:.3f}" in body
        assert "baseline:length" in body
        (source,) = json.loads((folder / "scored" / "run.json").read_text())["inputs"]["data"]["sources"]
        for shown in (
            f"pairs\\|.jsonl ({source['files']['pairs|.jsonl'][:19]})",
            "    prb evaluate trained --data 'pairs|.jsonl' --out scored",
            "    prb train c.py 'data=my file.jsonl' --out trained",
            "| training, last tenth | 0.5000 | 0.7500 | 0.2500 |",
        ):
            assert shown in body

        again = prb("push", "trained", "people/first", "--evaluations", "scored", cwd=folder, **variables)
        assert again.returncode == 0, again.stderr
        assert server.commits[1][2]["README.md"].decode() == card

        refused = prb("push", "trained", "people/first", cwd=folder, **variables | {"HF_TOKEN": "hf_other"})
        assert refused.returncode == 2
        assert refused.stderr.splitlines() == [
            "prb: error: people/first: the hub refused it: no right to write there (status 401): "
            "`hf auth login`, or set HF_TOKEN"
        ]
        assert len(server.commits) == 2


def test_what_has_no_model_is_refused(folder, tmp_path):
    evaluate("baseline:length", folder / "pairs|.jsonl", tmp_path / "plain")
    begun = tmp_path / "begun"
    begun.mkdir()
    (begun / "train.json").write_bytes((folder / "trained" / "train.json").read_bytes())
    other = shutil.copytree(folder / "scored", tmp_path / "scored")
    no_run = "expected the folder of a run, found"
    for run, message in (
        (tmp_path / "plain", "plain: the run scored baseline:length, which has no files of a model"),
        (begun, "begun: the training run is not finished, so there is no model in it yet"),
        (folder / "pairs|.jsonl", f"pairs|.jsonl: {no_run} a file; data are not pushed"),
        (folder / "trained" / "model", f"model: {no_run} no train.json and no run.json"),
        (other, "the run scored trained, and there is no such folder now"),
    ):
        with pytest.raises(RunError, match=re.escape(message)):
            push(run, "people/first")
    with pytest.raises(RunError, match="expected ORG/NAME, found 'first'"):
        push(folder / "trained", "first")
    with pytest.raises(RunError, match="evaluates another model"):
        push(folder / "trained", "people/first", evaluations=[tmp_path / "plain"])


def test_a_dry_run_shows_what_would_be_published(folder, monkeypatch, capsys):
    monkeypatch.chdir(folder)
    assert cli.main(["push", "scored", "people/first", "--dry-run"]) == 0
    shown = capsys.readouterr().out
    for path in (folder / "trained" / "model").iterdir():
        assert f"{path.name}  {path.stat().st_size:,} bytes" in shown
    for text in ("nothing is published", 'library_name: "prb_jax"', "## Evaluation on"):
        assert text in shown


def test_no_network_is_one_line(folder):
    variables = {"HF_ENDPOINT": "http://127.0.0.1:1", "HF_TOKEN": TOKEN}
    done = prb("push", "trained", "people/first", cwd=folder, **variables)
    assert done.returncode == 2
    assert done.stderr.splitlines()[-1].startswith("prb: error: people/first: the hub refused it: ")
    assert "Traceback" not in done.stderr


def test_evaluations_of_the_hub_are_written_in_its_format(folder, tmp_path):
    """The hub's own library reads the file back; what is not the whole data set is left out."""
    hub_data = {"kind": "hub", "repository": "org/benchmark", "split": "test"}
    record = json.loads((folder / "scored" / "run.json").read_text())
    places = {}
    for name, change in {"whole": {}, "cut": {"limit": 3}, "part": {"subset": "food"}, "file": {}}.items():
        data = {**record["inputs"]["data"], "subset": change.get("subset")}
        data |= {} if name == "file" else {"sources": [hub_data]}
        inputs = {**record["inputs"], "data": data, "limit": change.get("limit")}
        places[name] = shutil.copytree(folder / "scored", tmp_path / name)
        (places[name] / "run.json").write_text(json.dumps({**record, "inputs": inputs}))
    runs = list(places.values())
    upload = prepare_push(folder / "trained", "people/first", evaluations=runs, task_id="main")
    (entry,) = parse_eval_result_entries(yaml.safe_load(upload.results))
    summary = json.loads((folder / "scored" / "summary.json").read_text())
    assert (entry.dataset_id, entry.task_id, entry.value) == ("org/benchmark", "main", summary["accuracy"])
    assert entry.date == record["sessions"][-1]["started"]
    assert "split test, n 18, protocol default, profile_posts" in entry.notes
    with hub() as server:
        variables = {"HF_ENDPOINT": server.address, "HF_TOKEN": TOKEN}
        flags = ("--evaluations", places["whole"], "--task-id", "main")
        done = prb("push", "trained", "a/b", *flags, cwd=folder, **variables)
        assert done.returncode == 0, done.stderr
        assert server.commits[0][2][".eval_results/prb_jax.yaml"].decode() == upload.results
    assert prepare_push(folder / "trained", "a/b", evaluations=[places["file"]]).results == ""
