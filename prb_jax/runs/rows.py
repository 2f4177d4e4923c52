"""Files of JSON lines that grow by whole rows, and are sorted when they are complete.

A kill leaves at most one torn line, the last one, which is cut off when the file is opened again.
"""

from __future__ import annotations

import contextlib
import os
import time
from collections.abc import Callable, Hashable, Iterable, Iterator, Mapping, MutableMapping, Sequence
from dataclasses import dataclass, field
from itertools import islice
from pathlib import Path
from typing import Any, Final, Generic, TypeVar

from prb_jax.errors import RunError, quote, short_repr
from prb_jax.platform.processes.sharing import entered_on_first_process, process_count, share_json
from prb_jax.records.writing import json_line, whole_file, writing
from prb_jax.seams import get

Row = Mapping[str, Any]
AnyRow = TypeVar("AnyRow")

_SECONDS_BETWEEN_SYNCS: Final = 1.0

_SHARED: Final = 1_000
"""Rows per message to the other processes."""


def _same(row: Any) -> Any:
    return row


@dataclass(frozen=True)
class RowKind(Generic[AnyRow]):
    """Format of one kind of row file."""

    file: str  # name of the file
    what: str  # completes "a row of ..." in messages
    key: Callable[[AnyRow], Hashable]  # identifies a row
    schema: Any  # TypedDict: the fields that every row has, and their types
    # makes a row of an object with these fields; raises ValueError with the reason if it cannot
    decode: Callable[[dict[str, Any]], AnyRow] = _same
    encode: Callable[[AnyRow], Row] = _same  # makes a JSON object of a row
    table: Callable[[], MutableMapping[Any, AnyRow]] = dict  # makes the container that maps keys to rows
    # advice about an invalid line
    hint: str = "remove the line, and the same command writes it again"

    def read(self, path: Path, *, cut: bool = False) -> MutableMapping[Any, AnyRow]:
        """Return the rows of a file by key, in file order.

        Args:
          path: Path of the file, or of its folder.
          cut: If True, prepare the file for appending: it need not exist, and a torn last line is cut off.

        Raises:
          RunError: a whole line is not such a row, or two rows have the same key.
        """
        path = path / self.file if path.is_dir() else path
        if cut and not path.exists():
            return self.table()
        return get("runs", "read rows").value(self, path, cut=cut)

    @contextlib.contextmanager
    def open(
        self, folder: Path, rows: MutableMapping[Any, AnyRow] | None = None
    ) -> Iterator[RowFile[AnyRow]]:
        """Open the file in a folder for appending; create it if it does not exist.

        Args:
          folder: Folder that this process has locked.
          rows: Rows of the file, if they were read before.

        Raises:
          RunError: see :meth:`read`.
        """
        path = folder / self.file
        rows = self.read(path, cut=True) if rows is None else rows
        with writing(path):
            file = os.open(path, os.O_WRONLY | os.O_APPEND | os.O_CREAT, 0o644)
        try:
            yield RowFile(path, self, rows, file)
        finally:
            os.close(file)

    @contextlib.contextmanager
    def open_together(self, folder: Path) -> Iterator[RowFile[AnyRow]]:
        """Open the file on process 0, the only writer; the others keep its rows in memory. A collective.

        Raises:
          RunError: see :meth:`open`; raised in every process.
        """
        with entered_on_first_process(lambda: self.open(folder)) as (file, _):
            yield share_rows(self, folder, file)


@dataclass(frozen=True)
class RowFile(Generic[AnyRow]):
    """An open file of rows.

    With several processes only process 0 has the file itself; the others keep the rows that they append in memory.
    """

    path: Path  # path of the file
    kind: RowKind[AnyRow] = field(repr=False)
    rows: MutableMapping[Any, AnyRow] = field(repr=False)  # by key, in file order
    _file: int | None = field(repr=False)
    _synced: list[float] = field(default_factory=lambda: [time.monotonic()], repr=False)

    __repr__ = short_repr

    def append(self, rows: Iterable[AnyRow], *, sync: bool = False) -> None:
        """Append the rows whose keys are new. From then on they survive a kill of the process.

        They survive a power failure after about a second, or immediately with `sync`.

        Raises:
          RunError: a row cannot be written.
        """
        new = {self.kind.key(row): row for row in rows if self.kind.key(row) not in self.rows}
        if not new:
            return
        if self._file is None:
            self.rows.update(new)
            return
        data = b"".join(json_line(self.kind.encode(row)) for row in new.values())
        with writing(self.path):
            before = os.fstat(self._file).st_size
            try:
                left = memoryview(data)
                while left:
                    left = left[os.write(self._file, left) :]
            except OSError:
                with contextlib.suppress(OSError):  # a torn line would be dropped on reading anyway
                    os.ftruncate(self._file, before)
                raise
            if sync or time.monotonic() - self._synced[0] >= _SECONDS_BETWEEN_SYNCS:
                os.fsync(self._file)
                self._synced[0] = time.monotonic()
        self.rows.update(new)

    def finish(self, keys: Sequence[Any]) -> Sequence[AnyRow]:
        """Sort the rows by ``keys``, and return them; only for process 0.

        Raises:
          RunError: a row is missing, or has a key outside ``keys``.
        """
        what = f"rows of {self.kind.what}"
        missing = [key for key in keys if key not in self.rows]
        if missing:
            raise RunError(
                f"{self.path}: {len(missing)} of {len(keys)} {what} are missing, first {quote(missing[0])}"
            )
        if len(self.rows) != len(keys):
            known = set(keys)
            extra = [key for key in self.rows if key not in known]
            raise RunError(
                f"{self.path}: {len(extra)} {what} do not belong to this run, first {quote(extra[0])}; remove "
                "them, or start a new run in another folder"
            )
        from prb_jax.metrics.rows import RowView  # starts NumPy

        ordered: Any = RowView(self.rows, keys)  # pyright: ignore[reportArgumentType]
        assert self._file is not None
        with writing(self.path):
            os.fsync(self._file)
            if any(here != there for here, there in zip(self.rows, keys)):
                with whole_file(self.path) as file:
                    file.writelines(json_line(self.kind.encode(row)) for row in ordered)
        return ordered


def share_rows(kind: RowKind[AnyRow], folder: Path, file: RowFile[AnyRow] | None) -> RowFile[AnyRow]:
    """Share process 0's file with all processes, in which ``file`` is None. A collective."""
    if process_count() == 1 and file is not None:
        return file
    rows = kind.table() if file is None else file.rows
    for start in range(0, share_json(len(rows)), _SHARED):
        some = islice(rows.values(), start, start + _SHARED) if file is not None else ()
        for shared in share_json([kind.encode(row) for row in some]):
            if file is None:
                row = kind.decode(shared)
                rows[kind.key(row)] = row
    return RowFile(folder / kind.file, kind, rows, None) if file is None else file
