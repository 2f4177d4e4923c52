"""Records of a Python file: FILE.py:NAME."""

from __future__ import annotations

import json
from collections.abc import Iterator
from hashlib import sha256
from typing import Any

from prb_jax.errors import DataError, PrbError
from prb_jax.plugins import python_value
from prb_jax.records.comparison import Comparison
from prb_jax.records.files import Row
from prb_jax.records.intake import given_rows
from prb_jax.records.sources.source import Digest, Source


class PythonSource(Source):
    """FILE.py:NAME, a function that returns records, or the records."""

    kind = "python"

    def rows(self, *, subset: str | None, split: str) -> Iterator[Row]:
        value = python_value(self.name).value
        try:
            records: Any = value() if callable(value) else value
        except PrbError:
            raise
        except Exception as error:
            raise DataError(f"{self.name}: fails: {type(error).__name__}: {error}") from error
        for row in given_rows(records):
            yield Row(f"{self.name}: {row.where}", row.value)

    def describe(self, *, split: str, digest: Digest) -> dict[str, Any]:
        content = sha256()  # of the records, because results of the file can depend on more than its text
        for row in self.rows(subset=None, split=split):
            value = row.value.to_row() if isinstance(row.value, Comparison) else row.value
            content.update(json.dumps(value, sort_keys=True, default=str).encode() + b"\n")
        name = self.name.rpartition(":")[2]
        return {"kind": self.kind, "name": name, "sha256": content.hexdigest()}
