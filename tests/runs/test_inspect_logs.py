"""Logs that Inspect itself writes, compared with its own figures; needs the extra `inspect`."""

import random
from collections.abc import Callable
from pathlib import Path
from typing import Any

import numpy as np
import pytest

import prb_jax as prb
from prb_jax.errors import RunError
from prb_jax.metrics.uncertainty import grade_interval, mean_interval
from prb_jax.runs.harness_logs import read_run

inspect_ai = pytest.importorskip("inspect_ai", reason="needs the extra inspect")

from inspect_ai import Epochs, Task  # noqa: E402
from inspect_ai.dataset import Sample  # noqa: E402
from inspect_ai.scorer import Score, mean, scorer, stderr  # noqa: E402
from inspect_ai.solver import solver  # noqa: E402

SAMPLES, USERS = 24, 8


@solver
def silent() -> Any:
    """Calls no model: the grades below are drawn."""

    async def solve(state: Any, generate: Any) -> Any:
        return state

    return solve


@scorer(metrics=[mean(), stderr(cluster="user_id")])
def graded(seed: int, values: list[Any]) -> Any:
    """Grades of which most are those of the user."""

    async def score(state: Any, target: Any) -> Score:
        of_sample = random.Random(f"{seed} {state.sample_id} {state.epoch}")
        of_user = random.Random(f"{seed} {state.metadata['user_id']}")
        return Score(value=(of_user if of_sample.random() < 0.7 else of_sample).choice(values))

    return score


@scorer(metrics={"kind": [mean()], "long": [mean()]})
def both() -> Any:
    async def score(state: Any, target: Any) -> Score:
        return Score(value={"kind": 0.5, "long": 3})

    return score


def write(
    folder: Path,
    *scorers: Any,
    form: str = "eval",
    epochs: Any = 1,
    name: str = "toy",
    target: Callable[[int], str] = str,
    model: str = "mockllm/model",
) -> Path:
    samples = [
        Sample(
            id=i if i % 2 else f"s{i}",
            input=f"What is {i}?",
            target=target(i),
            metadata={"user_id": f"u{i % USERS}"},
        )
        for i in range(SAMPLES)
    ]
    task = Task(name=name, dataset=samples, solver=silent(), scorer=list(scorers), epochs=epochs)
    (log,) = inspect_ai.eval(task, model=model, log_dir=str(folder), log_format=form, display="none")
    assert log.status == "success", log.error
    return Path(log.location.removeprefix("file://"))


@pytest.mark.parametrize(
    ("form", "epochs"), [("eval", 3), ("json", 1), ("eval", Epochs(2, ["mean", "at_least_1"]))]
)
def test_figures_are_those_of_inspect(form: str, epochs: Any, tmp_path: Path) -> None:
    values = ["C", "I", "P", "N", 0.25, True, "yes"]
    paths = [write(tmp_path / str(k), graded(k, values), form=form, epochs=epochs) for k in range(2)]
    (pair,) = prb.compare(*paths)["pairs"]
    assert (pair["n"], pair["users"]) == (SAMPLES, USERS)
    for path in paths:
        metrics = inspect_ai.log.read_eval_log(str(path)).results.scores[0].metrics
        run = read_run(path)
        assert run.summary["model"] == "mockllm/model"
        assert run.summary["accuracy"] == pytest.approx(metrics["mean"].value)
        grades = np.array([row.scores[0] for row in run.rows])
        plain = mean_interval(grades, run.clusters.users)
        assert plain.standard_error == pytest.approx(metrics["stderr"].value)  # users have as many samples
        assert run.summary["ci95"] == grade_interval(grades, run.clusters).bounds  # stays between 0 and 1


def test_scorers_are_named_and_a_folder_holds_several_tasks(tmp_path: Path) -> None:
    for name in ("one", "two"):
        write(tmp_path, graded(0, [1, 0]), both(), name=name)
    with pytest.raises(RunError, match="found 3; --metric names one of: graded; both,kind; both,long"):
        read_run(tmp_path)
    assert read_run(tmp_path, metric=["both,long"]).summary["accuracy"] == 3
    run = read_run(tmp_path, metric=["graded"])
    assert list(run.summary["by_subset"]) == ["one", "two"]
    assert len(run.rows) == 2 * SAMPLES
    assert prb.report(tmp_path, out=tmp_path / "page.html", metric=["graded"]).exists()
    write(tmp_path, graded(0, [1, 0]), name="one")
    with pytest.raises(RunError, match="and of mockllm/model on one; expected one model, and each task once"):
        read_run(tmp_path, metric=["graded"])


def test_what_cannot_be_paired_is_refused(tmp_path: Path) -> None:
    right = write(tmp_path / "right", graded(0, [1, 0]))
    other = write(tmp_path / "other", graded(0, [1, 0]), target=lambda i: "5" if i == 7 else str(i))
    with pytest.raises(RunError, match=r"on different data, .* data\.samples\.toy/7: "):
        prb.compare(right, other)
    for value, message in (
        (float("nan"), "has no score of graded"),
        ("maybe", "expected a number .* 'maybe'"),
    ):
        path = write(tmp_path / message[:3], graded(0, [value]))
        with pytest.raises(RunError, match=message):
            read_run(path)
    damaged = tmp_path / "damaged.eval"
    damaged.write_bytes(right.read_bytes()[:200])
    with pytest.raises(RunError, match="cannot be read as a log of Inspect"):
        read_run(damaged)
    log = inspect_ai.log.read_eval_log(str(right))
    log.status = "cancelled"
    inspect_ai.log.write_eval_log(log, str(right))
    with pytest.raises(RunError, match="finished evaluation with samples, found cancelled"):
        read_run(right)
