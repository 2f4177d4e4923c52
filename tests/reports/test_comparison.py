"""`prb compare`: real runs, compared from the command line and from Python."""

import json
import shutil
from pathlib import Path

import pytest

import prb_jax
from prb_jax.errors import RunError
from tests.json_lines import write_lines
from tests.reports.conftest import Run, evaluate, pairs

NAMES = ("length", "random", "profile-overlap")


@pytest.fixture(scope="module")
def runs(tmp_path_factory: pytest.TempPathFactory) -> Path:
    folder = tmp_path_factory.mktemp("runs")
    data = write_lines(folder / "pairs.jsonl", (pair.to_row() for pair in pairs(80)))
    for name in NAMES:
        evaluate(f"baseline:{name}", data, folder / name)
    return folder


def test_runs_are_compared_and_the_file_is_written(
    runs: Path, tmp_path: Path, prb: Run, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.chdir(runs)
    monkeypatch.setenv("COLUMNS", "160")  # no cell is broken
    command = ["compare", "length", runs / "random", "profile-overlap/"]
    shown = prb(*command, "--out", tmp_path / "new" / "out")
    compared = json.loads((tmp_path / "new" / "out" / "compare.json").read_text())
    summaries = {name: json.loads((runs / name / "summary.json").read_text()) for name in NAMES}
    assert {run["name"]: run["accuracy"] for run in compared["runs"]} == {
        name: summary["accuracy"] for name, summary in summaries.items()
    }
    for run in compared["runs"]:
        assert {"name", "accuracy", "ci95", "rank_group"} <= run.keys()
        assert (run["model"], run["protocol"]) == (f"baseline:{run['name']}", "default")
        low, high = run["ci95"]
        assert f"{run['accuracy']:.3f} [{low:.3f}..{high:.3f}]" in shown
    for pair in compared["pairs"]:
        keys = {"a", "b", "difference", "ci95", "p", "p_holm", "p_mcnemar", "n", "users", "flips", "scores"}
        keys |= {"detectable"}
        assert f"{pair['detectable']:.3f}" in shown
        assert pair.keys() == keys == keys & compared["definitions"].keys() | {"a", "b"}
        assert (pair["n"], pair["users"]) == (80, 8)
        assert f"{pair['difference']:+.3f} [{pair['ci95'][0]:+.3f}..{pair['ci95'][1]:+.3f}]" in shown
    assert "80 comparisons of 8 users" in shown
    best, second = compared["runs"][:2]
    told = f"{best['accuracy']:.3f} [{best['ci95'][0]:.3f}, {best['ci95'][1]:.3f}], ahead of"
    assert told in " ".join(shown.split())
    assert f"{best['name']} minus {second['name']}" in shown.split("80 comparisons of 8 users")[0]
    two = prb("compare", runs / "length", runs / "random")
    scores = prb_jax.compare(runs / "length", runs / "random")["pairs"][0]["scores"]
    assert f"scores: RMS difference {scores['rms']:.2g}" in two
    by_length = summaries["random"]["baselines"]["baseline:length"]
    (pair,) = [pair for pair in compared["pairs"] if {pair["a"], pair["b"]} == {"length", "random"}]
    assert abs(pair["difference"]) == pytest.approx(abs(by_length["difference"]))
    again = prb_jax.compare(*(runs / name for name in NAMES))
    assert (again["pairs"], again["definitions"]) == (compared["pairs"], compared["definitions"])
    assert json.loads(prb(*command, "--format", "json"))["pairs"] == compared["pairs"]


def test_runs_in_folders_of_one_name_are_called_by_their_paths(runs: Path, tmp_path: Path) -> None:
    other = shutil.copytree(runs / "random", tmp_path / "length")
    compared = prb_jax.compare(runs / "length", other)
    assert {run["name"] for run in compared["runs"]} == {str(runs / "length"), str(other)}


def test_what_cannot_be_compared_is_refused_by_name(runs: Path, tmp_path: Path, prb: Run) -> None:
    def refused(*words: object) -> str:
        return prb("compare", length, *words, status=2)

    length = runs / "length"
    assert "expected two runs or more, found 1" in refused()
    assert "given twice, also as" in refused(runs / "random" / ".." / "length")
    assert f"{tmp_path}: expected the folder of a run" in refused(tmp_path)
    evaluate("baseline:length", pairs(80, words="red tea "), tmp_path / "other")
    evaluate("baseline:length", runs / "pairs.jsonl", tmp_path / "less", limit=9)
    for name, *parts in (
        ("other", "length and other are runs on different data", "data.sources[0].files.pairs.jsonl",
         "data.sha256: null and"),
        ("less", "data.comparisons: 80 and 9", "limit: null and 9"),
    ):  # fmt: skip
        line = refused(tmp_path / name)
        assert all(part in line for part in parts), line
    alone = [prb_jax.Comparison(id=f"{i}", question="?", chosen="a" * i, rejected="b") for i in range(1, 5)]
    both = [tmp_path / "alone" / name for name in ("length", "profile-overlap")]
    for path in both:
        evaluate(f"baseline:{path.name}", alone, path)
    undefined = "profile-overlap: its accuracy is not defined on these data (no response shares a word with a profile)"
    assert undefined in prb("compare", *both, status=2)
    (tmp_path / "less" / "summary.json").unlink()
    assert "the run is not finished" in refused(tmp_path / "less", "--out", tmp_path / "out")
    assert not (tmp_path / "out").exists()
    (tmp_path / "file").touch()
    assert "the output folder is a file" in refused(runs / "random", "--out", tmp_path / "file")


def test_protocols_are_compared_only_on_request(runs: Path, tmp_path: Path, prb: Run) -> None:
    record = json.loads((runs / "random" / "run.json").read_text())
    record["inputs"]["protocol"] = "paper"
    both = runs / "length", shutil.copytree(runs / "random", tmp_path / "paper")
    (tmp_path / "paper" / "run.json").write_text(json.dumps(record))
    with pytest.raises(RunError, match=r"different protocols, default and paper, .*--across-protocols"):
        prb_jax.compare(*both)
    compared = json.loads(prb("compare", "--across-protocols", *both, "--format", "json"))
    assert {run["protocol"] for run in compared["runs"]} == {"default", "paper"}
