"""Rows of local files: JSON lines, JSON arrays, CSV (all also gzipped) and parquet, each with its place.

In a CSV file the first line names the columns. ``responses``, ``labels``, ``profile`` and ``rubric_aspects`` are
JSON (a profile may also be a text); ``question``, ``prompt``, ``chosen`` and ``rejected`` are text, or a list of
messages as JSON.
"""

from __future__ import annotations

import contextlib
import csv
import gzip
import hashlib
import io
import json
import zlib
from collections import Counter
from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path
from typing import Any, Final

from prb_jax.data.arrow import parquet_values
from prb_jax.data.field_names import RECORD, FieldNames
from prb_jax.data.reading import open_file, unique_fields
from prb_jax.errors import DataError, quote

SUFFIXES: Final = (".jsonl", ".jsonl.gz", ".json", ".json.gz", ".csv", ".csv.gz", ".parquet")

LISTS: Final = ("responses", "labels", "profile", "rubric_aspects")
"""Fields of a record that are lists."""

_CONVERSATIONS: Final = ("question", "prompt", "chosen", "rejected")
_LONGEST_CELL: Final = 2**31 - 1


@dataclass(frozen=True, slots=True)
class Row:
    """One undecoded record and where it stands: "FILE:LINE", or "FILE: row N" in parquet."""

    where: str
    value: Any


def has_known_suffix(path: Path) -> bool:
    """Whether the file's name says how to read it."""
    return path.name.endswith(SUFFIXES)


def read_rows(path: Path, *, columns: FieldNames | None = RECORD) -> Iterator[Row]:
    """The records of one file, in order.

    Args:
      path: the file.
      columns: of CSV and parquet files, which are not read beyond these; None for all of them.

    Raises:
      DataError: for a file that is missing, unreadable, truncated, of unknown kind, not UTF-8 or
        not JSON, naming the file and, where there is one, the line and column.
    """
    if not has_known_suffix(path):
        raise DataError(f"{path}: unknown kind of file; expected a name ending in {', '.join(SUFFIXES)}")
    with reading(path):
        open_file(path).close()  # a pipe is none
        if path.name.endswith(".parquet"):
            for number, value in enumerate(parquet_values(path, columns), start=1):
                yield Row(f"{path}: row {number}", value)
        elif path.name.endswith((".csv", ".csv.gz")):
            yield from _csv_rows(path, columns)
        elif path.name.endswith((".json", ".json.gz")):
            yield from _json_rows(path)
        else:
            yield from _json_lines(path)


def file_digest(path: str | Path) -> str:
    """``"sha256:..."`` of a file's bytes.

    Raises:
      DataError: if it cannot be read.
    """
    path = Path(path)
    with reading(path), open_file(path) as file:
        return "sha256:" + hashlib.file_digest(file, "sha256").hexdigest()


@contextlib.contextmanager
def reading(path: Path) -> Iterator[None]:
    """Turn what the operating system and gzip raise into one line that names the file."""
    try:
        yield
    except FileNotFoundError as error:
        raise DataError(f"{path}: no such file") from error
    except (gzip.BadGzipFile, zlib.error) as error:
        raise DataError(f"{path}: damaged, or not gzip as its name says ({error})") from error
    except EOFError as error:
        raise DataError(f"{path}: truncated; the gzip stream ends too early") from error
    except OSError as error:
        raise DataError(f"{path}: cannot be read: {error.strerror or error}") from error


def _json_lines(path: Path) -> Iterator[Row]:
    opener = gzip.open if path.name.endswith(".gz") else open
    with opener(path, "rb") as file:
        for number, line in enumerate(file, start=1):
            row = parse_line(line, f"{path}:{number}", first=number == 1)
            if row is not None:
                yield row


def parse_line(line: bytes, where: str, *, first: bool) -> Row | None:
    """The record of one line; None for a blank one.

    Args:
      line: with or without its end.
      where: FILE:LINE.
      first: whether it is the first of the file, which may begin with a byte order mark.

    Raises:
      DataError: it is not UTF-8 or not JSON.
    """
    text = _decode(line, where, first=first).rstrip()
    if not text:
        return None
    try:
        value, end = _LINE_DECODER.raw_decode(text, _skip_space(text, 0))
        if end < len(text):
            end = _skip_space(text, end)
            raise json.JSONDecodeError("text after the end of the record", text, end)
    except (ValueError, RecursionError) as error:
        raise DataError(_malformed(where, error)) from error
    return Row(where, value)


def _json_rows(path: Path) -> Iterator[Row]:
    """A file named .json holds one array of records, or, as often, JSON lines."""
    raw = path.read_bytes()
    if path.name.endswith(".gz"):
        raw = gzip.decompress(raw)
    if raw.removeprefix(b"\xef\xbb\xbf").lstrip()[:1] != b"[":
        yield from _json_lines(path)
        return
    text = _decode_all(raw, path)
    decoder = _decoder()
    position, line, counted = text.index("[") + 1, 1, 0
    expecting = True  # a record may come: after "[" and after ","
    while True:
        position = _skip_space(text, position)
        line += text.count("\n", counted, position)
        counted = position
        where = f"{path}:{line}"
        mark = text[position : position + 1]
        if mark == "]":
            break
        if mark == "," and not expecting:
            position += 1
            expecting = True
            continue
        try:
            if not expecting:
                raise json.JSONDecodeError("expected ',' or ']'", text, position)
            value, position = decoder.raw_decode(text, position)
        except (ValueError, RecursionError) as error:
            place = f"{path}:{error.lineno}" if isinstance(error, json.JSONDecodeError) else where
            raise DataError(_malformed(place, error)) from error
        yield Row(where, value)
        expecting = False
    rest = _skip_space(text, position + 1)
    if rest < len(text):
        line += text.count("\n", counted, rest)
        raise DataError(f"{path}:{line}: malformed JSON: text after the end of the array")


def _skip_space(text: str, position: int) -> int:
    while position < len(text) and text[position] in " \t\r\n":
        position += 1
    return position


def _decode(line: bytes, where: str, *, first: bool) -> str:
    try:
        text = line.decode("utf-8")
    except UnicodeDecodeError as error:
        hint = "; the file looks gzipped, but is not named .gz" if first and line[:2] == b"\x1f\x8b" else ""
        bad = f"byte 0x{line[error.start]:02x} at column {error.start + 1}"
        raise DataError(f"{where}: invalid UTF-8: {bad} ({error.reason}){hint}") from error
    return text.removeprefix("\ufeff") if first else text


def _decode_all(raw: bytes, path: Path) -> str:
    try:
        return raw.decode("utf-8-sig")
    except UnicodeDecodeError as error:
        line = error.object.count(b"\n", 0, error.start) + 1
        raise DataError(
            f"{path}:{line}: invalid UTF-8: byte 0x{error.object[error.start]:02x} ({error.reason})"
        ) from error


def _decoder() -> json.JSONDecoder:
    return json.JSONDecoder(object_pairs_hook=unique_fields)


_LINE_DECODER: Final = _decoder()


def _malformed(where: str, error: Exception) -> str:
    if isinstance(error, json.JSONDecodeError):
        return f"{where}: malformed JSON at column {error.colno}: {error.msg}"
    if isinstance(error, RecursionError):
        return f"{where}: malformed JSON: nested too deeply"
    return f"{where}: malformed JSON: {error}"


def _csv_rows(path: Path, wanted: FieldNames | None) -> Iterator[Row]:
    """Records of a table whose first line names the columns; an empty cell is an absent field."""
    raw = path.read_bytes()
    text = _decode_all(gzip.decompress(raw) if path.name.endswith(".gz") else raw, path)
    csv.field_size_limit(_LONGEST_CELL)
    reader = csv.reader(io.StringIO(text, newline=""), strict=True)
    names: list[str] = []
    start = 1
    try:
        for cells in reader:
            where, start = f"{path}:{start}", reader.line_num + 1  # a cell may hold line ends
            if not cells:
                continue
            if not names:
                names = _csv_names(cells, where, wanted)
                continue
            if len(cells) != len(names):
                raise DataError(
                    f"{where}: expected {len(names)} cells, one for each column, found {len(cells)}"
                )
            pairs = zip(names, cells)
            named = {
                n: n if wanted is None else wanted.field(n) for n in names if wanted is None or n in wanted
            }
            yield Row(where, {n: _csv_value(named[n], cell, where) for n, cell in pairs if n in named})
    except csv.Error as error:
        raise DataError(f"{path}:{start}: malformed CSV: {error}") from error


def _csv_names(cells: list[str], where: str, wanted: FieldNames | None) -> list[str]:
    for name, count in Counter(cells).items():
        if count > 1 and (wanted is None or name in wanted):
            raise DataError(f"{where}: field {quote(name)} is given twice")
    if wanted is not None and not any(name in wanted for name in cells):
        raise DataError(
            f"{where}: names no field of a record; expected a first line as: id,question,chosen,rejected"
        )
    return cells


def _csv_value(name: str, cell: str, where: str) -> Any:
    if not cell:
        return None
    if name == "margin":
        try:
            return float(cell)
        except ValueError:
            return cell  # refused where numbers are checked
    if name == "profile" and not cell.lstrip().startswith(("[", "{", '"')):
        return cell
    if name in LISTS:
        try:
            return _decoder().decode(cell)
        except (ValueError, RecursionError) as error:
            raise DataError(
                f"{where}: field '{name}': expected JSON: {_malformed('the cell', error)}"
            ) from error
    if name in _CONVERSATIONS and cell.startswith("[{"):
        if cell.startswith(("[{'role'", "[{'content'")):
            raise DataError(f"{where}: field '{name}': a list of messages as Python prints it; expected JSON")
        with contextlib.suppress(ValueError, RecursionError):  # other text may begin like that, too
            value = _decoder().decode(cell)
            if all(isinstance(item, dict) and {"role", "content"} <= set(item) for item in value):
                return value
    return cell
