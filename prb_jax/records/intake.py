"""Build comparisons from records in files, and from tables, objects and generators in Python."""

from __future__ import annotations

import json
from collections import Counter
from collections.abc import Iterable, Iterator, Mapping
from hashlib import sha256
from io import IOBase
from pathlib import Path
from typing import Any, Final, Protocol

from prb_jax.errors import DataError, quote
from prb_jax.records import fields
from prb_jax.records.comparison import LISTS, Comparison
from prb_jax.records.field_names import RECORD, FieldMapper
from prb_jax.records.files import Row
from prb_jax.seams import get


class ArrowTable(Protocol):
    """A table with the Arrow C stream interface."""

    def __arrow_c_stream__(self, requested_schema: object | None = None) -> object: ...


MODEL_FIRST: Final = (
    "the model is the first argument and the data are the second (on the command line, --data)"
)
"""Hint for a caller who has exchanged the two."""

Records = Comparison | Mapping[str, Any] | Iterable[Comparison | Mapping[str, Any]] | ArrowTable
"""One comparison or object with the fields of a record; any iterable of them, e.g. a list, a generator or a data set of
``datasets``; or a table with the Arrow C stream interface, e.g. from pandas, polars or pyarrow."""


def as_comparisons(data: Records, *, labelled: bool = True) -> list[Comparison]:
    """Return the comparisons of a Python caller's records; see ``given_rows`` and ``read_records``."""
    return [row.value for row in read_records(given_rows(data), labelled=labelled)]


def given_rows(data: Records) -> Iterator[Row[Any]]:
    """Yield a Python caller's records with their positions, read one by one.

    Raises:
      DataError: The data are not of type ``Records``.
    """
    mapped = FieldMapper(RECORD, "data")
    if hasattr(data, "__arrow_c_stream__"):
        for position, value in enumerate(get("formats", "table").value(data, RECORD, where="data")):
            yield Row(f"position {position}", mapped(value, where=f"position {position}"))
        return
    if isinstance(data, Mapping) and data and all(hasattr(part, "column_names") for part in data.values()):
        raise DataError(
            f"data: expected one split of a data set, found all of them: {', '.join(map(str, data))}"
        )
    items: Any = [data] if isinstance(data, Comparison | Mapping) else data
    if isinstance(items, str | Path):
        raise DataError(
            f"data: expected comparisons, or a table of records, found the text {quote(str(items))}; read a file or "
            "data set first: prb.read_comparisons(NAME)"
        )
    if isinstance(items, IOBase):
        raise DataError(
            f"data: expected comparisons, found an open file; give its name: {quote(getattr(items, 'name', None))}"
        )
    if isinstance(items, bytes) or not isinstance(items, Iterable):
        is_model = callable(items) or any(hasattr(items, name) for name in ("stream", "score_tokens"))
        hint = f"; {MODEL_FIRST}" if is_model else ""
        raise DataError(
            f"data: expected comparisons, or a table of records, found {type(data).__name__}{hint}"
        )
    for position, item in enumerate(items):
        where = f"position {position}"
        if isinstance(item, Mapping):
            lists = {name: fields.as_list(item[name]) for name in LISTS if name in item}
            yield Row(where, mapped({**item, **lists}, where=where))
        elif isinstance(item, Comparison):
            yield Row(where, item)
        else:
            expected = "expected a Comparison or an object with its fields"
            raise DataError(f"{where}: {expected}, found {type(item).__name__}")


def read_records(
    rows: Iterable[Row[Any]], *, labelled: bool = True, tell: bool = True
) -> Iterator[Row[Comparison]]:
    """Yield the comparisons of rows; the second of equal records without an id gets the id "ID#2", and so on.

    Args:
      rows: Rows of records.
      labelled: If True, records must have labels.
      tell: If True, warn at the end about duplicates, similar user names, and prompts that are already rendered.

    Raises:
      DataError: A record is invalid.
    """
    unnamed: Counter[str] = Counter()
    read = (_read(row, unnamed, labelled=labelled) for row in rows)
    return get("formats", "remarks").value(read, unnamed) if tell else read


def _read(row: Row[Any], unnamed: Counter[str], *, labelled: bool) -> Row[Comparison]:
    if isinstance(row.value, Comparison):
        return row
    comparison = Comparison.from_row(row.value, where=row.where, labelled=labelled)
    named = row.value.get("id") is not None
    if not named:
        unnamed[comparison.id] += 1
        if (count := unnamed[comparison.id]) > 1:
            value = {**row.value, "id": f"{comparison.id}#{count}"}
            comparison = Comparison.from_row(value, where=row.where, labelled=labelled)
    return Row(row.where, comparison, named)


def digest(comparisons: Iterable[Comparison]) -> str:
    """Return ``"sha256:..."`` of the contents of comparisons, in order."""
    hashed = sha256()
    for comparison in comparisons:
        hashed.update(json.dumps(comparison.to_row(), sort_keys=True).encode())
        hashed.update(b"\n")
    return f"sha256:{hashed.hexdigest()}"
