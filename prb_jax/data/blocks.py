"""Large files by blocks of 16 MiB, by whose digests they are known."""

from __future__ import annotations

import hashlib
import os
from collections.abc import Iterable
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from typing import Final

from prb_jax.data.files import reading
from prb_jax.data.reading import open_file
from prb_jax.errors import DataError

LARGE: Final = 64 << 20
"""Bytes from which on a file is read by windows and known by the digests of its blocks."""

HELD: Final = 1 << 30
"""Bytes of raw files up to which training holds their comparisons in memory."""

BLOCK: Final = 16 << 20
_THREADS: Final = 4


def scanning_threads() -> ThreadPoolExecutor:
    """Threads that read blocks and take their digests."""
    return ThreadPoolExecutor(min(_THREADS, os.cpu_count() or 1), thread_name_prefix="scan")


def block_count(size: int) -> int:
    """How many blocks a file of so many bytes has."""
    return -(-size // BLOCK)


def large_digest(path: Path) -> str:
    """The digest of a large file.

    Raises:
      DataError: it cannot be read.
    """
    with reading(path), open_file(path) as file, scanning_threads() as pool:
        size = os.fstat(file.fileno()).st_size

        def digest(number: int) -> str:
            return read_block(file.fileno(), path, number, size=size)[1]

        return blocks_digest(pool.map(digest, range(block_count(size))))


def blocks_digest(digests: Iterable[str]) -> str:
    """``"sha256-blocks:..."``: the sha256 of the digests of all blocks of 16 MiB, one after the other."""
    return "sha256-blocks:" + hashlib.sha256(bytes.fromhex("".join(digests))).hexdigest()


def read_block(file: int, path: Path, number: int, *, size: int) -> tuple[bytes, str]:
    """The bytes of one block of an open file, and their sha256.

    Args:
      file: its descriptor.
      path: for messages.
      number: of the block.
      size: of the file when it was opened.

    Raises:
      DataError: the file ends before.
    """
    start, end = number * BLOCK, min((number + 1) * BLOCK, size)
    parts: list[bytes] = []
    while start < end:
        part = os.pread(file, end - start, start)
        if not part:
            raise DataError(f"{path}: became shorter while it was being read")
        parts.append(part)
        start += len(part)
    data = parts[0] if len(parts) == 1 else b"".join(parts)
    return data, hashlib.sha256(data).hexdigest()
