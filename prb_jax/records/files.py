"""Read rows of untrusted local files with their places; only regular files are opened.

JSON lines are read here, and all other files in :mod:`prb_jax.records.other_files`. A duplicate field is an error,
because one of its values would be lost.
"""

from __future__ import annotations

import contextlib
import errno
import gzip
import hashlib
import io
import itertools
import json
import os
import stat
import zlib
from codecs import BOM_UTF16_BE, BOM_UTF16_LE
from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path
from typing import Any, Final, Generic, Protocol, TypeVar

from prb_jax.errors import DataError, PrbError, quote
from prb_jax.platform.paths import near_path
from prb_jax.records.fields import RECORD, FieldNames
from prb_jax.seams import get

Value = TypeVar("Value")

LONGEST_LINE: Final = 64 << 20
"""Maximum bytes of a line, or of a CSV record. A small gzip file can contain a line larger than memory."""

LARGE: Final = 64 << 20
"""Minimum size in bytes of files that are read by windows and identified by digests of blocks."""

HELD: Final = 1 << 30  # maximum bytes of raw files whose comparisons training keeps in memory

WINDOWED: Final = (".jsonl", ".jsonl.gz", ".parquet")  # suffixes of files that can be read by windows
_PACKED: Final = 4  # estimated compression ratio


@dataclass(frozen=True, slots=True)
class Row(Generic[Value]):
    """One record with its place: first the raw fields, later the `Comparison`."""

    where: str  # "FILE:LINE", or "FILE: row N" in parquet
    value: Value
    named: bool = True  # False for a record without an id


def unpacked_size(path: Path) -> int:
    """Return the estimated bytes of text in a file, four times the size for compressed files; 0 if it is no file."""
    try:
        size = path.stat().st_size if path.is_file() else 0
    except OSError:
        return 0
    return size * (_PACKED if path.name.endswith((".gz", ".parquet")) else 1)


def is_large(path: Path) -> bool:
    """Return True if a file is read by windows."""
    return path.name.endswith(WINDOWED) and unpacked_size(path) >= LARGE


class SupportsReadline(Protocol):
    """An open binary file, compressed or not."""

    def readline(self, size: int, /) -> bytes:
        """Return a line, or at most `size` bytes of it."""
        ...


def open_file(path: str | Path) -> io.BufferedReader:
    """Open a file to read its bytes.

    Raises:
      OSError: The file cannot be opened, or is a pipe or a device, from which reading might never end.
    """
    descriptor = os.open(path, os.O_RDONLY | os.O_NONBLOCK)
    mode = os.fstat(descriptor).st_mode
    if stat.S_ISREG(mode):
        return open(descriptor, "rb")
    os.close(descriptor)
    if stat.S_ISDIR(mode):
        raise IsADirectoryError(errno.EISDIR, os.strerror(errno.EISDIR), str(path))
    raise OSError(errno.EINVAL, "expected a file, found a pipe or a device", str(path))


def bounded_lines(file: SupportsReadline, path: Path, *, error: type[PrbError]) -> Iterator[bytes]:
    """Yield the lines of an open file, with their ends.

    Raises:
      PrbError: (class `error`) A line has more than `LONGEST_LINE` bytes.
    """
    for number in itertools.count(1):
        line = file.readline(LONGEST_LINE + 1)
        if len(line) > LONGEST_LINE:
            raise error(too_long(f"{path}:{number}"))
        if not line:
            return
        yield line


def too_long(where: str) -> str:
    """Return the message for a line, or a record, of more than `LONGEST_LINE` bytes."""
    return f"{where}: expected a record of at most {LONGEST_LINE:,} bytes on a line, found more"


@contextlib.contextmanager
def reading(path: Path) -> Iterator[None]:
    """Turn the errors of the operating system and of gzip into one line that names the file of data."""
    try:
        yield
    except FileNotFoundError as error:
        raise DataError(f"{path}: no such file{near_path(path)}") from error
    except (gzip.BadGzipFile, zlib.error) as error:
        raise DataError(f"{path}: damaged, or not gzip as its name says ({error})") from error
    except EOFError as error:
        raise DataError(f"{path}: truncated; the gzip stream ends too early") from error
    except OSError as error:
        raise DataError(f"{path}: cannot be read: {error.strerror or error}") from error


def unique_fields(pairs: list[tuple[str, Any]]) -> dict[str, Any]:
    """Build an object from its fields, as a hook of a JSON decoder.

    Raises:
      ValueError: A field occurs twice; otherwise only its last value would be kept.
    """
    value = dict(pairs)
    if len(value) != len(pairs):
        seen: set[str] = set()
        for name, _ in pairs:
            if name in seen:
                raise ValueError(f"field {quote(name)} is given twice")
            seen.add(name)
    return value


def parse_line(line: bytes, where: str, *, first: bool) -> Row[Any] | None:
    """Return the record of one line; None for a blank line.

    Args:
      line: The line, with or without its line feed.
      where: Place of the line, FILE:LINE.
      first: True for the first line of the file, which can begin with a byte order mark.

    Raises:
      DataError: The line is not UTF-8 or not JSON.
    """
    try:
        text = line.decode("utf-8")
    except UnicodeDecodeError as error:
        hint = (other_format(line) if first else "") or SAVE_AS
        bad = f"byte 0x{line[error.start]:02x} at column {error.start + 1}"
        raise DataError(f"{where}: invalid UTF-8: {bad} ({error.reason}){hint}") from error
    text = (text.removeprefix("\ufeff") if first else text).rstrip()
    if not text:
        return None
    try:
        value, end = DECODER.raw_decode(text, skip_space(text, 0))
        if end < len(text):
            raise json.JSONDecodeError("text after the end of the record", text, skip_space(text, end))
    except (ValueError, RecursionError) as error:
        hint = _ARRAY if first and text.lstrip() in ("[", "{") else ""
        raise DataError(f"{malformed(where, error)}{hint}") from error
    return Row(where, value)


_ARRAY: Final = (
    "; expected one object on each line; a JSON array, over any lines, belongs in a file named .json"
)


SAVE_AS: Final = "; save the file as UTF-8"


def other_format(line: bytes) -> str:
    """Return what the first line of a file looks like that is not UTF-8, as the end of a message."""
    if line[:2] == b"\x1f\x8b":
        return "; the file looks gzipped, but is not named .gz"
    return (
        "; the file looks like UTF-16: save it as UTF-8" if line[:2] in (BOM_UTF16_LE, BOM_UTF16_BE) else ""
    )


DECODER: Final = json.JSONDecoder(object_pairs_hook=unique_fields)


def skip_space(text: str, position: int) -> int:
    """Return the index of the next character that is not JSON white space."""
    while position < len(text) and text[position] in " \t\r\n":
        position += 1
    return position


def malformed(where: str, error: Exception) -> str:
    """Return the message for JSON that cannot be decoded."""
    if isinstance(error, json.JSONDecodeError):
        return f"{where}: malformed JSON at column {error.colno}: {error.msg}"
    return f"{where}: malformed JSON: {'nested too deeply' if isinstance(error, RecursionError) else error}"


SUFFIXES: Final = (".jsonl", ".jsonl.gz", ".json", ".json.gz", ".csv", ".csv.gz", ".parquet")


def has_known_suffix(path: Path) -> bool:
    """Return True if the file has a known suffix."""
    return path.name.endswith(SUFFIXES)


def read_rows(path: Path, *, columns: FieldNames | None = RECORD) -> Iterator[Row]:
    """Yield the records of one file, in order.

    Args:
      path: File to read.
      columns: Columns to read from CSV and parquet files; None for all.

    Raises:
      DataError: The file is missing, unreadable, truncated, of unknown kind, not UTF-8 or not JSON. The message names
        the file and, if possible, the line and column.
    """
    kind = path.name.removesuffix(".gz").rpartition(".")[2]
    if not has_known_suffix(path):
        raise DataError(f"{path}: unknown kind of file; expected a name ending in {', '.join(SUFFIXES)}")
    if kind != "jsonl" or path.name.endswith(".gz") or is_large(path):
        yield from get("formats", "other").value(path, columns)
        return
    with reading(path), open_file(path) as file:
        for number, line in enumerate(bounded_lines(file, path, error=DataError), start=1):
            row = parse_line(line, f"{path}:{number}", first=number == 1)
            if row is not None:
                yield row


def file_digest(path: str | Path) -> str:
    """Return ``"sha256:..."`` of a file's bytes.

    Raises:
      DataError: The file cannot be read.
    """
    path = Path(path)
    with reading(path), open_file(path) as file:
        return "sha256:" + hashlib.file_digest(file, "sha256").hexdigest()
