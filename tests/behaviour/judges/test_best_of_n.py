"""`prb best-of-n`: the curves are those of the scores that the models give, and bad samples are one clear error."""

import json
from collections.abc import Sequence
from dataclasses import fields, replace
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from rouge_score.rouge_scorer import RougeScorer

import prb_jax as prb
from prb_jax import cli
from prb_jax.behaviour.generation.guided import Guide
from prb_jax.behaviour.generation.rules import SampleOptions
from prb_jax.behaviour.generation.sample import RUNS, sample_data
from prb_jax.behaviour.judges.candidates import read_candidates
from prb_jax.behaviour.rl.rewards import _asks
from prb_jax.metrics.best_of import best_of_first, best_of_k
from prb_jax.models.readouts.load_options import LoadOptions
from prb_jax.reports.best_of_n import best_of_n_answer
from prb_jax.runs.behaviour import read_behaviour
from tests.json_lines import read_lines, write_lines
from tests.scoring.records import write_model
from tests.tiny_policies import write_policy

N = 4


@pytest.fixture(scope="module")
def samples(tmp_path_factory) -> Path:
    """A finished run: two users, four samples a prompt, one of them made empty by hand."""
    folder = tmp_path_factory.mktemp("samples")
    rows = [
        {"id": f"q{k}", "user_id": f"u{k % 2}", "question": f"What should I cook {k}?", "chosen": "Something quick.",
         "rejected": "No."}
        for k in range(4)
    ]  # fmt: skip
    data = write_lines(folder / "pairs.jsonl", rows)
    write_policy(folder / "policy", "qwen3", eos=3, num_hidden_layers=2)
    options = SampleOptions(n=N, max_new_tokens=8, stop_ids=())
    sample_data(folder / "policy", data, out=folder / "run", options=options, progress=False)
    lines = read_lines(folder / "run" / "samples.jsonl")
    lines[6]["text"] = " \n"
    write_lines(folder / "run" / "samples.jsonl", lines)
    RUNS.finish(folder / "run", json.loads((folder / "run" / "summary.json").read_text()))
    return folder / "run"


def best_of_n(samples: Path, out: Path, rewards: Sequence[str] = ("baseline:length",), **more: Any) -> Any:
    """A run's summary."""
    return prb.best_of_n(samples, list(rewards), out=out, progress=False, **more).summary


def test_curves_are_those_of_the_scores(samples, tmp_path, capsys):
    model, out = write_model(tmp_path / "rm", "qwen3", num_hidden_layers=2), tmp_path / "out"
    names = [str(model), "baseline:length"]
    # An option of loading is for the model beside the baseline.
    words = ["--samples", str(samples), "--rewards", *names, "--dtype", "float32", "--out", str(out)]
    assert cli.main(["best-of-n", *words]) == 0
    shown = capsys.readouterr().out
    assert "1 empty samples cannot be scored" in shown
    assert "prompts with fewer samples than others: 1 " in shown
    assert "no intervals: 2 users" in shown
    summary = json.loads((out / "summary.json").read_text())
    assert (summary["n"], summary["empty"], summary["left_out"], summary["fewer"]) == (4, 1, [], 1)
    texts: dict[str, list[str]] = {}
    for row in read_lines(samples / "samples.jsonl"):
        texts.setdefault(row["id"], []).extend([row["text"]] if row["text"].strip() else [])
    asked = [
        prb.Comparison(id=name, question=f"What should I cook {name[1:]}?", responses=responses)
        for name, responses in texts.items()
    ]
    scores, rouge = prb.load(model).score(asked), RougeScorer(["rougeL"])
    truth = [
        np.array([rouge.score("Something quick.", text)["rougeL"].fmeasure for text in comparison.responses])
        for comparison in asked
    ]
    for point in summary["curves"][str(model)]:
        pairs = [(r, q, min(point["k"], len(r))) for r, q in zip(scores, truth, strict=True)]
        assert point["quality"] == pytest.approx(np.mean([best_of_k(*pair) for pair in pairs]), abs=1e-9)
        assert point["first"] == pytest.approx(np.mean([best_of_first(*pair) for pair in pairs]))
        assert (point["ci95"], point["ci95_reason"]) == (None, "2 users; an interval needs at least 6")
    best = [point["quality"] for point in summary["curves"]["oracle"]]
    assert best == sorted(best)
    assert best[-1] == pytest.approx(np.mean([qualities.max() for qualities in truth]))
    assert len({round(point["quality"], 9) for point in summary["curves"]["random"]}) == 1
    assert (out / "curves.png").read_bytes().startswith(b"\x89PNG")

    with pytest.raises(prb.RunError, match="dtype: "):
        best_of_n(samples, tmp_path / "none", loading=LoadOptions(dtype="float32"))
    with pytest.raises(prb.RunError, match='quality: "reference" -> "baseline:length"'):
        best_of_n(samples, out, names, quality="baseline:length")


def test_prompts_that_a_file_of_samples_lacks_are_counted(samples, tmp_path, capsys):
    lines = [line for line in read_lines(samples / "samples.jsonl") if line["id"] != "q0"][:-1]
    texts = [{name: line[name] for name in ("id", "sample", "text")} for line in lines]
    words = ["--samples", write_lines(tmp_path / "part.jsonl", texts), "--rewards", "baseline:length"]
    words += ["--data", str(samples.parent / "pairs.jsonl")]
    assert cli.main(["best-of-n", *words, "--out", str(tmp_path / "out")]) == 0
    shown = capsys.readouterr().out
    assert "1 of 4 prompts have no sample that was scored and are left out" in shown
    assert "prompts with fewer samples than others: " in shown
    assert json.loads((tmp_path / "out" / "summary.json").read_text())["left_out"] == ["q0"]


def test_a_reward_model_is_shown_the_whole_comparison(tmp_path):
    """Every field but the responses and their labels: of samples, of rollouts and of guided texts."""
    whole = {
        "id": "q0", "prompt": [{"role": "system", "content": "Be kind."}, {"role": "user", "content": "What?"}],
        "responses": ["Tea.", "No."], "labels": [1.0, 0.0], "user_id": "u", "profile_order": "bm25",
        "profile": [{"id": "p", "category": "food", "text": "I like tea."}], "category": "drinks", "subset": "s",
        "margin": 2.0, "rubric_aspects": [{"aspect": "tea", "evidence": "p", "reason": "liked"}],
        "narrative": "A life.",
    }  # fmt: skip
    data = write_lines(tmp_path / "data.jsonl", [whole])
    (comparison,) = prb.read_comparisons(data)
    left_out = ("responses", "labels", "is_pair")
    carried = [field.name for field in fields(comparison) if field.name not in left_out]
    assert all(getattr(comparison, name) for name in carried if name != "hints")  # which are of no record
    write_policy(tmp_path / "policy", "qwen3", eos=3, num_hidden_layers=1)
    options = SampleOptions(n=2, max_new_tokens=4, stop_ids=(), seed=1)
    policy = prb.load_policy(tmp_path / "policy")
    sample_data(policy, data, out=tmp_path / "run", options=options, progress=False)
    (candidates,) = read_candidates(tmp_path / "run", None).prompts
    hinted = replace(comparison, hints="Earlier choices.")
    (rollouts,) = _asks(0, hinted, ["one", "two"])
    guided: list[prb.Comparison] = []

    class Noting:
        def score(self, comparisons: Sequence[prb.Comparison]) -> list[np.ndarray]:
            guided.extend(comparisons)
            return [np.zeros(len(comparison.responses)) for comparison in comparisons]

    prompts = policy.encode([hinted], profile_posts=1, limit=200)
    guide = Guide(model=Noting(), weight=1.0, candidates=2, chunk=4)
    list(guide.draw(policy, [hinted], prompts, options))
    sources = (comparison, candidates.comparison), (hinted, rollouts.comparison), (hinted, guided[0])
    for source, shown in sources:
        assert [getattr(shown, name) for name in carried] == [getattr(source, name) for name in carried]
        assert shown.labels is None


def test_quality_is_a_file_or_another_model(samples, tmp_path):
    curves = best_of_n(samples, tmp_path / "model", quality="baseline:length")["curves"]
    for by_length, best in zip(curves["baseline:length"], curves["oracle"], strict=True):
        assert by_length["quality"] == best["quality"]
    judged = [
        {"id": row["id"], "sample": row["sample"], "quality": row["sample"] / 2}
        for row in read_lines(samples / "samples.jsonl")
    ]
    file = write_lines(tmp_path / "judged.jsonl", judged)
    curves = best_of_n(samples, tmp_path / "file", quality=file)["curves"]
    figures = read_behaviour(tmp_path / "file")
    started = next(figure for figure in figures if figure.label == "baseline:random")
    assert started.value == pytest.approx(curves["random"][-1]["quality"])
    assert curves["oracle"][-1]["quality"] == 1.5
    write_lines(tmp_path / "judged.jsonl", judged[:-1])
    with pytest.raises(prb.DataError, match=r"expected a finite quality of sample 3 of 'q3', found None"):
        best_of_n(samples, tmp_path / "less", quality=file)
    known = [prb.Comparison(id="h", question="?", chosen="a", rejected="b", user_id="u0")]
    with pytest.raises(prb.RunError, match=r"history: baseline:length does not adapt to users"):
        best_of_n(samples, tmp_path / "none", history=known)


def test_samples_of_other_data_or_of_no_run_are_refused(samples, tmp_path):
    row = {"id": "q0", "question": "?", "chosen": "a", "rejected": "b"}
    other = write_lines(tmp_path / "other.jsonl", [row])
    with pytest.raises(prb.DataError, match="its samples are of other data"):
        best_of_n(samples, tmp_path / "out", data=[other])
    with pytest.raises(prb.RunError, match=r"expected a run of `prb sample`, found no run\.json"):
        best_of_n(tmp_path, tmp_path / "out")
    with pytest.raises(prb.DataError, match="rewards: expected different models"):
        best_of_n(samples, tmp_path / "out", ["baseline:length"] * 2)


@pytest.fixture(scope="module")
def best(samples) -> Path:
    """A finished run of two rewards."""
    best_of_n(samples, samples.parent / "best", ["baseline:length", "baseline:shorter"])
    return samples.parent / "best"


def test_the_best_sample_and_a_worse_one_are_training_data(samples, best, tmp_path, capsys):
    out = tmp_path / "out"
    assert cli.main(["distil", str(best), "--reward", "baseline:length", "--out", str(out)]) == 0
    shown = capsys.readouterr().out
    texts: dict[str, dict[int, str]] = {}
    for row in read_lines(samples / "samples.jsonl"):
        if row["text"].strip():
            texts.setdefault(row["id"], {})[row["sample"]] = row["text"]
    sources = {source.id: source for source in prb.read_comparisons(samples.parent / "pairs.jsonl")}
    rows = read_lines(out / "pairs.jsonl")
    summary = json.loads((out / "distil.json").read_text())["summary"]
    expected = [name for name, drawn in texts.items() if len(set(map(len, drawn.values()))) > 1]
    assert [row["id"] for row in rows] == expected
    assert (summary["pairs"], summary["prompts"]) == (len(rows), len(texts))
    assert summary["single"] + summary["too_close"] + summary["same_text"] == len(texts) - len(rows)
    assert summary["unsampled"] == len(sources) - len(texts)
    assert f"{len(rows)} pairs of {len(texts)} prompts" in shown
    for row, pair in zip(rows, prb.read_comparisons(out / "pairs.jsonl"), strict=True):
        drawn, source = texts[row["id"]], sources[row["id"]]
        assert len(row["chosen"]) == max(map(len, drawn.values()))
        assert len(row["rejected"]) == min(map(len, drawn.values()))
        assert [drawn[number] for number in row["meta"]["samples"]] == [row["chosen"], row["rejected"]]
        assert row["margin"] == pytest.approx(len(row["chosen"]) - len(row["rejected"]))
        assert (pair.user_id, pair.prompt, pair.profile) == (source.user_id, source.prompt, source.profile)
    turned = prb.distil(best, reward="baseline:shorter", out=tmp_path / "turned")
    assert [len(row["chosen"]) for row in read_lines(turned.path)] == [len(row["rejected"]) for row in rows]
    any_worse, again = (
        prb.distil(best, reward="baseline:length", rejected="random", out=tmp_path / name, seed=3)
        for name in ("random", "again")
    )
    assert all(len(row["chosen"]) > len(row["rejected"]) for row in read_lines(any_worse.path))
    assert again.path.read_bytes() == any_worse.path.read_bytes()
    gaps = sorted(row["margin"] for row in rows)
    wide = prb.distil(best, reward="baseline:length", margin=gaps[-1], out=tmp_path / "wide").summary
    assert wide["pairs"] == gaps.count(gaps[-1])


@pytest.mark.parametrize(
    ("options", "message"),
    [
        ({}, "reward: expected one of the rewards of .*: baseline:length, baseline:shorter$"),
        ({"reward": "baseline:random"}, "reward: expected one of .*; found 'baseline:random'"),
        ({"reward": "baseline:length", "margin": -1.0}, "margin: expected a finite number of at least 0"),
        ({"reward": "baseline:length", "margin": 1e9}, "no prompt has two samples whose rewards"),
        ({"reward": "baseline:length", "rejected": "second"}, "rejected: expected worst or random"),
        ({"reward": "baseline:length", "out": "other"}, r"other/pairs\.jsonl: exists already with other"),
    ],
)
def test_rewards_that_give_no_training_data_are_refused(best, tmp_path, monkeypatch, options, message):
    monkeypatch.chdir(tmp_path)
    Path("other").mkdir()
    Path("other/pairs.jsonl").write_text("other\n")
    with pytest.raises((prb.DataError, prb.RunError), match=message):
        prb.distil(best, **{"out": "out", **options})
    assert not Path("out").exists()


def test_a_file_of_anybody_s_texts_is_chosen_from(samples, tmp_path):
    """The same texts with nothing but their ids give the same curves."""
    rows, names = read_lines(samples / "samples.jsonl"), ("id", "sample", "text")
    file, data = tmp_path / "texts.jsonl", [str(samples.parent / "pairs.jsonl")]
    write_lines(file, [{key: row[key] for key in names} for row in rows])
    ours, theirs = best_of_n(samples, tmp_path / "a"), best_of_n(file, tmp_path / "b", data=data)
    assert theirs["curves"] == ours["curves"]
    assert [theirs[name] for name in ("n", "empty", "samples_of_a_prompt")] == [4, 1, N]
    for row, options, message in (
        (("q0", 0, "a"), {}, "name it with --data"),
        (("q9", 0, "a"), {"data": data}, "'q9': no comparison of .* has this id"),
        (
            ("q0", "0", "a"),
            {"data": data},
            "field 'sample': expected a whole number, found '0'; correct the line",
        ),
        (("q0", 0), {"data": data}, "field 'text': expected a string, found nothing"),
    ):
        write_lines(file, [dict(zip(names, row, strict=False))])
        with pytest.raises(prb.PrbError, match=message):
            best_of_n(file, tmp_path / "c", **options)


def test_the_answer_names_the_best_choice_beside_its_bounds():
    def ends(quality, bounds=None):
        return [{"k": 1, "quality": 0.0, "ci95": None}, {"k": 4, "quality": quality, "ci95": bounds}]

    curves = {"a": ends(0.2), "b": ends(0.3, [0.1, 0.5]), "oracle": ends(0.9), "random": ends(0.05)}
    assert best_of_n_answer({"curves": curves}) == (
        "b is the best of 2 rewards: its choice among 4 samples has a quality of 0.300 [0.100, 0.500]. "
        "A random choice has 0.050, and the best possible one 0.900."
    )
    del curves["b"]
    assert best_of_n_answer({"curves": curves}).startswith(
        "The choice of a among 4 samples has a quality of 0.200. "
    )
