"""Evaluations of data larger than memory: the digests of the blocks that were read.

``blocks.jsonl`` has the digest of each block, written before any score of the block. Until the data is read to its end,
``run.json`` has null for the digest of the data and the number of its comparisons: the inputs are open. A continued run
compares these blocks with the data that it reads again.
"""

from __future__ import annotations

import contextlib
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass
from operator import itemgetter
from pathlib import Path
from typing import Any, Final, TypedDict

from prb_jax.errors import RunError
from prb_jax.runs.evaluation import BLOCKS, is_open
from prb_jax.runs.rows import Row, RowFile, RowKind


class _BlockLine(TypedDict):
    file: int
    block: int
    sha256: str


_BLOCK_ROWS: Final = RowKind(BLOCKS, "blocks", itemgetter("file", "block"), _BlockLine)


@dataclass(frozen=True)
class Blocks:
    """The digests of the blocks read so far."""

    file: RowFile[Row]

    def known(self) -> list[list[str]]:
        """Return the sha256 of each recorded block, per file; scores of later blocks do not exist.

        Raises:
          RunError: The blocks of a file are not consecutive.
        """
        rows = self.file.rows
        known: list[list[str]] = [[] for _ in {file for file, _ in rows}]
        for (file, block), row in rows.items():
            if file not in range(len(known)) or block != len(known[file]):
                raise RunError(
                    f"{self.file.path}: {file}, {block}: not the next block of a file; restore the file as it was "
                    "written, or choose another folder with --out"
                )
            known[file].append(row["sha256"])
        return known

    def append(self, digests: Sequence[Sequence[str]]) -> None:
        """Append the digests of the blocks read so far, per file, before any score of these blocks."""
        rows = (
            {"file": file, "block": block, "sha256": digest}
            for file, of_file in enumerate(digests)
            for block, digest in enumerate(of_file)
        )
        self.file.append(rows, sync=True)


@contextlib.contextmanager
def open_blocks(folder: Path) -> Iterator[Blocks]:
    """Open the file of blocks in a run folder, which this process has locked."""
    with _BLOCK_ROWS.open(folder) as file:
        yield Blocks(file)


def filled(inputs: Mapping[str, Any], other: Mapping[str, Any]) -> Mapping[str, Any]:
    """Return ``inputs`` with every open field filled in from ``other``."""
    data, known = inputs.get("data"), other.get("data")
    if not is_open(inputs) or not isinstance(data, Mapping) or not isinstance(known, Mapping):
        return inputs
    sources, theirs = data.get("sources", ()), known.get("sources", ())
    if len(sources) != len(theirs):
        return inputs
    described = []
    for source, their in zip(sources, theirs, strict=True):
        files, other_files = source.get("files"), their.get("files")
        if isinstance(files, Mapping) and isinstance(other_files, Mapping):
            closed = {
                name: other_files.get(name) if digest is None else digest for name, digest in files.items()
            }
            source = {**source, "files": closed}
        described.append(source)
    return {**inputs, "data": {**data, "sources": described, "comparisons": known.get("comparisons")}}
