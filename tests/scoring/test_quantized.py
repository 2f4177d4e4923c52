"""Evaluation of a quantised model: what it reports, how it goes on after a kill, what it refuses."""

from __future__ import annotations

import dataclasses
import json
import os
from collections.abc import Callable
from pathlib import Path
from typing import Any

import jax
import numpy as np
import pytest

import prb_jax as prb
from prb_jax import cli
from prb_jax.errors import CheckpointError, RunError
from prb_jax.models.quantization import FORMS, MATRICES
from prb_jax.readouts.open_model import OpenedModel
from prb_jax.reports.table import render_summary
from prb_jax.scoring import load
from prb_jax.scoring.reward_model import RewardModel
from tests.scoring.records import record

OPTIONS: dict[str, Any] = {"batch_tokens": 512, "controls": "none", "progress": False}


@pytest.fixture(scope="module")
def labelled() -> list[prb.Comparison]:
    return [
        dataclasses.replace(
            record(number, 2 + number % 2), labels=(1.0, 0.0, 0.0)[: 2 + number % 2], user_id=f"u{number % 6}"
        )
        for number in range(40)
    ]


@pytest.fixture(scope="module")
def finished(folder: Path, labelled: list[prb.Comparison], tmp_path_factory) -> prb.Evaluation:
    out = tmp_path_factory.mktemp("quantised")
    return prb.evaluate(folder, labelled, out=out, quantize="int8", **OPTIONS)


def read(path: Path) -> list[dict[str, Any]]:
    return [json.loads(line) for line in path.read_text().splitlines()]


def test_the_report_is_what_the_two_score_files_say(finished: prb.Evaluation) -> None:
    ours, theirs = (read(finished.out / name / "scores.jsonl") for name in ("", "unquantized"))
    assert [row["id"] for row in ours] == [row["id"] for row in theirs]
    found = finished.summary["quantization"]["reference"]
    wins = [[max(row["scores"][:1]) > max(row["scores"][1:]) for row in rows] for rows in (ours, theirs)]
    assert found["accuracy"] == finished.summary["accuracy"] == np.mean(wins[0])
    assert found["reference_accuracy"] == np.mean(wins[1])
    assert found["difference"] == pytest.approx(np.mean(wins[0]) - np.mean(wins[1]))
    assert found["flips"] == np.sum(np.array(wins[0]) != wins[1])
    flat = [np.concatenate([row["scores"] for row in rows]) for rows in (ours, theirs)]
    difference = flat[0] - flat[1]
    assert found["drift"]["rms"] == pytest.approx(np.sqrt(np.mean(difference**2)))
    assert found["drift"]["max_abs"] == np.abs(difference).max() > 1e-4
    assert found["relative_drift"]["rms"] == pytest.approx(found["drift"]["rms"] / flat[1].std())
    assert 0.95 < found["pearson"] < 1
    assert json.loads((finished.out / "summary.json").read_text()) == finished.summary
    assert "flips" in finished.summary["definitions"]["quantization"]


def test_the_reference_is_the_run_of_the_unquantised_model(
    finished: prb.Evaluation, folder: Path, labelled: list[prb.Comparison], tmp_path: Path
) -> None:
    alone = prb.evaluate(folder, labelled, out=tmp_path, **OPTIONS)
    reference = finished.out / "unquantized"
    for name in ("scores.jsonl", "summary.json"):
        assert (reference / name).read_bytes() == (tmp_path / name).read_bytes()
    inputs = [json.loads((place / "run.json").read_text())["inputs"] for place in (reference, tmp_path)]
    assert inputs[0] == inputs[1]
    assert "quantization" not in alone.summary
    identity = json.loads((finished.out / "run.json").read_text())["inputs"]["model"]
    assert identity == inputs[0]["model"] | {"quantize": "int8"}


def test_its_bytes_are_counted(finished: prb.Evaluation, folder: Path, model: RewardModel) -> None:
    narrow = prb.load(folder, dtype="bfloat16", quantize="int8")
    matrices = sum(model.params["layers"][name].size for name in MATRICES)
    channels = sum(
        model.params["layers"][name].shape[0] * model.params["layers"][name].shape[2] for name in MATRICES
    )
    held = sum(leaf.nbytes for leaf in jax.tree.leaves(narrow.params))
    assert narrow.report is not None
    assert narrow.report.quantize == "int8"
    assert narrow.report.bytes_held == held
    assert narrow.report.bytes_unquantized - held == matrices - 4 * channels  # two bytes become one
    figures = finished.summary["quantization"]
    assert figures["bytes_unquantized"] == sum(leaf.nbytes for leaf in jax.tree.leaves(model.params))
    assert figures["bytes_unquantized"] - figures["bytes_held"] == 3 * matrices - 4 * channels
    assert narrow.identity()["quantize"] == "int8"
    assert "quantize" not in model.identity()


def test_it_compiles_as_often_as_there_are_shapes(folder: Path, labelled: list[prb.Comparison]) -> None:
    shapes: set[Any] = set()
    narrow = prb.load(folder, quantize="int8")
    inner = narrow.score_fn

    def counted(params: Any, batch: Any) -> jax.Array:
        shapes.add((batch.prefix.shape, batch.responses.shape))
        return inner(params, batch)

    dataclasses.replace(narrow, score_fn=counted).score(labelled, batch_tokens=512)
    assert inner._cache_size() == len(shapes)  # pyright: ignore[reportFunctionMemberAccess]


def arrays_of(kind: str) -> int:
    return sum(leaf.nbytes for leaf in jax.live_arrays() if leaf.dtype == kind)


def watched(monkeypatch: pytest.MonkeyPatch, *, stop: Callable[[str | None, int], bool]) -> list[Any]:
    """What is loaded, with the bytes of int8 that live at that time; streams that break off where told."""
    seen: list[Any] = []
    original, stream = load.load_opened, RewardModel.stream

    def load_opened(opened: OpenedModel) -> RewardModel:
        seen.append((opened.options.quantize, arrays_of("int8")))
        return original(opened)

    def broken(self: RewardModel, *arguments: Any, **options: Any) -> Any:
        for number, batch in enumerate(stream(self, *arguments, **options)):
            if stop(self.quantize, number):
                raise KeyboardInterrupt
            yield batch

    monkeypatch.setattr(load, "load_opened", load_opened)
    monkeypatch.setattr(RewardModel, "stream", broken)
    return seen


@pytest.mark.parametrize("where", ["int8", None])
def test_a_run_that_was_killed_goes_on(
    where: str | None, finished: prb.Evaluation, folder: Path, labelled: list[prb.Comparison],
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch,
) -> None:  # fmt: skip
    run: dict[str, Any] = {"out": tmp_path, "quantize": "int8", **OPTIONS}
    before = arrays_of("int8")
    with monkeypatch.context() as patch:
        watched(patch, stop=lambda form, batch: form == where and batch == 2)
        with pytest.raises(KeyboardInterrupt):
            prb.evaluate(folder, labelled, **run)
    assert not (tmp_path / "summary.json").exists()
    with monkeypatch.context() as patch:
        seen = watched(patch, stop=lambda form, batch: False)
        prb.evaluate(folder, labelled, **run)
    # The quantised weights were gone when the others came.
    assert seen == [("int8", before), (None, before)]
    for name in ("scores.jsonl", "unquantized/scores.jsonl", "summary.json", "unquantized/summary.json"):
        assert (tmp_path / name).read_bytes() == (finished.out / name).read_bytes(), name
    with monkeypatch.context() as patch:
        seen = watched(patch, stop=lambda form, batch: True)
        assert prb.evaluate(folder, labelled, **run).summary == finished.summary
    assert seen == [("int8", before)]  # nothing is missing: the reference is not even loaded


def test_another_setting_is_another_run(
    finished: prb.Evaluation, folder: Path, labelled: list[prb.Comparison]
) -> None:
    run: dict[str, Any] = {"out": finished.out, "progress": False}
    with pytest.raises(RunError, match=r'model\.quantize: "int8" -> "int8-weights"'):
        prb.evaluate(folder, labelled, quantize="int8-weights", **run)
    with pytest.raises(RunError, match=r'model\.quantize: "int8" -> \(absent\)'):
        prb.evaluate(folder, labelled, **run)


def test_without_the_reference(folder: Path, labelled: list[prb.Comparison], tmp_path: Path) -> None:
    result = prb.evaluate(folder, labelled[:8], out=tmp_path, quantize="int8", reference=False, **OPTIONS)
    assert result.summary["quantization"]["reference"] is None
    assert sorted(os.listdir(tmp_path)) == ["run.json", "scores.jsonl", "summary.json"]
    loaded = prb.evaluate(prb.load(folder, quantize="int8"), labelled[:8], out=tmp_path, **OPTIONS)
    assert loaded.summary == result.summary


def test_what_is_printed(finished: prb.Evaluation) -> None:
    from io import StringIO

    from rich.console import Console

    def text(summary: dict[str, Any]) -> str:
        console = Console(file=StringIO(), width=120)
        console.print(render_summary({"m": summary}, title="t"))
        return console.file.getvalue()  # pyright: ignore[reportAttributeAccessIssue]

    shown, found = text(finished.summary), finished.summary["quantization"]
    figures = found["reference"]
    assert "m, int8" in shown
    assert f"{found['bytes_unquantized']:,} -> {found['bytes_held']:,}" in shown
    assert f"{figures['accuracy']:.3f}, unquantised {figures['reference_accuracy']:.3f}" in shown
    assert f"{figures['flips']} of 40 comparisons" in shown
    assert f"{figures['relative_drift']['rms']:.2%} of the scores' standard deviation" in shown
    assert f"{figures['pearson']:.5f}" in shown
    without = text(finished.summary | {"quantization": found | {"reference": None}})
    assert "not scored" in without


def test_what_cannot_be(
    folder: Path, labelled: list[prb.Comparison], model: RewardModel, tmp_path: Path
) -> None:
    def run(what: Any, **options: Any) -> None:
        prb.evaluate(what, labelled, out=tmp_path / "x", progress=False, **options)

    with pytest.raises(RunError, match="needs quantize"):
        run(folder, reference=False)
    with pytest.raises(RunError, match="baseline:length has no weights"):
        run("baseline:length", quantize="int8")
    with pytest.raises(RunError, match="quantize: decided where the model was loaded"):
        run(model, quantize="int8")
    with pytest.raises(CheckpointError, match="fp8 needs matrix units"):
        run(folder, quantize="fp8")
    assert not (tmp_path / "x").exists()


def test_from_the_command_line(
    folder: Path, labelled: list[prb.Comparison], tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    data = tmp_path / "pairs.jsonl"
    data.write_text("".join(json.dumps(item.to_row()) + "\n" for item in labelled[:8]))
    command = ["evaluate", str(folder), "--data", str(data), "--quantize", "int8-weights", "--no-progress"]
    assert cli.main([*command, "--out", str(tmp_path / "both")]) == 0
    assert "other verdict" in capsys.readouterr().out
    assert (tmp_path / "both" / "unquantized" / "summary.json").exists()
    assert cli.main([*command, "--out", str(tmp_path / "one"), "--no-reference"]) == 0
    assert "not scored" in capsys.readouterr().out
    figures = json.loads((tmp_path / "one" / "summary.json").read_text())["quantization"]
    assert (figures["form"], figures["reference"]) == ("int8-weights", None)
    assert cli.main(["inspect", str(folder), "--quantize", "int8-weights"]) == 0
    shown = " ".join(capsys.readouterr().out.split())
    assert (
        f"{figures['bytes_unquantized']:,} bytes in float32, {figures['bytes_held']:,} in int8-weights"
        in shown
    )
    assert cli.main(["evaluate", "baseline:length", "--data", str(data), "--out", "x", "--no-reference"]) == 2
    assert "--quantize" in capsys.readouterr().err


@pytest.mark.parametrize("form", FORMS)
def test_every_form_is_on_the_command_line(form: str) -> None:
    evaluated = cli.parser().parse_args(["evaluate", "m", "--data", "d", "--out", "o", "--quantize", form])
    timed = cli.parser().parse_args(["bench", "score", "m", "--quantize", form])
    assert evaluated.quantize == timed.quantize == form
