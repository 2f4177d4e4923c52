"""Digests of a run's output files, which its record contains, and which are compared when the files are read."""

from __future__ import annotations

from collections.abc import Iterable, Mapping
from concurrent.futures import ThreadPoolExecutor
from hashlib import sha256
from pathlib import Path
from typing import Final

from prb_jax.errors import DataError, PrbError
from prb_jax.records.files import LARGE, file_digest
from prb_jax.records.large_lines import OF_BLOCKS, large_digest

_THREADS: Final = 4  # files at a time; a large one uses further threads for its blocks


def digest_of_bytes(data: bytes) -> str:
    """Return the digest of a small file with these bytes."""
    return f"sha256:{sha256(data).hexdigest()}"


def matching(folder: Path, patterns: Iterable[str]) -> list[str]:
    """Return the paths within a folder of the files that match one of the patterns."""
    paths = {path for pattern in patterns for path in folder.glob(pattern) if path.is_file()}
    return sorted(path.relative_to(folder).as_posix() for path in paths)


def digests_of(folder: Path, patterns: Iterable[str]) -> dict[str, str]:
    """Return the digests of the files in a folder that match one of the patterns, by their paths within it.

    Raises:
      DataError: A file cannot be read.
    """
    names = matching(folder, patterns)
    with ThreadPoolExecutor(_THREADS, thread_name_prefix="digest") as threads:
        return dict(zip(names, threads.map(lambda name: _digest(folder / name), names)))


def check_digests(
    folder: Path,
    digests: Mapping[str, str],
    *,
    record: Path,
    error: type[PrbError],
    hint: str = "put the file back",
) -> None:
    """Compare files in a folder with the digests that a record has of them.

    Args:
      folder: Folder of the files.
      digests: Digests by the path of each file within the folder.
      record: File with the digests, for the message.
      error: Class of the error to raise.
      hint: Advice for the user, at the end of the message.

    Raises:
      PrbError: (class `error`) A file is missing, cannot be read, or differs from the written one.
    """

    def same_kind(name: str) -> str:  # whatever the size of the file
        return (large_digest if digests[name].startswith(OF_BLOCKS) else file_digest)(folder / name)

    with ThreadPoolExecutor(_THREADS, thread_name_prefix="digest") as threads:
        try:
            for name, found in zip(digests, threads.map(same_kind, digests)):
                if found != digests[name]:
                    raise error(
                        f"{folder / name}: is not the file that the run wrote: expected {digests[name]} as in "
                        f"{record}, found {found}; {hint}"
                    )
        except DataError as failed:
            raise error(f"{failed}; the run wrote it; {hint}") from failed


def _digest(path: Path) -> str:
    try:
        size = path.stat().st_size
    except OSError:
        size = 0  # reading it raises the error
    return large_digest(path) if size >= LARGE else file_digest(path)
