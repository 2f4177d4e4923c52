"""Benchmarks in whole runs: summary, tables, result files."""

import json
from dataclasses import dataclass

import datasets
import pandas as pd
import pytest

import prb_jax as prb
from prb_jax import cli
from prb_jax.errors import DataError
from prb_jax.records.benchmarks import rewardbench, rewardbench2
from prb_jax.records.benchmarks.benchmark import organisation_and_name
from prb_jax.records.intake import read_comparisons
from prb_jax.scoring.baselines import BASELINES
from tests.json_lines import write_lines
from tests.records.sources.hub_layout import prb_tables, write_layout
from tests.scoring.records import read_json, write_model
from tests.scoring.slow_scorer import SlowScorer

from . import people_layouts
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
    **people_layouts.WRITERS,
}


@pytest.mark.parametrize("name", WRITERS)
def test_a_run_of_every_benchmark(tmp_path, capsys, name):
    folder = WRITERS[name](tmp_path / "data")
    command = ["evaluate", "baseline:length", "--data", f"{name}:{folder}", "--out", str(tmp_path / "run")]
    assert cli.main([*command, "--no-progress"]) == 0
    printed = capsys.readouterr().out
    summary = read_json(tmp_path / "run" / "summary.json")
    result = summary["benchmarks"][name]
    assert set(summary["benchmarks"]) == {name}
    assert "benchmarks" in summary["definitions"]
    assert 0 <= result["score"] <= 1.01
    assert set(result["baselines"]) == set(BASELINES)
    drawn = {"score_ci95", "score_ci95_reason", "figures_ci95"}
    assert drawn < result.keys()
    figures = {key: value for key, value in result.items() if key not in {"rule", "baselines", *drawn}}
    assert result["baselines"]["baseline:length"] == figures  # the model is this baseline
    assert result["missing"] == []
    for shown in (name, "score", f"{result['score']:.4f}", result["rule"][:20]):
        assert shown in printed
    before = {path: path.read_bytes() for path in (tmp_path / "run").rglob("*") if path.is_file()}
    assert cli.main([*command, "--no-progress"]) == 0
    assert {path: path.read_bytes() for path in (tmp_path / "run").rglob("*") if path.is_file()} == before


@pytest.fixture
def pair(tmp_path):
    """A file of one pair, of no benchmark."""
    row = {"id": "x", "question": "?", "chosen": "a", "rejected": "b"}
    return write_lines(tmp_path / "pair.jsonl", [row])


def test_the_rule_sees_the_rows_of_its_benchmark_alone(pair, tmp_path):
    v1, v2 = write_rewardbench(tmp_path / "v1"), write_rm_bench(tmp_path / "v2")
    sources = [f"rewardbench:{v1}", pair, f"rm-bench:{v2}"]
    result = prb.evaluate("baseline:length", sources, progress=False)
    assert result.summary["n"] == 46 + 1 + 15
    scores = result.summary["benchmarks"]
    assert scores["rewardbench"]["details"]["pairs"] == 46
    assert scores["rm-bench"]["figures"]["chat"] is not None
    rows = [row for row in result.rows if row.subset in rewardbench.SUBSETS]
    assert rewardbench.score(rows).to_json()["figures"] == scores["rewardbench"]["figures"]
    assert "benchmarks" not in prb.evaluate("baseline:length", pair, progress=False).summary


def test_parts_of_one_benchmark_are_put_together(tmp_path):
    def evaluated(files):
        sources = []
        for number, rows in enumerate(files):
            path = tmp_path / f"{len(files)}-{number}.json"
            path.write_text(json.dumps(rows))
            sources.append(f"rewardbench2:{path}")
        return prb.evaluate("baseline:length", sources, progress=False).summary["benchmarks"]

    rows = rewardbench2_rows()
    assert evaluated([[row] for row in rows]) == evaluated([rows])


def test_a_rule_that_cannot_be_applied_is_refused_before_anything_is_scored(pair, tmp_path):
    scorer = SlowScorer()
    with pytest.raises(DataError, match=r": the rule of '\w+' cannot be applied: row 'x': no subset"):
        prb.evaluate(scorer, f"rewardbench:{pair}", out=tmp_path / "run", progress=False)
    assert scorer.scored == []
    assert not (tmp_path / "run").exists()


def read_as_leaderboards_do(folder):
    """Every file of one kind as a row of a table, found as ORG/MODEL.json and parsed as one record."""
    files, cache = sorted(folder.glob("*/*.json")), str(folder / "cache")
    return pd.concat([datasets.Dataset.from_json(str(f), cache_dir=cache).to_pandas() for f in files])  # pyright: ignore


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
    scores = read_json(place / "eval-set-scores" / "baseline" / "length.json")
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
    scores = read_json(place / "eval-set-scores" / "baseline" / "length.json")
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
    scores = read_json(tmp_path / "run" / "rewardbench" / "eval-set-scores" / "org" / "model-1.5.json")
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
    data = f"rewardbench:{write_rewardbench(tmp_path / 'rb')}"
    command = ["evaluate", "baseline:random", "--data", data, "--limit", "3", "--no-progress"]
    assert cli.main([*command, "--out", str(tmp_path / "run")]) == 0
    printed = " ".join(capsys.readouterr().out.split())
    assert "not in the data: alpacaeval-hard, mt-bench-easy" in printed
    assert len(read_comparisons(data, limit=3)) == 3


def test_a_model_on_responses_of_any_number(tmp_path):
    folder = write_hub(tmp_path / "rb2", {"test": rewardbench2_rows()})
    model = prb.load(write_model(tmp_path / "qwen3", "qwen3"))
    result = prb.evaluate(model, f"rewardbench2:{folder}", out=tmp_path / "run", progress=False)
    figures = result.summary["benchmarks"]["rewardbench2"]["figures"]
    by_hand = [row.scores[0] == max(row.scores) for row in result.rows[:5]]
    assert list(figures.values())[:5] == [float(won) for won in by_hand]
    assert figures["Ties"] == pytest.approx(rewardbench2.ties_score(result.rows[5:]).score)
    scores = read_json(tmp_path / "run" / "rewardbench2" / "eval-set-scores" / "local" / "qwen3.json")
    assert scores["scores"] == [list(row.scores) for row in result.rows]
    asked, answered = prb.Message("user", "Question 0?"), prb.Message("assistant", "the right one")
    assert scores["text"][0][0] == model.tokenizer.render([[asked, answered]])[0]
    assert scores["chat_template"] == model.tokenizer.template_hash
