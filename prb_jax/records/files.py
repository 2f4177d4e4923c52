"""Read rows of local files with their places.

JSON lines are read here, and all other files in :mod:`prb_jax.records.other_files`.
"""

from __future__ import annotations

import hashlib
from collections.abc import Iterator
from pathlib import Path
from typing import Final

from prb_jax.errors import DataError
from prb_jax.records.field_names import RECORD, FieldNames
from prb_jax.records.lines import Row, is_large, parse_line
from prb_jax.records.reading import bounded_lines, open_file, reading
from prb_jax.seams import get

SUFFIXES: Final = (".jsonl", ".jsonl.gz", ".json", ".json.gz", ".csv", ".csv.gz", ".parquet")


def has_known_suffix(path: Path) -> bool:
    """Return True if the file has a known suffix."""
    return path.name.endswith(SUFFIXES)


def read_rows(path: Path, *, columns: FieldNames | None = RECORD) -> Iterator[Row]:
    """Yield the records of one file, in order.

    Args:
      path: File to read.
      columns: Columns to read from CSV and parquet files; None for all.

    Raises:
      DataError: The file is missing, unreadable, truncated, of unknown kind, not UTF-8 or not JSON. The message names
        the file and, if possible, the line and column.
    """
    kind = path.name.removesuffix(".gz").rpartition(".")[2]
    if not has_known_suffix(path):
        raise DataError(f"{path}: unknown kind of file; expected a name ending in {', '.join(SUFFIXES)}")
    if kind != "jsonl" or path.name.endswith(".gz") or is_large(path):
        yield from get("formats", "other").value(path, columns)
        return
    with reading(path), open_file(path) as file:
        for number, line in enumerate(bounded_lines(file, path, error=DataError), start=1):
            row = parse_line(line, f"{path}:{number}", first=number == 1)
            if row is not None:
                yield row


def file_digest(path: str | Path) -> str:
    """Return ``"sha256:..."`` of a file's bytes.

    Raises:
      DataError: The file cannot be read.
    """
    path = Path(path)
    with reading(path), open_file(path) as file:
        return "sha256:" + hashlib.file_digest(file, "sha256").hexdigest()
