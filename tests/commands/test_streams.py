"""The status and the one line of a `prb` process whose surroundings fail: output, devices, working directory."""

import json
import os
import subprocess
import sys
from pathlib import Path

import pytest

import prb_jax
from prb_jax import cli
from prb_jax.errors import RunError


def prb(
    *words: object, before: str = "", behind: str = "", **variables: str
) -> subprocess.CompletedProcess[str]:
    """A real process, with commands of a shell `before` it, and words `behind` it."""
    command = ["sh", "-c", f'{before} exec "$0" -m prb_jax "$@" {behind}', sys.executable, *map(str, words)]
    settings = {"capture_output": True, "text": True, "timeout": 120}
    return subprocess.run(command, env={**os.environ, **variables}, **settings)


def only_line(done: subprocess.CompletedProcess[str]) -> str:
    assert done.returncode == 2, done.stderr
    lines = done.stderr.strip().splitlines()
    assert len([line for line in lines if line.startswith("prb: error:")]) == 1
    assert "Traceback" not in done.stderr
    assert "Exception ignored" not in done.stderr
    return lines[-1]


def test_a_table_that_cannot_be_printed_is_an_error_of_a_complete_run(data: Path, tmp_path: Path) -> None:
    command = ["evaluate", "baseline:length", "--data", data, "--no-progress", "--out"]
    line = only_line(prb(*command, tmp_path / "full", behind="> /dev/full"))
    assert "cannot write to standard output: No space left on device" in line
    closed = prb(*command, tmp_path / "closed", behind=">&-")
    narrow = prb(*command, tmp_path / "narrow", PYTHONIOENCODING="ascii")
    for done in (closed, narrow):  # nobody reads it, or letters are lacking
        assert (done.returncode, done.stderr) == (0, "")
    for name in ("full", "closed", "narrow"):
        assert json.loads((tmp_path / name / "summary.json").read_text())["n"] == 9
        assert (tmp_path / name / "scores.jsonl").read_bytes().count(b"\n") == 9


def test_a_platform_without_devices(data: Path, tmp_path: Path) -> None:
    command = ["rank-profiles", "--encoder", tmp_path, "--data", data, "--out", tmp_path / "ranked.jsonl"]
    for name in ("gpx", "tpu"):
        line = only_line(prb(*command, JAX_PLATFORMS=name))
        assert f"JAX finds no device (JAX_PLATFORMS={name})" in line


def test_a_working_directory_that_was_removed(data: Path, tmp_path: Path) -> None:
    gone = tmp_path / "gone"
    gone.mkdir()
    words = ("evaluate", "baseline:length", "--data", data, "--out", "run")
    done = prb(*words, before=f"cd {gone} && rmdir {gone} &&")
    assert "the working directory was removed" in only_line(done)


@pytest.mark.parametrize("words", [("--out", ""), ("--out=",)])
def test_an_empty_argument(words: tuple[str, ...], evaluate, capsys) -> None:
    with pytest.raises(SystemExit, match="2"):
        evaluate(*words)
    assert "an argument is empty" in capsys.readouterr().err


def test_an_empty_name_of_a_folder(data: Path) -> None:
    with pytest.raises(RunError, match="out: expected the name of a folder"):
        prb_jax.evaluate("baseline:length", str(data), out="")


def test_control_characters_do_not_reach_the_terminal(data: Path, evaluate, tmp_path: Path, capsys) -> None:
    row, escape = json.loads(data.read_text().splitlines()[0]), "\x1b]0;title\x07\x9b2J"
    data.write_text(json.dumps(row | {"subset": f"s{escape}"}) + "\n")
    assert evaluate("--no-progress") == 0
    for form in ("csv", "markdown", "latex", "rewardbench", None):
        assert cli.main(["leaderboard", str(tmp_path), *(["--format", form] if form else [])]) == 0
    assert evaluate("--subset", f"none{escape}") == 2
    data.write_text(json.dumps(row | {"id": f"i{escape}", "chosen": ""}) + "\n")
    assert evaluate("--out", tmp_path / escape.replace("/", "")) == 2
    shown = capsys.readouterr()
    assert "\\x1b" in shown.out
    assert "\\x1b" in shown.err
    for text in (shown.out, shown.err):
        assert all(letter.isprintable() or letter == "\n" for letter in text)
