"""Atomic writes: a file appears complete under its name, or not at all."""

from __future__ import annotations

import contextlib
import os
from collections.abc import Iterator
from pathlib import Path
from typing import BinaryIO


def temporary_name(path: Path) -> Path:
    """Return the name of an unfinished file; a killed process may leave one behind, and the next one overwrites it."""
    return path.with_name(f".{path.name}.tmp")


@contextlib.contextmanager
def whole_file(path: Path) -> Iterator[BinaryIO]:
    """Open a file under a temporary name; on exit, flush it to disk and rename it to ``path``.

    Raises:
      OSError: the file cannot be written; nothing is left behind.
    """
    temporary = temporary_name(path)
    try:
        with temporary.open("wb") as file:
            yield file
            file.flush()
            os.fsync(file.fileno())
        temporary.replace(path)
    finally:
        with contextlib.suppress(OSError):
            temporary.unlink(missing_ok=True)
