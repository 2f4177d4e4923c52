"""A large file read once, block by block, at the pace of its reader: each process of a job reads blocks of its own."""

from __future__ import annotations

import json
import os
import threading
from collections.abc import Sequence
from concurrent.futures import Future
from pathlib import Path
from typing import Final

import numpy as np

from prb_jax import errors
from prb_jax.data import blocks
from prb_jax.data.blocks import (
    Block,
    different_sizes,
    packed,
    read_block,
    scan_block,
    scanning_threads,
    unpacked,
)
from prb_jax.errors import DataError, PrbError
from prb_jax.processes.sharing import gather_int32, process_count, process_index

_AHEAD: Final = 2
"""Blocks that a process reads before they are asked for."""

_HELD: Final = 256 << 20
"""Bytes of blocks that are held for their records to be read; beyond them the oldest are let go."""

_ERROR: Final = -1


class BlockReader:
    """The blocks of one file, in order, in rounds of one for each process.

    Args:
      file: descriptor of the open file.
      path: of it, for messages.
      lines: whether line ends are looked for.
      together: False where this process reads all blocks by itself.

    Attributes:
      size: bytes of the file when it was opened.
      count: blocks of the file.
      found: the blocks that are known so far, of all processes, in order.
      shared: how many of them were read in rounds, each by the process whose turn it was.
      bytes_read: by this process, of blocks.

    Raises:
      OSError: it cannot be read.
    """

    def __init__(self, file: int, path: Path, *, lines: bool, together: bool = True) -> None:
        self._file, self._path, self._lines = file, path, lines
        self.size = os.fstat(file).st_size
        self.count = blocks.block_count(self.size)
        self.found: list[bytes] = []
        self.shared = self.bytes_read = 0
        self._processes, self._index = (process_count(), process_index()) if together else (1, 0)
        self._coming: dict[int, Future[tuple[bytes, Block]]] = {}
        self._held: dict[int, bytes] = {}
        self._expected: Sequence[bytes] = ()
        self._threads = scanning_threads()
        self._lock = threading.Lock()

    @property
    def complete(self) -> bool:
        """Whether all blocks are known."""
        return len(self.found) == self.count

    def owner(self, number: int) -> int | None:
        """Return the process that read a block and holds it for a while; None where every process may read it."""
        return number % self._processes if number < self.shared and self._processes > 1 else None

    def further(self) -> list[Block]:
        """Return the blocks of the next round, none at the end of the file; a collective.

        Raises:
          OSError, DataError: one of them cannot be read, or is not what is expected.
        """
        first = len(self.found)
        stop = min(first + self._processes, self.count)
        if first == stop:
            return []
        found = self._gathered(first + self._index, stop)
        if len(found) != stop - first:
            raise different_sizes(self._path, self.count)
        self.shared = stop
        self._note(found)
        if self.complete:
            self._threads.shutdown(wait=False)
        return found

    def rest(self) -> list[Block]:
        """Return all further blocks, of which the bytes are not held; a collective.

        Raises:
          OSError, DataError: as :meth:`further`.
        """
        first = len(self.found)
        own = [number for number in range(first, self.count) if number % self._processes == self._index]
        for number in own:
            self._begin(number, held=False)
        found: list[Block] = []
        for start in range(first, self.count, self._processes):
            found += self._gathered(start + self._index, min(start + self._processes, self.count), held=False)
        if len(found) != self.count - first:
            raise different_sizes(self._path, self.count)
        self._note(found)
        self._threads.shutdown(wait=False)
        return found

    def held(self, number: int) -> bytes | None:
        """Return the bytes of a block that this process holds."""
        return self._held.get(number)

    def let_go(self, stop: int) -> None:
        """Hold the blocks before this one no longer."""
        with self._lock:
            for number in [number for number in self._held if number < stop]:
                del self._held[number]

    def expect(self, digests: Sequence[bytes]) -> None:
        """Compare the first blocks of the file, also those still to be read, with digests of an earlier time.

        Raises:
          DataError: one of them is another one.
        """
        self._expected = digests
        if len(digests) > self.count:
            raise self._changed(self.count)
        self._compare(0)

    def _note(self, found: Sequence[Block]) -> None:
        start = len(self.found)
        self.found += [block.digest for block in found]
        self._compare(start)

    def _compare(self, start: int) -> None:
        for number, (found, expected) in enumerate(zip(self.found[start:], self._expected[start:]), start):
            if found != expected:
                raise self._changed(number)

    def _changed(self, number: int) -> DataError:
        return DataError(
            f"{self._path}: changed since it was scored (block {number + 1} of {blocks.BLOCK >> 20} MiB); the scores "
            "so far are kept and belong to the old contents: put those back to finish the run, or start again in "
            "another folder"
        )

    def _begin(self, number: int, *, held: bool) -> None:
        """Read a block in the background."""

        def read() -> tuple[bytes, Block]:
            data = read_block(self._file, self._path, number, size=self.size)
            with self._lock:
                self.bytes_read += len(data)
            return data if held else b"", scan_block(data, number, lines=self._lines)

        if number < self.count and number not in self._coming:
            self._coming[number] = self._threads.submit(read)

    def _gathered(self, own: int, stop: int, *, held: bool = True) -> list[Block]:
        """The blocks of one round, or what one of the processes met."""
        if self._processes == 1:
            return [self._own(own, held=held)]
        sent = np.asarray([self.count], np.int32)
        failure: Exception | None = None
        if own < stop:
            try:
                sent = np.concatenate([sent, packed([self._own(own, held=held)], own)])
            except (OSError, PrbError) as error:
                failure = error
                kind = type(error).__name__ if isinstance(error, PrbError) else DataError.__name__
                text = str(error) if isinstance(error, PrbError) else f"{self._path}: cannot be read: {error}"
                told = np.frombuffer(json.dumps([kind, text]).encode(), np.uint8)
                sent = np.concatenate([[_ERROR], told]).astype(np.int32)
        found: list[Block] = []
        for process, vector in enumerate(gather_int32(sent)):
            if failure is not None and process == self._index:
                raise failure
            if vector[0] == _ERROR:
                kind, text = json.loads(vector[1:].astype(np.uint8).tobytes())
                raise getattr(errors, kind)(f"process {process}: {text}")
            if vector[0] != self.count:
                raise different_sizes(self._path, self.count)
            found += unpacked(vector[1:])
        return found

    def _own(self, number: int, *, held: bool) -> Block:
        self._begin(number, held=held)
        data, block = self._coming.pop(number).result()
        if held:
            for further in range(1, _AHEAD + 1):
                self._begin(number + further * self._processes, held=True)
            with self._lock:
                self._held[number] = data
                while len(self._held) > max(_AHEAD + 1, _HELD // blocks.BLOCK):
                    del self._held[min(self._held)]
        return block
