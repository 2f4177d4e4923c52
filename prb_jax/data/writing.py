"""Comparisons to a file that `read_comparisons` reads back."""

import contextlib
import gzip
import json
import os
from collections.abc import Iterable
from pathlib import Path

from prb_jax.data.comparison import Comparison
from prb_jax.errors import DataError


def write_comparisons(path: str | Path, comparisons: Iterable[Comparison]) -> int:
    """Writes JSON lines, gzipped where the name ends in .gz; returns how many.

    The file appears under its name only when it is whole. Equal comparisons give equal bytes.

    Raises:
      DataError: a name that does not end in .jsonl or .jsonl.gz, or a file that cannot be written.
    """
    path = Path(path)
    if not path.name.endswith((".jsonl", ".jsonl.gz")):
        raise DataError(f"{path}: expected a name ending in .jsonl or .jsonl.gz")
    lines = [json.dumps(c.to_row(), ensure_ascii=False) + "\n" for c in comparisons]
    data = "".join(lines).encode()
    if path.name.endswith(".gz"):
        data = gzip.compress(data, mtime=0)
    temporary = path.with_name(f".{path.name}.tmp")
    try:
        path.parent.mkdir(parents=True, exist_ok=True)
        temporary.write_bytes(data)
        os.replace(temporary, path)
    except OSError as error:
        with contextlib.suppress(OSError):
            temporary.unlink(missing_ok=True)
        raise DataError(f"cannot write {path}: {error.strerror or error}") from error
    return len(lines)
