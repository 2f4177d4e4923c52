"""The lines of a large gzip file: inflated once in their order, and again from states that are kept on the way."""

from __future__ import annotations

import os
import threading
import zlib
from collections import deque
from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path
from typing import Any, Final

from prb_jax.data import blocks
from prb_jax.data.block_reader import BlockReader
from prb_jax.data.blocks import is_blank
from prb_jax.data.line_table import LineTable
from prb_jax.errors import DataError

_CHECKPOINT: Final = 32 << 20
_PIECE: Final = 1 << 20
_HELD: Final = 256 << 20
"""Bytes of lines that are held until they are asked for; beyond them the oldest are let go."""


@dataclass(frozen=True)
class _Checkpoint:
    """A place in a gzip file from which on it can be inflated.

    Attributes:
      place: in the inflated bytes.
      packed: in the file.
      state: of the decompressor; None at the start of a member.
    """

    place: int
    packed: int
    state: Any


class InflatedLines:
    """Lines of a gzip file; attributes and methods as of `prb_jax.data.lines._PlainLines`.

    Each process of a job inflates the whole file by itself.
    """

    def __init__(self, file: int, path: Path) -> None:
        self._file, self._path = file, path
        self.blocks = BlockReader(file, path, lines=False, together=False)
        self.table = LineTable()
        self.bytes_read = 0
        self._forward = _Inflating(self._packed, _Checkpoint(0, 0, None))
        self._again = _Inflating(self._read_again, _Checkpoint(0, 0, None))
        self._checkpoints = [_Checkpoint(0, 0, None)]
        self._start = self._lines = 0
        self._parts: list[bytes] = []
        self._held: deque[bytes] = deque()  # the lines of the last records that are known, in order
        self._first = self._held_bytes = 0  # the record of the first of them
        self._lock = threading.Lock()

    def grow(self, *, held: bool = True) -> bool:
        """Make the records of a further piece known; False at the end of the file."""
        forward = self._forward
        piece = forward.more()
        if not piece:
            if any(self._parts):
                self._take(b"".join(self._parts), held=held)
                self._parts = []
            self.blocks.rest()
            return False
        *whole, rest = piece.split(b"\n")
        for line in whole:
            self._take(b"".join([*self._parts, line]) if self._parts else line, held=held)
            self._parts = []
        self._parts.append(rest)
        if forward.place - self._checkpoints[-1].place >= _CHECKPOINT:
            self._checkpoints.append(forward.checkpoint())
        return True

    def finish(self) -> None:
        """Make all records known, without holding their bytes."""
        while self.grow(held=False):
            pass

    def share_read(self) -> float:
        """The part of the file in which the records known so far lie."""
        return min(1.0, self._forward.packed / max(1, self.blocks.size))

    def line(self, index: int) -> bytes:
        """The bytes of a record."""
        start, size = self.table.starts[index], self.table.sizes[index]
        with self._lock:
            held = 0 <= index - self._first < len(self._held)
            line = self._held[index - self._first] if held else None
            while self._held and self._first <= index:
                self._let_go()
            if line is None:
                line = self._inflated_again(start, size)
        if zlib.crc32(line) != self.table.checks[index]:
            raise DataError(f"{self._path}:{self.table.numbers[index]}: changed while it was being read")
        return line

    def _take(self, line: bytes, *, held: bool) -> None:
        """Take up a line that is whole."""
        start = self._start
        self._start += len(line) + 1
        self._lines += 1
        if line[:1] != b"{" and is_blank(line, first=self._lines == 1):
            return
        with self._lock:
            if held:
                self._first = self._first if self._held else len(self.table)
                self._held.append(line)
                self._held_bytes += len(line)
            while self._held_bytes > _HELD and len(self._held) > 1:
                self._let_go()
        self.table.append(start, len(line), self._lines, zlib.crc32(line))

    def _let_go(self) -> None:
        self._held_bytes -= len(self._held.popleft())
        self._first += 1

    def _inflated_again(self, start: int, size: int) -> bytes:
        nearest = [each for each in self._checkpoints if each.place <= start][-1]
        if start < self._again.window_at or nearest.place > self._again.place:
            self._again.begin(nearest)
        found = self._again.read(start, size)
        if len(found) < size:
            raise DataError(f"{self._path}: became shorter while it was being read")
        return found

    def _packed(self, place: int) -> bytes:
        """Bytes of the file from a place on, for the first reading: the digest of their block is known by then."""
        number, inside = divmod(place, blocks.BLOCK)
        while len(self.blocks.found) <= number and self.blocks.further():
            pass
        self.blocks.let_go(number)
        held = self.blocks.held(number)
        if held is not None:
            return held[inside : inside + _PIECE]
        return b"" if number >= self.blocks.count else self._read_again(place)

    def _read_again(self, place: int) -> bytes:
        found = os.pread(self._file, min(_PIECE, max(0, self.blocks.size - place)), place)
        self.bytes_read += len(found)
        return found


class _Inflating:
    """A walk through the inflated bytes; those that came last are held.

    Args:
      packed: gives bytes of the file from a place on; none at its end.
      checkpoint: where it begins.
    """

    def __init__(self, packed: Callable[[int], bytes], checkpoint: _Checkpoint) -> None:
        self._bytes = packed
        self.begin(checkpoint)

    def begin(self, checkpoint: _Checkpoint) -> None:
        """Go to a checkpoint."""
        self.packed, self.place = checkpoint.packed, checkpoint.place
        self._state = None if checkpoint.state is None else checkpoint.state.copy()
        self._window, self.window_at = b"", checkpoint.place

    def checkpoint(self) -> _Checkpoint:
        """The place where the walk is."""
        return _Checkpoint(self.place, self.packed, None if self._state is None else self._state.copy())

    def more(self) -> bytes:
        """The next inflated bytes; empty at the end of the file."""
        while True:
            data = self._bytes(self.packed)
            if self._state is None:
                if not data.strip(b"\0"):
                    if not data:
                        return b""
                    self.packed += len(data)  # padding after the last member
                    continue
                self.packed += len(data) - len(data.lstrip(b"\0"))
                data = data.lstrip(b"\0")
                self._state = zlib.decompressobj(wbits=31)
            elif not data:
                raise EOFError
            found = self._state.decompress(data, _PIECE)
            rest = self._state.unused_data if self._state.eof else self._state.unconsumed_tail
            self.packed += len(data) - len(rest)
            if self._state.eof:
                self._state = None
            if found:
                self.place += len(found)
                return found

    def read(self, start: int, size: int) -> bytes:
        """The inflated bytes of a place that is not before the last ones; fewer at the end of the file."""
        while self.place < start + size:
            piece = self.more()
            if not piece:
                break
            end = self.place - len(piece)
            keep = self._window[max(0, start - self.window_at) :] if end > start else b""
            self.window_at = end - len(keep)
            self._window = keep + piece
        inside = start - self.window_at
        return self._window[inside : inside + size]
