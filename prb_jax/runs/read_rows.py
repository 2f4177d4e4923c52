"""Read files of rows, to continue a run or to report on it."""

from __future__ import annotations

import os
from collections.abc import Iterator, MutableMapping
from pathlib import Path
from typing import Any, BinaryIO

from prb_jax.errors import RunError, quote
from prb_jax.records.files import bounded_lines
from prb_jax.records.reading import parse_json
from prb_jax.records.schema import check_schema
from prb_jax.records.writing import writing
from prb_jax.runs.rows import AnyRow, RowKind


def read_rows(kind: RowKind[AnyRow], path: Path, *, cut: bool) -> MutableMapping[Any, AnyRow]:
    """Return the rows of a file by key; see :meth:`RowKind.read`."""
    rows = kind.table()
    try:
        with path.open("rb") as file:
            for number, line in enumerate(_lines(file, path, cut=cut), start=1):
                where = f"{path}:{number}"
                wrong: dict[str, Any] = {
                    "where": f"{where}: not a row of {kind.what}",
                    "error": RunError,
                    "hint": kind.hint,
                }
                value = parse_json(line.removesuffix(b"\n"), **wrong)
                check_schema(value, kind.schema, **wrong)
                try:
                    row = kind.decode(value)
                except ValueError as error:
                    raise RunError(f"{wrong['where']}: {error}; {kind.hint}") from None
                if kind.key(row) in rows:
                    raise RunError(f"{where}: a second row for {quote(kind.key(row))}; remove one of the two")
                rows[kind.key(row)] = row
    except OSError as error:
        if cut and isinstance(error, FileNotFoundError):
            return rows
        raise RunError(f"cannot read {path}: {error.strerror or error}") from error
    return rows


def _lines(file: BinaryIO, path: Path, *, cut: bool) -> Iterator[bytes]:
    """Yield the lines of a file; with ``cut``, cut off a torn last line instead of yielding it."""
    whole = 0
    for line in bounded_lines(file, path, error=RunError):
        if cut and not line.endswith(b"\n"):
            with writing(path):
                os.truncate(path, whole)
            return
        yield line
        whole += len(line)
