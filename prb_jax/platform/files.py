"""A file appears whole under its name, or not at all."""

from __future__ import annotations

import contextlib
import os
from collections.abc import Iterator
from pathlib import Path
from typing import BinaryIO


def temporary_name(path: Path) -> Path:
    """Return where a file lies until it is whole; a killed process may leave it, and the next one writes over it."""
    return path.with_name(f".{path.name}.tmp")


@contextlib.contextmanager
def whole_file(path: Path) -> Iterator[BinaryIO]:
    """Open a file under a temporary name; at the end it is flushed to the disk and renamed to ``path``.

    Raises:
      OSError: it cannot be written; nothing is left behind.
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
