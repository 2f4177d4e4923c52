"""`prb evaluate --wandb`: what Weights & Biases is told, by a stand-in that writes it down."""

import json
import os
import subprocess
import sys

STAND_IN = """
import json, os
def say(**what):
    with open(os.environ["SAID"], "a") as file:
        file.write(json.dumps(what) + "\\n")
class Summary:
    def update(self, values): say(summary=values)
class Run:
    summary = Summary()
    def finish(self): say(finished=True)
def init(**options):
    if options["project"] == "closed":
        raise RuntimeError("not logged in: run wandb login\\nmore")
    say(init=options)
    return Run()
"""


def prb(*arguments, cwd, path):
    command = [
        sys.executable,
        "-m",
        "prb_jax",
        "evaluate",
        "baseline:length",
        "--data",
        "pairs.jsonl",
        *arguments,
    ]
    environment = os.environ | {"PYTHONPATH": f"{path}:{os.getcwd()}", "SAID": str(cwd / "said.jsonl")}
    return subprocess.run(command, capture_output=True, text=True, cwd=cwd, env=environment, timeout=120)


def test_the_summary_is_written_to_the_project(tmp_path):
    pair = {
        "id": "1",
        "user_id": "u",
        "subset": "s",
        "question": "?",
        "chosen": "longer",
        "rejected": "short",
    }
    (tmp_path / "pairs.jsonl").write_text(json.dumps(pair) + "\n" + json.dumps(pair | {"id": "2"}) + "\n")
    module = tmp_path / "modules"
    module.mkdir()
    (module / "wandb.py").write_text(STAND_IN)
    done = prb("--wandb", "people", "--out", "run", cwd=tmp_path, path=module)
    assert done.returncode == 0, done.stderr
    started, summed, finished = map(json.loads, (tmp_path / "said.jsonl").read_text().splitlines())
    assert started["init"]["project"] == "people"
    assert started["init"]["name"] == "run"
    assert started["init"]["config"]["command"].startswith("prb evaluate baseline:length --data pairs.jsonl")
    summary = json.loads((tmp_path / "run" / "summary.json").read_text())
    told = summed["summary"]
    assert told["accuracy"] == summary["accuracy"] == 1.0
    assert told["by_subset/s/n"] == 2
    assert "definitions/n" not in told
    assert finished == {"finished": True}

    again = prb("--wandb", "people", "--out", "run", cwd=tmp_path, path=module)
    assert again.returncode == 0
    identities = [json.loads(line) for line in (tmp_path / "said.jsonl").read_text().splitlines()]
    assert len({entry["init"]["id"] for entry in identities if "init" in entry}) == 1

    refused = prb("--wandb", "closed", "--out", "other", cwd=tmp_path, path=module)
    assert refused.returncode == 2
    message = "prb: error: --wandb closed: wandb cannot start a run: not logged in: run wandb login"
    assert refused.stderr.splitlines() == [message]
    assert not (tmp_path / "other" / "scores.jsonl").exists()

    (module / "wandb.py").write_text("raise ImportError")
    missing = prb("--wandb", "people", "--out", "other", cwd=tmp_path, path=module)
    assert missing.returncode == 2
    assert "--wandb people: wandb is not installed: pip install wandb" in missing.stderr
