"""Read records from parquet files, and from pandas, polars or pyarrow tables in memory."""

from __future__ import annotations

import contextlib
from collections.abc import Container, Iterable, Iterator, Mapping, Sequence
from pathlib import Path
from typing import Any

from prb_jax.errors import DataError, first_line, quote
from prb_jax.records.fields import CONTEXT_FIELDS, CONVERSATIONS, FieldNames
from prb_jax.records.foreign_fields import check_columns


def parquet_values(path: Path, wanted: Container[str] | None) -> Iterator[Mapping[str, Any]]:
    """Yield the rows of a parquet file, with only the ``wanted`` columns (None: all).

    Raises:
      DataError: The file is damaged, a column occurs twice, or text is not UTF-8.
    """
    import pyarrow.parquet as pq  # slow to import, and most files are JSON lines

    with _arrow_errors(f"{path}: not a whole parquet file"), pq.ParquetFile(path) as file:
        columns = _chosen_columns(file.schema_arrow.names, wanted, str(path))
        batches = file.iter_batches(batch_size=1024, columns=columns)
        yield from _with_all_names(_batch_values(batches, str(path)), file.schema_arrow.names)


def parquet_rows(path: Path) -> int:
    """Return the number of rows in the metadata of a parquet file; errors as in :func:`parquet_values`."""
    import pyarrow.parquet as pq

    with _arrow_errors(f"{path}: not a whole parquet file"):
        return pq.read_metadata(path).num_rows


@contextlib.contextmanager
def _arrow_errors(wrong: str, *others: type[Exception]) -> Iterator[None]:
    """Turn errors of Arrow, and of other classes, into one line that begins with `wrong`."""
    import pyarrow as pa

    try:
        yield
    except (pa.ArrowException, *others) as error:
        raise DataError(f"{wrong}: {first_line(error)}") from error


def table_values(table: Any, wanted: Container[str], *, where: str) -> Iterator[Mapping[str, Any]]:
    """Yield the rows of an object with the Arrow C stream interface (``__arrow_c_stream__``).

    Raises:
      DataError: Arrow cannot represent the table, a column occurs twice, or text is not UTF-8.
    """
    import pyarrow as pa

    wrong = f"{where}: not a table of records"
    # The table's own library refuses two columns of one name, and a name that is no text.
    with _arrow_errors(wrong, TypeError, ValueError):
        reader = pa.RecordBatchReader.from_stream(table)
    with _arrow_errors(wrong):
        columns = _chosen_columns(reader.schema.names, wanted, where)
        values = _batch_values((batch.select(columns) for batch in reader), where)
        yield from _with_all_names(values, reader.schema.names)


def _chosen_columns(names: Sequence[str], wanted: Container[str] | None, where: str) -> list[str]:
    """Return the wanted columns of a table (None: all); DataError for a wanted column that occurs twice."""
    if isinstance(wanted, FieldNames):
        check_columns(names, wanted, where)
    columns = [name for name in names if wanted is None or name in wanted]
    for name in columns:
        if columns.count(name) > 1:
            places = " and ".join(str(i) for i, other in enumerate(names, start=1) if other == name)
            raise DataError(f"{where}: field {quote(name)} is given twice, in columns {places}")
    return columns


def _with_all_names(rows: Iterator[Mapping[str, Any]], names: Sequence[str]) -> Iterator[Mapping[str, Any]]:
    """Yield the rows; the first has all columns, because an error about it lists them. Columns not read are None."""
    for row in rows:
        yield {**row, **{name: None for name in names if name not in row}}
        break
    yield from rows


def _batch_values(batches: Iterable[Any], where: str) -> Iterator[Mapping[str, Any]]:
    """Yield the rows of record batches as Python objects."""
    before = 0
    for batch in batches:
        try:
            values = batch.to_pylist()
        # Invalid UTF-8, a duplicate field in a list of objects, or a date beyond the year 9999.
        except (ValueError, OverflowError) as error:
            raise DataError(_bad_value(batch, where, before)) from error
        yield from map(without_padding, values)
        before += batch.num_rows


def _bad_value(batch: Any, where: str, before: int) -> str:
    """Return a message on the first row and field of a record batch that cannot become a Python object."""
    for i in range(batch.num_rows):
        for name in batch.schema.names:
            try:
                batch.column(name).slice(i, 1).to_pylist()
            except UnicodeDecodeError as error:
                return f"{where}: row {before + i + 1}: field '{name}': invalid UTF-8 ({error.reason})"
            except (ValueError, OverflowError) as error:
                return f"{where}: row {before + i + 1}: field '{name}': {first_line(error)}"
    return f"{where}: rows {before + 1} to {before + batch.num_rows} cannot be read"


def without_padding(row: dict[str, Any]) -> dict[str, Any]:
    """Return a table row without the nulls that tables add to the fields of messages and tools."""
    for name in (*CONVERSATIONS, *CONTEXT_FIELDS):
        if isinstance(row.get(name), list | dict):
            row[name] = _without_nulls(row[name])
    return row


def _without_nulls(value: Any) -> Any:
    if isinstance(value, dict):
        kept = {key: item for key, item in value.items() if item is not None or key == "content"}
        return {key: _without_nulls(item) for key, item in kept.items()}
    return list(map(_without_nulls, value)) if isinstance(value, list) else value
