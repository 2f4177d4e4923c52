"""The benchmark as files of one JSON record a line."""

from __future__ import annotations

import contextlib
import gzip
import json
import os
from collections.abc import Sequence
from pathlib import Path

from prb_jax.data.comparison import Comparison
from prb_jax.errors import DataError
from prb_jax.sources.personas.generate import GENERIC_PARTS, PERSONAL_PARTS, WORDING_PART, Personas


def serialise(comparisons: Sequence[Comparison]) -> bytes:
    """The records as UTF-8 JSON lines; equal records give equal bytes."""
    lines = (json.dumps(c.to_row(), ensure_ascii=False, separators=(", ", ": ")) for c in comparisons)
    return "".join(line + "\n" for line in lines).encode("utf-8")


def export(benchmark: Personas, folder: str | Path) -> dict[str, Path]:
    """Write ``PART.jsonl.gz`` for every part that is no union; existing files are replaced whole.

    No time stamp or file name enters the compressed bytes.

    Raises:
      DataError: if a file cannot be written.
    """
    folder = Path(folder)
    paths = {part: folder / f"{part}.jsonl.gz" for part in (*PERSONAL_PARTS, *GENERIC_PARTS, WORDING_PART)}
    for part, path in paths.items():
        content = gzip.compress(serialise(benchmark.parts[part]), compresslevel=6, mtime=0)
        unfinished = path.with_name(f".{path.name}.{os.getpid()}.part")
        try:
            folder.mkdir(parents=True, exist_ok=True)
            unfinished.write_bytes(content)
            os.replace(unfinished, path)
        except OSError as error:
            with contextlib.suppress(OSError):
                unfinished.unlink()
            raise DataError(f"{path}: cannot write the generated records: {error.strerror}") from error
    return paths
