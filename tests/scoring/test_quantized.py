"""Evaluation of a quantised model: what it reports, how it goes on after a kill, what it refuses."""

from __future__ import annotations

import contextlib
import dataclasses
import io
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
from prb_jax.models.lora_config import LoraConfig
from prb_jax.models.quantization import FORMS
from prb_jax.models.readouts.open_model import OpenedModel
from prb_jax.scoring import reward_model
from prb_jax.scoring.reward_model import RewardModel
from tests.scoring.records import read_json, record, score_rows, write_comparisons

OPTIONS: dict[str, Any] = {"batch_tokens": 512, "controls": "none", "progress": False}


@pytest.fixture(scope="module")
def labelled() -> list[prb.Comparison]:
    return [
        dataclasses.replace(
            record(number, 2 + number % 2), labels=(1.0, 0.0, 0.0)[: 2 + number % 2], user_id=f"u{number % 6}"
        )
        for number in range(40)
    ]


@dataclasses.dataclass(frozen=True)
class Command:
    """What `prb evaluate --quantize int8` leaves, and prints."""

    out: Path
    arguments: list[str]
    shown: str

    def summary(self, run: str = "") -> dict[str, Any]:
        return read_json(self.out / run / "summary.json")


@pytest.fixture(scope="module")
def data(labelled: list[prb.Comparison], tmp_path_factory: pytest.TempPathFactory) -> Path:
    return write_comparisons(tmp_path_factory.mktemp("data") / "pairs.jsonl", labelled)


@pytest.fixture(scope="module")
def finished(folder: Path, data: Path, tmp_path_factory: pytest.TempPathFactory) -> Command:
    out = tmp_path_factory.mktemp("quantised") / "int8"
    arguments = ["evaluate", str(folder), "--data", str(data), "--quantize", "int8", "--controls", "none"]
    arguments += ["--batch-tokens", "512", "--no-progress"]
    shown = io.StringIO()
    with contextlib.redirect_stdout(shown):
        assert cli.main([*arguments, "--out", str(out)]) == 0
    return Command(out, arguments, shown.getvalue())


def test_the_comparison_is_what_the_two_score_files_say(finished: Command) -> None:
    ours, theirs = (score_rows(finished.out / name) for name in ("", "unquantized"))
    assert [row["id"] for row in ours] == [row["id"] for row in theirs]
    compared = read_json(finished.out / "compare.json")
    assert compared == prb.compare(finished.out, finished.out / "unquantized")
    (pair,) = compared["pairs"]
    wins = [[max(row["scores"][:1]) > max(row["scores"][1:]) for row in rows] for rows in (ours, theirs)]
    accuracy = {run["name"]: run["accuracy"] for run in compared["runs"]}
    assert accuracy == {"int8": np.mean(wins[0]), "unquantized": np.mean(wins[1])}
    assert accuracy["int8"] == finished.summary()["accuracy"]
    assert pair["flips"] == np.sum(np.array(wins[0]) != wins[1])
    flat = [np.concatenate([row["scores"] for row in rows]) for rows in (ours, theirs)]
    difference = flat[0] - flat[1]
    assert pair["scores"]["rms"] == pytest.approx(np.sqrt(np.mean(difference**2)))
    assert pair["scores"]["max_abs"] == np.abs(difference).max() > 1e-4
    assert 0.95 < pair["scores"]["pearson"] < 1
    assert "unquantized" in finished.shown
    assert f"{pair['scores']['pearson']:.4f}" in finished.shown


def test_each_is_the_run_of_that_model_alone(
    finished: Command, folder: Path, data: Path, tmp_path: Path
) -> None:
    for run, quantize in (("", "int8"), ("unquantized", None)):
        alone = prb.evaluate(folder, str(data), out=tmp_path / f"{quantize}", quantize=quantize, **OPTIONS)
        for name in ("scores.jsonl", "summary.json"):
            assert (finished.out / run / name).read_bytes() == (tmp_path / f"{quantize}" / name).read_bytes()
        assert ("quantization" in alone.summary) == (quantize is not None)
    inputs = [read_json(finished.out / run / "run.json")["inputs"] for run in ("", "unquantized")]
    assert inputs[0]["model"] == inputs[1]["model"] | {"quantize": "int8"}


def test_its_bytes_are_counted(finished: Command, folder: Path, model: RewardModel) -> None:
    narrow = prb.load(folder, dtype="bfloat16", quantize="int8")
    layers = [model.params["layers"][name] for name in LoraConfig.targets]
    matrices = sum(matrix.size for matrix in layers)
    channels = sum(matrix.shape[0] * matrix.shape[2] for matrix in layers)
    held = sum(leaf.nbytes for leaf in jax.tree.leaves(narrow.params))
    assert narrow.report is not None
    assert narrow.report.quantize == "int8"
    assert narrow.report.bytes_held == held
    assert narrow.report.bytes_unquantized - held == matrices - 4 * channels  # two bytes become one
    figures = finished.summary()["quantization"]
    assert figures["bytes_unquantized"] == sum(leaf.nbytes for leaf in jax.tree.leaves(model.params))
    assert figures["bytes_unquantized"] - figures["bytes_held"] == 3 * matrices - 4 * channels
    assert f"{figures['bytes_unquantized']:,} -> {figures['bytes_held']:,}" in " ".join(
        finished.shown.split()
    )
    assert narrow.identity()["quantize"] == "int8"
    assert "quantize" not in model.identity()


def test_it_compiles_as_often_as_there_are_shapes(folder: Path, labelled: list[prb.Comparison]) -> None:
    shapes: set[Any] = set()
    narrow = prb.load(folder, quantize="int8")
    inner = narrow.score_fn

    def counted(params: Any, batch: Any) -> jax.Array:
        shapes.add((batch.tokens.shape, batch.reads.shape))
        return inner(params, batch)

    dataclasses.replace(narrow, score_fn=counted).score(labelled, batch_tokens=512)
    assert inner._cache_size() == len(shapes)  # pyright: ignore[reportFunctionMemberAccess]


def arrays_of(kind: str) -> int:
    return sum(leaf.nbytes for leaf in jax.live_arrays() if leaf.dtype == kind)


def watched(monkeypatch: pytest.MonkeyPatch, *, stop: Callable[[str | None, int], bool]) -> list[Any]:
    """What is loaded, with the bytes of int8 that live at that time; streams that break off where told."""
    seen: list[Any] = []
    original, stream = reward_model.load_reward_model, RewardModel.stream

    def load_reward_model(opened: OpenedModel) -> RewardModel:
        seen.append((opened.options.quantize, arrays_of("int8")))
        return original(opened)

    def broken(self: RewardModel, *arguments: Any, **options: Any) -> Any:
        for number, batch in enumerate(stream(self, *arguments, **options)):
            if stop(self.quantize, number):
                raise KeyboardInterrupt
            yield batch

    monkeypatch.setattr(reward_model, "load_reward_model", load_reward_model)
    monkeypatch.setattr(RewardModel, "stream", broken)
    return seen


@pytest.mark.slow
@pytest.mark.parametrize("where", ["int8", None])
def test_a_run_that_was_killed_goes_on(
    where: str | None, finished: Command, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    command = [*finished.arguments, "--out", str(tmp_path / "int8")]
    before = arrays_of("int8")
    with monkeypatch.context() as patch:
        watched(patch, stop=lambda form, batch: form == where and batch == 2)
        assert cli.main(command) == 130
    assert not (tmp_path / "int8" / "compare.json").exists()
    with monkeypatch.context() as patch:
        seen = watched(patch, stop=lambda form, batch: False)
        assert cli.main(command) == 0
    # The quantised weights were gone when the others came.
    assert seen == [("int8", before), (None, before)]
    for name in ("scores.jsonl", "unquantized/scores.jsonl", "summary.json", "unquantized/summary.json"):
        assert (tmp_path / "int8" / name).read_bytes() == (finished.out / name).read_bytes(), name


def test_another_setting_is_another_run(finished: Command, folder: Path, data: Path) -> None:
    for quantize, shown in (("int8-weights", '"int8-weights"'), (None, r"\(absent\)")):
        with pytest.raises(RunError, match=rf'model\.quantize: "int8" -> {shown}'):
            prb.evaluate(folder, str(data), out=finished.out, quantize=quantize, progress=False)


def test_without_the_reference(finished: Command, folder: Path, data: Path, tmp_path: Path) -> None:
    out = tmp_path / "int8"
    assert cli.main([*finished.arguments, "--no-reference", "--out", str(out)]) == 0
    assert sorted(os.listdir(out)) == ["run.json", "scores.jsonl", "summary.json", "users.csv"]
    assert read_json(out / "summary.json") == finished.summary()
    loaded = prb.evaluate(prb.load(folder, quantize="int8"), str(data), out=out, **OPTIONS)
    assert loaded.summary == finished.summary()


def test_the_command_says_what_cannot_be(
    finished: Command, folder: Path, data: Path, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    with pytest.raises(CheckpointError, match="fp8 needs matrix units"):
        prb.evaluate(folder, data, out=tmp_path / "x", quantize="fp8", progress=False)
    assert not (tmp_path / "x").exists()
    figures = finished.summary()["quantization"]
    assert cli.main(["inspect", str(folder), "--quantize", "int8"]) == 0
    shown = " ".join(capsys.readouterr().out.split())
    assert f"{figures['bytes_unquantized']:,} bytes in float32, {figures['bytes_held']:,} in int8" in shown
    assert cli.main([*finished.arguments, "--profile-posts", "0", "1", "--out", "x"]) == 2
    assert "add --no-reference" in capsys.readouterr().err


@pytest.mark.parametrize("form", FORMS)
def test_every_form_is_on_the_command_line(form: str) -> None:
    evaluated = cli.parser().parse_args(["evaluate", "m", "--data", "d", "--out", "o", "--quantize", form])
    timed = cli.parser().parse_args(["bench", "score", "m", "--quantize", form])
    assert evaluated.quantize == timed.quantize == form
