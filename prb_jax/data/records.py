"""Comparisons from records: of files, and of the tables, objects and generators of a Python caller."""

from __future__ import annotations

import json
from collections import Counter
from collections.abc import Iterable, Iterator, Mapping
from dataclasses import dataclass
from hashlib import sha256
from pathlib import Path
from typing import Any, Protocol

from prb_jax.data import fields
from prb_jax.data.arrow import table_values
from prb_jax.data.comparison import Comparison
from prb_jax.data.files import LISTS, RECORD_FIELDS, Row
from prb_jax.errors import DataError


class ArrowTable(Protocol):
    """A table with the Arrow C stream interface."""

    def __arrow_c_stream__(self, requested_schema: object | None = None) -> object: ...


Records = Comparison | Mapping[str, Any] | Iterable[Comparison | Mapping[str, Any]] | ArrowTable
"""One comparison or object with the fields of a record; any iterable of them, as a list, a generator or a data set of
``datasets``; or a table with the Arrow C stream interface, as of pandas, polars or pyarrow."""


@dataclass(frozen=True, slots=True)
class Placed:
    """A comparison and where it stands."""

    where: str
    comparison: Comparison


def as_comparisons(data: Records, *, labelled: bool = True) -> list[Comparison]:
    """The comparisons of a Python caller; see ``given_rows`` and ``read_records``."""
    return [each.comparison for each in read_records(given_rows(data), labelled=labelled)]


def given_rows(data: Records) -> Iterator[Row]:
    """The records that a Python caller gives, each with its position; they are read one by one.

    Raises:
      DataError: for anything but ``Records``.
    """
    if hasattr(data, "__arrow_c_stream__"):
        for position, value in enumerate(table_values(data, RECORD_FIELDS, where="data")):
            yield Row(f"position {position}", value)
        return
    if isinstance(data, Mapping) and data and all(hasattr(part, "column_names") for part in data.values()):
        raise DataError(
            f"data: expected one split of a data set, found all of them: {', '.join(map(str, data))}"
        )
    items: Any = [data] if isinstance(data, Comparison | Mapping) else data
    if isinstance(items, str | Path | bytes) or not isinstance(items, Iterable):
        raise DataError(f"data: expected comparisons, or a table of records, found {type(data).__name__}")
    for position, item in enumerate(items):
        where = f"position {position}"
        if isinstance(item, Mapping):
            lists = {name: fields.as_list(item[name]) for name in LISTS if name in item}
            yield Row(where, {**item, **lists})
        elif isinstance(item, Comparison):
            yield Row(where, item)
        else:
            expected = "expected a Comparison or an object with its fields"
            raise DataError(f"{where}: {expected}, found {type(item).__name__}")


def read_records(rows: Iterable[Row], *, labelled: bool = True) -> Iterator[Placed]:
    """The comparisons of rows; of equal records without an id the second one is "ID#2", and so on.

    Args:
      rows: decoded records, or comparisons, which are not looked at.
      labelled: whether records must have labels.

    Raises:
      DataError: for a record that is none.
    """
    unnamed: Counter[str] = Counter()
    for row in rows:
        if isinstance(row.value, Comparison):
            yield Placed(row.where, row.value)
            continue
        comparison = Comparison.from_row(row.value, where=row.where, labelled=labelled)
        if row.value.get("id") is None:
            unnamed[comparison.id] += 1
            if (count := unnamed[comparison.id]) > 1:
                value = {**row.value, "id": f"{comparison.id}#{count}"}
                comparison = Comparison.from_row(value, where=row.where, labelled=labelled)
        yield Placed(row.where, comparison)


def digest(comparisons: Iterable[Comparison]) -> str:
    """``"sha256:..."`` of the contents of comparisons, in order."""
    found = sha256()
    for comparison in comparisons:
        found.update(json.dumps(comparison.to_row(), sort_keys=True).encode())
        found.update(b"\n")
    return f"sha256:{found.hexdigest()}"
