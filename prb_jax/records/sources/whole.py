"""Comparisons of a source for access in any order, and its raw records."""

from __future__ import annotations

from pathlib import Path

from prb_jax.errors import DataError
from prb_jax.records import files as local_files
from prb_jax.records.comparison import Comparison
from prb_jax.records.files import Row, unpacked_size
from prb_jax.records.intake import each_comparison, each_row, large_files, resolve
from prb_jax.records.items import Held, Items


def find_comparisons(
    source: str | Path, *, subset: str | None = None, split: str = "train", limit: int | None = None
) -> Items[Comparison]:
    """Like ``read_comparisons``, for access in any order.

    Comparisons of a large prepared folder stay on disk: all are returned, and the caller applies subset and limit.

    Raises:
      DataError: Errors of ``read_comparisons``; or raw files are too large for memory.
    """
    opened = resolve(source, split=split)
    files = large_files(opened, split=split)
    if files and (stored := opened.stored(split=split)) is not None:
        return stored
    if sum(map(unpacked_size, files)) > local_files.HELD:
        raise DataError(
            f"{source}: too large for memory, and raw files have no random access: run `prb prepare --data {source} "
            f"--split {split} --out DIR` once, and use DIR instead"
        )
    return Held(each_comparison(source, subset=subset, split=split, limit=limit))


def source_rows(source: str | Path) -> list[Row]:
    """Return the raw records of a source; records of JSON files keep fields outside the schema.

    Raises:
      DataError: Errors of `read_comparisons`; but records of a file only need to be JSON objects or rows.
    """
    opened = resolve(source, split="test")
    if opened.kind == "file" and opened.benchmark is None:
        rows = list(each_row(source))
    else:
        numbered = enumerate(each_comparison(source), start=1)
        rows = [Row(f"{source}: record {number}", one.to_row()) for number, one in numbered]
    if not rows:
        raise DataError(f"{source}: no comparisons in it; expected at least one")
    return rows
