"""Runs whose data is not read to its end yet: what their inputs leave open, and the blocks that were read so far.

A large file is read while it is scored, so that its digest and the number of its comparisons are known at the end.
Until then they are null in ``run.json``, and ``blocks.jsonl`` beside it holds the digest of each block that was read,
before any score of it: a run that is continued compares them with what it reads again.
"""

from __future__ import annotations

import json
import os
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any, Final

from prb_jax.data.writing import json_line, writing
from prb_jax.errors import RunError

BLOCKS: Final = "blocks.jsonl"


def is_open(inputs: Mapping[str, Any]) -> bool:
    """Whether the inputs of a run leave open what its data is."""
    data = inputs.get("data")
    return isinstance(data, Mapping) and data.get("comparisons", 0) is None


def filled(inputs: Mapping[str, Any], other: Mapping[str, Any]) -> Mapping[str, Any]:
    """Return inputs in which everything that is open stands as in other ones."""
    data, known = inputs.get("data"), other.get("data")
    if not is_open(inputs) or not isinstance(data, Mapping) or not isinstance(known, Mapping):
        return inputs
    sources, theirs = data.get("sources", ()), known.get("sources", ())
    if len(sources) != len(theirs):
        return inputs
    described = []
    for source, their in zip(sources, theirs, strict=True):
        files, found = source.get("files"), their.get("files")
        if isinstance(files, Mapping) and isinstance(found, Mapping):
            closed = {name: found.get(name) if digest is None else digest for name, digest in files.items()}
            described.append({**source, "files": closed})
        else:
            described.append(source)
    return {
        **inputs,
        "data": {**data, "sources": described, "comparisons": known.get("comparisons")},
    }


def read_blocks(folder: Path) -> list[list[bytes]]:
    """Return the digests of the blocks that a run read so far, for each of its files; a torn last line is dropped.

    Raises:
      RunError: there are none, though there are scores, or the file is not as it was written.
    """
    path = folder / BLOCKS
    try:
        lines = path.read_bytes().split(b"\n")[:-1]
    except OSError as error:
        raise RunError(
            f"cannot read {path}: {error.strerror or error}; it says which data the scores are of: put it back, or "
            "give --out another folder"
        ) from error
    found: list[list[bytes]] = []
    for number, line in enumerate(lines, start=1):
        try:
            row = json.loads(line)
            file, block, digest = int(row["file"]), int(row["block"]), bytes.fromhex(row["sha256"])
        except (ValueError, KeyError, TypeError) as error:
            raise _not_a_block(path, number) from error
        while len(found) <= file <= len(lines):
            found.append([])
        if not 0 <= file < len(found) or block != len(found[file]):
            raise _not_a_block(path, number)
        found[file].append(digest)
    if not found:
        raise RunError(f"{path}: empty, though there are scores; give --out another folder")
    return found


def append_blocks(folder: Path, known: list[list[bytes]], read: Sequence[Sequence[bytes]]) -> None:
    """Add the digests of the blocks that were read since.

    Args:
      folder: of the run.
      known: the digests that are there, for each file; those that are added are added here too.
      read: the digests of the blocks that were read so far, for each file.

    Raises:
      RunError: they cannot be written.
    """
    lines = b""
    for number, digests in enumerate(read):
        if number == len(known):
            known.append([])
        for block in range(len(known[number]), len(digests)):
            row = {"file": number, "block": block, "sha256": digests[block].hex()}
            lines += json_line(row)
            known[number].append(digests[block])
    if not lines:
        return
    path = folder / BLOCKS
    with writing(path), path.open("ab") as file:
        file.write(lines)
        file.flush()
        os.fsync(file.fileno())


def remove_blocks(folder: Path) -> None:
    """Remove the digests of blocks, where the data is known as a whole or nothing is scored yet."""
    with writing(folder / BLOCKS):
        (folder / BLOCKS).unlink(missing_ok=True)


def _not_a_block(path: Path, number: int) -> RunError:
    return RunError(
        f"{path}:{number}: not the digest of the next block of a file; put the file back as it was written, or give "
        "--out another folder"
    )
