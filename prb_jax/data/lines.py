"""The records of a large file of JSON lines, also gzipped, read forward block by block."""

from __future__ import annotations

import os
import zlib
from collections import deque
from collections.abc import Iterator, Sequence
from concurrent.futures import Future
from pathlib import Path
from typing import Final

from prb_jax.data import blocks
from prb_jax.data.blocks import blocks_digest, read_block, scanning_threads
from prb_jax.data.files import Row, parse_line, reading
from prb_jax.data.reading import open_file
from prb_jax.errors import DataError

_AHEAD: Final = 2
"""Blocks that are read before they are asked for."""

_PIECE: Final = 1 << 20
"""Bytes that are inflated at a time."""


class JsonLines:
    """One file that is read from its beginning as often as it is asked for; its digest is taken on the first occasion.

    Args:
      path: of the file.

    Attributes:
      path: of the file.
      digests: sha256 of each block that was read so far.
      bytes_read: of the file, so far.

    Raises:
      DataError: a file that is missing or unreadable.
    """

    def __init__(self, path: Path) -> None:
        self.path = path
        self.bytes_read = 0
        self.digests: list[str] = []
        with reading(path), open_file(path) as file:
            self._size = os.fstat(file.fileno()).st_size
        self._packed = path.name.endswith(".gz")
        self._expected: Sequence[str] = ()
        self._records = self._bytes = 0  # of the pass that came farthest

    @property
    def complete(self) -> bool:
        """Whether every block was read."""
        return len(self.digests) == blocks.block_count(self._size)

    @property
    def digest(self) -> str:
        """The digest of all bytes, as ``blocks_digest`` gives it; what is left of the file is read."""
        with reading(self.path):
            for _ in self._blocks(len(self.digests)):
                pass
        return blocks_digest(self.digests)

    def about(self) -> float:
        """Return how many records there are, by what was read so far; 0 where nothing was."""
        if self._packed:
            return self._records * blocks.block_count(self._size) / max(1, len(self.digests))
        return self._records * max(1.0, self._size / max(1, self._bytes))

    def expect(self, digests: Sequence[str]) -> None:
        """Compare the first blocks of the file, also those still to be read, with digests of an earlier time.

        Raises:
          DataError: one of them is another one.
        """
        self._expected = digests
        for number in range(len(digests)):
            if number >= blocks.block_count(self._size):
                raise self._changed(number)
            if number < len(self.digests):
                self._compare(number)

    def rows(self) -> Iterator[Row]:
        """Yield every record, from the first one on.

        Raises:
          DataError: the file cannot be read, is not what it was, or a line is no JSON.
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
        begun: list[bytes] = []  # the line that goes on in the next piece
        inflater = None
        for rest in self._blocks(0):
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
                    yield b"".join([*begun, line])
                    begun = []
                if last:
                    begun.append(last)
        if inflater is not None:
            raise EOFError
        if begun:
            yield b"".join(begun)

    def _blocks(self, first: int) -> Iterator[bytes]:
        """The bytes of one block after another, which must be what they were; some are read ahead."""
        count, coming = blocks.block_count(self._size), deque[Future[tuple[bytes, str]]]()
        with open_file(self.path) as file, scanning_threads() as threads:
            for number in range(first, count):
                # Whoever wants the first records alone needs no further blocks.
                stop = min(number + 1 + (_AHEAD if number else 0), count)
                for block in range(number + len(coming), stop):
                    coming.append(
                        threads.submit(read_block, file.fileno(), self.path, block, size=self._size)
                    )
                data, digest = coming.popleft().result()
                self.bytes_read += len(data)
                if number == len(self.digests):
                    self.digests.append(digest)
                    self._compare(number)
                elif self.digests[number] != digest:
                    raise DataError(f"{self.path}: changed while it was being read (block {number + 1})")
                yield data

    def _compare(self, number: int) -> None:
        if number < len(self._expected) and self.digests[number] != self._expected[number]:
            raise self._changed(number)

    def _changed(self, number: int) -> DataError:
        return DataError(
            f"{self.path}: changed since it was scored (block {number + 1} of {blocks.BLOCK >> 20} MiB); the scores "
            "so far are kept and belong to the old contents: put those back to finish the run, or start again in "
            "another folder"
        )
