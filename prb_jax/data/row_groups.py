"""Random access to the records of large parquet files: a batch of rows is held, and row groups are entered anew."""

from __future__ import annotations

import itertools
import threading
from collections.abc import Iterator, Mapping
from pathlib import Path
from typing import Any

import numpy as np

from prb_jax.data.arrow import arrow_errors, batch_values, chosen_columns
from prb_jax.data.blocks import large_digest
from prb_jax.data.field_names import RECORD, FieldMapper, FieldNames
from prb_jax.data.files import Row, reading

_AT_A_TIME = 256


class ParquetRows:
    """The records of one file, read forward, or from the start of a row group.

    Attributes:
      path: of the file.
      digest: of its bytes, as ``blocks_digest`` gives it; the file is read once for it.

    Raises:
      DataError: a file that is missing, unreadable or damaged.
    """

    def __init__(self, path: Path, *, columns: FieldNames = RECORD) -> None:
        import pyarrow.parquet as pq  # slow to import

        self.path = path
        self._mapped = FieldMapper(columns, path)
        self._lock = threading.Lock()
        self.digest = large_digest(path)
        with reading(path), arrow_errors(path):
            self._file = pq.ParquetFile(path)
            groups = [self._file.metadata.row_group(n).num_rows for n in range(self._file.num_row_groups)]
            self._columns = chosen_columns(self._file.schema_arrow.names, columns, str(path))
        self._starts = np.cumsum([0, *groups])
        self._values: Iterator[Mapping[str, Any]] = iter(())
        self._next = -1

    def __len__(self) -> int:
        return int(self._starts[-1])

    def row(self, index: int) -> Row:
        """One record.

        Raises:
          DataError: it cannot be read.
        """
        with self._lock, arrow_errors(self.path), reading(self.path):
            group = int(np.searchsorted(self._starts, index, side="right")) - 1
            start = int(self._starts[group])
            if self._next < 0 or index < self._next or start > self._next:
                self._values, self._next = self._from_group(group), start
            value = next(itertools.islice(self._values, index - self._next, None))
            self._next = index + 1
        where = f"{self.path}: row {index + 1}"
        return Row(where, self._mapped(value, where=where))

    def _from_group(self, group: int) -> Iterator[Mapping[str, Any]]:
        groups = range(group, len(self._starts) - 1)
        batches = self._file.iter_batches(
            batch_size=_AT_A_TIME, row_groups=list(groups), columns=self._columns, use_threads=False
        )
        return batch_values(batches, str(self.path), first=int(self._starts[group]))
