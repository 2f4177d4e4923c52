"""`prb leaderboard`: every run below a folder, in every form."""

import csv
import io
import json
import subprocess
import sys
from pathlib import Path

import pytest

import prb_jax as prb
from prb_jax import cli
from prb_jax.errors import RunError
from tests.reports.test_comparison import pairs


@pytest.fixture(scope="module")
def folder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    top = tmp_path_factory.mktemp("board")
    data = top / "pairs_&_more.jsonl"
    rows = [{**pair.to_row(), "subset": "even" if i % 2 else "odd_50%"} for i, pair in enumerate(pairs(80))]
    data.write_text("".join(json.dumps(row) + "\n" for row in rows))
    prb.evaluate("baseline:random", str(data), out=top / "random", progress=False)
    prb.evaluate(
        "baseline:length", str(data), out=top / "deep" / "er" / "length", controls="blind", progress=False
    )
    prb.evaluate("baseline:profile-overlap", str(data), out=top / "part", progress=False)
    (top / "part" / "summary.json").unlink()
    scores = top / "part" / "scores.jsonl"
    scores.write_text("".join(scores.read_text().splitlines(keepends=True)[:30]))
    (top / "other").mkdir()
    (top / "other" / "run.json").write_text('{"kind": "something else"}')
    return top


def output(*words: object) -> str:
    command = [sys.executable, "-m", "prb_jax", "leaderboard", *map(str, words)]
    done = subprocess.run(command, capture_output=True, text=True, timeout=120)
    assert (done.returncode, done.stderr) == (0, "")
    return done.stdout


def test_finished_runs_from_the_best_to_the_worst(folder: Path) -> None:
    found = prb.leaderboard(folder)
    assert [entry["run"] for entry in found] == ["deep/er/length", "random"]
    for entry in found:
        summary = json.loads((folder / entry["run"] / "summary.json").read_text())
        for name in ("n", "accuracy", "ci95", "user_accuracy", "coverage", "accuracy_by_subset"):
            assert entry[name] == summary[name]
    shown = output(folder)
    low, high = found[0]["ci95"]
    assert f"{found[0]['accuracy']:.3f}" in shown
    assert f"[{low:.3f}..{high:.3f}]" in shown
    assert shown.index("deep/er/length") < shown.index("random")
    assert "part" not in shown


def test_unfinished_runs_and_controls_only_if_asked(folder: Path) -> None:
    found = {entry["run"]: entry for entry in prb.leaderboard(folder, unfinished=True, controls=True)}
    assert set(found) == {"deep/er/length", "deep/er/length/controls/blind", "random", "part"}
    assert (found["part"]["scored"], found["part"]["comparisons"], found["part"]["accuracy"]) == (
        30,
        80,
        None,
    )
    assert "30 of 80" in output(folder, "--unfinished", "--format", "markdown")
    assert found["deep/er/length"]["gain"] == 0.0
    with pytest.raises(RunError, match=r"no finished run .*; 1 are not finished: --unfinished shows them"):
        prb.leaderboard(folder / "part")


def test_every_form_holds_the_figures(folder: Path, capsys: pytest.CaptureFixture[str]) -> None:
    first, second = prb.leaderboard(folder)
    texts = {}
    for form in ("csv", "latex", "markdown", "rewardbench"):
        assert cli.main(["leaderboard", str(folder), "--format", form]) == 0
        texts[form] = capsys.readouterr().out
    lines = list(csv.DictReader(io.StringIO(texts["csv"])))
    assert [line["run"] for line in lines] == ["deep/er/length", "random"]
    assert float(lines[1]["accuracy"]) == second["accuracy"]
    assert [float(lines[1][f"ci95_{end}"]) for end in ("low", "high")] == second["ci95"]
    assert float(lines[1]["subset odd_50%"]) == second["accuracy_by_subset"]["odd_50%"]
    assert (lines[1]["gain"], float(lines[0]["gain"])) == ("", 0)
    models = json.loads(texts["rewardbench"])
    assert [model["model"] for model in models] == ["baseline/length", "baseline/random"]
    assert models[1]["even"] == second["accuracy_by_subset"]["even"]
    assert {"model_type", "chat_template"} <= models[0].keys()
    shown = f"{first['accuracy']:.3f} [{first['ci95'][0]:.3f}..{first['ci95'][1]:.3f}]"
    rows = texts["markdown"].splitlines()
    assert len(rows) == 4
    assert {row.count("|") for row in rows} == {9}
    assert shown in rows[2]
    assert shown in texts["latex"]
    assert r"pairs\_\&\_more.jsonl" in texts["latex"]
    assert texts["latex"].count(r"\\") == 3
    assert texts["latex"].startswith(r"\begin{tabular}{lllrrrrr}")


def test_what_is_no_folder_of_runs(tmp_path: Path) -> None:
    with pytest.raises(RunError, match="expected a folder with runs, found nothing"):
        prb.leaderboard(tmp_path / "no")
    with pytest.raises(RunError, match=r"no finished run of `prb evaluate` in it or below it$"):
        prb.leaderboard(tmp_path)
