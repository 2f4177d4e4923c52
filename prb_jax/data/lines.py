"""The records of a large file of JSON lines, also gzipped, read once in their order while they are asked for."""

from __future__ import annotations

import os
import sys
import threading
import zlib
from bisect import bisect_right
from collections.abc import Iterator, Sequence
from concurrent.futures import Future
from dataclasses import dataclass
from operator import attrgetter
from pathlib import Path
from typing import Any, Final

from prb_jax.data import blocks
from prb_jax.data.blocks import blocks_digest, read_block, scanning_threads
from prb_jax.data.field_names import RECORD, FieldMapper, FieldNames
from prb_jax.data.files import Row, parse_line, reading
from prb_jax.data.reading import open_file
from prb_jax.errors import DataError

_AHEAD: Final = 2
"""Blocks that are read before they are asked for."""

_HELD: Final = 256 << 20
"""Bytes of lines that are held until they are asked for; beyond them the oldest are let go."""

_BEHIND: Final = 32 << 20
"""Bytes of lines that are held before the one that was asked for last: several threads read."""

_PIECE: Final = 1 << 20
"""Bytes that are inflated at a time."""


@dataclass(frozen=True)
class _Place:
    """Where a block begins.

    Attributes:
      block: its number.
      records, lines: how many of them end before it.
      begun: the line that goes on in it, as far as it lies before.
      inflater: the state of a gzip stream; None between two members and in files that are not packed.
    """

    block: int = 0
    records: int = 0
    lines: int = 0
    begun: Sequence[bytes] = ()
    inflater: Any = None


@dataclass(frozen=True, slots=True)
class _Line:
    """A line that is held: its number, its bytes, and how many bytes of lines the walk came by before it."""

    number: int
    data: bytes
    before: int


class JsonLines:
    """The records of one file, which become known while it is read.

    A reader who goes forward reads the file once: a line is held from when it is reached until records some way behind
    it were asked for. For any other record the file is read again from the beginning of a block.

    Args:
      path: of the file.
      columns: the names of the fields in it.

    Attributes:
      path: of the file.
      known: how many records are known.
      complete: whether the whole file was read.
      digests: sha256 of each block that was read so far.
      bytes_read: of the file, so far.

    Raises:
      DataError: a file that is missing or unreadable.
    """

    def __init__(self, path: Path, *, columns: FieldNames = RECORD) -> None:
        self.path = path
        self.known = self.bytes_read = 0
        self.complete = False
        self.digests: list[bytes] = []
        with reading(path):
            self._file = open_file(path)
            self._size = os.fstat(self._file.fileno()).st_size
        self._packed = path.name.endswith(".gz")
        self._mapped = FieldMapper(columns, path)
        self._expected: Sequence[bytes] = ()
        self._threads = scanning_threads()
        self._coming: dict[int, Future[tuple[bytes, bytes]]] = {}
        self._lock = threading.RLock()
        self._places = [_Place()]  # of all blocks that were begun
        self._walk = self._lines(self._places[0])
        self._held: dict[int, _Line] = {}
        self._first = self._next = 0  # the records that are held; the walk comes to the second one next
        self._passed = 0  # bytes of lines since the walk began
        self._known_bytes = 0  # of the lines of all known records

    def __len__(self) -> int:
        """How many records there are; what is left of the file is read."""
        return self.reach(sys.maxsize)

    @property
    def digest(self) -> str:
        """The digest of all bytes, as ``blocks_digest`` gives it; what is left of the file is read."""
        len(self)
        return blocks_digest(self.digests)

    def reach(self, stop: int) -> int:
        """Make sure that so many records are known, if there are as many, and return how many are.

        Raises:
          DataError: the file cannot be read, or is not what is expected.
        """
        with self._lock, reading(self.path):
            if self.known < stop and not self.complete:
                self._go_to(self.known)
            while self.known < stop and self._take():
                pass
        return self.known

    def about(self) -> float:
        """Return how many records there will be, by what was read so far."""
        if self.complete or not self.known:
            return self.known
        if self._packed:
            return self.known * blocks.block_count(self._size) / len(self.digests)
        return self.known * max(1.0, self._size / self._known_bytes)

    def expect(self, digests: Sequence[bytes]) -> None:
        """Compare the first blocks of the file, also those still to be read, with digests of an earlier time.

        Raises:
          DataError: one of them is another one.
        """
        with self._lock:
            self._expected = digests
            for number in range(len(digests)):
                if number >= blocks.block_count(self._size):
                    raise self._changed(number)
                if number < len(self.digests):
                    self._compare(number)

    def row(self, index: int) -> Row:
        """One record, which becomes known by it.

        Raises:
          IndexError: there are not as many.
          DataError: it is no JSON, or not what it was when it became known.
        """
        with self._lock, reading(self.path):
            if index not in self._held:
                self._go_to(index)
            while index not in self._held:
                if not self._take():
                    raise IndexError(index)
            line = self._held[index]
            while line.before - self._held[self._first].before > _BEHIND:
                self._let_go()
        where = f"{self.path}:{line.number}"
        row = parse_line(line.data, where, first=line.number == 1)
        assert row is not None  # a blank line is no record
        return Row(where, self._mapped(row.value, where=where))

    def _go_to(self, index: int, *, again: bool = False) -> None:
        """Walk on so that the walk comes to this record, from the beginning of a block where that is needed."""
        place = self._places[bisect_right(self._places, index, key=attrgetter("records")) - 1]
        if again or index < self._next or place.records > self._next:
            self._walk, self._passed = self._lines(place), 0
            self._first = self._next = place.records
            self._held.clear()
            self._coming.clear()

    def _take(self) -> bool:
        """Walk to the next record and hold its line; False at the end of the file."""
        try:
            found = next(self._walk, None)
        except BaseException:
            self._go_to(self._next, again=True)  # a walk that failed is over, and the file is not
            raise
        if found is None:
            self.complete = True
            return False
        number, data = found
        self._held[self._next] = _Line(number, data, self._passed)
        self._next += 1
        self._passed += len(data)
        if self._next > self.known:
            self.known = self._next
            self._known_bytes += len(data) + 1
        while self._passed - self._held[self._first].before > _HELD and self._next - self._first > 1:
            self._let_go()
        return True

    def _let_go(self) -> None:
        del self._held[self._first]
        self._first += 1

    def _lines(self, place: _Place) -> Iterator[tuple[int, bytes]]:
        """Number and bytes of the lines that hold a record, from the beginning of a block on."""
        records, lines, begun, inflater = place.records, place.lines, list(place.begun), place.inflater
        inflater = inflater and inflater.copy()
        for number in range(place.block, blocks.block_count(self._size)):
            if number == len(self._places):
                state = inflater and inflater.copy()
                self._places.append(_Place(number, records, lines, tuple(begun), state))
            # Whoever wants one record of a block alone needs no further ones.
            rest = self._block(
                number, ahead=_AHEAD if number > place.block or number == len(self.digests) else 0
            )
            while rest:
                if not self._packed:
                    piece, rest = rest, b""
                else:
                    if inflater is None:
                        rest = rest.lstrip(b"\0")  # padding after a member
                        if not rest:
                            break
                        inflater = zlib.decompressobj(wbits=31)
                    piece = inflater.decompress(rest, _PIECE)
                    rest = inflater.unused_data if inflater.eof else inflater.unconsumed_tail
                    inflater = None if inflater.eof else inflater
                *whole, last = piece.split(b"\n")
                for line in whole:
                    lines += 1
                    line, begun = b"".join([*begun, line]) if begun else line, []
                    if not is_blank(line, first=lines == 1):
                        records += 1
                        yield lines, line
                if last:
                    begun.append(last)
        if inflater is not None:
            raise EOFError
        if begun and not is_blank(line := b"".join(begun), first=lines == 0):
            yield lines + 1, line

    def _block(self, number: int, *, ahead: int) -> bytes:
        """The bytes of a block, which must be what they were; so many after it are read meanwhile."""
        for coming in range(number, min(number + 1 + ahead, blocks.block_count(self._size))):
            if coming not in self._coming:
                self._coming[coming] = self._threads.submit(
                    read_block, self._file.fileno(), self.path, coming, size=self._size
                )
        data, digest = self._coming.pop(number).result()
        self.bytes_read += len(data)
        if number == len(self.digests):
            self.digests.append(digest)
            self._compare(number)
        elif self.digests[number] != digest:
            raise DataError(f"{self.path}: changed while it was being read (block {number + 1})")
        return data

    def _compare(self, number: int) -> None:
        if number < len(self._expected) and self.digests[number] != self._expected[number]:
            raise self._changed(number)

    def _changed(self, number: int) -> DataError:
        return DataError(
            f"{self.path}: changed since it was scored (block {number + 1} of {blocks.BLOCK >> 20} MiB); the scores "
            "so far are kept and belong to the old contents: put those back to finish the run, or start again in "
            "another folder"
        )


def is_blank(line: bytes, *, first: bool) -> bool:
    """Whether a line, perhaps the first of its file, holds no record."""
    if line[:1] == b"{":
        return False
    text = line.decode("utf-8", errors="replace")
    return not (text.removeprefix("\ufeff") if first else text).strip()
