"""`prb leaderboard`: all runs below a folder, grouped by data, as dicts and as a page."""

from __future__ import annotations

import math
from collections.abc import Mapping
from pathlib import Path
from typing import Any, Final

from prb_jax.errors import RunError
from prb_jax.metrics.coverage import chance
from prb_jax.platform.paths import near_path
from prb_jax.records.benchmarks.benchmark import AGGREGATES, organisation_and_name
from prb_jax.records.reading import read_json, read_object
from prb_jax.records.schema import check_schema
from prb_jax.reports.leaderboard_shown import leaderboard_chapters
from prb_jax.reports.page import check_page, write_page
from prb_jax.runs.evaluation import EVALUATION, SCORES
from prb_jax.runs.finished import read_finished
from prb_jax.runs.kind import RUN, SUMMARY
from prb_jax.scoring import UPPER_BOUND
from prb_jax.scoring.prompt_extras import told_of

_FIGURES: Final = (
    "n", "accuracy", "ci95", "ties", "half_credit_accuracy", "user_accuracy", "user_accuracy_ci95", "coverage",
    "mean_margin",
)  # fmt: skip


def leaderboard(
    folder: str | Path,
    *,
    unfinished: bool = False,
    controls: bool = False,
    upper_bounds: bool = False,
    out: str | Path | None = None,
) -> list[dict[str, Any]]:
    """Return the runs of `prb evaluate` in a folder and its subfolders, grouped by data; a page shows them.

    Args:
      folder: Folder to search, at any depth.
      unfinished: Include runs without a summary; their figures are None.
      controls: Include the controls of runs, which are separate runs within them.
      upper_bounds: Include runs with information that no real model has, e.g. the true rubric or narrative, and runs of
        `baseline:persona-truth`.
      out: Page to write, with a name that ends in .html; an existing page is replaced.

    Returns:
      One dict for each run, by data and then from the best to the worst accuracy, with ties counted half: run (its
      folder), model, data, protocol, profile_posts, hints (what else the model was told, in words), upper_bound,
      comparisons, scored, the figures of its summary, chance (accuracy of random scores), gain and gain_ci95 (of
      knowing the user, if there is a blind control), benchmarks (score by name), accuracy_by_subset, template.

    Raises:
      RunError: the folder does not exist or contains no such run; a file of a run cannot be read;
        the page cannot be written.
    """
    top = Path(folder)
    if out is not None:
        check_page(out)
    if not top.is_dir():
        found = "a file" if top.exists() else f"nothing{near_path(top)}"
        raise RunError(f"{top}: expected a folder with runs, found {found}")
    entries = []
    for path in sorted(top.rglob(RUN)):
        found = read_json(path, error=RunError)
        if isinstance(found, dict) and found.get("kind") == EVALUATION.name:
            record = EVALUATION.read(path.parent)
            assert record is not None
            entries.append(_entry(top, path.parent, record))
    kept = [
        entry for entry in entries
        if (unfinished or entry["finished"])
        and (controls or entry["control"] is None)
        and (upper_bounds or not entry["upper_bound"])
    ]  # fmt: skip
    if not kept:
        waiting = sum(not entry["finished"] for entry in entries)
        more = f"; {waiting} are not finished: --unfinished shows them" if waiting else ""
        raise RunError(f"{top}: no finished run of `prb evaluate` in it or below it{more}")
    ordered = sorted(kept, key=lambda entry: (entry["data"], -_rank_value(entry), entry["run"]))
    if out is not None:
        write_page(leaderboard_chapters(ordered), out=out, title=f"Leaderboard: {top.resolve().name}")
    return ordered


def _rank_value(entry: Mapping[str, Any]) -> float:
    """Return the accuracy with ties counted half, so coarse scores do not rank below fine ones."""
    half = entry["half_credit_accuracy"]  # absent in summaries of earlier versions
    return (entry["accuracy"] if half is None else half) or 0.0


def _entry(top: Path, path: Path, record: Mapping[str, Any]) -> dict[str, Any]:
    inputs = record["inputs"]
    finished, scores = (path / SUMMARY).exists(), path / SCORES
    run = read_finished(path) if finished else None
    summary: Mapping[str, Any] = run.summary if run else {}
    blind = (summary.get("controls") or {}).get("blind") or {}
    return {
        "run": path.name if path == top else path.relative_to(top).as_posix(),
        "model": str(record.get("model")),
        "data": " ".join(map(str, record.get("data") or ())) or str((inputs.get("data") or {}).get("sha256")),
        "protocol": inputs.get("protocol"),
        "profile_posts": inputs.get("profile_posts"),
        "control": inputs.get("control"),
        "hints": told_of(inputs.get("hints") or {}),
        "upper_bound": UPPER_BOUND in (inputs.get("hints") or {})
        or UPPER_BOUND in (inputs.get("model") or {}),
        "finished": finished,
        "comparisons": (inputs.get("data") or {}).get("comparisons"),
        "scored": summary["n"] if finished else scores.read_bytes().count(b"\n") if scores.exists() else 0,
        **{name: summary.get(name) for name in _FIGURES},
        "chance": math.fsum(chance(row.labels) for row in run.rows) / len(run.rows) if run else None,
        "gain": blind.get("difference"),
        "gain_ci95": blind.get("difference_ci95"),
        "benchmarks": {name: one["score"] for name, one in (summary.get("benchmarks") or {}).items()},
        "accuracy_by_subset": _by_subset(path, record, summary),
        "template": (inputs.get("model") or {}).get("template"),
    }


def _by_subset(path: Path, record: Mapping[str, Any], summary: Mapping[str, Any]) -> dict[str, Any]:
    """Return accuracy by subset; for RewardBench's own subsets, the values of its result file, by its own rule."""
    figures = dict(summary.get("accuracy_by_subset") or {})
    name = organisation_and_name(str(record.get("model")))
    for benchmark in summary.get("benchmarks") or {}:
        file = path / benchmark / AGGREGATES / f"{name}.json"
        if file.exists():
            subset_figures = read_object(file, error=RunError)
            own = {key: value for key, value in subset_figures.items() if key in figures}
            check_schema(own, dict[str, float | None], where=str(file), error=RunError)
            figures |= own
    return figures
