"""The records of large files of JSON lines, also gzipped: read once in their order, and again where asked for."""

from __future__ import annotations

import threading
import zlib
from bisect import bisect_left
from collections.abc import Sequence
from pathlib import Path
from typing import Protocol

import numpy as np

from prb_jax.data import blocks
from prb_jax.data.block_reader import BlockReader
from prb_jax.data.blocks import Block, blocks_digest, is_blank, read_at
from prb_jax.data.field_names import RECORD, FieldMapper, FieldNames
from prb_jax.data.files import Row, parse_line, reading
from prb_jax.data.inflated import InflatedLines
from prb_jax.data.line_table import LineTable
from prb_jax.data.reading import open_file
from prb_jax.errors import DataError
from prb_jax.processes.sharing import process_count


class _Source(Protocol):
    """Where the lines of a file come from; attributes and methods as of :class:`_PlainLines`."""

    blocks: BlockReader
    table: LineTable
    bytes_read: int

    def grow(self) -> bool: ...
    def finish(self) -> None: ...
    def line(self, index: int) -> bytes: ...
    def share_read(self) -> float: ...


class JsonLines:
    """The records of one file, which become known while it is read, block by block.

    What is known of a record are its place and its checksum; its bytes are held from then on until they are asked for,
    in order, so that a reader who goes forward reads the file once. Any other record is read again.

    Attributes:
      path: of the file.

    Raises:
      DataError: a file that is missing or unreadable.
    """

    def __init__(self, path: Path, *, columns: FieldNames = RECORD) -> None:
        self.path = path
        self._mapped = FieldMapper(columns, path)
        self._growing = threading.RLock()
        with reading(path):
            self._file = open_file(path)
            packed = path.name.endswith(".gz")
            self._source: _Source = (InflatedLines if packed else _PlainLines)(self._file.fileno(), path)

    def __len__(self) -> int:
        """How many records there are; what is left of the file is read, a collective."""
        with self._growing, reading(self.path):
            self._source.finish()
        return len(self._source.table)

    @property
    def known(self) -> int:
        """How many records are known."""
        return len(self._source.table)

    @property
    def complete(self) -> bool:
        """Whether the whole file was read."""
        return self._source.blocks.complete

    @property
    def digest(self) -> str:
        """The digest of all bytes, as ``blocks_digest`` gives it; what is left of the file is read, a collective."""
        len(self)
        return blocks_digest(self._source.blocks.found)

    @property
    def digests(self) -> Sequence[bytes]:
        """The digests of the blocks that were read so far, sha256 of each."""
        return self._source.blocks.found

    @property
    def bytes_read(self) -> int:
        """Bytes of the file that this process read so far."""
        return self._source.blocks.bytes_read + self._source.bytes_read

    def reach(self, stop: int) -> int:
        """Make sure that so many records are known, if there are as many, and return how many are; a collective.

        Raises:
          DataError: the file cannot be read, or is not what is expected.
        """
        source = self._source
        with self._growing, reading(self.path):
            while len(source.table) < stop and source.grow():
                pass
            # Each of several processes tokenises what it has read: a round ahead, so that none waits for another.
            while stop <= len(source.table) and self._rounds_ahead(stop - 1) < 1 and source.grow():
                pass
        return len(source.table)

    def about(self) -> float:
        """Return how many records there will be, by what was read so far."""
        share = self._source.share_read()
        return self.known / share if share else 0.0

    def expect(self, digests: Sequence[bytes]) -> None:
        """Compare the first blocks of the file, also those still to be read, with digests of an earlier time.

        Raises:
          DataError: one of them is another one.
        """
        self._source.blocks.expect(digests)

    def owner(self, index: int) -> int | None:
        """Return the process that has the bytes of a record; None where every process has to read it again."""
        return self._source.blocks.owner(self._block(index))

    def ahead(self, index: int) -> int:
        """Return up to which record the blocks of this round and the next one go; 0 where no process has its own."""
        if self.owner(index) is None:
            return 0
        count = process_count()
        stop = (self._block(index) // count + 2) * count * blocks.BLOCK
        return bisect_left(self._source.table.starts, stop)

    def row(self, index: int) -> Row:
        """One record, which becomes known by it.

        Raises:
          DataError: it is no JSON, or not what it was when it became known.
        """
        if index >= self.known:
            self.reach(index + 1)
        where = self.where(index)
        with reading(self.path):
            line = self._source.line(index)
        found = parse_line(line, where, first=self._source.table.numbers[index] == 1)
        if found is None:
            raise DataError(f"{where}: changed while it was being read")
        return Row(where, self._mapped(found.value, where=where))

    def where(self, index: int) -> str:
        """The place of a record that is known: FILE:LINE."""
        return f"{self.path}:{self._source.table.numbers[index]}"

    def _block(self, index: int) -> int:
        return self._source.table.starts[index] // blocks.BLOCK

    def _rounds_ahead(self, index: int) -> int:
        """How many rounds of blocks are known after that of a record."""
        count, shared = process_count(), self._source.blocks.shared
        if count == 1 or index < 0 or self.owner(index) is None:
            return 1
        return (shared - 1) // count - self._block(index) // count


class _PlainLines:
    """Lines of a file that is not packed.

    Attributes:
      blocks: of the file.
      table: of the lines that are known.
      bytes_read: of lines that were read again.
    """

    def __init__(self, file: int, path: Path) -> None:
        self._file, self._path = file, path
        self.blocks = BlockReader(file, path, lines=True)
        self.table = LineTable()
        self.bytes_read = 0
        self._start = self._lines = 0  # of the line that is not at its end, and how many there were before it
        self._pieces: list[
            tuple[int, int, int, bool]
        ] = []  # of that line: start, end, crc32, whether it may be blank
        self._crossing: dict[int, list[tuple[int, int, int, bool]]] = {}

    def grow(self) -> bool:
        """Make the records of further blocks known; False at the end of the file."""
        found = self.blocks.further()
        self._add(found, len(self.blocks.found) - len(found))
        return bool(found)

    def finish(self) -> None:
        """Make all records known, without holding their bytes."""
        if not self.blocks.complete:
            first = len(self.blocks.found)
            self._add(self.blocks.rest(), first)

    def share_read(self) -> float:
        """The part of the file in which the records known so far lie."""
        return min(1.0, len(self.blocks.found) * blocks.BLOCK / max(1, self.blocks.size))

    def line(self, index: int) -> bytes:
        """The bytes of a record."""
        start, size, check = self.table.starts[index], self.table.sizes[index], self.table.checks[index]
        pieces = [
            self._bytes(
                number, max(start, number * blocks.BLOCK), min(start + size, (number + 1) * blocks.BLOCK)
            )
            for number in range(start // blocks.BLOCK, (start + size - 1) // blocks.BLOCK + 1)
        ]
        crossing = self._crossing.get(index)
        expected = [check] if crossing is None else [crc for _, _, crc, _ in crossing]
        if [zlib.crc32(piece) for piece in pieces] != expected:
            raise DataError(f"{self._path}:{self.table.numbers[index]}: changed while it was being read")
        after = self.table.starts[index + 1] if index + 1 < len(self.table) else start + size
        self.blocks.let_go(after // blocks.BLOCK)
        return pieces[0] if len(pieces) == 1 else b"".join(pieces)

    def _bytes(self, number: int, start: int, end: int) -> bytes:
        held, first = self.blocks.held(number), number * blocks.BLOCK
        if held is not None:
            return held[start - first : end - first]
        self.bytes_read += end - start
        return read_at(self._file, self._path, start, end - start)

    def _add(self, found: Sequence[Block], first: int) -> None:
        for number, block in enumerate(found, start=first):
            start = number * blocks.BLOCK
            end = min(start + blocks.BLOCK, self.blocks.size)
            blank = set(block.blank.tolist())
            if len(block.ends):
                self._piece(start, int(block.ends[0]), int(block.checks[0]), 0 in blank)
                self._close(int(block.ends[0]))
                self._whole_lines(block)
                start = int(block.ends[-1]) + 1
            self._piece(start, end, int(block.checks[-1]), len(block.ends) in blank)
        if self.blocks.complete and self._pieces:
            self._close(self.blocks.size)  # a last line without an end

    def _piece(self, start: int, end: int, check: int, blank: bool) -> None:
        if end > start:
            self._pieces.append((start, end, check, blank))

    def _close(self, end: int) -> None:
        """Take up the line that ends here, of which parts may lie in several blocks."""
        pieces, start = self._pieces, self._start
        self._lines += 1
        self._pieces, self._start = [], end + 1
        if all(blank for *_, blank in pieces):
            # Only the whole line tells: a part may end within a letter.
            self.bytes_read += end - start
            if is_blank(read_at(self._file, self._path, start, end - start), first=self._lines == 1):
                return
        if len(pieces) > 1:
            self._crossing[len(self.table)] = pieces
        self.table.append(start, end - start, self._lines, pieces[0][2])

    def _whole_lines(self, block: Block) -> None:
        """Take up the lines that lie wholly in a block, but for its first one."""
        ends = block.ends
        starts = ends[:-1] + 1
        kept = np.ones(len(starts), bool)
        inner = block.blank[(block.blank > 0) & (block.blank < len(ends))]
        kept[inner - 1] = False
        numbers = self._lines + 1 + np.arange(len(starts))
        self.table.extend(starts[kept], (ends[1:] - starts)[kept], numbers[kept], block.checks[1:-1][kept])
        self._lines += len(starts)
        self._start = int(ends[-1]) + 1
