"""Files of JSON lines, read and written whole."""

from __future__ import annotations

import json
from collections.abc import Iterable, Mapping
from pathlib import Path
from typing import Any


def read_lines(path: Path) -> list[dict[str, Any]]:
    """The objects of a file."""
    return [json.loads(line) for line in path.read_text().splitlines()]


def write_lines(path: Path, rows: Iterable[Mapping[str, Any]]) -> str:
    """Write the objects into a file, and return its name."""
    path.write_text("".join(json.dumps(row) + "\n" for row in rows))
    return str(path)
