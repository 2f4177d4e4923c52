"""The status and the one line of a `prb` process whose surroundings fail: output, devices, working directory."""

import json
import os
import subprocess
import sys
from pathlib import Path

import pytest

ROWS = [
    {"id": "a", "user_id": "u", "question": "Tea?", "chosen": "Green tea.", "rejected": "No."},
    {"id": "b", "user_id": "u", "question": "Rain?", "chosen": "Yes, heavy rain.", "rejected": "No."},
]


@pytest.fixture
def data(tmp_path: Path) -> Path:
    path = tmp_path / "pairs.jsonl"
    path.write_text("".join(json.dumps(row) + "\n" for row in ROWS))
    return path


def prb(*words: object, shell: str = "", **options: str) -> subprocess.CompletedProcess[str]:
    """A real process; `shell` is put behind the command."""
    command = f'exec "$0" -m prb_jax "$@" {shell}'
    return subprocess.run(
        ["sh", "-c", command, sys.executable, *map(str, words)],
        capture_output=True,
        text=True,
        env={**os.environ, **options},
        timeout=120,
        check=False,
    )


def only_line(done: subprocess.CompletedProcess[str]) -> str:
    assert done.returncode == 2, done.stderr
    lines = done.stderr.strip().splitlines()
    assert len([line for line in lines if line.startswith("prb: error:")]) == 1
    assert "Traceback" not in done.stderr
    assert "Exception ignored" not in done.stderr
    return lines[-1]


def test_a_table_that_cannot_be_printed_is_an_error_of_a_complete_run(data: Path, tmp_path: Path) -> None:
    command = ["evaluate", "baseline:length", "--data", data, "--no-progress", "--out"]
    line = only_line(prb(*command, tmp_path / "full", shell="> /dev/full"))
    assert "cannot write to standard output: No space left on device" in line
    closed = prb(*command, tmp_path / "closed", shell=">&-")
    assert (closed.returncode, closed.stderr) == (0, "")  # nobody reads it
    for name in ("full", "closed"):
        assert json.loads((tmp_path / name / "summary.json").read_text())["n"] == 2
        assert (tmp_path / name / "scores.jsonl").read_bytes().count(b"\n") == 2


def test_a_platform_without_devices(data: Path, tmp_path: Path) -> None:
    command = ["rank-profiles", "--encoder", tmp_path, "--data", data, "--out", tmp_path / "ranked.jsonl"]
    for name in ("gpx", "tpu"):
        line = only_line(prb(*command, JAX_PLATFORMS=name))
        assert f"JAX finds no device (JAX_PLATFORMS={name})" in line


def test_a_working_directory_that_was_removed(data: Path, tmp_path: Path) -> None:
    gone = tmp_path / "gone"
    gone.mkdir()
    command = f'cd {gone} && rmdir {gone} && exec "$0" -m prb_jax "$@"'
    words = [sys.executable, "evaluate", "baseline:length", "--data", str(data), "--out", "run"]
    done = subprocess.run(["sh", "-c", command, *words], capture_output=True, text=True, check=False)
    assert "the working directory was removed" in only_line(done)


@pytest.mark.parametrize("words", [("--out", ""), ("--out=",)])
def test_an_empty_argument(words: tuple[str, ...], data: Path, capsys: pytest.CaptureFixture[str]) -> None:
    from prb_jax import cli

    with pytest.raises(SystemExit, match="2"):
        cli.main(["evaluate", "baseline:length", "--data", str(data), *words])
    assert "an argument is empty" in capsys.readouterr().err


def test_an_empty_name_of_a_folder(data: Path) -> None:
    import prb_jax as prb
    from prb_jax.errors import RunError

    with pytest.raises(RunError, match="out: expected the name of a folder"):
        prb.evaluate("baseline:length", str(data), out="")


def test_control_characters_do_not_reach_the_terminal(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    from prb_jax import cli

    path, escape = tmp_path / "pairs.jsonl", "\x1b]0;title\x07\x9b2J"
    path.write_text("".join(json.dumps(row | {"subset": f"s{escape}"}) + "\n" for row in ROWS))
    command = ["evaluate", "baseline:length", "--data", str(path), "--out", str(tmp_path / "run")]
    assert cli.main([*command, "--no-progress"]) == 0
    assert cli.main([*command, "--subset", f"none{escape}"]) == 2
    path.write_text(json.dumps(ROWS[0] | {"id": f"i{escape}", "chosen": ""}) + "\n")
    assert cli.main([*command, "--out", str(tmp_path / escape.replace("/", ""))]) == 2
    shown = capsys.readouterr()
    assert "\\x1b" in shown.out
    assert "\\x1b" in shown.err
    for text in (shown.out, shown.err):
        assert all(letter.isprintable() or letter == "\n" for letter in text)
