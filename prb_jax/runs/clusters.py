"""``clusters.jsonl`` of a run: users and responses that its intervals cluster by, if the rows do not contain them.

A run has this file if users were derived from profiles, or if several users judge the same responses. One line per row
of ``scores.jsonl``, in the same order: id, user, and the keys of the responses (null if the data are not crossed).
"""

from __future__ import annotations

from collections.abc import Sequence
from operator import itemgetter
from pathlib import Path
from typing import TypedDict

from prb_jax.errors import RunError, quote
from prb_jax.metrics.clusters import Clusters
from prb_jax.metrics.rows import ScoredRow
from prb_jax.records.writing import json_line, whole_file, writing
from prb_jax.runs.evaluation import CLUSTERS
from prb_jax.runs.rows import RowKind


class _Line(TypedDict):
    id: str
    user: str | None
    responses: list[str] | None
    derived: bool


_ROWS = RowKind(CLUSTERS, "clusters", itemgetter("id"), _Line)


def write_clusters(folder: Path, rows: Sequence[ScoredRow], clusters: Clusters) -> None:
    """Write the clusters of rows that do not contain them.

    Args:
      folder: Run folder.
      rows: Rows of the run.
      clusters: Clusters of the rows, in the same order.

    Raises:
      RunError: the file cannot be written.
    """
    path = folder / CLUSTERS
    with writing(path), whole_file(path) as file:
        for i, (row, user) in enumerate(zip(rows, clusters.users, strict=True)):
            responses = None if clusters.responses is None else list(clusters.responses[i])
            value = {"id": row.id, "user": user, "responses": responses, "derived": clusters.derived}
            file.write(json_line(value))


def read_clusters(folder: Path, rows: Sequence[ScoredRow]) -> Clusters:
    """Return the clusters of a run's rows: from the file, or else by the users of the rows.

    Args:
      folder: Run folder.
      rows: Rows of the run, in any order.

    Raises:
      RunError: the file cannot be read, or does not belong to these rows.
    """
    path = folder / CLUSTERS
    if not path.exists():
        return Clusters(tuple(row.user_id for row in rows))
    by_id = _ROWS.read(path)
    if by_id.keys() != {row.id for row in rows}:
        raise RunError(f"{path}: expected each comparison of this run exactly once")
    lined = [by_id[row.id] for row in rows]
    crossed = bool(lined) and lined[0]["responses"] is not None
    for row, value in zip(rows, lined, strict=True):
        alike = value["derived"] == lined[0]["derived"] and (value["responses"] is not None) == crossed
        if not alike or (not value["derived"] and value["user"] != row.user_id):
            raise RunError(f"{path}: {quote(row.id)}: does not match the other lines, or the row in the run")
    return Clusters(
        tuple(value["user"] for value in lined),
        tuple(tuple(value["responses"]) for value in lined) if crossed else None,
        bool(lined) and lined[0]["derived"],
    )
