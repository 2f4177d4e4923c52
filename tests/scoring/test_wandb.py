"""`prb evaluate --wandb`: what Weights & Biases is told, by a stand-in that writes it down."""

import os
import subprocess
import sys

from tests.json_lines import read_lines, write_lines
from tests.scoring.records import read_json

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


def evaluate(project, out, *, cwd, path):
    command = [sys.executable, "-m", "prb_jax", "evaluate", "baseline:length", "--data", "pairs.jsonl"]
    command += ["--wandb", project, "--out", out]
    environment = os.environ | {"PYTHONPATH": f"{path}:{os.getcwd()}", "SAID": str(cwd / "said.jsonl")}
    return subprocess.run(command, capture_output=True, text=True, cwd=cwd, env=environment, timeout=120)


def test_the_summary_is_written_to_the_project(tmp_path):
    pair = {"user_id": "u", "subset": "s", "question": "?", "chosen": "longer", "rejected": "short"}
    write_lines(tmp_path / "pairs.jsonl", [pair | {"id": "1"}, pair | {"id": "2"}])
    module = tmp_path / "modules"
    module.mkdir()
    (module / "wandb.py").write_text(STAND_IN)
    done = evaluate("people", "run", cwd=tmp_path, path=module)
    assert done.returncode == 0, done.stderr
    started, summed, finished = read_lines(tmp_path / "said.jsonl")
    assert started["init"]["project"] == "people"
    assert started["init"]["name"] == "run"
    assert started["init"]["config"]["command"].startswith("prb evaluate baseline:length --data pairs.jsonl")
    summary = read_json(tmp_path / "run" / "summary.json")
    told = summed["summary"]
    assert told["accuracy"] == summary["accuracy"] == 1.0
    assert told["by_subset/s/n"] == 2
    assert "definitions/n" not in told
    assert finished == {"finished": True}

    assert evaluate("people", "run", cwd=tmp_path, path=module).returncode == 0
    entries = read_lines(tmp_path / "said.jsonl")
    assert len({entry["init"]["id"] for entry in entries if "init" in entry}) == 1

    refused = evaluate("closed", "other", cwd=tmp_path, path=module)
    assert refused.returncode == 2
    message = "prb: error: --wandb closed: wandb cannot start a run: not logged in: run wandb login"
    assert refused.stderr.splitlines() == [message]
    assert not (tmp_path / "other" / "scores.jsonl").exists()

    (module / "wandb.py").write_text("raise ImportError")
    missing = evaluate("people", "other", cwd=tmp_path, path=module)
    assert missing.returncode == 2
    assert "--wandb people: wandb is not installed: pip install wandb" in missing.stderr
