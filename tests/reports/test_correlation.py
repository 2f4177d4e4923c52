"""`prb correlate`: runs of both kinds are joined by reward model, and the figures are those of the rows."""

from __future__ import annotations

import json
import re
import subprocess
import sys
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import scipy.stats

import prb_jax as prb
from prb_jax import cli
from prb_jax.readouts.load_options import LoadOptions
from prb_jax.runs.behaviour import Figure, cluster_of, figure_of, write_behaviour
from prb_jax.scoring.load import open_scorer

USERS, EACH, MODELS = 8, 6, 5


def judge(model: int):
    """A reward model that is right about every (model + 2)-th comparison, and a behaviour that goes with it."""

    def scores(comparison: prb.Comparison) -> list[float]:
        right = (int(comparison.id) * 7) % 11 < 4 + model
        return [1.0, 0.0] if right else [0.0, 1.0]

    return scores


@pytest.fixture(scope="module")
def folders(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """Runs of `prb evaluate` of five functions and a baseline, and a behaviour of four of these and another one."""
    top = tmp_path_factory.mktemp("runs")
    rows = [
        {"id": str(k), "user_id": f"u{k % USERS}", "subset": "ab"[k % 2], "question": f"{k}?", "chosen": "Yes.",
         "rejected": "No."}
        for k in range(USERS * EACH)
    ]  # fmt: skip
    data = top / "pairs.jsonl"
    data.write_text("".join(json.dumps(row) + "\n" for row in rows))
    for model in range(MODELS):
        prb.evaluate(judge(model), str(data), out=top / f"m{model}", name=f"m{model}", progress=False)
    prb.evaluate("baseline:length", str(data), out=top / "length", progress=False)
    figures = []
    names = [f"m{model}" for model in range(1, MODELS)] + ["stranger", "baseline:length"]
    for place, name in enumerate(names):
        if name.startswith("baseline"):
            identity = dict(open_scorer(name, LoadOptions()).identity())
        else:
            identity = {
                **json.loads((top / "m1" / "run.json").read_text())["inputs"]["model"],
                "function": name,
            }
        values = [place + 0.1 * (int(row["id"]) % 5) + (place == 2) * 2 for row in rows]
        clusters = [cluster_of(row["user_id"], row["id"]) for row in rows]
        figures.append(
            figure_of(
                values,
                clusters,
                name="quality",
                label=name,
                identity=identity,
                setting={},
                policy="LlamaForX",
            )
        )
    (top / "behaviour").mkdir()
    write_behaviour(top / "behaviour", figures)
    return top


def test_runs_are_joined_and_figures_are_those_of_the_rows(folders: Path, tmp_path: Path) -> None:
    scores = [folders / name for name in ("m0", "m1", "m2", "m3", "m4", "length")]
    lineage = tmp_path / "lineage.json"
    lineage.write_text(json.dumps({"m1": "Llama", "m2": "Qwen3"}))
    out = tmp_path / "out"
    command = [
        sys.executable, "-m", "prb_jax", "correlate", "--scores", *map(str, scores), "--behaviour",
        str(folders / "behaviour"), "--out", str(out), "--draws", "200", "--lineage", str(lineage),
    ]  # fmt: skip
    done = subprocess.run(command, capture_output=True, text=True, timeout=300)
    assert done.returncode == 0, done.stderr
    for said in (
        "the order is not resolved",
        "in --scores alone, left out: m0",
        "left out: stranger (quality)",
    ):
        assert said in " ".join(done.stdout.split())
    found = json.loads((out / "correlate.json").read_text())
    assert (out / "correlate.png").read_bytes().startswith(b"\x89PNG")
    models = {model["name"]: model for model in found["models"]}
    assert [models[name]["lineage"] for name in ("m1", "m2", "m3")] == ["Llama", "Qwen3", None]
    assert models["m1"]["behaviour"]["quality"]["same_as_policy"]
    assert not models["m2"]["behaviour"]["quality"]["same_as_policy"]
    own = ("m1", "m2", "m3", "m4", "length")
    summaries = {name: json.loads((folders / name / "summary.json").read_text()) for name in own}
    for name, summary in summaries.items():
        benchmark = models[name]["benchmark"]
        assert benchmark["accuracy"]["value"] == pytest.approx(summary["accuracy"])
        assert benchmark["user_accuracy"]["value"] == pytest.approx(summary["user_accuracy"])
        subsets = list(summary["accuracy_by_subset"].values())
        assert benchmark["subset_quantile"]["value"] == pytest.approx(np.quantile(subsets, 0.1))
        for figure, interval in (("accuracy", "ci95"), ("user_accuracy", "user_accuracy_ci95")):
            assert benchmark[figure]["ci95"] == pytest.approx(summary[interval])
    assert {each["benchmark"] for each in found["correlations"]} == {
        "accuracy", "user_accuracy", "user_quantile", "subset_quantile",
    }  # fmt: skip
    x = [summaries[name]["accuracy"] for name in own]
    y = [models[name]["behaviour"]["quality"]["value"] for name in own]
    first = found["correlations"][0]
    assert (first["benchmark"], first["models"]) == ("accuracy", 5)
    assert first["measures"]["spearman"]["value"] == pytest.approx(scipy.stats.spearmanr(x, y).statistic)
    assert first["measures"]["kendall"]["value"] == pytest.approx(scipy.stats.kendalltau(x, y).statistic)
    # the same from Python, and the same figures again; nothing is written without `out`
    again = prb.correlate(scores, [folders / "behaviour"], draws=200, lineage=lineage)
    assert json.loads(json.dumps(again)) == found
    # some figures alone have the same measures
    some = prb.correlate(
        scores,
        [folders / "behaviour"],
        draws=200,
        lineage=lineage,
        figures=["accuracy"],
        out=tmp_path / "some",
    )
    assert some["correlations"] == found["correlations"][:1]
    assert (tmp_path / "some" / "correlate.png").read_bytes().startswith(b"\x89PNG")


def test_an_interval_is_withheld_as_everywhere(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    rows = [
        {"id": str(k), "user_id": f"u{k % 2}", "question": f"{k}?", "chosen": "Yes.", "rejected": "No."}
        for k in range(24)
    ]
    data, names, figures = tmp_path / "pairs.jsonl", ("m0", "m1", "m2"), []
    data.write_text("".join(json.dumps(row) + "\n" for row in rows))
    for place, name in enumerate(names):
        prb.evaluate(judge(2 * place), str(data), out=tmp_path / name, name=name, progress=False)
        identity = json.loads((tmp_path / name / "run.json").read_text())["inputs"]["model"]
        clusters = [cluster_of(row["user_id"], row["id"]) for row in rows]
        figures.append(
            figure_of(
                [float(place)] * len(rows), clusters, name="good", label=name, identity=identity, setting={},
                policy=None,
            )
        )  # fmt: skip
    (tmp_path / "behaviour").mkdir()
    write_behaviour(tmp_path / "behaviour", figures)
    scores = [str(tmp_path / name) for name in names]
    assert cli.main(["correlate", "--scores", *scores, "--behaviour", str(tmp_path / "behaviour")]) == 0
    shown = " ".join(capsys.readouterr().out.split())
    assert "no interval: 2 users; an interval needs at least 6" in shown
    assert ".." not in re.sub(r"\[\.\.\]", "", shown)  # no interval is shown
    found = prb.correlate(scores, [tmp_path / "behaviour"], draws=100)
    measure = found["correlations"][0]["measures"]["spearman"]
    assert (measure["value"], measure["ci95"]) == (1.0, None)
    assert measure["ci95_reason"] == "2 users; an interval needs at least 6"


def test_where_the_truth_moves_nothing_no_correlation_is_shown(
    folders: Path, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    truth, draws = "baseline:persona-truth", np.random.default_rng(0)
    identities: dict[str, Any] = {
        f"m{model}": json.loads((folders / f"m{model}" / "run.json").read_text())["inputs"]["model"]
        for model in range(MODELS)
    }
    identities |= {truth: dict(open_scorer(truth, LoadOptions()).identity())}
    identities |= {"baseline:random": dict(open_scorer("baseline:random", LoadOptions()).identity())}
    clusters = [cluster_of(f"u{k % USERS}", str(k)) for k in range(USERS * EACH)]
    figures = []
    for behaviour, gain in (("moved", 0.3), ("unmoved", 0.0)):
        for place, (name, identity) in enumerate(identities.items()):
            level = {truth: gain, "baseline:random": 0.0}.get(name, 0.1 * place * gain)
            values = level + 0.05 * draws.standard_normal(len(clusters))
            figures.append(
                figure_of(
                    values.tolist(), clusters, name=behaviour, label=name, identity=identity, setting={}, policy=None
                )
            )  # fmt: skip
    write_behaviour_in(tmp_path / "all", figures)
    scores = [str(folders / f"m{model}") for model in range(MODELS)]
    command = [
        "correlate",
        "--scores",
        *scores,
        "--behaviour",
        str(tmp_path / "all"),
        "--draws",
        "200",
        "--plan",
    ]
    assert cli.main([*command, "--out", str(tmp_path / "out"), "--figures", "accuracy"]) == 0
    shown = " ".join(capsys.readouterr().out.split())
    assert "no power: the upper bound itself moves it by" in shown
    assert "Models that find a correlation of accuracy and moved, with a power of 80 %" in shown
    found = json.loads((tmp_path / "out" / "correlate.json").read_text())
    assert [each["behaviour"] for each in found["correlations"]] == ["moved"]
    assert found["gates"]["moved"]["passed"]
    assert found["gates"]["moved"]["improvement"] == pytest.approx(0.3, abs=0.03)
    assert found["gates"]["unmoved"]["passed"] is False
    assert not found["unmatched"]["behaviour"]
    plan = found["plans"]["moved"]["accuracy"]
    assert plan["prompts"] == USERS * EACH
    needed = {(row["correlation"], row["prompts"]): row["models"] for row in plan["rows"]}
    for count in (24, 48, 96):
        assert (needed[0.3, count] or 1001) > needed[0.5, count] > needed[0.8, count] >= 9
    assert needed[0.5, 24] >= needed[0.5, 384]  # more prompts, less noise, fewer models
    assert "no number of them resolves" in (found["plans"]["unmoved"]["accuracy"]["reason"] or "") or (
        found["plans"]["unmoved"]["accuracy"]["behaviour"]["spread"] < 0.02
    )

    # a start that is given, a gain that is asked for, and an upper bound without a start
    alone = [figure for figure in figures if figure.label != "baseline:random"]
    write_behaviour_in(tmp_path / "alone", alone)
    runs, behaviour = [Path(run) for run in scores], [tmp_path / "alone"]
    options: dict[str, Any] = {"draws": 100, "figures": ["accuracy"]}
    gates = prb.correlate(runs, behaviour, **options)["gates"]
    assert gates["moved"]["passed"] is None
    assert "no start: give --start" in gates["moved"]["reason"]
    assert not prb.correlate(runs, behaviour, start=0.28, **options)["gates"]["moved"]["passed"]
    assert prb.correlate(runs, behaviour, start=0.28, least_gain=0.001, **options)["gates"]["moved"]["passed"]
    with pytest.raises(
        prb.DataError, match="start: expected behaviours, some of moved, unmoved, found 'mved'"
    ):
        prb.correlate(runs, behaviour, start={"mved": 0.1}, **options)
    by_name = [*command[:-1], "--figures", "accuracy", "--behaviour", str(behaviour[0]), "--start"]
    assert cli.main([*by_name, "moved=0.28", "unmoved=-1"]) == 0
    shown = " ".join(capsys.readouterr().out.split())
    assert shown.count("no power: the upper bound itself moves it") == 1
    assert cli.main([*by_name, "moved=much"]) == 2
    assert "--start: expected X or NAME=X, found 'moved=much'" in capsys.readouterr().err
    assert (
        "no upper bound"
        in prb.correlate(runs, [write_behaviour_in(tmp_path / "none", alone[:MODELS])], **options)["gates"][
            "moved"
        ]["reason"]
    )


def write_behaviour_in(folder: Path, figures: list[Figure]) -> Path:
    folder.mkdir()
    write_behaviour(folder, figures)
    return folder


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
    behaviour = [folders / "behaviour"]
    with pytest.raises(
        prb.RunError, match=r"at least 3 reward models .* found 1: m1; .* alone: m2, m3, m4, stranger"
    ):
        prb.correlate([folders / "m0", folders / "m1"], behaviour)
    with pytest.raises(prb.RunError, match=r"found no behaviour\.json in it"):
        prb.correlate([folders / "m1"], [folders / "m1"])
    with pytest.raises(prb.RunError, match=r"also in .*behaviour; expected it once"):
        prb.correlate([folders / "m1"], behaviour * 2)
    with pytest.raises(prb.DataError, match=r"figures: expected some of accuracy, .*, found 'rouge'"):
        prb.correlate([folders / "m1", folders / "m2", folders / "m3"], behaviour, figures=["rouge"])
    with pytest.raises(prb.DataError, match="quantile: expected above 0"):
        prb.correlate([folders / "m1"], behaviour, quantile=0.7)
    prb.evaluate(
        "baseline:profile-overlap", str(folders / "pairs.jsonl"), out=tmp_path / "overlap", progress=False
    )
    with pytest.raises(
        prb.RunError, match=r"overlap: its accuracy is not defined on these data .*leave it out"
    ):
        prb.correlate([folders / "m1", folders / "m2", folders / "m3", tmp_path / "overlap"], behaviour)
    prb.evaluate(
        judge(1), str(folders / "pairs.jsonl"), out=tmp_path / "again", name="m1", seed=3, progress=False
    )
    with pytest.raises(prb.RunError, match="m1 and again: the same reward model twice"):
        prb.correlate([folders / "m1", tmp_path / "again"], behaviour)
