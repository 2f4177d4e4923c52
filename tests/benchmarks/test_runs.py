"""Benchmarks in whole runs: summary, tables, result files."""

import json
from dataclasses import dataclass

import datasets
import pandas as pd
import pytest

import prb_jax as prb
from prb_jax import cli
from prb_jax.benchmarks import rewardbench, rewardbench2
from prb_jax.benchmarks.benchmark import organisation_and_name
from prb_jax.errors import DataError
from prb_jax.scoring.baselines import BASELINES
from prb_jax.sources.reading import read_comparisons
from tests.scoring.records import write_model
from tests.scoring.slow_scorer import SlowScorer
from tests.sources.hub_layout import prb_tables, write_layout

from .layouts import (
    rewardbench2_rows,
    write_hub,
    write_judgebench,
    write_llmbar,
    write_prefeval,
    write_rewardbench,
    write_rm_bench,
)

WRITERS = {
    "prb": lambda folder: write_layout(folder, prb_tables(), readme=True),
    "rewardbench": write_rewardbench,
    "rewardbench2": lambda folder: write_hub(folder, {"test": rewardbench2_rows()}),
    "rm-bench": write_rm_bench,
    "judgebench": write_judgebench,
    "llmbar": write_llmbar,
    "prefeval": write_prefeval,
}


@pytest.mark.parametrize("name", WRITERS)
def test_a_run_of_every_benchmark(tmp_path, capsys, name):
    folder = WRITERS[name](tmp_path / "data")
    command = ["evaluate", "baseline:length", "--data", f"{name}:{folder}", "--out", str(tmp_path / "run")]
    assert cli.main([*command, "--no-progress"]) == 0
    printed = capsys.readouterr().out
    summary = json.loads((tmp_path / "run" / "summary.json").read_text())
    result = summary["benchmarks"][name]
    assert set(summary["benchmarks"]) == {name}
    assert "benchmarks" in summary["definitions"]
    assert 0 <= result["score"] <= 1.01
    assert set(result["baselines"]) == set(BASELINES)
    drawn = {"score_ci95", "score_ci95_reason", "figures_ci95"}
    assert drawn < result.keys()
    own = {key: value for key, value in result.items() if key not in {"rule", "baselines", *drawn}}
    assert result["baselines"]["baseline:length"] == own  # the model is this baseline
    assert result["missing"] == []
    for shown in (name, "score", f"{result['score']:.4f}", result["rule"][:20]):
        assert shown in printed
    before = {path: path.read_bytes() for path in (tmp_path / "run").rglob("*") if path.is_file()}
    assert cli.main([*command, "--no-progress"]) == 0
    assert {path: path.read_bytes() for path in (tmp_path / "run").rglob("*") if path.is_file()} == before


def test_the_rule_sees_the_rows_of_its_benchmark_alone(tmp_path):
    v1, v2 = write_rewardbench(tmp_path / "v1"), WRITERS["rm-bench"](tmp_path / "v2")
    own = tmp_path / "own.jsonl"
    own.write_text('{"id": "x", "question": "?", "chosen": "a", "rejected": "b"}\n')
    sources = [f"rewardbench:{v1}", own, f"rm-bench:{v2}"]
    result = prb.evaluate("baseline:length", sources, out=tmp_path / "run", progress=False)
    assert result.summary["n"] == 46 + 1 + 15
    found = result.summary["benchmarks"]
    assert found["rewardbench"]["details"]["pairs"] == 46
    assert found["rm-bench"]["figures"]["chat"] is not None
    rows = [row for row in result.rows if row.subset in rewardbench.SUBSETS]
    assert rewardbench.score(rows).to_json()["figures"] == found["rewardbench"]["figures"]


def test_parts_of_one_benchmark_are_put_together(tmp_path):
    parts = []
    for number, row in enumerate(rewardbench2_rows()):
        path = tmp_path / f"{number}.json"
        path.write_text(json.dumps([row]))
        parts.append(f"rewardbench2:{path}")
    together = prb.evaluate("baseline:length", parts, out=tmp_path / "run", progress=False)
    whole = tmp_path / "whole.json"
    whole.write_text(json.dumps(rewardbench2_rows()))
    once = prb.evaluate("baseline:length", f"rewardbench2:{whole}", out=tmp_path / "once", progress=False)
    assert together.summary["benchmarks"] == once.summary["benchmarks"]


def test_without_a_benchmark_the_summary_has_none(tmp_path):
    own = tmp_path / "own.jsonl"
    own.write_text('{"id": "x", "question": "?", "chosen": "a", "rejected": "b"}\n')
    result = prb.evaluate("baseline:length", own, out=tmp_path / "run", progress=False)
    assert "benchmarks" not in result.summary


def test_a_rule_that_cannot_be_applied_is_found_before_anything_is_scored(tmp_path):
    path = tmp_path / "x.jsonl"
    path.write_text('{"id": "x", "question": "?", "chosen": "a", "rejected": "b"}\n')
    scorer = SlowScorer()
    with pytest.raises(DataError, match=r": the rule of '\w+' cannot be applied: row 'x': no subset"):
        prb.evaluate(scorer, f"rewardbench:{path}", out=tmp_path / "run", progress=False)
    assert scorer.scored == []
    assert not (tmp_path / "run").exists()


def read_as_leaderboards_do(folder):
    """Every file of one kind as a row of a table, found as ORG/MODEL.json and parsed as one record."""
    files = sorted(folder.glob("*/*.json"))
    frames = [
        datasets.Dataset.from_json(str(file), cache_dir=str(folder / "cache")).to_pandas() for file in files
    ]  # pyright: ignore
    return pd.concat(frames)


def test_result_files_of_version_1(tmp_path):
    folder = write_rewardbench(tmp_path / "rb")
    result = prb.evaluate("baseline:length", f"rewardbench:{folder}", out=tmp_path / "run", progress=False)
    place = tmp_path / "run" / "rewardbench"
    table = read_as_leaderboards_do(place / "eval-set")
    assert list(table["model"]) == ["baseline/length"]
    assert set(table.columns) == {*rewardbench.SUBSETS, "model", "model_type", "chat_template"}
    means = {name: float(table[name].iloc[0]) for name in rewardbench.SUBSETS}
    assert means == result.summary["benchmarks"]["rewardbench"]["details"]["subsets"]
    text = (place / "eval-set" / "baseline" / "length.json").read_text()
    assert text == json.dumps(json.loads(text), indent=4, sort_keys=True) + "\n"
    scores = json.loads((place / "eval-set-scores" / "baseline" / "length.json").read_text())
    facts = {"model": "baseline/length", "model_type": "Custom Classifier", "chat_template": None}
    assert {key: scores.pop(key) for key in facts} == facts
    frame = pd.DataFrame(scores)
    assert len(frame) == 46
    assert list(frame["id"]) == list(range(46))
    assert frame["scores_chosen"].iloc[1] == [float(len("a good answer!"))]
    assert frame["text_rejected"].iloc[0] == "Question 0 of alpacaeval-easy?\n\na bad answer"
    assert list(frame["results"]) == [int(row.scores[0] > row.scores[1]) for row in result.rows]
    assert frame.groupby("subset")["results"].mean().to_dict() == means


def test_result_files_of_version_2(tmp_path):
    folder = write_hub(tmp_path / "rb2", {"test": rewardbench2_rows()})
    result = prb.evaluate("baseline:length", f"rewardbench2:{folder}", out=tmp_path / "run", progress=False)
    place = tmp_path / "run" / "rewardbench2"
    table = read_as_leaderboards_do(place / "eval-set")
    figures = result.summary["benchmarks"]["rewardbench2"]["figures"]
    assert {name: float(table[name].iloc[0]) for name in rewardbench2.SUBSETS} == pytest.approx(figures)
    scores = json.loads((place / "eval-set-scores" / "baseline" / "length.json").read_text())
    frame = pd.DataFrame({name: values for name, values in scores.items() if isinstance(values, list)})
    assert set(frame.columns) == {"id", "subset", "text", "scores", "num_correct", "results"}
    assert list(frame["num_correct"]) == [1, 1, 1, 1, 1, 1, 3]
    assert [len(texts) for texts in frame["text"]] == [4] * 5 + [3, 6]
    assert frame["results"].iloc[0] == 1 / 2  # shares the greatest length with one of three wrong answers


@dataclass
class _Named(SlowScorer):
    name: str = "org/model-1.5"

    def identity(self):
        return {"name": self.name}


class _Template:
    template_hash = "sha256:x"

    def render(self, conversations):
        return ["".join(f"<{m.role}>{m.content}" for m in messages) for messages in conversations]


def test_the_texts_are_those_of_the_models_template(tmp_path):
    folder = write_rewardbench(tmp_path / "rb")
    scorer = _Named()
    scorer.tokenizer = _Template()  # pyright: ignore[reportAttributeAccessIssue]
    prb.evaluate(scorer, f"rewardbench:{folder}", out=tmp_path / "run", progress=False)
    path = tmp_path / "run" / "rewardbench" / "eval-set-scores" / "org" / "model-1.5.json"
    scores = json.loads(path.read_text())
    assert scores["text_chosen"][0] == "<user>Question 0 of alpacaeval-easy?<assistant>a good answer"
    assert (scores["model_type"], scores["chat_template"]) == ("Seq. Classifier", "sha256:x")


@pytest.mark.parametrize(
    ("model", "name"),
    [
        ("org/model", "org/model"),
        ("/data/models/my rm/", "local/my_rm"),
        ("runs/a/b", "local/b"),
        ("..", "local/model"),
        ("baseline:profile-overlap", "baseline/profile-overlap"),
        ("model", "local/model"),
    ],
)
def test_names_of_result_files(model, name):
    assert organisation_and_name(model) == name


def test_a_stray_copy_beside_the_topics_of_prefeval_is_not_read(tmp_path):
    folder = write_prefeval(tmp_path / "data")
    (folder / "travel_hotel copy.json").write_text((folder / "travel_hotel.json").read_text())
    assert len(read_comparisons(f"prefeval:{folder}")) == 6
    for path in folder.iterdir():
        path.rename(path.with_name(f"my_{path.name}"))
    with pytest.raises(DataError, match=r"with the name of a topic \(education_learning_styles"):
        read_comparisons(f"prefeval:{folder}")


def test_limits_and_subsets_say_what_is_missing(tmp_path, capsys):
    folder = write_rewardbench(tmp_path / "rb")
    data = f"rewardbench:{folder}"
    command = ["evaluate", "baseline:random", "--data", data, "--limit", "3", "--no-progress", "--out"]
    assert cli.main([*command, str(tmp_path / "run")]) == 0
    printed = " ".join(capsys.readouterr().out.split())
    assert "not in the data: alpacaeval-hard, mt-bench-easy" in printed
    assert len(read_comparisons(data, limit=3)) == 3


def test_a_model_on_responses_of_any_number(tmp_path):
    folder = write_hub(tmp_path / "rb2", {"test": rewardbench2_rows()})
    model = prb.load(write_model(tmp_path / "qwen3", "qwen3"))
    result = prb.evaluate(model, f"rewardbench2:{folder}", out=tmp_path / "run", progress=False)
    found = result.summary["benchmarks"]["rewardbench2"]
    by_hand = [row.scores[0] == max(row.scores) for row in result.rows[:5]]
    assert list(found["figures"].values())[:5] == [float(won) for won in by_hand]
    assert found["figures"]["Ties"] == pytest.approx(rewardbench2.ties_score(result.rows[5:]).score)
    path = tmp_path / "run" / "rewardbench2" / "eval-set-scores" / "local" / "qwen3.json"
    scores = json.loads(path.read_text())
    assert scores["scores"] == [list(row.scores) for row in result.rows]
    asked, answered = prb.Message("user", "Question 0?"), prb.Message("assistant", "the right one")
    assert scores["text"][0][0] == model.tokenizer.render([[asked, answered]])[0]
    assert scores["chat_template"] == model.tokenizer.template_hash
