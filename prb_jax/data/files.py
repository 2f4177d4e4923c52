"""Rows of local files: JSON lines, JSON arrays (both also gzipped) and parquet, each with its place."""

from __future__ import annotations

import gzip
import hashlib
import json
import zlib
from collections.abc import Collection, Iterator, Mapping
from contextlib import contextmanager
from dataclasses import dataclass
from pathlib import Path
from typing import Any, Final

from prb_jax.errors import DataError, quote

SUFFIXES: Final = (".jsonl", ".jsonl.gz", ".json", ".json.gz", ".parquet")

RECORD_FIELDS: Final = (
    "id",
    "question",
    "prompt",
    "chosen",
    "rejected",
    "responses",
    "labels",
    "user_id",
    "profile",
    "category",
    "subset",
    "margin",
    "rubric_aspects",
    "narrative",
)


@dataclass(frozen=True, slots=True)
class Row:
    """One undecoded record and where it stands: "FILE:LINE", or "FILE: row N" in parquet."""

    where: str
    value: Any


def has_known_suffix(path: Path) -> bool:
    """Whether the file's name says how to read it."""
    return path.name.endswith(SUFFIXES)


def read_rows(path: Path, *, columns: Collection[str] | None = RECORD_FIELDS) -> Iterator[Row]:
    """The records of one file, in order.

    Args:
      path: the file.
      columns: of parquet files, which are not read beyond these; None for all of them.

    Raises:
      DataError: for a file that is missing, unreadable, truncated, of unknown kind, not UTF-8 or
        not JSON, naming the file and, where there is one, the line and column.
    """
    if not has_known_suffix(path):
        raise DataError(f"{path}: unknown kind of file; expected a name ending in {', '.join(SUFFIXES)}")
    with _reading(path):
        if path.name.endswith(".parquet"):
            yield from _parquet_rows(path, columns)
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
    with _reading(path), path.open("rb") as file:
        return "sha256:" + hashlib.file_digest(file, "sha256").hexdigest()


@contextmanager
def _reading(path: Path) -> Iterator[None]:
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
    decoder = _decoder()
    opener = gzip.open if path.name.endswith(".gz") else open
    with opener(path, "rb") as file:
        for number, line in enumerate(file, start=1):
            where = f"{path}:{number}"
            text = _decode(line, where, first=number == 1).rstrip()
            if not text:
                continue
            try:
                value, end = decoder.raw_decode(text, _skip_space(text, 0))
                if end < len(text):
                    end = _skip_space(text, end)
                    raise json.JSONDecodeError("text after the end of the record", text, end)
            except (ValueError, RecursionError) as error:
                raise DataError(_malformed(where, error)) from error
            yield Row(where, value)


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
    return json.JSONDecoder(object_pairs_hook=_unique)


def _unique(pairs: list[tuple[str, Any]]) -> dict[str, Any]:
    """An object; a field given twice would otherwise silently keep its last value."""
    value = dict(pairs)
    if len(value) != len(pairs):
        names = [name for name, _ in pairs]
        twice = next(name for name in names if names.count(name) > 1)
        raise ValueError(f"field {quote(twice)} is given twice")
    return value


def _malformed(where: str, error: Exception) -> str:
    if isinstance(error, json.JSONDecodeError):
        return f"{where}: malformed JSON at column {error.colno}: {error.msg}"
    if isinstance(error, RecursionError):
        return f"{where}: malformed JSON: nested too deeply"
    return f"{where}: malformed JSON: {error}"


def _parquet_rows(path: Path, wanted: Collection[str] | None) -> Iterator[Row]:
    import pyarrow as pa  # slow to import, and most files are JSON lines
    import pyarrow.parquet as pq

    try:
        with pq.ParquetFile(path) as file:
            columns = [name for name in file.schema_arrow.names if wanted is None or name in wanted]
            number = 0
            for batch in file.iter_batches(batch_size=1024, columns=columns):
                for value in _batch_values(batch, path, number):
                    number += 1
                    yield Row(f"{path}: row {number}", value)
    except (pa.ArrowException, pa.ArrowInvalid) as error:
        raise DataError(f"{path}: not a whole parquet file: {_first_line(error)}") from error


def _batch_values(batch: Any, path: Path, before: int) -> list[Mapping[str, Any]]:
    """The rows of a record batch; text that is not UTF-8 is an error that names its row."""
    try:
        return batch.to_pylist()
    except UnicodeDecodeError:
        for i in range(batch.num_rows):
            for name in batch.schema.names:
                try:
                    batch.column(name).slice(i, 1).to_pylist()
                except UnicodeDecodeError as error:
                    where = f"{path}: row {before + i + 1}"
                    raise DataError(f"{where}: field '{name}': invalid UTF-8 ({error.reason})") from error
        raise


def _first_line(error: Exception) -> str:
    return (str(error).splitlines() or [type(error).__name__])[0]
