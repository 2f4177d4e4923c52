"""`prb compare`: real runs, compared by a real process and from Python."""

import json
import subprocess
import sys
from pathlib import Path

import pytest

import prb_jax as prb
from prb_jax import cli
from prb_jax.errors import RunError


def pairs(count: int, *, words: str = "green tea ") -> list[prb.Comparison]:
    return [
        prb.Comparison(
            id=f"c{i}",
            question="?",
            chosen=words * (1 + i * 7 % 5),
            rejected="no " * (1 + i % 3),
            user_id=f"u{i % 8}",
            profile=[{"id": f"p{i % 8}", "text": "I grow green tea." if i % 2 else "No."}],
        )
        for i in range(count)
    ]


@pytest.fixture(scope="module")
def runs(tmp_path_factory: pytest.TempPathFactory) -> Path:
    folder = tmp_path_factory.mktemp("runs")
    data = folder / "pairs.jsonl"
    data.write_text("".join(json.dumps(pair.to_row()) + "\n" for pair in pairs(80)))
    for name in ("length", "random", "profile-overlap"):
        prb.evaluate(f"baseline:{name}", str(data), out=folder / name, progress=False)
    return folder


def test_a_process_compares_and_writes_the_file(runs: Path, tmp_path: Path) -> None:
    command = [sys.executable, "-m", "prb_jax", "compare", "length", str(runs / "random"), "profile-overlap/"]
    done = subprocess.run(
        [*command, "--out", str(tmp_path / "new" / "out")],
        capture_output=True,
        text=True,
        timeout=120,
        cwd=runs,
    )
    assert (done.returncode, done.stderr) == (0, "")
    found = json.loads((tmp_path / "new" / "out" / "compare.json").read_text())
    summaries = {
        name: json.loads((runs / name / "summary.json").read_text())
        for name in ("length", "random", "profile-overlap")
    }
    assert {run["name"]: run["accuracy"] for run in found["runs"]} == {
        name: summary["accuracy"] for name, summary in summaries.items()
    }
    for run in found["runs"]:
        assert {"name", "accuracy", "ci95", "rank_group"} <= run.keys()
        assert (run["model"], run["protocol"]) == (f"baseline:{run['name']}", "default")
        low, high = run["ci95"]
        assert f"{run['accuracy']:.3f} [{low:.3f}..{high:.3f}]" in done.stdout
    for pair in found["pairs"]:
        keys = {"a", "b", "difference", "ci95", "p", "p_holm", "p_mcnemar", "n", "users", "flips", "scores"}
        assert pair.keys() == keys == keys & found["definitions"].keys() | {"a", "b"}
        assert f"{pair['scores']['rms']:.2g}" in done.stdout
        assert (pair["n"], pair["users"]) == (80, 8)
        assert f"{pair['difference']:+.3f} [{pair['ci95'][0]:+.3f}..{pair['ci95'][1]:+.3f}]" in done.stdout
    assert "80 comparisons of 8 users" in done.stdout
    by_length = summaries["random"]["baselines"]["baseline:length"]
    (pair,) = [pair for pair in found["pairs"] if {pair["a"], pair["b"]} == {"length", "random"}]
    assert abs(pair["difference"]) == pytest.approx(abs(by_length["difference"]))
    again = prb.compare(runs / "length", runs / "random", runs / "profile-overlap")
    assert again["pairs"] == found["pairs"]
    done = subprocess.run(
        [*command, "--format", "json"], capture_output=True, text=True, timeout=120, cwd=runs
    )
    assert (done.returncode, done.stderr) == (0, "")
    assert json.loads(done.stdout)["pairs"] == found["pairs"]
    assert again["definitions"] == found["definitions"]


def test_runs_in_folders_of_one_name_are_called_by_their_paths(runs: Path, tmp_path: Path) -> None:
    data = runs / "pairs.jsonl"
    other = tmp_path / "length"
    prb.evaluate("baseline:random", str(data), out=other, progress=False)
    found = prb.compare(runs / "length", other)
    assert {run["name"] for run in found["runs"]} == {str(runs / "length"), str(other)}


def refusal(capsys: pytest.CaptureFixture[str], *words: object) -> str:
    assert cli.main(["compare", *map(str, words)]) == 2
    (line,) = capsys.readouterr().err.strip().splitlines()
    return line


def test_what_cannot_be_compared_is_refused_by_name(
    runs: Path, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    length = runs / "length"
    assert "expected two runs or more, found 1" in refusal(capsys, length)
    assert "given twice, also as" in refusal(capsys, length, runs / "random" / ".." / "length")
    assert f"{tmp_path}: expected the folder of a run" in refusal(capsys, length, tmp_path)
    prb.evaluate("baseline:length", pairs(80, words="red tea "), out=tmp_path / "other", progress=False)
    line = refusal(capsys, length, tmp_path / "other")
    assert "length and other are runs on different data" in line
    assert "data.sources[0].files.pairs.jsonl" in line
    assert "data.sha256: null and" in line
    prb.evaluate("baseline:length", str(runs / "pairs.jsonl"), out=tmp_path / "less", limit=9, progress=False)
    line = refusal(capsys, length, tmp_path / "less")
    assert "data.comparisons: 80 and 9" in line
    assert "limit: null and 9" in line
    assert not (tmp_path / "out").exists()
    alone = [prb.Comparison(id=f"{i}", question="?", chosen="a" * i, rejected="b") for i in range(1, 5)]
    for name in ("length", "profile-overlap"):
        prb.evaluate(f"baseline:{name}", alone, out=tmp_path / "alone" / name, progress=False)
    undefined = "profile-overlap: its accuracy is not defined on these data (no response shares a word with a profile)"
    assert undefined in refusal(capsys, tmp_path / "alone" / "length", tmp_path / "alone" / "profile-overlap")
    (tmp_path / "less" / "summary.json").unlink()
    assert "the run is not finished" in refusal(capsys, length, tmp_path / "less", "--out", tmp_path / "out")
    (tmp_path / "file").touch()
    assert "the output folder is a file" in refusal(
        capsys, length, runs / "random", "--out", tmp_path / "file"
    )


def test_protocols_are_compared_only_on_request(
    runs: Path, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    record = json.loads((runs / "random" / "run.json").read_text())
    record["inputs"]["protocol"] = "paper"
    other = tmp_path / "paper"
    other.mkdir()
    for name in ("scores.jsonl", "summary.json"):
        (other / name).write_bytes((runs / "random" / name).read_bytes())
    (other / "run.json").write_text(json.dumps(record))
    line = refusal(capsys, runs / "length", other)
    assert "different protocols, default and paper" in line
    assert "--across-protocols" in line
    with pytest.raises(RunError, match="different protocols"):
        prb.compare(runs / "length", other)
    found = prb.compare(runs / "length", other, across_protocols=True)
    assert {run["protocol"] for run in found["runs"]} == {"default", "paper"}
    assert cli.main(["compare", "--across-protocols", str(runs / "length"), str(other)]) == 0
