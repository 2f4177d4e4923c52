"""Rows of local files: JSON lines, JSON arrays, CSV (all also gzipped) and parquet, each with its place.

In a CSV file the first line names the columns. ``responses``, ``labels``, ``profile`` and ``rubric_aspects`` are
JSON (a profile may also be a text); ``question``, ``prompt``, ``chosen`` and ``rejected`` are text, or a list of
messages as JSON. Tables of pandas, polars or pyarrow in memory are read as parquet files are.
"""

from __future__ import annotations

import contextlib
import csv
import gzip
import hashlib
import io
import json
from collections import Counter
from collections.abc import Container, Iterable, Iterator, Mapping, Sequence
from pathlib import Path
from typing import Any, Final

from prb_jax.errors import DataError, first_line, quote
from prb_jax.records.comparison import LISTS
from prb_jax.records.field_names import RECORD, FieldNames
from prb_jax.records.lines import DECODER, HELD, JsonLines, Row, malformed, skip_space
from prb_jax.records.reading import LONGEST_LINE, bounded_lines, open_file, reading, too_long

SUFFIXES: Final = (".jsonl", ".jsonl.gz", ".json", ".json.gz", ".csv", ".csv.gz", ".parquet")

_CONVERSATIONS: Final = ("question", "prompt", "chosen", "rejected")
_LONGEST_CELL: Final = 2**31 - 1
_PIECE: Final = 1 << 20  # bytes that are read at a time


def has_known_suffix(path: Path) -> bool:
    """Whether the file's name says how to read it."""
    return path.name.endswith(SUFFIXES)


def read_rows(path: Path, *, columns: FieldNames | None = RECORD) -> Iterator[Row]:
    """The records of one file, in order.

    Args:
      columns: of CSV and parquet files, which are not read beyond these; None for all of them.

    Raises:
      DataError: for a file that is missing, unreadable, truncated, of unknown kind, not UTF-8 or
        not JSON, naming the file and, where there is one, the line and column.
    """
    kind = path.name.removesuffix(".gz").rpartition(".")[2]
    if not has_known_suffix(path):
        raise DataError(f"{path}: unknown kind of file; expected a name ending in {', '.join(SUFFIXES)}")
    if kind == "jsonl":
        yield from JsonLines(path).rows()
        return
    with reading(path):
        open_file(path).close()  # a pipe is no regular file
        if kind == "parquet":
            for number, value in enumerate(parquet_values(path, columns), start=1):
                yield Row(f"{path}: row {number}", value)
            return
        with open_file(path) as raw, gzip.GzipFile(fileobj=raw) if _is_packed(path) else raw as file:
            if kind == "csv":
                yield from _csv_rows(path, file, columns)
                return
            if _begins_array(file):
                yield from _array_rows(path, _read_text(file, path))
                return
    yield from JsonLines(path).rows()  # as often, a file named .json holds JSON lines


def file_digest(path: str | Path) -> str:
    """``"sha256:..."`` of a file's bytes.

    Raises:
      DataError: if it cannot be read.
    """
    path = Path(path)
    with reading(path), open_file(path) as file:
        return "sha256:" + hashlib.file_digest(file, "sha256").hexdigest()


def _is_packed(path: Path) -> bool:
    return path.name.endswith(".gz")


def _begins_array(file: io.BufferedIOBase) -> bool:
    """Whether the first letter of a file, which is read from its beginning again, is that of a JSON array."""
    start = b"\xef\xbb\xbf"
    while piece := file.read(_PIECE):
        if piece := piece.removeprefix(start).lstrip():
            break
        start = b""
    file.seek(0)
    return piece[:1] == b"["


def _read_text(file: io.BufferedIOBase, path: Path) -> str:
    raw = bytearray()
    while piece := file.read(_PIECE):
        raw += piece
        if len(raw) > HELD and _is_packed(path):
            raise DataError(
                f"{path}: holds more than {HELD:,} bytes of JSON, which has to be in memory at once: expected JSON "
                "lines, one record a line, in a file named .jsonl.gz"
            )
    return _decode(raw, path)


def _decode(raw: bytes | bytearray, path: Path, first: int = 1) -> str:
    """The text of some lines of a file, from line ``first`` on."""
    try:
        return raw.decode("utf-8-sig" if first == 1 else "utf-8")
    except UnicodeDecodeError as error:
        line = error.object.count(b"\n", 0, error.start) + first
        raise DataError(
            f"{path}:{line}: invalid UTF-8: byte 0x{error.object[error.start]:02x} ({error.reason})"
        ) from error


def _array_rows(path: Path, text: str) -> Iterator[Row]:
    """The records of one JSON array, each with the line where it begins."""
    position, line, counted = text.index("[") + 1, 1, 0
    expecting = True  # a record may come: after "[" and after ","
    while True:
        position = skip_space(text, position)
        line += text.count("\n", counted, position)
        counted = position
        where, mark = f"{path}:{line}", text[position : position + 1]
        if mark == "]":
            break
        if mark == "," and not expecting:
            position, expecting = position + 1, True
            continue
        try:
            if not expecting:
                raise json.JSONDecodeError("expected ',' or ']'", text, position)
            value, position = DECODER.raw_decode(text, position)
        except (ValueError, RecursionError) as error:
            place = f"{path}:{error.lineno}" if isinstance(error, json.JSONDecodeError) else where
            raise DataError(malformed(place, error)) from error
        yield Row(where, value)
        expecting = False
    rest = skip_space(text, position + 1)
    if rest < len(text):
        line += text.count("\n", counted, rest)
        raise DataError(f"{path}:{line}: malformed JSON: text after the end of the array")


def _csv_rows(path: Path, file: io.BufferedIOBase, wanted: FieldNames | None) -> Iterator[Row]:
    """Records of a table whose first line names the columns; an empty cell is an absent field."""
    csv.field_size_limit(_LONGEST_CELL)
    names: list[str] = []
    fields: dict[str, str] = {}  # of each column that is read, the field
    start, size = 1, 0  # of the record that is being read

    def lines() -> Iterator[str]:
        nonlocal size
        for number, line in enumerate(bounded_lines(file, path, error=DataError), start=1):
            if (size := size + len(line)) > LONGEST_LINE:
                raise DataError(too_long(f"{path}:{start}"))
            text = _decode(line, path, number)
            yield from io.StringIO(text, newline="") if "\r" in text else [text]

    reader = csv.reader(lines(), strict=True)
    try:
        for cells in reader:
            where, start, size = f"{path}:{start}", reader.line_num + 1, 0  # a cell may hold line ends
            if not cells:
                continue
            if not names:
                names, fields = cells, _csv_fields(cells, where, wanted)
                continue
            if len(cells) != len(names):
                raise DataError(
                    f"{where}: expected {len(names)} cells, one for each column, found {len(cells)}"
                )
            pairs = zip(names, cells)
            yield Row(where, {n: _csv_value(fields[n], cell, where) for n, cell in pairs if n in fields})
    except csv.Error as error:
        raise DataError(f"{path}:{start}: malformed CSV: {error}") from error


def _csv_fields(names: list[str], where: str, wanted: FieldNames | None) -> dict[str, str]:
    fields = {n: n if wanted is None else wanted.field(n) for n in names if wanted is None or n in wanted}
    for name, count in Counter(names).items():
        if count > 1 and name in fields:
            raise DataError(f"{where}: field {quote(name)} is given twice")
    if not fields:
        raise DataError(
            f"{where}: names no field of a record; expected a first line as: id,question,chosen,rejected"
        )
    return fields


def _csv_value(name: str, cell: str, where: str) -> Any:
    if not cell:
        return None
    if name == "margin":
        try:
            return float(cell)
        except ValueError:
            return cell  # refused where numbers are checked
    if name in LISTS and (name != "profile" or cell.lstrip().startswith(("[", "{", '"'))):
        try:
            return DECODER.decode(cell)
        except (ValueError, RecursionError) as error:
            message = malformed("the cell", error)
            raise DataError(f"{where}: field '{name}': expected JSON: {message}") from error
    if name in _CONVERSATIONS and cell.startswith("[{"):
        if cell.startswith(("[{'role'", "[{'content'")):
            raise DataError(f"{where}: field '{name}': a list of messages as Python prints it; expected JSON")
        with contextlib.suppress(ValueError, RecursionError):  # other text may begin like that, too
            value = DECODER.decode(cell)
            if all(isinstance(item, dict) and {"role", "content"} <= set(item) for item in value):
                return value
    return cell


def parquet_values(path: Path, wanted: Container[str] | None) -> Iterator[Mapping[str, Any]]:
    """The rows of a parquet file; columns outside ``wanted`` are not read (None: all are).

    Raises:
      DataError: for a damaged file, a column given twice, and text that is not UTF-8.
    """
    import pyarrow.parquet as pq  # slow to import, and most files are JSON lines

    with _arrow_errors(f"{path}: not a whole parquet file"), pq.ParquetFile(path) as file:
        columns = _chosen_columns(file.schema_arrow.names, wanted, str(path))
        yield from _batch_values(file.iter_batches(batch_size=1024, columns=columns), str(path))


def parquet_rows(path: Path) -> int:
    """Return how many rows a parquet file says that it has; errors as of :func:`parquet_values`."""
    import pyarrow.parquet as pq

    with _arrow_errors(f"{path}: not a whole parquet file"):
        return pq.read_metadata(path).num_rows


@contextlib.contextmanager
def _arrow_errors(wrong: str) -> Iterator[None]:
    """Turn Arrow's errors into one line that begins with what is wrong."""
    import pyarrow as pa

    try:
        yield
    except pa.ArrowException as error:
        raise DataError(f"{wrong}: {first_line(error)}") from error


def table_values(table: Any, wanted: Container[str], *, where: str) -> Iterator[Mapping[str, Any]]:
    """The rows of an object with the Arrow C stream interface (``__arrow_c_stream__``).

    Raises:
      DataError: for a table that Arrow cannot represent, a column given twice, and text that is not UTF-8.
    """
    import pyarrow as pa

    with _arrow_errors(f"{where}: not a table of records"):
        reader = pa.RecordBatchReader.from_stream(table)
        columns = _chosen_columns(reader.schema.names, wanted, where)
        yield from _batch_values((batch.select(columns) for batch in reader), where)


def _chosen_columns(names: Sequence[str], wanted: Container[str] | None, where: str) -> list[str]:
    """Which of a table's columns are read: the wanted ones (None: all), each there at most once."""
    columns = [name for name in names if wanted is None or name in wanted]
    for name in columns:
        if columns.count(name) > 1:
            places = " and ".join(str(i) for i, other in enumerate(names, start=1) if other == name)
            raise DataError(f"{where}: field {quote(name)} is given twice, in columns {places}")
    return columns


def _batch_values(batches: Iterable[Any], where: str) -> Iterator[Mapping[str, Any]]:
    """The rows of record batches as Python objects."""
    before = 0
    for batch in batches:
        try:
            values = batch.to_pylist()
        # Text that is not UTF-8, a field given twice within a list of objects, a date beyond the year 9999.
        except (ValueError, OverflowError) as error:
            raise DataError(_bad_value(batch, where, before)) from error
        yield from values
        before += batch.num_rows


def _bad_value(batch: Any, where: str, before: int) -> str:
    """Which row and field of a record batch cannot be turned into Python objects, and why."""
    for i in range(batch.num_rows):
        for name in batch.schema.names:
            try:
                batch.column(name).slice(i, 1).to_pylist()
            except UnicodeDecodeError as error:
                return f"{where}: row {before + i + 1}: field '{name}': invalid UTF-8 ({error.reason})"
            except (ValueError, OverflowError) as error:
                return f"{where}: row {before + i + 1}: field '{name}': {first_line(error)}"
    return f"{where}: rows {before + 1} to {before + batch.num_rows} cannot be read"
