"""A file of JSON lines that grows a whole row at a time, and is put into order when it is complete.

A kill can leave at most one torn line, the last one, which is cut off when the file is opened again.
"""

from __future__ import annotations

import contextlib
import os
from collections.abc import Callable, Hashable, Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

from prb_jax.data.reading import parse_json
from prb_jax.data.writing import json_line, whole_file, writing
from prb_jax.errors import RunError, quote, short_repr

Row = Mapping[str, Any]


@dataclass(frozen=True)
class RowFile:
    """An open file of rows.

    Attributes:
      path: of the file.
      rows: by key, in the order in which they lie on disk.
      key: tells rows apart.
    """

    path: Path
    rows: dict[Hashable, Row] = field(repr=False)
    key: Callable[[Row], Hashable] = field(repr=False)

    __repr__ = short_repr

    def append(self, rows: Iterable[Row]) -> None:
        """Add the rows that are not there yet; they survive a kill of the process from here on.

        Raises:
          RunError: they cannot be written.
        """
        new = {self.key(row): row for row in rows if self.key(row) not in self.rows}
        if not new:
            return
        with writing(self.path), self.path.open("ab") as file:
            file.write(b"".join(map(json_line, new.values())))
        self.rows.update(new)

    def finish(self, keys: Sequence[Hashable]) -> list[Row]:
        """Put the rows into the order of ``keys``, and return them.

        Raises:
          RunError: a row is missing, or belongs to nothing here.
        """
        missing = [key for key in keys if key not in self.rows]
        if missing:
            raise RunError(
                f"{self.path}: {len(missing)} of {len(keys)} rows are missing, first {quote(missing[0])}"
            )
        if len(self.rows) != len(keys):
            known = set(keys)
            extra = next(key for key in self.rows if key not in known)
            raise RunError(
                f"{self.path}: holds a row of nothing in this run: {quote(extra)}; remove it, or start again in "
                "another folder"
            )
        ordered = [self.rows[key] for key in keys]
        if list(self.rows) != list(keys):
            with writing(self.path), whole_file(self.path) as file:
                file.writelines(map(json_line, ordered))
        return ordered


@contextlib.contextmanager
def open_rows(
    path: Path, *, what: str, key: Callable[[Row], Hashable], fields: Iterable[str]
) -> Iterator[RowFile]:
    """Open a file of rows to go on with it; it need not be there.

    Args:
      path: of the file; its folder is there and held by this process.
      what: a row is, for messages.
      key: tells rows apart.
      fields: that every row has.

    Raises:
      RunError: a whole line that is no such row, or two rows with one key.
    """
    with writing(path):
        path.touch()
    yield RowFile(path, read_rows(path, what=what, key=key, fields=fields, cut=True), key)


def read_rows(
    path: Path, *, what: str, key: Callable[[Row], Hashable], fields: Iterable[str], cut: bool = False
) -> dict[Hashable, Row]:
    """Return the rows of a file by their keys; arguments and errors as of :func:`open_rows`.

    Args:
      cut: take a torn last line off the file; else it is an error as any other.
    """
    try:
        data = path.read_bytes()
    except OSError as error:
        raise RunError(f"cannot read {path}: {error.strerror or error}") from error
    whole = data.rfind(b"\n") + 1 if cut else len(data)
    if whole < len(data):
        with writing(path):
            os.truncate(path, whole)
    needed, rows = set(fields), dict[Hashable, Row]()
    for number, line in enumerate(data[:whole].splitlines(), start=1):
        where, hint = f"{path}:{number}", "remove the line, and the same command writes it again"
        row = parse_json(line, where=f"{where}: not a row of {what}", error=RunError, hint=hint)
        if not isinstance(row, dict) or not needed <= row.keys():
            raise RunError(
                f"{where}: not a row of {what}: expected the fields {', '.join(sorted(needed))}; {hint}"
            )
        if key(row) in rows:
            raise RunError(f"{where}: a second row for {quote(key(row))}; remove one of them")
        rows[key(row)] = row
    return rows
