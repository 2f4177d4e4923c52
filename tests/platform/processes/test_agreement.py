"""Processes that would not compute the same say so, all of them, before they compute."""

from __future__ import annotations

import shutil
from pathlib import Path

import pytest
from safetensors.numpy import load_file, save_file

from prb_jax.platform.processes.agreement import differences
from tests.platform.processes.jobs import EVALUATE, run_job
from tests.training.tiny import rows, write_model, write_rows

MODEL = "inputs.model.files.model.safetensors: "


def write_folders(place: Path) -> None:
    """Folders 0 and 1: equal but for the head of a model and one word of a data file."""
    write_model(place / "0" / "model")
    for process, word in enumerate(("tea", "tee")):
        folder = place / str(process)
        if process:
            shutil.copytree(place / "0" / "model", folder / "model")
        shutil.copytree(folder / "model", folder / "trained")
        write_rows(folder / "pairs.jsonl", rows(6))
        write_rows(folder / "other.jsonl", [*rows(6), {**rows(7)[-1], "question": word}])
    weights = place / "1" / "trained" / "model.safetensors"
    tensors = load_file(weights)
    tensors["score.weight"] = tensors["score.weight"] + 1
    save_file(tensors, weights, metadata={"format": "pt"})


@pytest.mark.slow
def test_processes_that_differ_are_refused_by_name_and_field(tmp_path: Path) -> None:
    write_folders(tmp_path)
    printed = run_job(["-m", "tests.platform.processes.agreement_process", tmp_path], count=2)
    said, others = ([line for line in output.splitlines() if "Gloo" not in line] for output, _ in printed)
    assert said == others
    expected = [
        "inputs.profile_posts: 3, expected 10",
        MODEL + '"sha256:',
        'inputs.data.sources[0].files.other.jsonl: "sha256:',
        "inputs.settings.steps: 2, expected 1",
        MODEL + '"sha256:',
        'inputs.verb: "train", expected "evaluate"; ',
    ]
    for line, field in zip(said, expected, strict=True):
        assert line.startswith(f"process 1 differs from process 0 in {field}"), line
    assert "; and " in said[-1]
    assert (tmp_path / "same" / "summary.json").exists()  # equal files in another folder


def test_every_process_of_a_command_ends_with_status_2_and_one_line(tmp_path: Path) -> None:
    command = [*EVALUATE, "--out", tmp_path / "run", "--distributed", "--limit"]
    for _, errors in run_job([*command, 20], count=2, others=[*command, 10], status=2):
        assert errors.count("\n") == 1
        assert "error: process 1 differs from process 0 in inputs.limit: 10, expected 20; inputs." in errors
    assert not (tmp_path / "run").exists()


def test_differences_are_named_with_both_values() -> None:
    before = {"a": {"b": [1, 2]}, "c": None, "d": 1}
    after = {"a": {"b": [1, 3]}, "d": 1.0, "e": "x"}
    assert differences(before, after) == {
        "a.b[1]": ("2", "3"),
        "c": ("null", "(absent)"),
        "e": ("(absent)", '"x"'),
    }
