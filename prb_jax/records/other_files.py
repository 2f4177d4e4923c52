"""Rows of files that are not plain JSON lines: JSON arrays, CSV, parquet, and all that is gzipped."""

from __future__ import annotations

import gzip
import io
import json
from collections.abc import Iterator
from pathlib import Path
from typing import Final

from prb_jax.errors import DataError
from prb_jax.records.fields import FieldNames
from prb_jax.records.files import (
    DECODER,
    HELD,
    SAVE_AS,
    Row,
    malformed,
    open_file,
    other_format,
    reading,
    skip_space,
)
from prb_jax.records.large_lines import JsonLines
from prb_jax.seams import get

_PIECE: Final = 1 << 20  # bytes per read


def other_rows(path: Path, columns: FieldNames | None) -> Iterator[Row]:
    """Yield the records of one file; see :func:`prb_jax.records.files.read_rows`."""
    kind = path.name.removesuffix(".gz").rpartition(".")[2]
    if kind == "jsonl":
        yield from JsonLines(path).rows()
        return
    with reading(path):
        open_file(path).close()  # refuses pipes and devices
        if kind == "parquet":
            values = get("formats", "parquet").value(path, columns)
            yield from (Row(f"{path}: row {number}", value) for number, value in enumerate(values, start=1))
            return
        with open_file(path) as raw, gzip.GzipFile(fileobj=raw) if _is_packed(path) else raw as file:
            if kind == "csv":
                yield from get("formats", "csv").value(path, file, columns)
                return
            if _begins_array(file):
                yield from _array_rows(path, _read_text(file, path))
                return
    yield from JsonLines(path).rows()  # many .json files contain JSON lines


def _is_packed(path: Path) -> bool:
    return path.name.endswith(".gz")


def _begins_array(file: io.BufferedIOBase) -> bool:
    """Return True if a file begins with a JSON array; the position is reset to the start."""
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
                f"{path}: contains more than {HELD:,} bytes of JSON, too much for memory: expected JSON "
                "lines, one record a line, in a file named .jsonl.gz"
            )
    return decoded(raw, path)


def decoded(raw: bytes | bytearray, path: Path, first: int = 1) -> str:
    """Return the text of some lines of a file, beginning with line ``first``."""
    try:
        return raw.decode("utf-8-sig" if first == 1 else "utf-8")
    except UnicodeDecodeError as error:
        line = error.object.count(b"\n", 0, error.start) + first
        bad = f"byte 0x{error.object[error.start]:02x} ({error.reason})"
        hint = (other_format(bytes(raw[:2])) if first == 1 else "") or SAVE_AS
        raise DataError(f"{path}:{line}: invalid UTF-8: {bad}{hint}") from error


def _array_rows(path: Path, text: str) -> Iterator[Row]:
    """Yield the records of one JSON array, each with the line at which it begins."""
    position, line, counted = text.index("[") + 1, 1, 0
    expecting = True  # True after "[" and ",", where a record can follow
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
