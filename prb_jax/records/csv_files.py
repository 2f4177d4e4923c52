"""Read records from CSV files with a header line.

``responses``, ``labels``, ``profile`` and ``rubric_aspects`` are JSON (a profile may also be a text); ``question``,
``prompt``, ``chosen`` and ``rejected`` are text, or a list of messages as JSON.
"""

from __future__ import annotations

import contextlib
import csv
import io
from collections import Counter
from collections.abc import Iterator
from pathlib import Path
from typing import Any, Final

from prb_jax.errors import DataError, quote
from prb_jax.records.comparison import LISTS
from prb_jax.records.fields import FieldNames
from prb_jax.records.files import DECODER, LONGEST_LINE, Row, bounded_lines, malformed, too_long
from prb_jax.records.foreign_fields import check_columns
from prb_jax.records.other_files import decoded

_CONVERSATIONS: Final = ("question", "prompt", "chosen", "rejected")
_LONGEST_CELL: Final = 2**31 - 1


def csv_rows(path: Path, file: io.BufferedIOBase, wanted: FieldNames | None) -> Iterator[Row]:
    """Yield the records of a table with a header line; an empty cell is an absent field."""
    csv.field_size_limit(_LONGEST_CELL)
    names: list[str] = []
    fields: dict[str, str] = {}  # column -> field
    unread: dict[
        str, None
    ] = {}  # columns that are not read, in the first record: an error about it lists them
    start, size = 1, 0  # of the record that is being read

    def lines() -> Iterator[str]:
        nonlocal size
        for number, line in enumerate(bounded_lines(file, path, error=DataError), start=1):
            if (size := size + len(line)) > LONGEST_LINE:
                raise DataError(too_long(f"{path}:{start}"))
            text = decoded(line, path, number)
            yield from io.StringIO(text, newline="") if "\r" in text else [text]

    reader = csv.reader(lines(), strict=True)
    try:
        for cells in reader:
            where, start, size = f"{path}:{start}", reader.line_num + 1, 0  # a cell may hold line ends
            if not cells:
                continue
            if not names:
                names, fields = cells, _fields(cells, where, wanted)
                unread = {name: None for name in names if name not in fields}
                continue
            if len(cells) != len(names):
                raise DataError(
                    f"{where}: expected {len(names)} cells, one for each column, found {len(cells)}"
                )
            pairs = zip(names, cells)
            yield Row(where, {n: _value(fields[n], cell, where) for n, cell in pairs if n in fields} | unread)
            unread = {}
    except csv.Error as error:
        raise DataError(f"{path}:{start}: malformed CSV: {error}") from error


def _fields(names: list[str], where: str, wanted: FieldNames | None) -> dict[str, str]:
    fields = {n: n if wanted is None else wanted.field(n) for n in names if wanted is None or n in wanted}
    for name, count in Counter(names).items():
        if count > 1 and name in fields:
            raise DataError(f"{where}: field {quote(name)} is given twice")
    check_columns(names, wanted, where)
    return fields


def _value(name: str, cell: str, where: str) -> Any:
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
        with contextlib.suppress(ValueError, RecursionError):  # other text may begin like that, too
            value = DECODER.decode(cell)
            if all(isinstance(item, dict) and {"role", "content"} <= set(item) for item in value):
                return value
    return cell
