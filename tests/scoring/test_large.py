"""Data larger than memory: read by windows, with the same bytes as a result; counts, not timings."""

from __future__ import annotations

import gzip
import json
import subprocess
import sys
from functools import partial
from pathlib import Path

import pyarrow as pa
import pyarrow.parquet as pq
import pytest

from prb_jax import cli, evaluate
from prb_jax.scoring.reward_model import RewardModel
from tests.json_lines import write_lines
from tests.platform.processes.jobs import ended, job
from tests.scoring.large_process import Counts, read_by_windows
from tests.scoring.records import read_json, record

COUNT = 800
OPTIONS = {"max_length": 64, "profile_posts": 1, "controls": "none", "progress": False}
PROGRAM = ("-m", "tests.scoring.large_process")
ROOT = Path(__file__).resolve().parents[2]


def row(number: int) -> dict:
    twice = number % 500 in (3, 4)  # two equal records without an id
    shown = record((number - number % 500 if twice else number) % 700, longest=12).to_row()
    fields = {name: shown[name] for name in ("question", "profile") if name in shown} | {"rejected": "no"}
    if twice:
        return {**fields, "chosen": f"yes {number // 500}", "user_id": "u"}
    rare = {"subset": "rare"} if number % 97 == 0 else {}
    return {**fields, **rare, "id": f"c{number}", "chosen": f"yes {number}", "user_id": f"u{number % 20}"}


@pytest.fixture(scope="module")
def data(tmp_path_factory: pytest.TempPathFactory) -> Path:
    path = tmp_path_factory.mktemp("large") / "data.jsonl"
    return Path(write_lines(path, map(row, range(COUNT))))


def command(model: Path, data: Path, out: Path, *options: str) -> list[str]:
    shared = ["--max-length", "64", "--no-progress", "--profile-posts", "1", "--controls", "none"]
    return ["evaluate", str(model), "--data", str(data), "--out", str(out), *shared, *options]


def run(*arguments: object) -> subprocess.CompletedProcess[str]:
    command = [sys.executable, *map(str, arguments)]
    return subprocess.run(command, cwd=ROOT, capture_output=True, text=True, timeout=300)


def counts(output: str) -> dict[str, int]:
    return json.loads(output.splitlines()[-1])


FIGURES = ("n", "accuracy", "ties", "mean_margin", "user_accuracy", "truncated", "length_baseline")


def files(out: Path) -> list[bytes]:
    """Scores, and the figures of the summary that need no texts of others."""
    summary = read_json(out / "summary.json")
    return [(out / "scores.jsonl").read_bytes(), *(repr(summary[name]).encode() for name in FIGURES)]


@pytest.fixture(scope="module")
def expected(model: RewardModel, data: Path, tmp_path_factory: pytest.TempPathFactory) -> Path:
    """The run of the same data, held in memory."""
    out = tmp_path_factory.mktemp("held") / "run"
    evaluate(model, str(data), out=out, **OPTIONS)
    return out


@pytest.fixture
def seen(monkeypatch: pytest.MonkeyPatch) -> Counts:
    """Every file is large; what is read of it."""
    return read_by_windows(partial(monkeypatch.setattr, raising=False))


def test_windows_give_the_same_bytes(model, data, expected, seen, tmp_path):
    evaluate(model, str(data), out=tmp_path / "run", **OPTIONS)
    assert files(tmp_path / "run") == files(expected)
    assert seen.records == COUNT + 1  # the first one was looked at before
    assert seen.bytes <= data.stat().st_size + (1 << 16)
    ids = [json.loads(line)["id"] for line in files(tmp_path / "run")[0].splitlines()]
    assert ids[4] == f"{ids[3]}#2"


@pytest.mark.slow
def test_two_processes_read_the_files_each_for_itself(folder, data, expected, tmp_path):
    arguments = command(folder, data, tmp_path / "run")
    with job([*PROGRAM, *arguments, "--distributed"], count=2) as processes:
        outcomes = ended(processes)
    assert [status for status, *_ in outcomes] == [0, 0], outcomes
    assert files(tmp_path / "run") == files(expected)
    for _, output, _ in outcomes:
        assert counts(output)["records"] == COUNT + 1
        assert counts(output)["bytes"] <= data.stat().st_size + (1 << 16)


def test_gzip_and_parquet(data, tmp_path, monkeypatch):
    lines = data.read_bytes()
    whole = len(lines) // 2
    packed = tmp_path / "data.jsonl.gz"
    packed.write_bytes(gzip.compress(lines[:whole]) + gzip.compress(lines[whole:]))
    rows = [{"subset": "", **row(number), "id": f"c{number}"} for number in range(700)]
    pq.write_table(pa.Table.from_pylist(rows), tmp_path / "data.parquet", row_group_size=250)
    held = tmp_path / "held"
    evaluate("baseline:random", str(tmp_path / "data.parquet"), out=held, progress=False)
    seen = read_by_windows(partial(monkeypatch.setattr, raising=False))
    for path in (data, packed, tmp_path / "data.parquet"):
        before = seen.records
        evaluate("baseline:random", str(path), out=tmp_path / f"large-{path.name}", progress=False)
        assert seen.records > before
    assert files(held) == files(tmp_path / "large-data.parquet")
    assert files(tmp_path / "large-data.jsonl") == files(tmp_path / "large-data.jsonl.gz")


@pytest.mark.parametrize(
    ("change", "message"),
    [
        ({"id": "c7"}, "data.jsonl:701: field 'id': 'c7' was already used at {data}:8"),
        ({"chosen": 3}, "data.jsonl:701: field 'chosen'"),
    ],
)
def test_a_bad_record_is_named(seen, tmp_path, change, message, capsys):
    rows = [row(number) | (change if number == 700 else {}) for number in range(COUNT)]
    data = write_lines(tmp_path / "data.jsonl", rows)
    assert cli.main(["evaluate", "baseline:length", "--data", data, "--out", str(tmp_path / "run")]) == 2
    assert message.format(data=data) in capsys.readouterr().err
    assert seen.records > 600


@pytest.mark.slow
@pytest.mark.timeout(1200)
def test_a_hundred_thousand_comparisons_of_long_profiles(tmp_path):
    """100,000 comparisons, 20 of each of 5,000 users, with profiles of 2,000 words: 1 GB, of which little is held."""
    count = 100_000
    path = tmp_path / "data.jsonl"
    with path.open("w", encoding="utf-8") as file:
        for user in range(count // 20):
            profile = [{"id": "p", "category": "", "text": f"{user} " + "tea rain walk hill " * 500}]
            for number in range(20):
                pair = {"question": "q?", "chosen": f"a {number} {user}", "rejected": "b", "profile": profile}
                file.write(json.dumps({"id": f"{user}-{number}", "user_id": f"u{user}", **pair}) + "\n")
    assert path.stat().st_size > 900_000_000
    words = ("evaluate", "baseline:length", "--data", path, "--out", tmp_path / "run", "--no-progress")
    done = run(*PROGRAM, *words)
    assert done.returncode == 0, done.stderr
    seen = counts(done.stdout)
    assert seen["held"] <= 5000  # the baseline scores 4,096 at a time
    assert count <= seen["records"] <= 2 * count  # and the facts are taken on the same occasion
    assert read_json(tmp_path / "run" / "summary.json")["n"] == count
    assert 100 << 10 < seen["peak"] < 2 << 20  # KiB
