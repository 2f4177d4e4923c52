"""Large files in one pass: the digest of their bytes and the places of their lines, by blocks.

Blocks are independent, so several threads share them, and so do the processes of a job: each reads its part, and
all get the whole.
"""

from __future__ import annotations

import hashlib
import itertools
import os
import zlib
from collections.abc import Iterator
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
_THREADS: Final = 4
_BRACE: Final = ord("{")


@dataclass(frozen=True)
class Block:
    """What was found in one block of a file.

    Attributes:
      digest: sha256 of its bytes.
      ends: int64 [n], places in the file of the line ends in it.
      checks: uint32 [n], crc32 of the lines (without their ends) that lie wholly in it; the first one is not known.
      blank: int64 [m], which of those lines are blank.
    """

    digest: bytes
    ends: np.ndarray
    checks: np.ndarray
    blank: np.ndarray


def scan_blocks(path: Path, *, lines: bool, together: bool = True) -> list[Block]:
    """The blocks of a file, each read once by one process of the job; a collective.

    Args:
      path: the file.
      lines: whether line ends are looked for.
      together: False where this process alone asks for them.

    Raises:
      OSError: it cannot be read.
      DataError: it became shorter meanwhile.
    """
    with open_file(path) as file:
        count = -(-os.fstat(file.fileno()).st_size // BLOCK)
        own = own_part(count) if together else range(count)
        with ThreadPoolExecutor(min(_THREADS, os.cpu_count() or 1), thread_name_prefix="scan") as pool:
            found = list(pool.map(lambda number: _scan(file.fileno(), path, number, lines=lines), own))
    if process_count() == 1 or not together:
        return found
    blocks: list[Block] = []
    for vector in gather_int32(_packed(found, own.start)):
        blocks += _unpacked(vector)
    if len(blocks) != count:
        raise DataError(
            f"{path}: has {count} blocks of {BLOCK >> 20} MiB here, but not in all processes of the job"
        )
    return blocks


def large_digest(path: Path) -> str:
    """The digest of a large file, read by this process alone.

    Raises:
      DataError: it cannot be read.
    """
    with reading(path):
        return blocks_digest(scan_blocks(path, lines=False, together=False))


def blocks_digest(blocks: list[Block]) -> str:
    """``"sha256-blocks:..."``: the sha256 of the digests of all blocks of 16 MiB, one after the other."""
    return "sha256-blocks:" + hashlib.sha256(b"".join(block.digest for block in blocks)).hexdigest()


def _scan(file: int, path: Path, number: int, *, lines: bool) -> Block:
    start = number * BLOCK
    data = read_at(file, path, start, min(BLOCK, os.fstat(file).st_size - start))
    digest = hashlib.sha256(data).digest()
    ends = list(_line_ends(data)) if lines else []
    view = memoryview(data)
    inner = list(itertools.pairwise(ends))
    checks = [0, *(zlib.crc32(view[first + 1 : last]) for first, last in inner)] if ends else []
    odd = (n for n, (first, _) in enumerate(inner, start=1) if data[first + 1] != _BRACE)
    blank = [n for n in odd if is_blank(data[ends[n - 1] + 1 : ends[n]])]
    return Block(
        digest, np.asarray(ends, np.int64) + start, np.asarray(checks, np.uint32), np.asarray(blank, np.int64)
    )


def is_blank(line: bytes, *, first: bool = False) -> bool:
    """Whether a line, perhaps the first of its file, holds no record."""
    text = line.decode("utf-8", errors="replace")
    return not (text.removeprefix("\ufeff") if first else text).strip()


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


def _packed(blocks: list[Block], first: int) -> np.ndarray:
    """int32: for each block its number, how many line ends and blank lines, its digest, and all of these."""
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


def _unpacked(vector: np.ndarray) -> list[Block]:
    blocks: list[Block] = []
    at = 0

    def take(count: int) -> np.ndarray:
        nonlocal at
        at += count
        return np.array(vector[at - count : at], np.int32)

    while at < len(vector):
        number, count, blank = take(3).tolist()
        digest, ends = take(8).tobytes(), take(count).astype(np.int64) + number * BLOCK
        blocks.append(Block(digest, ends, take(count).view(np.uint32), take(blank).astype(np.int64)))
    return blocks
