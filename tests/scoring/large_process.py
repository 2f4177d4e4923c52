"""`prb` in a process for which every file is large: read by windows. Started by tests, which also count in their own.

python -m tests.scoring.large_process VERB ...

Its last line tells the records and their bytes that it read, and how many comparisons it held at a time.
"""

import json
import re
import sys
from collections.abc import Callable, Iterator
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

from prb_jax import cli
from prb_jax.records import files, large_lines
from prb_jax.records.comparison import Comparison
from prb_jax.records.files import Row
from prb_jax.records.large_lines import JsonLines
from prb_jax.records.sources.large import LargeComparisons
from prb_jax.runs.kind import RUN


@dataclass
class Counts:
    """What was read: records, the files of JSON lines, and most comparisons that were there at a time."""

    records: int = 0
    held: int = 0
    files: list[JsonLines] = field(default_factory=list)

    @property
    def bytes(self) -> int:
        """Bytes of the files of JSON lines."""
        return sum(file.bytes_read for file in self.files)

    def to_json(self) -> dict[str, int]:
        return {"records": self.records, "bytes": self.bytes, "held": self.held}


def read_by_windows(replace: Callable[[Any, str, Any], object] = setattr, *, block: int = 1 << 16) -> Counts:
    """Every file is large from here on, and what is read of it is counted.

    Args:
      replace: sets an attribute, as ``monkeypatch.setattr`` does until the end of a test.
      block: bytes of a block.
    """
    counts, there = Counts(), set[int]()
    read, begin = LargeComparisons.placed, JsonLines.__init__

    def counted(self: LargeComparisons, name: str = "") -> Iterator[Row]:
        for placed in read(self, name):
            counts.records += 1
            there.add(id(placed.value))
            counts.held = max(counts.held, len(there))
            yield placed

    def begun(self: JsonLines, path: Path) -> None:
        begin(self, path)
        if not (path.parent / RUN).exists():  # files of a run have their digests taken at its end
            counts.files.append(self)

    def gone(self: Comparison) -> None:
        there.discard(id(self))

    replace(files, "LARGE", 1)
    replace(large_lines, "BLOCK", block)
    replace(LargeComparisons, "placed", counted)
    replace(JsonLines, "__init__", begun)
    replace(Comparison, "__del__", gone)
    return counts


if __name__ == "__main__":
    counts = read_by_windows()
    status = cli.main(sys.argv[1:])
    # KiB, of this program alone: ru_maxrss knows the process that started it too.
    (peak,) = re.findall(r"VmHWM:\s+(\d+) kB", Path("/proc/self/status").read_text(encoding="utf-8"))
    print(json.dumps({**counts.to_json(), "peak": int(peak)}))
    sys.exit(status)
