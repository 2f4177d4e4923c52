"""Read a finished evaluation: figures are recomputed from its rows, and ``summary.json`` must agree with them."""

from __future__ import annotations

import math
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any, NotRequired, TypedDict

from prb_jax.errors import DataError, RunError, quote, short_repr
from prb_jax.metrics.clusters import Clusters
from prb_jax.metrics.rows import ScoredRow
from prb_jax.metrics.summary import summarise
from prb_jax.metrics.uncertainty import paired_difference
from prb_jax.platform.paths import no_run
from prb_jax.records.benchmarks import NAMES, get_benchmark
from prb_jax.records.reading import read_object
from prb_jax.records.schema import check_schema
from prb_jax.runs.clusters import read_clusters
from prb_jax.runs.evaluation import CONTROL_RUNS, EVALUATION, SCORE_ROWS, SCORES
from prb_jax.runs.kind import RUN, SUMMARY

Interval = tuple[float, float] | None


class _Part(TypedDict):
    n: int
    accuracy: float | None
    ci95: NotRequired[Interval]
    ties: int | None


class Figures(TypedDict):
    """The figures of a model, a baseline or a control."""

    n: int
    accuracy: float | None
    ci95: Interval
    ties: int | None
    ci95_reason: NotRequired[str | None]
    half_credit_accuracy: NotRequired[float | None]
    mean_margin: NotRequired[float | None]
    users: NotRequired[int]
    users_derived: NotRequired[bool]
    user_accuracy: NotRequired[float | None]
    user_accuracy_ci95: NotRequired[Interval]
    user_accuracy_ci95_reason: NotRequired[str | None]
    users_testable: NotRequired[int | None]
    coverage: NotRequired[float | None]
    coverage_reason: NotRequired[str | None]
    coverage_ci95: NotRequired[Interval]
    coverage_ci95_reason: NotRequired[str | None]
    coverage_by_chance: NotRequired[float | None]
    coverage_benjamini_hochberg: NotRequired[float | None]
    by_subset: NotRequired[dict[str, _Part]]
    accuracy_by_subset: NotRequired[dict[str, float | None]]
    truncated: NotRequired[int]
    truncation: NotRequired[dict[str, int]]
    difference: NotRequired[float | None]
    difference_ci95: NotRequired[Interval]
    difference_ci95_reason: NotRequired[str | None]


class _Control(TypedDict):
    n: int
    accuracy: float | None
    ci95: Interval
    ties: int | None
    shown_otherwise: int
    difference: float | None
    difference_ci95: Interval
    difference_ci95_reason: str | None


class _Benchmark(TypedDict):
    rule: str
    score: float | None
    figures: dict[str, float | None]
    missing: list[str]
    score_ci95: NotRequired[Interval]
    baselines: dict[str, dict[str, Any]]
    left_out: NotRequired[int]


class _Quantization(TypedDict):
    form: str
    bytes_unquantized: int | None
    bytes_held: int | None


class _LeftOut(TypedDict):
    comparisons: int


class _More(TypedDict, total=False):
    """Fields of a run's summary beside its figures."""

    model: str
    limit: int | None
    readout: str
    hints: dict[str, Any]
    controls: dict[str, _Control]
    baselines: dict[str, Figures]
    benchmarks: dict[str, _Benchmark]
    quantization: _Quantization
    users_fitted_on: int
    history_left_out: dict[str, int]
    users_without_history: int
    unknown_users: int
    left_out: _LeftOut
    definitions: dict[str, str]


@dataclass(frozen=True)
class FinishedRun:
    """Contents of a run folder of `prb evaluate`."""

    path: Path  # the folder
    record: dict[str, Any]  # contents of `run.json`
    # contents of `summary.json`, with the figures of the model and its controls recomputed from the rows
    summary: dict[str, Any]
    rows: list[ScoredRow]  # rows of `scores.jsonl`, in order, at least one
    clusters: Clusters  # of these rows, for intervals

    __repr__ = short_repr


def read_finished(folder: str | Path) -> FinishedRun:
    """Return the run in a folder.

    Raises:
      RunError: the folder has no run of `prb evaluate`, or the run is unfinished; or its files cannot be read, are
        damaged, or do not belong together: a figure of the summary differs from the rows.
    """
    path = Path(folder)
    if not (path / RUN).is_file():
        raise RunError(no_run(path, f"no {RUN} in it"))
    if not (path / SUMMARY).exists():
        raise RunError(
            f"{path}: the run is not finished: it has no {SUMMARY}; repeat the command that started it"
        )
    record, where = EVALUATION.read_finished(path), str(path / SUMMARY)
    summary = read_object(path / SUMMARY, error=RunError)
    for schema in (Figures, _More):
        check_schema(summary, schema, where=where, error=RunError)
    rows = list(SCORE_ROWS.read(path).values())
    if not rows or summary["n"] != len(rows):
        raise RunError(
            f"{path / SCORES}: holds {len(rows)} rows, but {SUMMARY} counts {summary['n']}; the files of a run "
            "belong together: restore the whole folder, or evaluate again in another one"
        )
    clusters = read_clusters(path, rows)
    try:
        figures = _figures(record, summary, rows, clusters)
    except DataError as error:
        raise RunError(f"{path / SCORES}: {error}") from error
    for name in ("accuracy", "ties", "mean_margin", "users", "user_accuracy", "truncated"):
        _check_figure(where, name, summary.get(name), figures[name], is_required=name == "accuracy")
    for name, one in (summary.get("benchmarks") or {}).items():
        # only for runs of one source, whose rows all belong to the benchmark; reading a record loads no plug-in
        if len(summary["benchmarks"]) == len(record.get("data") or ()) == 1 and name in NAMES:
            score = get_benchmark(name).score(rows).score
            _check_figure(where, f"benchmarks.{name}.score", one["score"], score)
    controls = {
        name: {**one, **_control_figures(path / CONTROL_RUNS / name, rows, clusters)}
        for name, one in (summary.get("controls") or {}).items()
    }
    definitions = {**summary.get("definitions", {}), **figures["definitions"]}
    summary = {
        **summary,
        **figures,
        "definitions": definitions,
        **({"controls": controls} if controls else {}),
    }
    return FinishedRun(path, record, summary, rows, clusters)


def _figures(
    record: Mapping[str, Any], summary: Mapping[str, Any], rows: Sequence[ScoredRow], clusters: Clusters
) -> dict[str, Any]:
    """Return the figures of the rows; null for undefined baselines, and for judges without any verdict."""
    name = record["inputs"].get("model", {}).get("name")
    figures = summarise(rows, clusters=clusters, model=name)
    if summary["accuracy"] is None and (
        str(name).startswith("baseline:") or (summary.get("judge") and figures["ties"] == figures["n"])
    ):
        figures = summarise(rows, clusters=clusters, model=name, undefined=str(summary.get("ci95_reason")))
    return {key: value for key, value in figures.items() if key not in ("baselines", "length_baseline")}


def _control_figures(folder: Path, rows: Sequence[ScoredRow], clusters: Clusters) -> dict[str, Any]:
    """Return the figures of a control from its rows; empty if its folder was not kept."""
    if not folder.is_dir():
        return {}
    control = read_finished(folder)
    try:
        paired = paired_difference(rows, control.rows, clusters=clusters)
    except DataError as error:
        raise RunError(f"{folder / SCORES}: {error}") from error
    return {
        **{key: control.summary[key] for key in ("n", "accuracy", "ci95", "ties")},
        "difference": paired["difference"],
        "difference_ci95": paired["ci95"],
        "difference_ci95_reason": paired["ci95_reason"],
    }


def _check_figure(where: str, name: str, stated: Any, found: Any, *, is_required: bool = True) -> None:
    """Reject a figure that differs from its rows; figures that earlier versions did not write may be missing."""
    if stated is None and not is_required:
        return
    if stated == found or (
        stated is not None and found is not None and math.isclose(stated, found, rel_tol=1e-9, abs_tol=1e-12)
    ):
        return
    raise RunError(
        f"{where}: field '{name}': found {quote(stated)}, but the rows of {SCORES} give {quote(found)}; the files of "
        "a run belong together: restore the whole folder, or evaluate again in another one"
    )
