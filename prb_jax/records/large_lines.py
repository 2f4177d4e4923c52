"""Files of JSON lines that are large or gzipped, read block by block; digests of blocks identify a large file."""

from __future__ import annotations

import hashlib
import os
import zlib
from collections import deque
from collections.abc import Iterator, Sequence
from concurrent.futures import Future, ThreadPoolExecutor
from pathlib import Path
from typing import Any, Final

from prb_jax.errors import DataError
from prb_jax.records.files import LONGEST_LINE, Row, open_file, parse_line, reading, too_long

BLOCK: Final = 16 << 20

OF_BLOCKS: Final = "sha256-blocks:"
"""Start of the digest of a large file."""

_PIECE: Final = 1 << 20  # bytes to decompress at a time

_AHEAD: Final = 2  # blocks to read ahead

_THREADS: Final = 4


class JsonLines:
    """A file that can be read several times from its start; the first pass also computes its digest.

    Attributes:
      path: Path of the file.
      digests: sha256 of each block read so far, in hexadecimal.
      bytes_read: Bytes read so far, over all passes.

    Raises:
      DataError: The file is missing or cannot be read.
    """

    def __init__(self, path: Path) -> None:
        self.path = path
        self.bytes_read = 0
        self.digests: list[str] = []
        with reading(path), open_file(path) as file:
            self._size = os.fstat(file.fileno()).st_size
        self._count = block_count(self._size)
        self._packed = path.name.endswith(".gz")
        self._expected: Sequence[str] = ()
        self._records = self._bytes = 0  # maxima over passes

    @property
    def complete(self) -> bool:
        """True if every block was read."""
        return len(self.digests) == self._count

    @property
    def digest(self) -> str:
        """Digest of all bytes, see :func:`large_digest`; reads the rest of the file."""
        with reading(self.path):
            for _ in self._blocks(len(self.digests)):
                pass
        return OF_BLOCKS + hashlib.sha256(bytes.fromhex("".join(self.digests))).hexdigest()

    def about(self) -> float:
        """Return an estimate of the number of records from the part read so far; 0 if nothing was read."""
        if self._packed:
            return self._records * self._count / max(1, len(self.digests))
        return self._records * max(1.0, self._size / max(1, self._bytes))

    def expect(self, digests: Sequence[str]) -> None:
        """Compare the first blocks of the file, now or when they are read, with earlier digests.

        Raises:
          DataError: A block differs from its earlier digest.
        """
        self._expected = digests
        for number in range(len(digests)):
            if number >= self._count or number < len(self.digests):
                self._compare(number)

    def rows(self) -> Iterator[Row[Any]]:
        """Yield every record, from the start of the file.

        Raises:
          DataError: The file cannot be read or has changed, or a line is not JSON.
        """
        records = size = 0
        with reading(self.path):
            for number, line in enumerate(self._lines(), start=1):
                row = parse_line(line, f"{self.path}:{number}", first=number == 1)
                if row is not None:
                    records, size = records + 1, size + len(line) + 1
                    if records > self._records:
                        self._records, self._bytes = records, size
                    yield row

    def _lines(self) -> Iterator[bytes]:
        begun: list[bytes] = []  # start of a line that continues in the next piece
        size, number = 0, 1  # its size and line number
        for piece in self._inflated() if self._packed else self._blocks(0):
            for position, part in enumerate(piece.split(b"\n")):
                if position:
                    yield b"".join(begun)
                    begun, size, number = [], 0, number + 1
                if part:
                    begun.append(part)
                    if (size := size + len(part)) > LONGEST_LINE:
                        raise DataError(too_long(f"{self.path}:{number}"))
        if begun:
            yield b"".join(begun)

    def _inflated(self) -> Iterator[bytes]:
        inflater = None
        for rest in self._blocks(0):
            while rest := rest if inflater else rest.lstrip(b"\0"):  # zero padding after a gzip member
                inflater = inflater or zlib.decompressobj(wbits=31)
                yield inflater.decompress(rest, _PIECE)
                rest = inflater.unused_data if inflater.eof else inflater.unconsumed_tail
                inflater = None if inflater.eof else inflater
        if inflater is not None:
            raise EOFError

    def _blocks(self, first: int) -> Iterator[bytes]:
        """Yield the bytes of each block and check its digest; some blocks are read ahead."""
        coming = deque[Future[tuple[bytes, str]]]()
        threads = ThreadPoolExecutor(min(_THREADS, os.cpu_count() or 1), thread_name_prefix="scan")
        with open_file(self.path) as file, threads:
            for number in range(first, self._count):
                # Reading only the first records loads no further blocks.
                stop = min(number + 1 + (_AHEAD if number else 0), self._count)
                for block in range(number + len(coming), stop):
                    coming.append(threads.submit(self._read, file.fileno(), block))
                data, digest = coming.popleft().result()
                self.bytes_read += len(data)
                if number == len(self.digests):
                    self.digests.append(digest)
                    self._compare(number)
                elif self.digests[number] != digest:
                    raise DataError(f"{self.path}: changed while it was being read (block {number + 1})")
                yield data

    def _read(self, file: int, number: int) -> tuple[bytes, str]:
        """Return the bytes of one block of the open file, and their sha256."""
        start, end = number * BLOCK, min((number + 1) * BLOCK, self._size)
        parts: list[bytes] = []
        while start < end:
            part = os.pread(file, end - start, start)
            if not part:
                raise DataError(f"{self.path}: became shorter while it was being read")
            parts.append(part)
            start += len(part)
        data = parts[0] if len(parts) == 1 else b"".join(parts)
        return data, hashlib.sha256(data).hexdigest()

    def _compare(self, number: int) -> None:
        known = self.digests[number] if number < len(self.digests) else None
        if number < len(self._expected) and known != self._expected[number]:
            raise DataError(
                f"{self.path}: changed since it was scored (block {number + 1} of {BLOCK >> 20} MiB); the scores so "
                "far are kept and belong to the old contents: restore them to finish the run, or start again in "
                "another folder"
            )


def block_count(size: int) -> int:
    """Return the number of blocks of a file of ``size`` bytes."""
    return -(-size // BLOCK)


def large_digest(path: Path) -> str:
    """Return ``"sha256-blocks:..."``: the sha256 of the digests of all 16 MiB blocks; errors of :class:`JsonLines`."""
    return JsonLines(path).digest


def stamp(files: Sequence[Path]) -> list[tuple[str, int, int, int]]:
    """Return name, size, modification time and inode of each file, which reveal a change.

    Raises:
      DataError: A file is missing.
    """
    try:
        states = [(str(file), file.stat()) for file in files]
    except OSError as error:
        raise DataError(f"{error.filename}: cannot be read: {error.strerror or error}") from error
    return [(name, facts.st_size, facts.st_mtime_ns, facts.st_ino) for name, facts in states]
