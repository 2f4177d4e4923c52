"""Random access to the records of large files of JSON lines, also gzipped: no more than one record is held."""

from __future__ import annotations

import os
import threading
import zlib
from dataclasses import dataclass
from pathlib import Path
from typing import Any, Final

import numpy as np

from prb_jax.data.blocks import Block, blocks_digest, is_blank, read_at, scan_blocks
from prb_jax.data.files import Row, parse_line, reading
from prb_jax.data.reading import open_file
from prb_jax.errors import DataError

_CHECKPOINT: Final = 32 << 20
_PIECE: Final = 1 << 20


class JsonLines:
    """The records of one file, each read when it is asked for.

    Attributes:
      path: of the file.
      digest: of its bytes, as ``blocks_digest`` gives it.
      bytes_read: of the records that were read so far.

    Raises:
      DataError: a file that is missing, unreadable or truncated.
    """

    def __init__(self, path: Path) -> None:
        self.path, self.bytes_read = path, 0
        with reading(path):
            self._file = open_file(path)
            blocks = scan_blocks(path, lines=not path.name.endswith(".gz"))
            self.digest = blocks_digest(blocks)
            if path.name.endswith(".gz"):
                self._inflated = _Inflated(self._file.fileno(), path)
                table = self._inflated.index()
            else:
                self._inflated = None
                table = _line_table(self._file.fileno(), path, blocks)
        self._starts, self._sizes, self._numbers, self._checks = table

    def __len__(self) -> int:
        return len(self._starts)

    def row(self, index: int) -> Row:
        """One record.

        Raises:
          DataError: it is no JSON, or not what it was when the file was opened.
        """
        start, size, number = int(self._starts[index]), int(self._sizes[index]), int(self._numbers[index])
        where = f"{self.path}:{number}"
        with reading(self.path):
            if self._inflated is not None:
                line = self._inflated.read(start, size)
            else:
                line = read_at(self._file.fileno(), self.path, start, size)
        if zlib.crc32(line) != int(self._checks[index]):
            raise DataError(f"{where}: changed while it was being read")
        self.bytes_read += size
        found = parse_line(line, where, first=number == 1)
        if found is None:
            raise DataError(f"{where}: changed while it was being read")
        return found


Table = tuple[np.ndarray, np.ndarray, np.ndarray, np.ndarray]
"""Of each record: start and size in bytes (int64), number of its line (int64) and crc32 (uint32)."""


def _line_table(file: int, path: Path, blocks: list[Block]) -> Table:
    size = os.fstat(file).st_size
    ends = np.concatenate([np.zeros(0, np.int64), *(block.ends for block in blocks)])
    checks = np.concatenate([np.zeros(0, np.uint32), *(block.checks for block in blocks)])
    before = np.cumsum([0, *(len(block.ends) for block in blocks)])
    blank = {int(place) for first, block in zip(before, blocks) for place in first + block.blank}
    if len(ends) == 0 or ends[-1] != size - 1:  # a last line without an end
        ends, checks = np.append(ends, size), np.append(checks, np.uint32(0))
    starts = np.concatenate([[0], ends[:-1] + 1])
    for place in {int(place) for place in before if place < len(ends)}:  # lines that lie in several blocks
        line = read_at(file, path, int(starts[place]), int(ends[place] - starts[place]))
        checks[place] = zlib.crc32(line)
        blank |= {place} if is_blank(line, first=place == 0) else set()
    kept = np.setdiff1d(np.arange(len(starts)), np.asarray(sorted(blank), np.int64))
    return starts[kept], (ends - starts)[kept], kept + 1, checks[kept]


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


class _Inflated:
    """The inflated bytes of a gzip file: forward, or from a checkpoint; a window of them is held."""

    def __init__(self, file: int, path: Path) -> None:
        self._file, self._path = file, path
        self._checkpoints = [_Checkpoint(0, 0, None)]
        self._lock = threading.Lock()
        self._begin(self._checkpoints[0])

    def _begin(self, checkpoint: _Checkpoint) -> None:
        self._packed = checkpoint.packed
        self._state = None if checkpoint.state is None else checkpoint.state.copy()
        self._window, self._window_at = b"", checkpoint.place

    def _more(self) -> bytes:
        """The next inflated bytes; empty at the end of the file."""
        while True:
            data = os.pread(self._file, _PIECE, self._packed)
            if self._state is None:
                if not data.strip(b"\0"):
                    if not data:
                        return b""
                    self._packed += len(data)  # padding after the last member
                    continue
                self._packed += len(data) - len(data.lstrip(b"\0"))
                data = data.lstrip(b"\0")
                self._state = zlib.decompressobj(wbits=31)
            elif not data:
                raise EOFError
            found = self._state.decompress(data, _PIECE)
            rest = self._state.unused_data if self._state.eof else self._state.unconsumed_tail
            self._packed += len(data) - len(rest)
            if self._state.eof:
                self._state = None
            if found:
                return found

    def index(self) -> Table:
        """The places of all lines; the file is inflated once."""
        starts: list[int] = []
        sizes: list[int] = []
        numbers: list[int] = []
        checks: list[int] = []
        at = start = number = 0
        parts: list[bytes] = []

        def end(line: bytes) -> None:
            nonlocal number
            number += 1
            if line[:1] == b"{" or not is_blank(line, first=number == 1):
                starts.append(start)
                sizes.append(len(line))
                numbers.append(number)
                checks.append(zlib.crc32(line))

        while piece := self._more():
            *whole, rest = piece.split(b"\n")
            for line in whole:
                end(b"".join([*parts, line]) if parts else line)
                start, parts = start + sum(map(len, parts)) + len(line) + 1, []
            parts.append(rest)
            at += len(piece)
            if at - self._checkpoints[-1].place >= _CHECKPOINT:
                state = None if self._state is None else self._state.copy()
                self._checkpoints.append(_Checkpoint(at, self._packed, state))
        if any(parts):
            end(b"".join(parts))
        self._begin(self._checkpoints[0])
        return (
            np.asarray(starts, np.int64),
            np.asarray(sizes, np.int64),
            np.asarray(numbers, np.int64),
            np.asarray(checks, np.uint32),
        )

    def read(self, start: int, size: int) -> bytes:
        """Inflated bytes by their place: the nearer after the last ones, the faster."""
        with self._lock:
            nearest = [each for each in self._checkpoints if each.place <= start][-1]
            if start < self._window_at or nearest.place > self._window_at + len(self._window):
                self._begin(nearest)
            while True:
                end = self._window_at + len(self._window)
                if end >= start + size:
                    break
                piece = self._more()
                if not piece:
                    raise DataError(f"{self._path}: became shorter while it was being read")
                keep = self._window[max(0, start - self._window_at) :] if end > start else b""
                self._window_at = end - len(keep)
                self._window = keep + piece
            inside = start - self._window_at
            return self._window[inside : inside + size]
