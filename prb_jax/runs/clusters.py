"""``clusters.jsonl`` of a run: the users and responses over which its intervals are taken, where rows do not tell.

It is there where users were derived from profiles, or several users judge the same responses. One line for each row
of ``scores.jsonl``, in its order: id, user, and the keys of the responses (null where the data are not crossed).
"""

from __future__ import annotations

from collections.abc import Sequence
from pathlib import Path

from prb_jax.data.reading import bounded_lines, open_file, parse_json
from prb_jax.data.writing import json_line, whole_file, writing
from prb_jax.errors import RunError
from prb_jax.metrics.accuracy import ScoredRow
from prb_jax.metrics.clusters import Clusters

CLUSTERS = "clusters.jsonl"
_FIELDS = {"id", "user", "responses", "derived"}


def write_clusters(folder: Path, rows: Sequence[ScoredRow], clusters: Clusters) -> None:
    """Write the file, if the rows alone do not tell their clusters.

    Args:
      folder: of the run.
      rows: of the run.
      clusters: of the rows, in their order.

    Raises:
      RunError: it cannot be written.
    """
    if clusters.responses is None and not clusters.derived:
        return
    path = folder / CLUSTERS
    with writing(path), whole_file(path) as file:
        for i, (row, user) in enumerate(zip(rows, clusters.users, strict=True)):
            responses = None if clusters.responses is None else list(clusters.responses[i])
            value = {"id": row.id, "user": user, "responses": responses, "derived": clusters.derived}
            file.write(json_line(value))


def read_clusters(folder: Path, rows: Sequence[ScoredRow]) -> Clusters:
    """Return the clusters of the rows of a run: those of the file, or else by the users of the rows.

    Args:
      folder: of the run.
      rows: of the run, in any order.

    Raises:
      RunError: the file cannot be read, or does not belong to these rows.
    """
    path = folder / CLUSTERS
    try:
        with open_file(path) as file:
            lines = list(bounded_lines(file, path, error=RunError))
    except FileNotFoundError:
        return Clusters(tuple(row.user_id for row in rows))
    except OSError as error:
        raise RunError(f"{path}: cannot be read: {error.strerror or error}") from error
    by_id = {}
    for number, line in enumerate(lines, start=1):
        where = f"{path}:{number}"
        value = parse_json(line, where=where, error=RunError)
        if not isinstance(value, dict) or value.keys() != _FIELDS or not isinstance(value["id"], str):
            raise RunError(f"{where}: expected an object with {', '.join(sorted(_FIELDS))}")
        by_id[value["id"]] = value
    if by_id.keys() != {row.id for row in rows}:
        raise RunError(f"{path}: does not name the comparisons of this run, each once")
    lined = [by_id[row.id] for row in rows]
    crossed = bool(lined) and lined[0]["responses"] is not None
    return Clusters(
        tuple(value["user"] for value in lined),
        tuple(tuple(value["responses"]) for value in lined) if crossed else None,
        bool(lined) and lined[0]["derived"],
    )
