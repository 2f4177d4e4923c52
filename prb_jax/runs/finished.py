"""A finished evaluation, read and never written: what was run, its rows and its summary."""

from __future__ import annotations

from dataclasses import dataclass
from pathlib import Path
from typing import Any

from prb_jax.data.reading import read_object
from prb_jax.errors import RunError, short_repr
from prb_jax.metrics.accuracy import ScoredRow
from prb_jax.metrics.clusters import Clusters
from prb_jax.runs.clusters import read_clusters
from prb_jax.runs.evaluation import EVALUATION, SCORE_ROWS, SCORES
from prb_jax.runs.kind import RUN, SUMMARY


@dataclass(frozen=True)
class FinishedRun:
    """What a run folder of `prb evaluate` holds."""

    path: Path  # the folder
    record: dict[str, Any]  # what `run.json` says
    summary: dict[str, Any]  # what `summary.json` says
    rows: list[ScoredRow]  # of `scores.jsonl`, in its order, at least one
    clusters: Clusters  # of these rows: over what intervals are taken

    __repr__ = short_repr


def read_finished(folder: str | Path) -> FinishedRun:
    """Return the run in a folder.

    Raises:
      RunError: there is no run of `prb evaluate` in it, or it is not finished, or its files cannot be read or do not
        belong together.
    """
    path = Path(folder)
    record = EVALUATION.read(path)
    if record is None:
        raise RunError(f"{path}: expected the folder of a run, found no {RUN} in it")
    if not (path / SUMMARY).exists():
        raise RunError(
            f"{path}: the run is not finished: it has no {SUMMARY}; the command that began it finishes it"
        )
    summary = read_object(path / SUMMARY, error=RunError)
    rows = list(SCORE_ROWS.read(path).values())
    if not rows or summary.get("n") != len(rows):
        raise RunError(
            f"{path / SCORES}: holds {len(rows)} rows, but {SUMMARY} is of {summary.get('n')}; the files of a run "
            "belong together: put back the whole folder, or evaluate again in another one"
        )
    return FinishedRun(path, record, summary, rows, read_clusters(path, rows))
