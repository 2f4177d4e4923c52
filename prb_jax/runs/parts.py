"""Runs in parts: jobs that do not communicate each compute a part of the batches.

The parts use the batches of the whole run, so every row has the same bytes. `prb_jax.runs.merging` makes one run
of the parts.
"""

from __future__ import annotations

import re
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any, Final, NotRequired, TypedDict
from zlib import crc32

from prb_jax.errors import RunError, quote
from prb_jax.records.digests import digests_of
from prb_jax.records.writing import write_json

PART: Final = "part.json"
"""File in the folder of a finished part: the part, its number of rows, and its files with their digests."""


class PartFile(TypedDict):
    """Contents of ``part.json``; earlier versions wrote neither digests nor the number of all rows."""

    part: str
    rows: int
    files: list[str]
    rows_of_all: NotRequired[int]
    digests: NotRequired[dict[str, str]]


@dataclass(frozen=True)
class Part:
    """Part ``number`` of ``count``, from 1."""

    number: int
    count: int

    def __str__(self) -> str:
        return f"{self.number}/{self.count}"

    def has(self, indices: Sequence[int]) -> bool:
        """Return True if a batch belongs to this part: its first comparison assigns it to a pseudo-random part."""
        return crc32(str(indices[0]).encode()) % self.count == self.number - 1

    def skip(self, finished: Callable[[Sequence[int]], bool]) -> Skip:
        """Return a function of a batch's indices: True if the batch is finished or belongs to another part."""
        return Skip(finished, self)


def parse_part(text: str) -> Part:
    """Parse a part such as "2/7".

    Raises:
      RunError: the text has another form.
    """
    if (match := re.fullmatch(r"([1-9]\d*)/([1-9]\d*)", text)) and int(match[1]) <= int(match[2]):
        return Part(int(match[1]), int(match[2]))
    raise RunError(f"part: expected I/N with 1 <= I <= N, e.g. 2/7, found {quote(text)}")


@dataclass(frozen=True)
class Skip:
    """Returns True if a batch needs no scores here: it has them, or belongs to another part."""

    finished: Callable[[Sequence[int]], bool]
    part: Part | None

    def __call__(self, indices: Sequence[int]) -> bool:
        return self.finished(indices) or (self.part is not None and not self.part.has(indices))

    def window(self, indices: Sequence[int]) -> bool:
        """Return True if a window of comparisons is finished; windows hold batches of all parts."""
        return self.finished(indices)


def finish_part(
    folder: Path, part: Part, *, rows: int, rows_of_all: int, files: Sequence[str]
) -> dict[str, Any]:
    """Mark a part as finished, and return its summary.

    Args:
      folder: Run folder; a folder inside it that has a `run.json` also holds part of a run.
      part: The finished part.
      rows: Number of rows of the part.
      rows_of_all: Number of rows of all parts together.
      files: Names of the row files, in the folder and in such folders inside it.
    """
    patterns = [pattern for name in files for pattern in (name, f"*/*/{name}")]
    record: PartFile = {
        "part": str(part),
        "rows": rows,
        "rows_of_all": rows_of_all,
        "files": list(files),
        "digests": digests_of(folder, patterns),
    }
    write_json(folder / PART, record)
    return {"part": str(part), "n": rows}
