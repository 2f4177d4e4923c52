"""`prb` in a process for which every file is large: read by windows. Started by tests, which also count in their own.

python -m tests.scoring.large_process VERB ...

Its last line tells the records and their bytes that it read, and how many comparisons it held at a time.
"""

import json
import resource
import sys
from collections.abc import Callable
from dataclasses import asdict, dataclass
from typing import Any

from prb_jax import cli
from prb_jax.data import blocks
from prb_jax.data.comparison import Comparison
from prb_jax.data.files import Row
from prb_jax.data.lines import JsonLines
from prb_jax.sources.large import LargeComparisons, Read


@dataclass
class Counts:
    """What was read: records, the bytes of their lines, and most comparisons that were there at a time."""

    records: int = 0
    bytes: int = 0
    held: int = 0


def read_by_windows(replace: Callable[[Any, str, Any], object] = setattr) -> Counts:
    """Every file is large from here on, and what is read of it is counted.

    Args:
      replace: sets an attribute, as ``monkeypatch.setattr`` does until the end of a test.
    """
    counts, there = Counts(), set[int]()
    read, row = LargeComparisons.read, JsonLines.row

    def counted(self: LargeComparisons, index: int) -> Read:
        found = read(self, index)
        counts.records += 1
        there.add(id(found.comparison))
        counts.held = max(counts.held, len(there))
        return found

    def counted_row(self: JsonLines, index: int) -> Row:
        before = self.bytes_read
        found = row(self, index)
        counts.bytes += self.bytes_read - before
        return found

    def gone(self: Comparison) -> None:
        there.discard(id(self))

    replace(blocks, "LARGE", 1)
    replace(blocks, "BLOCK", 1 << 16)
    replace(LargeComparisons, "read", counted)
    replace(JsonLines, "row", counted_row)
    replace(Comparison, "__del__", gone)
    return counts


if __name__ == "__main__":
    found = read_by_windows()
    status = cli.main(sys.argv[1:])
    peak = resource.getrusage(resource.RUSAGE_SELF).ru_maxrss  # KiB; of this process alone
    print(json.dumps({**asdict(found), "peak": peak}))
    sys.exit(status)
