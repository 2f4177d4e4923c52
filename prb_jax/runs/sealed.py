"""Finished runs: their record has the digests of their files, which are compared when the files are read."""

from __future__ import annotations

from collections.abc import Mapping
from pathlib import Path
from typing import Any

from prb_jax.errors import RunError
from prb_jax.models.checkpoints.locate import MODEL, TRAIN
from prb_jax.records.digests import check_digests, digest_of_bytes, digests_of, matching
from prb_jax.records.reading import read_object
from prb_jax.records.schema import check_schema
from prb_jax.records.writing import json_file, write_file, write_json
from prb_jax.runs.kind import FORMAT, RUN, RunKind, RunRecord
from prb_jax.seams import value_at


def seal(kind: RunKind, folder: Path, summary: Any) -> None:
    """Write the digests of all files to the record of a run, then its summary; see :meth:`RunKind.finish`."""
    data = json_file(summary)
    patterns = [*kind.sealed, *([kind.rows.file] if kind.rows else [])]
    files = {**digests_of(folder, patterns), kind.finished: digest_of_bytes(data)}
    write_json(folder / kind.file, {**(kind.read(folder) or {}), "format": FORMAT, "files": files})
    write_file(folder / kind.finished, data)


def check_sealed(kind: RunKind, folder: Path, run: Mapping[str, Any], *, hint: str) -> None:
    """Compare the files in a folder with the digests in its record; see :meth:`RunKind.check_files`."""
    path, files = folder / kind.file, run.get("files", {})
    if run.get("format", 1) == FORMAT:
        written = [
            kind.finished,
            *([kind.rows.file] if kind.rows else []),
            *matching(folder, kind.sealed),
        ]
        # Sub-folders may hold files that a killed command added to a finished run.
        if unknown := [name for name in written if name not in files and "/" not in name]:
            raise RunError(f"{path}: field 'files': expected the digest of {unknown[0]}, found nothing")
    own = {name: digest for name, digest in files.items() if not name.startswith(f"{MODEL}/")}
    check_digests(folder, own, record=path, error=RunError, hint=hint)


def check_record(kind: RunKind, run: dict[str, Any], *, where: str, hint: str) -> None:
    """Check the types of a record that was read, and its version; see :meth:`RunKind.read`."""
    check_schema(run, RunRecord, where=where, error=RunError, hint=hint)
    inputs = value_at(kind.inputs) if isinstance(kind.inputs, str) else kind.inputs
    check_schema(run["inputs"], inputs, where=f"{where}: inputs", error=RunError, hint=hint)
    if run.get("format", 1) > FORMAT:
        raise RunError(f"{where}: format {run['format']}: written by a later version of prb_jax; {hint}")


def check_file(path: Path) -> None:
    """Compare a file of any run with its digest in the record beside it, if there is one.

    Raises:
      RunError: the file differs from its digest.
    """
    for name in (RUN, TRAIN):
        record = path.parent / name
        if record.is_file():
            run = read_object(record, error=RunError)
            check_schema(run, RunRecord, where=str(record), error=RunError)
            known = {path.name: run["files"][path.name]} if path.name in run.get("files", {}) else {}
            check_digests(path.parent, known, record=record, error=RunError)
