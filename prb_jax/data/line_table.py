"""Where the records of a large file of lines stand."""

from __future__ import annotations

from array import array
from typing import Any

import numpy as np


class LineTable:
    """The places of records, as far as they are known; blank lines are none.

    Attributes:
      starts, sizes: in bytes, of the inflated file where it is packed.
      numbers: of the lines, from 1.
      checks: crc32 of the lines without their ends.
    """

    def __init__(self) -> None:
        self.starts: Any = array("q")
        self.sizes: Any = array("q")
        self.numbers: Any = array("q")
        self.checks: Any = array("I")

    def __len__(self) -> int:
        return len(self.checks)  # the last one that is added to

    def append(self, start: int, size: int, number: int, check: int) -> None:
        """Add one record."""
        self.starts.append(start)
        self.sizes.append(size)
        self.numbers.append(number)
        self.checks.append(check)

    def extend(self, starts: np.ndarray, sizes: np.ndarray, numbers: np.ndarray, checks: np.ndarray) -> None:
        """Add several records."""
        for column, values in ((self.starts, starts), (self.sizes, sizes), (self.numbers, numbers)):
            column.frombytes(values.astype(np.int64).tobytes())
        self.checks.frombytes(checks.astype(np.uint32).tobytes())
