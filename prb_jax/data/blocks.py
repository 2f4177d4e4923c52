"""Blocks of large files: what each one tells of the whole, its digest and the places of its lines.

Blocks are independent, so several threads share them, and so do the processes of a job: each reads its own, and all
get what was found in them.
"""

from __future__ import annotations

import hashlib
import itertools
import os
import zlib
from collections.abc import Iterable, Iterator
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass
from pathlib import Path
from typing import Final

import numpy as np

from prb_jax.data.files import reading
from prb_jax.data.reading import open_file
from prb_jax.errors import DataError
from prb_jax.processes.sharing import gather_int32, own_part, process_count

LARGE: Final = 64 << 20
"""Bytes from which on a file is read by windows and known by the digests of its blocks."""

BLOCK: Final = 16 << 20
THREADS: Final = 4
_BRACE: Final = ord("{")
_REPLACED: Final = "\N{REPLACEMENT CHARACTER}"


@dataclass(frozen=True)
class Block:
    """What was found in one block of a file.

    The line ends in it divide it into pieces: the end of a line that began before it, whole lines, and the beginning
    of a line. A block without a line end is one piece.

    Attributes:
      digest: sha256 of its bytes.
      ends: int64 [n], places in the file of the line ends in it.
      checks: uint32 [n + 1], crc32 of the pieces, without line ends.
      blank: int64 [m], which pieces are blank; of the first and the last, which may end within a letter, those that
        may be a part of a blank line.
    """

    digest: bytes
    ends: np.ndarray
    checks: np.ndarray
    blank: np.ndarray


def scan_blocks(path: Path, *, together: bool = True) -> list[Block]:
    """The blocks of a file, without the places of its lines, each read once by one process of the job; a collective.

    Args:
      path: the file.
      together: False where this process alone asks for them.

    Raises:
      OSError: it cannot be read.
      DataError: it became shorter meanwhile.
    """
    with open_file(path) as file:
        count = block_count(os.fstat(file.fileno()).st_size)
        own = own_part(count) if together else range(count)

        def scan(number: int) -> Block:
            return scan_block(read_block(file.fileno(), path, number), number, lines=False)

        with scanning_threads() as pool:
            found = list(pool.map(scan, own))
    if process_count() == 1 or not together:
        return found
    blocks = [block for part in gather_int32(packed(found, own.start)) for block in unpacked(part)]
    if len(blocks) != count:
        raise different_sizes(path, count)
    return blocks


def scanning_threads() -> ThreadPoolExecutor:
    """Threads that read and scan blocks."""
    return ThreadPoolExecutor(min(THREADS, os.cpu_count() or 1), thread_name_prefix="scan")


def different_sizes(path: Path, count: int) -> DataError:
    """The error of processes whose files are not alike."""
    return DataError(
        f"{path}: has {count} blocks of {BLOCK >> 20} MiB here, but not in all processes of the job"
    )


def block_count(size: int) -> int:
    """How many blocks a file of so many bytes has."""
    return -(-size // BLOCK)


def large_digest(path: Path) -> str:
    """The digest of a large file, read by this process alone.

    Raises:
      DataError: it cannot be read.
    """
    with reading(path):
        return blocks_digest(block.digest for block in scan_blocks(path, together=False))


def blocks_digest(digests: Iterable[bytes]) -> str:
    """``"sha256-blocks:..."``: the sha256 of the digests of all blocks of 16 MiB, one after the other."""
    return "sha256-blocks:" + hashlib.sha256(b"".join(digests)).hexdigest()


def read_block(file: int, path: Path, number: int, *, size: int | None = None) -> bytes:
    """The bytes of one block of an open file.

    Args:
      file: its descriptor.
      path: for messages.
      number: of the block.
      size: of the file when it was opened; as it is now if not given.

    Raises:
      DataError: the file ends before.
    """
    start = number * BLOCK
    size = os.fstat(file).st_size if size is None else size
    return read_at(file, path, start, min(BLOCK, size - start))


def scan_block(data: bytes, number: int, *, lines: bool) -> Block:
    """What the bytes of a block tell; ``lines`` says whether line ends are looked for."""
    digest = hashlib.sha256(data).digest()
    if not lines:
        return Block(digest, np.zeros(0, np.int64), np.zeros(1, np.uint32), np.zeros(0, np.int64))
    ends = list(_line_ends(data))
    view = memoryview(data)
    pieces = list(itertools.pairwise([-1, *ends, len(data)]))
    checks = [zlib.crc32(view[before + 1 : end]) for before, end in pieces]
    blank = []
    for place, (before, end) in enumerate(pieces):
        outer = place in (0, len(pieces) - 1)
        if (outer or data[before + 1] != _BRACE) and is_blank(
            data[before + 1 : end], first=number == place == 0, part=outer
        ):
            blank.append(place)
    found = np.asarray(ends, np.int64) + number * BLOCK
    return Block(digest, found, np.asarray(checks, np.uint32), np.asarray(blank, np.int64))


def is_blank(line: bytes, *, first: bool = False, part: bool = False) -> bool:
    """Whether a line, perhaps the first of its file, holds no record; of a part of one, whether that may be."""
    text = line.decode("utf-8", errors="replace")
    text = text.removeprefix("\ufeff") if first else text
    return not (text.replace(_REPLACED, "") if part else text).strip()


def read_at(file: int, path: Path, start: int, size: int) -> bytes:
    """Exactly so many bytes of an open file.

    Raises:
      DataError: it ends before.
    """
    parts: list[bytes] = []
    while size > 0:
        part = os.pread(file, size, start)
        if not part:
            raise DataError(f"{path}: became shorter while it was being read")
        parts.append(part)
        start, size = start + len(part), size - len(part)
    return parts[0] if len(parts) == 1 else b"".join(parts)


def _line_ends(data: bytes) -> Iterator[int]:
    place = data.find(b"\n")
    while place >= 0:
        yield place
        place = data.find(b"\n", place + 1)


def packed(blocks: list[Block], first: int) -> np.ndarray:
    """int32: for each block its number, how many line ends and blank pieces, its digest, and all of these."""
    parts = [np.zeros(0, np.int32)]
    for number, block in enumerate(blocks, start=first):
        parts += [
            np.asarray([number, len(block.ends), len(block.blank)], np.int32),
            np.frombuffer(block.digest, np.int32),
            (block.ends - number * BLOCK).astype(np.int32),
            block.checks.view(np.int32),
            block.blank.astype(np.int32),
        ]
    return np.concatenate(parts)


def unpacked(vector: np.ndarray) -> list[Block]:
    """The blocks that :func:`packed` made a vector of."""
    blocks: list[Block] = []
    at = 0

    def take(count: int) -> np.ndarray:
        nonlocal at
        at += count
        return np.array(vector[at - count : at], np.int32)

    while at < len(vector):
        number, count, blank = take(3).tolist()
        digest, ends = take(8).tobytes(), take(count).astype(np.int64) + number * BLOCK
        blocks.append(Block(digest, ends, take(count + 1).view(np.uint32), take(blank).astype(np.int64)))
    return blocks
