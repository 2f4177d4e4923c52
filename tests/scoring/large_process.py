"""`prb` in a process for which every file is large: read by windows. Started by tests.

python -m tests.scoring.large_process VERB ...

Its last line tells the records and their bytes that it read, and how many comparisons it held at a time.
"""

import json
import sys

from prb_jax import cli
from prb_jax.data import blocks
from prb_jax.data.comparison import Comparison
from prb_jax.data.files import Row
from prb_jax.data.lines import JsonLines
from prb_jax.sources.large import LargeComparisons, Read

counts = {"records": 0, "bytes": 0, "held": 0}
gone = [0]


def counting() -> None:
    """Count what is read from here on."""
    read, row = LargeComparisons.read, JsonLines.row

    def counted(self: LargeComparisons, index: int) -> Read:
        counts["records"] += 1
        counts["held"] = max(counts["held"], counts["records"] - gone[0])
        return read(self, index)

    def counted_row(self: JsonLines, index: int) -> Row:
        before = self.bytes_read
        found = row(self, index)
        counts["bytes"] += self.bytes_read - before
        return found

    def count_gone(self: Comparison) -> None:
        gone[0] += 1

    LargeComparisons.read, JsonLines.row, Comparison.__del__ = counted, counted_row, count_gone


if __name__ == "__main__":
    blocks.LARGE, blocks.BLOCK = 1, 1 << 16
    counting()
    status = cli.main(sys.argv[1:])
    print(json.dumps(counts))
    sys.exit(status)
