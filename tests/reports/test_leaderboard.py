"""`prb leaderboard`: every run below a folder, in every form."""

import csv
import io
import json
import re
from html import escape
from pathlib import Path

import pytest

import prb_jax
from prb_jax.errors import RunError
from prb_jax.reports.table import gained, percent
from tests.json_lines import write_lines
from tests.reports.conftest import Run, evaluate, pairs


@pytest.fixture(scope="module")
def folder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    top = tmp_path_factory.mktemp("board")
    rows = [{**pair.to_row(), "subset": "even" if i % 2 else "odd_50%"} for i, pair in enumerate(pairs(80))]
    data = write_lines(top / "pairs_&_more.jsonl", rows)
    evaluate("baseline:random", data, top / "random")
    evaluate("baseline:length", data, top / "deep" / "er" / "length", controls="blind")
    evaluate("baseline:profile-overlap", data, top / "part")
    (top / "part" / "summary.json").unlink()
    scores = top / "part" / "scores.jsonl"
    scores.write_text("".join(scores.read_text().splitlines(keepends=True)[:30]))
    (top / "other").mkdir()
    (top / "other" / "run.json").write_text('{"kind": "something else"}')
    return top


def test_finished_runs_from_the_best_to_the_worst(folder: Path, prb: Run) -> None:
    best, last = entries = prb_jax.leaderboard(folder)
    assert [best["run"], last["run"]] == ["deep/er/length", "random"]
    for entry in entries:
        summary = json.loads((folder / entry["run"] / "summary.json").read_text())
        for name in ("n", "accuracy", "ci95", "user_accuracy", "coverage", "accuracy_by_subset"):
            assert entry[name] == summary[name]
    shown = prb("leaderboard", folder)
    assert f"{best['accuracy']:.3f}" in shown
    assert "[{:.3f}..{:.3f}]".format(*best["ci95"]) in shown
    assert shown.index("deep/er/length") < shown.index("random")
    assert "part" not in shown


def test_unfinished_runs_and_controls_only_if_asked(folder: Path, prb: Run) -> None:
    entries = {entry["run"]: entry for entry in prb_jax.leaderboard(folder, unfinished=True, controls=True)}
    assert set(entries) == {"deep/er/length", "deep/er/length/controls/blind", "random", "part"}
    part = entries["part"]
    assert (part["scored"], part["comparisons"], part["accuracy"]) == (30, 80, None)
    assert "30 of 80" in prb("leaderboard", folder, "--unfinished", "--format", "markdown")
    assert entries["deep/er/length"]["gain"] == 0.0
    with pytest.raises(RunError, match=r"no finished run .*; 1 are not finished: --unfinished shows them"):
        prb_jax.leaderboard(folder / "part")


def test_every_form_holds_the_figures(folder: Path, prb: Run) -> None:
    first, second = prb_jax.leaderboard(folder)
    forms = ("csv", "latex", "markdown", "rewardbench")
    texts = {form: prb("leaderboard", folder, "--format", form) for form in forms}
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


def test_ties_count_half_in_the_order(tmp_path: Path, prb: Run) -> None:
    data = write_lines(tmp_path / "pairs.jsonl", [pair.to_row() for pair in pairs(12)])
    evaluate(lambda one: [1.0, float(one.id[-1] in "02468")], data, tmp_path / "coarse", name="coarse")
    evaluate(lambda one: [1.0, 2.0 * (one.id[-1] in "02468")], data, tmp_path / "fine", name="fine")
    first, second = prb_jax.leaderboard(tmp_path)
    assert (first["run"], second["run"]) == ("coarse", "fine")
    assert first["accuracy"] == second["accuracy"]
    assert first["half_credit_accuracy"] == first["accuracy"] + first["ties"] / 24
    assert "half credit" in prb("leaderboard", tmp_path, "--format", "markdown").splitlines()[0]
    shown = prb("leaderboard", tmp_path)
    assert f"{first['half_credit_accuracy']:.3f}" in shown


def test_a_page_opens_with_the_best_run(folder: Path, prb: Run, tmp_path: Path) -> None:
    """Names of runs stay text, and chance is drawn beside the runs."""
    page = tmp_path / "page.html"
    assert prb("leaderboard", folder, "--out", page).endswith(f"written to {page}\n")
    best, last = prb_jax.leaderboard(folder)
    assert best["chance"] == 0.5
    text = page.read_text("utf-8")
    (answer,) = re.findall(r'<p class="answer">(.*?)</p>', text)
    (data,) = re.findall(r"runs on (.+?): it prefers", answer)  # of a long path, the end
    assert escape(best["data"]).endswith(data.removeprefix("..."))
    assert "pairs_&amp;_more.jsonl" in data
    share, other = percent(best["accuracy"], best["ci95"]), percent(last["accuracy"], last["ci95"])
    assert answer == (
        f"deep/er/length is the best of 2 runs on {data}: it prefers what the user wants in {share} of 80 comparisons; "
        f"the profile is worth {gained(best['gain'], best['gain_ci95'])}; next is random with {other}."
    )
    assert text.count('<g class="baseline">') == 2
    assert "chance 0.5" in text
    assert '<td class="figure"' in text
    (tmp_path / "other.jsonl").write_text("".join(f"{json.dumps(pair.to_row())}\n" for pair in pairs(8)))
    evaluate("baseline:random", tmp_path / "other.jsonl", tmp_path / "runs" / "a")
    evaluate("baseline:random", str(folder / "pairs_&_more.jsonl"), tmp_path / "runs" / "b")
    prb_jax.leaderboard(tmp_path / "runs", out=page)
    first, *others = re.findall(r'<p class="answer">(.*?)</p>', page.read_text("utf-8"))
    assert first.startswith("The best of 2 runs on 2 data sets: ")
    assert re.search(r"b on \S*pairs_&amp;_more.jsonl \(48.7 % .*a on \S*other.jsonl \(50.0 %", first)
    assert len(others) == 2
    with pytest.raises(RunError, match=r"page\.txt: expected a name that ends in \.html"):
        prb_jax.leaderboard(folder, out="page.txt")


def test_what_is_no_folder_of_runs(tmp_path: Path) -> None:
    with pytest.raises(RunError, match="expected a folder with runs, found nothing"):
        prb_jax.leaderboard(tmp_path / "no")
    with pytest.raises(RunError, match=r"no finished run of `prb evaluate` in it or below it$"):
        prb_jax.leaderboard(tmp_path)
