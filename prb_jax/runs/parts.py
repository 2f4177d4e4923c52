"""A run in parts: jobs that know nothing of each other compute a part of the batches each.

The batches are those of the whole run, so that every row has the same bytes, and `prb_jax.runs.merging` makes one run
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
"""In the folder of a part that is finished: the part, how many rows it has, and its files with their digests."""


class PartFile(TypedDict):
    """What ``part.json`` holds; parts of an earlier version have no digests, and do not know the whole."""

    part: str
    rows: int
    files: list[str]
    rows_of_all: NotRequired[int]
    digests: NotRequired[dict[str, str]]


@dataclass(frozen=True)
class Part:
    """The part ``number`` of ``count``, from 1."""

    number: int
    count: int

    def __str__(self) -> str:
        return f"{self.number}/{self.count}"

    def has(self, indices: Sequence[int]) -> bool:
        """Tell whether a batch belongs to this part: it falls to a part at random, by its first comparison."""
        return crc32(str(indices[0]).encode()) % self.count == self.number - 1

    def skip(self, finished: Callable[[Sequence[int]], bool]) -> Skip:
        """Return what tells of a batch's indices that they are finished, or of another part."""
        return Skip(finished, self)


def parse_part(text: str) -> Part:
    """Return the part of a text as "2/7".

    Raises:
      RunError: it says something else.
    """
    if (match := re.fullmatch(r"([1-9]\d*)/([1-9]\d*)", text)) and int(match[1]) <= int(match[2]):
        return Part(int(match[1]), int(match[2]))
    raise RunError(f"part: expected I/N with 1 <= I <= N, as 2/7, found {quote(text)}")


@dataclass(frozen=True)
class Skip:
    """Tells of a batch's indices that they need no scores here: they have them, or are of another part."""

    finished: Callable[[Sequence[int]], bool]
    part: Part | None

    def __call__(self, indices: Sequence[int]) -> bool:
        return self.finished(indices) or (self.part is not None and not self.part.has(indices))

    def window(self, indices: Sequence[int]) -> bool:
        """As above, of a window of comparisons, which holds batches of all parts."""
        return self.finished(indices)


def finish_part(
    folder: Path, part: Part, *, rows: int, rows_of_all: int, files: Sequence[str]
) -> dict[str, Any]:
    """Say that a part is finished, and return the summary of it.

    Args:
      folder: of the run; a folder in it that holds a `run.json` is a part of a run too.
      part: that it is.
      rows: of the part.
      rows_of_all: Rows of all parts together.
      files: that hold them, in the folder and in such folders in it.
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
