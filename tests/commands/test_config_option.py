"""`prb evaluate --config FILE`: the file, the command line before it, and what run.json says."""

import json
from pathlib import Path

import pytest

from prb_jax.cli import main
from tests.plain_process import prb


def written(path: Path, text: str) -> Path:
    """A config file that returns what the text says."""
    path.write_text(f"from ml_collections import ConfigDict\n\n\ndef get_config():\n    return {text}\n")
    return path


@pytest.mark.parametrize("kind", ["{}", "ConfigDict({})"])
def test_a_process_reads_a_file_and_the_command_line_comes_before_it(tmp_path, data, kind) -> None:
    out = tmp_path / "run"
    values = {
        "model": "baseline:random", "data": ["absent.jsonl"], "limit": 3, "seed": 5, "out": str(out),
        "no-progress": True, "subset": None,
    }  # fmt: skip
    config = written(tmp_path / "options.py", kind.format(values))
    done = prb("evaluate", "--config", config, "baseline:length", "--data", data, "--seed=0")
    assert done.returncode == 0, done.stderr
    assert done.stderr == ""  # no progress
    run = json.loads((out / "run.json").read_text())
    assert run["inputs"]["model"] == {"name": "baseline:length"}
    assert (run["inputs"]["limit"], run["inputs"]["seed"]) == (3, 0)
    # The recorded command is the whole one: it gives the same run without the file.
    assert run["command"] == [
        "prb", "evaluate", "baseline:length", "--data", str(data), "--out", str(out), "--limit", "3", "--no-progress",
    ]  # fmt: skip
    before = (out / "summary.json").read_bytes()
    assert main(run["command"][1:]) == 0
    assert (out / "summary.json").read_bytes() == before


def test_what_is_given_in_neither_place_is_missing(tmp_path, data, capsys) -> None:
    config = written(tmp_path / "options.py", "{'model': 'baseline:length'}")
    with pytest.raises(SystemExit) as ended:
        main(["evaluate", "--config", str(config), "--data", str(data)])
    assert ended.value.code == 2
    assert "the following arguments are required: --out (" in capsys.readouterr().err
    # A model may stand behind options, with a file or without.
    words = ["--data", str(data), "--out", str(tmp_path / "r")]
    assert main(["evaluate", "--limit", "2", "baseline:random", *words]) == 0
    assert main(["evaluate", "--config", str(config), *words[:-1], str(tmp_path / "s")]) == 0
    assert json.loads((tmp_path / "s" / "summary.json").read_text())["model"] == "baseline:length"
