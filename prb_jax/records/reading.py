"""Files that strangers wrote: opened only if they are files, and read as JSON within bounds.

Depth has a bound, since whatever walks a value would fail far from here, where no file could be named; and so has
size. A field given twice is an error, as one of its values would be lost. So is a number that is not finite, which no
JSON has and no figure can use.
"""

from __future__ import annotations

import contextlib
import errno
import gzip
import io
import itertools
import json
import math
import os
import stat
import zlib
from collections.abc import Iterator, Mapping
from pathlib import Path
from typing import Any, Final, Protocol

from prb_jax.errors import DataError, PrbError, quote

LONGEST_LINE: Final = 64 << 20
"""The most bytes of a line, or of a record of CSV. A small gzip may hold a line that no memory holds."""

_LARGEST: Final = 100_000_000
_DEEPEST: Final = 64
_MOST_DIGITS: Final = 300
"""Digits of a whole number; one with a few more is too large for a float."""


class SupportsReadline(Protocol):
    """An open file of bytes, packed or not."""

    def readline(self, size: int, /) -> bytes:
        """Return a line, or so many bytes of it."""
        ...


def open_file(path: str | Path) -> io.BufferedReader:
    """Open a file to read its bytes.

    Raises:
      OSError: it cannot be opened, or is a pipe or a device, on which reading might wait or go on forever.
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
      PrbError: of the kind `error`: a line has more than `LONGEST_LINE` bytes.
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
        raise DataError(f"{path}: no such file") from error
    except (gzip.BadGzipFile, zlib.error) as error:
        raise DataError(f"{path}: damaged, or not gzip as its name says ({error})") from error
    except EOFError as error:
        raise DataError(f"{path}: truncated; the gzip stream ends too early") from error
    except OSError as error:
        raise DataError(f"{path}: cannot be read: {error.strerror or error}") from error


def read_json(
    path: Path, *, error: type[PrbError], hint: str = "", optional: bool = False, finite: bool = True
) -> Any:
    """The value in a JSON file.

    Args:
      hint: what the user can do, put at the end of the message.
      optional: a file that is not there is None.
      finite: see `parse_json`.

    Raises:
      PrbError: of the kind `error`: the file cannot be read, is too large, or is refused by `parse_json`.
    """
    try:
        with open_file(path) as file:
            data = file.read(_LARGEST + 1)
    except OSError as failed:
        if optional and isinstance(failed, FileNotFoundError):
            return None
        raise error(f"{path}: cannot be read: {failed.strerror or failed}{_after(hint)}") from failed
    if len(data) > _LARGEST:
        raise error(f"{path}: expected at most {_LARGEST:,} bytes of JSON, found more{_after(hint)}")
    return parse_json(data, where=str(path), error=error, hint=hint, finite=finite)


def read_object(path: Path, *, error: type[PrbError], hint: str = "", finite: bool = True) -> dict[str, Any]:
    """As `read_json`, of a file that holds an object."""
    value = read_json(path, error=error, hint=hint, finite=finite)
    if not isinstance(value, dict):
        raise error(f"{path}: expected a JSON object, found {type(value).__name__}{_after(hint)}")
    return value


def parse_json(data: bytes, *, where: str, error: type[PrbError], hint: str = "", finite: bool = True) -> Any:
    """The value that JSON in UTF-8 stands for.

    Args:
      finite: If False, NaN and infinity are read too, which other programs write.

    Raises:
      PrbError: of the kind `error`, starting with `where`: it is not JSON, nested too deeply, a field is given
        twice, or a number is not finite.
    """
    try:
        value = (_STRICT if finite else _LENIENT).decode(data.decode("utf-8"))
        if data.count(b"[") + data.count(b"{") > _DEEPEST:
            _check_depth(value)
    except RecursionError as failed:
        raise error(f"{where}: not valid JSON: nested too deeply{_after(hint)}") from failed
    except ValueError as failed:  # malformed, or bytes that are not UTF-8
        raise error(f"{where}: not valid JSON: {failed}{_after(hint)}") from failed
    return value


def _finite(text: str) -> float:
    if not math.isfinite(number := float(text)):
        raise ValueError(f"{text} is not a finite number")
    return number


def _whole(text: str) -> int:
    if len(text) > _MOST_DIGITS:
        raise ValueError(f"{quote(text, limit=40)} has more than {_MOST_DIGITS} digits")
    return int(text)


def unique_fields(pairs: list[tuple[str, Any]]) -> dict[str, Any]:
    """An object from its fields, for a JSON decoder.

    Raises:
      ValueError: a field is given twice, of which only the last value would be kept.
    """
    value = dict(pairs)
    if len(value) != len(pairs):
        seen: set[str] = set()
        for name, _ in pairs:
            if name in seen:
                raise ValueError(f"field {quote(name)} is given twice")
            seen.add(name)
    return value


_LENIENT: Final = json.JSONDecoder(object_pairs_hook=unique_fields)
_STRICT: Final = json.JSONDecoder(
    object_pairs_hook=unique_fields, parse_constant=_finite, parse_float=_finite, parse_int=_whole
)


def _check_depth(value: Any) -> None:
    level, depth = [value], 0
    while level:
        if (depth := depth + 1) > _DEEPEST:
            raise RecursionError
        inside = (item.values() if isinstance(item, Mapping) else item for item in level)
        level = [item for items in inside for item in items if isinstance(item, dict | list)]


def _after(hint: str) -> str:
    return f"; {hint}" if hint else ""
