"""Evaluation: outputs, resuming after kills, refusals, sources that change."""

import os
import shutil
from dataclasses import dataclass
from pathlib import Path

import numpy as np
import pyarrow as pa
import pytest
from datasets import Dataset

from prb_jax import Comparison, DataError, RunError, evaluate
from prb_jax.records.files import file_digest
from prb_jax.text.view import DEFAULT_PROFILE_POSTS
from prb_jax.trees.tree import ScoredBatch, Truncation
from tests.scoring.records import read_json, score_rows, write_comparisons
from tests.scoring.slow_scorer import SlowScorer, comparisons

LOADING = {"dtype": "float32", "quantize": "int8", "attention": "xla"}  # options of a model by name
ROOT = Path(__file__).resolve().parents[2]


def same_files(out: Path, other: Path) -> bool:
    """Whether two runs have the same scores and the same summary, byte for byte."""
    names = ("scores.jsonl", "summary.json")
    return all((out / name).read_bytes() == (other / name).read_bytes() for name in names)


def test_the_files_and_the_result_agree_and_say_what_decides_them(tmp_path):
    items = comparisons(23)
    result = evaluate(SlowScorer(), items, out=tmp_path, progress=False)
    rows = score_rows(tmp_path)
    assert [row["id"] for row in rows] == [item.id for item in items]
    wins = [row["scores"][0] > row["scores"][1] for row in rows]
    ties = [row["scores"][0] == row["scores"][1] for row in rows]
    summary = read_json(tmp_path / "summary.json")
    assert summary == result.summary
    assert (summary["model"], summary["n"]) == ("slow", 23)
    assert summary["accuracy"] == pytest.approx(np.mean(wins))
    assert summary["ties"] == sum(ties)
    assert set(summary["accuracy_by_subset"]) == {"even", "odd"}
    assert summary["truncated"] == sum(bool(row["truncated"]) for row in rows) > 0
    assert [row.id for row in result.rows] == [item.id for item in items]
    assert result.rows[3].scores == rows[3]["scores"]
    # two users judge equal responses: the clusters are kept beside the rows
    assert set(os.listdir(tmp_path)) == {
        "clusters.jsonl", "run.json", "scores.jsonl", "summary.json", "users.csv",
    }  # fmt: skip
    assert (summary["crossed"] or {})["by"] == "response"
    run = read_json(tmp_path / "run.json")
    assert run["command"] == []  # of a call from Python
    assert set(run["inputs"]) == {
        "model", "data", "protocol", "profile_posts", "max_length", "limit", "seed", "versions",
    }  # fmt: skip
    assert {"prb_jax", "jax", "flax", "transformers"} <= set(run["inputs"]["versions"])
    assert run["inputs"]["model"] == {"files": {"weights": "sha256:0"}}
    assert run["model"] == "slow"
    (session,) = run["sessions"]
    assert session["started"].endswith("+00:00")


def test_baselines_stand_beside_every_model(tmp_path):
    summary = evaluate(SlowScorer(), comparisons(30), out=tmp_path, progress=False).summary
    assert list(summary["baselines"]) == [
        f"baseline:{name}"
        for name in ("length", "shorter", "first", "random", "profile-overlap", "popularity", "nearest-users")
    ]
    first = summary["baselines"]["baseline:first"]
    assert first["accuracy"] is None
    assert "given as chosen and rejected" in first["difference_ci95_reason"]
    shorter = summary["baselines"]["baseline:shorter"]
    assert shorter["accuracy"] == pytest.approx(1 - summary["accuracy"] - shorter["ties"] / 30)
    length = summary["baselines"]["baseline:length"]
    assert summary["length_baseline"] == length["accuracy"]
    # This scorer prefers length too, so it equals that baseline and the paired difference is nothing.
    assert length["accuracy"] == summary["accuracy"]
    overlap = summary["baselines"]["baseline:profile-overlap"]  # no comparison has a profile
    assert overlap["n"] == 30
    assert overlap["accuracy"] is overlap["ties"] is overlap["difference"] is None
    assert overlap["ci95_reason"] == "no response shares a word with a profile"
    for baseline in summary["baselines"].values():
        assert {"accuracy", "ci95", "user_accuracy", "coverage"} <= set(baseline)


def test_votes_are_counted_where_others_judge_the_same_responses(tmp_path):
    items = [
        Comparison(
            id=f"{user}-{pair}",
            question=f"{pair}?",
            responses=["x", "yy"],
            labels=[1, 0] if (user + pair) % 3 else [0, 1],
            user_id=f"u{user}",
            profile=[{"text": "x"}, {"text": "yy"}],
        )
        for user in range(8)
        for pair in range(6 if user < 7 else 7)  # nobody else judges the last one
    ]
    summary = evaluate("baseline:popularity", items, out=tmp_path / "a", progress=False).summary
    popular = summary["baselines"]["baseline:popularity"]
    assert (summary["n"], popular["n"]) == (49, 48)
    rows = {row["id"]: row for row in score_rows(tmp_path / "a")}
    assert rows["7-6"]["scores"] == [0, 0]
    assert popular["accuracy"] == pytest.approx(summary["accuracy"] * 49 / 48)
    assert popular["difference"] is None  # from itself
    length = evaluate("baseline:length", items, out=tmp_path / "b", progress=False).summary
    judged = [row for row in rows.values() if row["id"] != "7-6"]
    longer = np.mean([row["labels"] == [0, 1] for row in judged])
    popularity = length["baselines"]["baseline:popularity"]
    assert popularity["difference"] == pytest.approx(longer - popular["accuracy"])
    assert length["baselines"]["baseline:first"]["accuracy"] == pytest.approx(1 - length["accuracy"])


@pytest.mark.parametrize("protocol", ["default", "paper"])
def test_options_reach_the_scorer_with_the_protocols_defaults(tmp_path, protocol):
    scorer = SlowScorer()
    evaluate(scorer, comparisons(4), out=tmp_path, protocol=protocol, max_length=99, progress=False)
    posts = {"default": 10, "paper": 0}[protocol]
    assert DEFAULT_PROFILE_POSTS[protocol] == posts
    assert scorer.options == {"profile_posts": posts, "protocol": protocol, "max_length": 99}
    assert read_json(tmp_path / "run.json")["inputs"]["profile_posts"] == posts


def test_bytes_do_not_depend_on_batches(tmp_path):
    for batch in (1, 4, 100):
        evaluate(SlowScorer(batch=batch), comparisons(23), out=tmp_path / str(batch), progress=False)
    first, *others = (tmp_path / str(batch) / "scores.jsonl" for batch in (1, 4, 100))
    assert all(other.read_bytes() == first.read_bytes() for other in others)


def test_a_continued_run_scores_only_unfinished_batches(tmp_path):
    items = comparisons(23)
    with pytest.raises(KeyboardInterrupt):
        evaluate(SlowScorer(until=12), items, out=tmp_path / "a", progress=False)
    assert not (tmp_path / "a" / "summary.json").exists()
    assert len(score_rows(tmp_path / "a")) == 12
    # A torn line makes the last batch a partly finished one, which is computed again as a whole.
    path = tmp_path / "a" / "scores.jsonl"
    path.write_bytes(path.read_bytes()[:-5])
    scorer = SlowScorer()
    evaluate(scorer, items, out=tmp_path / "a", progress=False)
    assert len(scorer.skipped) == 8
    assert len(scorer.scored) == 15
    evaluate(SlowScorer(), items, out=tmp_path / "b", progress=False)
    assert same_files(tmp_path / "a", tmp_path / "b")
    again = SlowScorer()
    evaluate(again, items, out=tmp_path / "a", progress=False)
    assert again.scored == []


def test_a_changed_run_is_refused_with_both_values(tmp_path):
    items = comparisons(8)
    evaluate(SlowScorer(), items, out=tmp_path, progress=False, seed=1)
    for changed, line in (
        ({"protocol": "paper"}, 'protocol: "default" -> "paper"'),
        ({"profile_posts": 3}, "profile_posts: 10 -> 3"),
        ({"max_length": 5}, "max_length: null -> 5"),
        ({"limit": 8}, "limit: null -> 8"),
        ({"seed": 2}, "seed: 1 -> 2"),
        ({"model": SlowScorer(weights="sha256:1")}, r'model\.files\.weights: "sha256:0" -> "sha256:1"'),
        ({"data": items[:7]}, r"data\.comparisons: 8 -> 7"),
        ({"data": items[::-1]}, r"data\.sha256"),
    ):
        options = {"model": SlowScorer(), "data": items, "seed": 1, **changed}
        with pytest.raises(RunError, match=line):
            evaluate(**options, out=tmp_path, progress=False)


def test_scores_that_cannot_be():
    @dataclass
    class Wrong(SlowScorer):
        value: object = None

        def stream(self, comparisons, **options):
            yield ScoredBatch([0], [np.asarray(self.value, np.float32)], [1], [Truncation()])

    for value, message in (
        ([1, 2, 3], "'c0'.*3 scores, expected 2"),
        ([np.nan, 1], r"'c0'.*\[nan, 1\.0\].*finite"),
        ([0, 1], "1 of 2 rows of scores are missing, first 'c1'"),
    ):
        with pytest.raises(RunError, match=message):
            evaluate(Wrong(value=value), comparisons(2), progress=False)


def test_bad_arguments(tmp_path):
    one = comparisons(1)
    unlabelled = Comparison(id="x", question="?", responses=["a", "b"])
    for options, error, message in (
        ({"data": []}, DataError, "nothing to score"),
        ({"data": [*one, *one]}, DataError, "'c0' occurs twice: in position 0 and in position 1"),
        ({"data": [unlabelled]}, DataError, "position 0: comparison 'x' has no labels"),
        ({"data": [1]}, DataError, "position 0: expected a Comparison or an object with its fields, found i"),
        ({"data": one, "subset": "s"}, DataError, "subset: applies to named sources"),
        ({"data": one, "limit": 0}, DataError, "limit: expected a positive number"),
        ({"data": one, "protocol": "other"}, DataError, "protocol: expected.*'other'"),
        ({"data": one, "profile_posts": -1}, DataError, "profile_posts: expected 0 or more, found -1"),
        ({"data": one, "max_length": 0}, DataError, "max_length: expected at least 1, found 0"),
        ({"data": one, **LOADING}, RunError, f"{', '.join(LOADING)}: decided where the model was loaded"),
        ({"data": one, "model": "baseline:best"}, RunError, "unknown baseline 'baseline:best'"),
    ):
        with pytest.raises(error, match=message):
            evaluate(**{"model": SlowScorer(), **options}, out=tmp_path / "x", progress=False)
    assert not (tmp_path / "x").exists()


def test_records_of_python_are_known_by_their_contents(tmp_path):
    rows = [comparison.to_row() for comparison in comparisons(6)]
    names = {key for row in rows for key in row}
    table = pa.Table.from_pylist([{name: row.get(name) for name in names} for row in rows])
    out = tmp_path / "run"
    for data in (rows, iter(comparisons(6)), table, Dataset.from_list(rows)):  # each is the same run
        result = evaluate("baseline:length", data, out=out, progress=False)
    assert read_json(out / "run.json")["inputs"]["data"]["sha256"].startswith("sha256:")
    assert [row.id for row in result.rows] == [row["id"] for row in rows]
    with pytest.raises(RunError, match="sha256"):
        evaluate("baseline:length", [*rows[:5], rows[5] | {"category": "new"}], out=out, progress=False)
    unnamed = [{**rows[number], "id": None} for number in (0, 1, 0)]
    ids = [row.id for row in evaluate("baseline:length", unnamed, progress=False).rows]
    assert ids == [Comparison(**unnamed[0]).id, Comparison(**unnamed[1]).id, f"{ids[0]}#2"]


def test_named_files_their_limit_and_an_id_in_two_of_them(tmp_path):
    items = comparisons(20)
    one = write_comparisons(tmp_path / "one.jsonl", items[:12])
    two = write_comparisons(tmp_path / "two.jsonl", items[12:])
    result = evaluate(SlowScorer(), [one, str(two)], out=tmp_path / "all", progress=False)
    assert [row.id for row in result.rows] == [item.id for item in items]
    run = read_json(tmp_path / "all" / "run.json")
    assert run["data"] == [str(one), str(two)]
    files = [source["files"] for source in run["inputs"]["data"]["sources"]]
    assert files == [{path.name: file_digest(path)} for path in (one, two)]
    result = evaluate(SlowScorer(), [one, two], out=tmp_path / "few", limit=3, progress=False)
    assert [row.id for row in result.rows] == ["c0", "c1", "c2", "c12", "c13", "c14"]
    assert result.summary["limit"] == 3
    copy = shutil.copy(two, tmp_path / "copy.jsonl")
    for sources, message in (
        ([two, copy], f"'c12' .*{two} .*{copy}"),
        ([one, one], "given twice as a source"),
    ):
        with pytest.raises(DataError, match=message):
            evaluate(SlowScorer(), sources, progress=False)


def test_a_file_that_changes_or_vanishes_while_it_is_scored(tmp_path):
    path = write_comparisons(tmp_path / "data.jsonl", comparisons(9))
    before = path.read_bytes()

    @dataclass
    class Meddling(SlowScorer):
        vanish: bool = False

        def stream(self, comparisons, **options):
            yield from super().stream(comparisons, **options)
            if self.vanish:
                path.unlink()
            else:
                path.write_bytes(before + b"\n\n")

    with pytest.raises(DataError, match=r"data\.jsonl: changed while it was being scored"):
        evaluate(Meddling(), path, out=tmp_path / "run", progress=False)
    path.write_bytes(before)
    with pytest.raises(DataError, match=r"data\.jsonl: vanished while it was being scored"):
        evaluate(Meddling(vanish=True), path, out=tmp_path / "run", progress=False)
    assert not (tmp_path / "run" / "summary.json").exists()
    path.write_bytes(before)
    scorer = SlowScorer()
    evaluate(scorer, path, out=tmp_path / "run", progress=False)
    assert scorer.scored == []
    assert read_json(tmp_path / "run" / "summary.json")["n"] == 9


def test_a_file_is_known_by_its_name_and_contents_wherever_it_lies(tmp_path):
    path = write_comparisons(tmp_path / "data.jsonl", comparisons(9))
    evaluate("baseline:length", path, out=tmp_path / "run", progress=False)
    (tmp_path / "elsewhere").mkdir()
    path = path.rename(tmp_path / "elsewhere" / path.name)
    evaluate("baseline:length", path, out=tmp_path / "run", progress=False)
    write_comparisons(path, comparisons(8))
    changes = r'(?s)data\.sources\[0\]\.files\.data\.jsonl: "sha256:.*data\.comparisons: 9 -> 8'
    with pytest.raises(RunError, match=changes):
        evaluate("baseline:length", path, out=tmp_path / "run", progress=False)


def test_progress_goes_to_standard_error_as_lines(tmp_path, capsys):
    evaluate(SlowScorer(), comparisons(9), out=tmp_path)
    captured = capsys.readouterr()
    assert captured.out == ""
    assert "left, 9 of 9 pairs (100%), " in captured.err
