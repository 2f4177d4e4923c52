"""`prb correlate`: runs of both kinds are joined by reward model, and the figures are those of the rows."""

from __future__ import annotations

import html
import json
import re
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import scipy.stats

import prb_jax
from prb_jax.errors import DataError, RunError
from prb_jax.metrics.paired import holm
from prb_jax.models.readouts.load_options import LoadOptions
from prb_jax.reports.table import gained
from prb_jax.runs.behaviour import Figure, cluster_of, figure_of, write_behaviour
from prb_jax.scoring.open_scorer import open_scorer
from tests.json_lines import write_lines
from tests.reports.conftest import Run, evaluate

USERS, EACH, MODELS = 8, 6, 5


def judge(model: int):
    """A reward model that is right about every (model + 2)-th comparison, and a behaviour that goes with it."""

    def scores(comparison: prb_jax.Comparison) -> list[float]:
        right = (int(comparison.id) * 7) % 11 < 4 + model
        return [1.0, 0.0] if right else [0.0, 1.0]

    return scores


def rows(count: int, users: int) -> list[dict[str, Any]]:
    same = {"chosen": "Yes.", "rejected": "No."}
    return [
        {"id": str(k), "user_id": f"u{k % users}", "subset": "ab"[k % 2], "question": f"{k}?", **same}
        for k in range(count)
    ]


def identity(run: Path) -> dict[str, Any]:
    return json.loads((run / "run.json").read_text())["inputs"]["model"]


def behaviour(
    folder: Path, pairs: list[dict[str, Any]], figures: list[tuple[str, str, dict[str, Any], Any]]
) -> Path:
    """Write figures to a folder: name, label of the reward model, its identity, and the values of all rows."""
    clusters = [cluster_of(row["user_id"], row["id"]) for row in pairs]
    folder.mkdir()
    written: list[Figure] = []
    for name, label, model, values in figures:
        about = {"name": name, "label": label, "identity": model, "setting": {}, "policy": "LlamaForX"}
        written.append(figure_of(list(map(float, values)), clusters, **about))
    write_behaviour(folder, written)
    return folder


@pytest.fixture(scope="module")
def folders(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """Runs of `prb evaluate` of five functions and a baseline, and a behaviour of four of these and another one."""
    top, pairs = tmp_path_factory.mktemp("runs"), rows(USERS * EACH, USERS)
    data = write_lines(top / "pairs.jsonl", pairs)
    for model in range(MODELS):
        evaluate(judge(model), data, top / f"m{model}", name=f"m{model}")
    evaluate("baseline:length", data, top / "length")
    models = {f"m{model}": identity(top / f"m{model}") for model in range(1, MODELS)}
    models["stranger"] = {**models["m1"], "function": "stranger"}
    models["baseline:length"] = dict(open_scorer("baseline:length", LoadOptions()).identity())
    figures = [
        ("quality", name, model, [place + 0.1 * (k % 5) + (place == 2) * 2 for k in range(len(pairs))])
        for place, (name, model) in enumerate(models.items())
    ]
    behaviour(top / "behaviour", pairs, figures)
    return top


def test_runs_are_joined_and_figures_are_those_of_the_rows(folders: Path, tmp_path: Path, prb: Run) -> None:
    scores = [folders / name for name in ("m0", "m1", "m2", "m3", "m4", "length")]
    lineage, out = tmp_path / "lineage.json", tmp_path / "out"
    lineage.write_text(json.dumps({"m1": "Llama", "m2": "Qwen3"}))
    shown = prb(
        "correlate", "--scores", *scores, "--behaviour", folders / "behaviour", "--out", out, "--draws", 200,
        "--lineage", lineage,
    )  # fmt: skip
    for said in ("not resolved", "only in --scores, left out: m0", "left out: stranger (quality)"):
        assert said in " ".join(shown.split())
    written = json.loads((out / "correlate.json").read_text())
    assert (out / "correlate.png").read_bytes().startswith(b"\x89PNG")
    models = {model["name"]: model for model in written["models"]}
    assert [models[name]["lineage"] for name in ("m1", "m2", "m3")] == ["Llama", "Qwen3", None]
    assert [models[name]["behaviour"]["quality"]["same_as_policy"] for name in ("m1", "m2")] == [True, False]
    both = ("m1", "m2", "m3", "m4", "length")
    summaries = {name: json.loads((folders / name / "summary.json").read_text()) for name in both}
    for name, summary in summaries.items():
        benchmark = models[name]["benchmark"]
        assert benchmark["accuracy"]["value"] == pytest.approx(summary["accuracy"])
        assert benchmark["user_accuracy"]["value"] == pytest.approx(summary["user_accuracy"])
        subsets = list(summary["accuracy_by_subset"].values())
        assert benchmark["subset_quantile"]["value"] == pytest.approx(np.quantile(subsets, 0.1))
        for figure, interval in (("accuracy", "ci95"), ("user_accuracy", "user_accuracy_ci95")):
            assert benchmark[figure]["ci95"] == pytest.approx(summary[interval])
    figures = {"accuracy", "user_accuracy", "user_quantile", "subset_quantile"}
    assert {part["benchmark"] for part in written["correlations"]} == figures
    x = [summaries[name]["accuracy"] for name in both]
    y = [models[name]["behaviour"]["quality"]["value"] for name in both]
    first = written["correlations"][0]
    assert (first["benchmark"], first["models"]) == ("accuracy", 5)
    assert first["measures"]["spearman"]["value"] == pytest.approx(scipy.stats.spearmanr(x, y).statistic)
    assert first["measures"]["kendall"]["value"] == pytest.approx(scipy.stats.kendalltau(x, y).statistic)
    rho = first["measures"]["spearman"]
    answer = f"Over 5 reward models, Spearman's rho of accuracy and quality is {gained(rho['value'], rho['ci95'])}, p "
    assert answer in " ".join(shown.split())
    page = html.unescape(prb_jax.report(out, out=tmp_path / "page.html").read_text(encoding="utf-8"))
    assert f'<p class="answer">{answer}' in page
    for measure in first["measures"].values():
        assert f"{measure['value']:+.3f}" in page
    (out / "correlate.json").write_text("{}")
    with pytest.raises(RunError, match=r"correlate\.json: field 'models': expected a list, found nothing"):
        prb_jax.report(out, out=tmp_path / "page.html")
    # the same from Python, and the same figures again; nothing is written without `out`
    options: dict[str, Any] = {"behaviour": [folders / "behaviour"], "draws": 200, "lineage": lineage}
    assert json.loads(json.dumps(prb_jax.correlate(scores, **options))) == written
    # some figures alone have the same measures
    some = prb_jax.correlate(scores, **options, figures=["accuracy"], out=tmp_path / "some")
    (first,), (again,) = written["correlations"][:1], some["correlations"]
    for part in (first, again):  # adjusted for all that is shown
        adjusted = [measure.pop("p_holm") for measure in part["measures"].values()]
    assert adjusted == holm([measure["p"] for measure in again["measures"].values()]).tolist()
    assert again == first
    assert (tmp_path / "some" / "correlate.png").read_bytes().startswith(b"\x89PNG")


def test_a_tie_is_half_a_win_or_nothing(tmp_path: Path, prb: Run) -> None:
    """Scores of whole points tie often; the figures are then those of the summary with half credit."""
    pairs, scores = rows(24, users=8), [tmp_path / name for name in ("coarse", "m1", "m2")]
    data = write_lines(tmp_path / "pairs.jsonl", pairs)
    for run, scorer in zip(scores, (lambda one: [float(int(one.id) % 3), 1.0], judge(0), judge(4))):
        evaluate(scorer, data, run, name=run.name)
    figures = [("good", run.name, identity(run), [place] * len(pairs)) for place, run in enumerate(scores)]
    good = behaviour(tmp_path / "behaviour", pairs, figures)
    summary = json.loads((scores[0] / "summary.json").read_text())
    assert summary["ties"] == 8
    prb("correlate", "--scores", *scores, "--behaviour", good, "--ties", "loss", "--out", tmp_path / "strict")
    strict = json.loads((tmp_path / "strict" / "correlate.json").read_text())
    half = prb_jax.correlate(scores, [good], draws=100)
    for found, name in ((strict, "accuracy"), (half, "half_credit_accuracy")):
        of_model = found["models"][0]["benchmark"]
        assert of_model["accuracy"]["value"] == pytest.approx(summary[name])
        assert of_model["user_accuracy"]["value"] == pytest.approx(summary[name])  # users have as many rows
        low, high = of_model["accuracy"]["ci95"]
        assert low < summary[name] < high
    assert (strict["parameters"]["ties"], half["parameters"]["ties"]) == ("loss", "half")
    with pytest.raises(DataError, match="ties: expected one of half, loss, found 'win'"):
        prb_jax.correlate(scores, [good], ties="win")


def test_an_interval_is_withheld_as_everywhere(tmp_path: Path, prb: Run) -> None:
    pairs, scores = rows(24, users=2), [tmp_path / name for name in ("m0", "m1", "m2")]
    data = write_lines(tmp_path / "pairs.jsonl", pairs)
    for place, run in enumerate(scores):
        evaluate(judge(2 * place), data, run, name=run.name)
    figures = [("good", run.name, identity(run), [place] * len(pairs)) for place, run in enumerate(scores)]
    good = behaviour(tmp_path / "behaviour", pairs, figures)
    shown = " ".join(prb("correlate", "--scores", *scores, "--behaviour", good).split())
    assert "no interval: 2 users; an interval needs at least 6" in shown
    assert ".." not in re.sub(r"\[\.\.\]", "", shown)  # no interval is shown
    measure = prb_jax.correlate(scores, [good], draws=100)["correlations"][0]["measures"]["spearman"]
    assert (measure["value"], measure["ci95"]) == (1.0, None)
    assert measure["ci95_reason"] == "2 users; an interval needs at least 6"


def test_where_the_truth_moves_nothing_no_correlation_is_shown(
    folders: Path, tmp_path: Path, prb: Run
) -> None:
    truth, chance, draws = "baseline:persona-truth", "baseline:random", np.random.default_rng(0)
    pairs, runs = rows(USERS * EACH, USERS), [folders / f"m{model}" for model in range(MODELS)]
    models = {run.name: identity(run) for run in runs}
    models |= {name: dict(open_scorer(name, LoadOptions()).identity()) for name in (truth, chance)}
    figures = []
    for name, gain in (("moved", 0.3), ("unmoved", 0.0)):
        for place, (label, model) in enumerate(models.items()):
            level = {truth: gain, chance: 0.0}.get(label, 0.1 * place * gain)
            figures.append((name, label, model, level + 0.05 * draws.standard_normal(len(pairs))))
    everything = behaviour(tmp_path / "all", pairs, figures)
    command = ["correlate", "--scores", *runs, "--behaviour", everything, "--draws", 200, "--plan"]
    shown = " ".join(prb(*command, "--out", tmp_path / "out", "--figures", "accuracy").split())
    assert "no power: the upper bound itself moves it by" in shown
    assert "Models that find a correlation of accuracy and moved, with a power of 80 %" in shown
    written = json.loads((tmp_path / "out" / "correlate.json").read_text())
    assert [part["behaviour"] for part in written["correlations"]] == ["moved"]
    assert written["gates"]["moved"]["passed"]
    assert written["gates"]["moved"]["improvement"] == pytest.approx(0.3, abs=0.03)
    assert written["gates"]["unmoved"]["passed"] is False
    assert not written["unmatched"]["behaviour"]
    plan = written["plans"]["moved"]["accuracy"]
    assert plan["prompts"] == USERS * EACH
    needed = {(row["correlation"], row["prompts"]): row["models"] for row in plan["rows"]}
    for count in (24, 48, 96):
        assert (needed[0.3, count] or 1001) > needed[0.5, count] > needed[0.8, count] >= 9
    assert needed[0.5, 24] >= needed[0.5, 384]  # more prompts, less noise, fewer models
    unmoved = written["plans"]["unmoved"]["accuracy"]
    assert "no number of them resolves" in (unmoved["reason"] or "") or unmoved["behaviour"]["spread"] < 0.02

    # a start that is given, a gain that is asked for, and an upper bound without a start
    without = [figure for figure in figures if figure[1] != chance]
    alone = behaviour(tmp_path / "alone", pairs, without)

    def moved(folder: Path = alone, **options: Any) -> dict[str, Any]:
        return prb_jax.correlate(runs, [folder], draws=100, figures=["accuracy"], **options)["gates"]["moved"]

    assert moved()["passed"] is None
    assert "no start: give --start" in moved()["reason"]
    assert not moved(start=0.28, least_gain=0.05)["passed"]
    assert moved(start=0.28)["passed"]  # a small gain that is surely above zero is one
    with pytest.raises(DataError, match="start: expected behaviours, some of moved, unmoved, found 'mved'"):
        moved(start={"mved": 0.1})
    by_name = [*command[:-1], "--figures", "accuracy", "--behaviour", alone, "--start"]
    shown = " ".join(prb(*by_name, "moved=0.5", "unmoved=-1").split())
    assert shown.count("no power: the upper bound itself moves it") == 1
    assert "--start: expected X or NAME=X, found 'moved=much'" in prb(*by_name, "moved=much", status=2)
    none = behaviour(tmp_path / "none", pairs, without[:MODELS])
    assert "no upper bound" in moved(none)["reason"]


def test_names_at_points_stay_within_the_picture_and_apart(folders: Path, tmp_path: Path) -> None:
    from matplotlib.figure import Figure as Picture
    from matplotlib.text import Text

    from prb_jax.reports.correlation_shown import _name_points

    figure = Picture(figsize=(5.2, 3.4), layout="constrained")
    axis = figure.subplots()
    points = {f"a model with a long name {k}": (0.5 + k / 1000, 0.9 if k < 12 else 0.1) for k in range(16)}
    axis.plot(*zip(*points.values(), strict=True), "o")
    _name_points(axis, points)
    figure.draw_without_rendering()
    boxes = [Text.get_window_extent(text) for text in axis.texts]  # without the lines to the points
    inside = figure.bbox
    assert all(inside.x0 <= box.x0 and box.x1 <= inside.x1 and inside.y0 <= box.y0 for box in boxes)
    heights = sorted(box.y0 + box.height / 2 for box in boxes)
    assert min(np.diff(heights)) > 0.8 * boxes[0].height
    assert min(box.x0 for box in boxes) >= axis.get_window_extent().x1


def test_runs_that_do_not_go_together_are_one_error(folders: Path, tmp_path: Path) -> None:
    known, quality = [folders / name for name in ("m1", "m2", "m3")], [folders / "behaviour"]
    evaluate("baseline:profile-overlap", folders / "pairs.jsonl", tmp_path / "overlap")
    evaluate(judge(1), folders / "pairs.jsonl", tmp_path / "again", name="m1", seed=3)
    few = r"at least 3 reward models .* found 1: m1; only in --behaviour: m2, m3, m4, stranger"
    undefined = r"overlap: its accuracy is not defined on these data .*leave it out"
    unknown = r"figures: expected some of accuracy, .*, found 'rouge'"
    for scores, behaviours, options, error, message in (
        ([folders / "m0", known[0]], quality, {}, RunError, few),
        (known[:1], known[:1], {}, RunError, r"found no behaviour\.json in it"),
        (known[:1], quality * 2, {}, RunError, r"also in .*behaviour; expected it once"),
        (known, quality, {"figures": ["rouge"]}, DataError, unknown),
        (known[:1], quality, {"quantile": 0.7}, DataError, "quantile: expected above 0"),
        ([*known, tmp_path / "overlap"], quality, {}, RunError, undefined),
        ([known[0], tmp_path / "again"], quality, {}, RunError, "m1 and again: the same reward model twice"),
    ):
        with pytest.raises(error, match=message):
            prb_jax.correlate(scores, behaviours, **options)
