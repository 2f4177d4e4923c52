"""`prb` in a process for which every file is large: read by windows. Started by tests.

python -m tests.scoring.large_process VERB ...

Its last line tells the records and their bytes that it read, and how many comparisons it held at a time.
"""

import gc
import json
import sys

from prb_jax import cli
from prb_jax.data import blocks
from prb_jax.data.comparison import Comparison
from prb_jax.data.lines import JsonLines
from prb_jax.sources.large import LargeComparisons, Read

EVERY = 97

counts = {"records": 0, "bytes": 0, "held": 0}


def counting() -> None:
    """Count what is read from here on."""
    read, row = LargeComparisons.read, JsonLines.row

    def counted(self: LargeComparisons, index: int) -> Read:
        counts["records"] += 1
        if counts["records"] % EVERY == 0:
            held = sum(isinstance(each, Comparison) for each in gc.get_objects())
            counts["held"] = max(counts["held"], held)
        return read(self, index)

    def counted_row(self: JsonLines, index: int):
        before = self.bytes_read
        found = row(self, index)
        counts["bytes"] += self.bytes_read - before
        return found

    LargeComparisons.read, JsonLines.row = counted, counted_row


if __name__ == "__main__":
    blocks.LARGE, blocks.BLOCK = 1, 1 << 16
    counting()
    status = cli.main(sys.argv[1:])
    print(json.dumps(counts))
    sys.exit(status)
