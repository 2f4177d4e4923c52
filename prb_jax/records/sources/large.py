"""Comparisons of data larger than memory, read sequentially from their files."""

from __future__ import annotations

import itertools
import math
from collections.abc import Callable, Iterator, Mapping, Sequence
from pathlib import Path
from typing import Any

from prb_jax.records.comparison import Comparison
from prb_jax.records.files import Row, is_large, read_rows
from prb_jax.records.intake import chosen, mapped_rows, read_records
from prb_jax.records.items import Items
from prb_jax.records.large_lines import JsonLines
from prb_jax.records.sources.source import Source
from prb_jax.seams import get


class LargeComparisons(Items[Comparison]):
    """Labelled comparisons that are read sequentially: every loop reads the files again and keeps nothing in memory.

    The number of comparisons is known after a complete loop; `len` reads to the end. Every process reads the files.
    `prb_jax.scoring.large_table` checks that ids are distinct.

    Args:
      start: Starts a pass over the comparisons.
      about: Estimates the number of comparisons from the part read so far; 0 if unknown.
      files: Files of JSON lines that are hashed while they are read.
      count: Number of comparisons, if known without reading them.
    """

    in_memory = False

    def __init__(
        self,
        start: Callable[[], Iterator[Row[Comparison]]],
        *,
        about: Callable[[], float] = lambda: 0.0,
        files: Mapping[Path, JsonLines] = Items.files,
        count: int | None = None,
    ) -> None:
        self._start, self._about, self.files = start, about, files
        self._known, self.complete = count or 0, count is not None
        self._listeners: list[Callable[[int, Row[Comparison]], None]] = []
        self._walk: Iterator[Comparison] = iter(())  # continues after the last comparison looked up
        self._last: tuple[int, Comparison | None] = (-1, None)

    def placed(self, name: str = "") -> Iterator[Row[Comparison]]:
        """Yield each comparison with its place in a file.

        Raises:
          DataError: A file cannot be read, or a record is invalid; the message names file and line.
        """
        index = -1
        for index, placed in enumerate(self._start()):
            self._known = max(self._known, index + 1)
            for listener in self._listeners:
                listener(index, placed)
            yield placed
        self.complete = True

    def listen(self, listener: Callable[[int, Row[Comparison]], None]) -> Callable[[int], str]:
        self._listeners.append(listener)
        self._last = (-1, None)
        return lambda index: next(itertools.islice(self._start(), index, None)).where

    def __iter__(self) -> Iterator[Comparison]:
        return (placed.value for placed in self.placed())

    def __len__(self) -> int:
        if not self.complete:
            for _ in self.placed():
                pass
        return self._known

    def about(self) -> float:
        return self._known if self.complete else self._about()

    def __getitem__(self, index: Any) -> Any:
        """Return one comparison; ascending indices are read in a single pass."""
        if isinstance(index, slice):
            return list(itertools.islice(self, index.start, index.stop, index.step))
        place = index + len(self) if index < 0 else index
        last, comparison = self._last
        if place < last or comparison is None:
            last, self._walk = -1, iter(self)
        if place != last:
            comparison = (
                next(itertools.islice(self._walk, place - last - 1, None), None) if place >= 0 else None
            )
            self._last = (place, comparison)
        if comparison is None:
            raise IndexError("comparison index out of range")
        return comparison

    def sample(self, count: int) -> Sequence[Comparison]:
        return self[:count]

    def without(self, places: set[int]) -> LargeComparisons:
        return LargeComparisons(
            lambda: (placed for place, placed in enumerate(self.placed()) if place not in places)
        )

    def changed(self, change: Callable[[Comparison], Comparison]) -> LargeComparisons:
        return LargeComparisons(
            lambda: (Row(placed.where, change(placed.value)) for placed in self.placed()),
            about=self.about,
        )


def open_large(
    opened: Source,
    files: Sequence[Path],
    *,
    name: str | Path,
    subset: str | None,
    split: str,
    limit: int | None,
) -> LargeComparisons:
    """Return the comparisons of a source with these large files; other arguments as in `open_comparisons`."""
    stored = opened.stored(split=split)
    raw = files if stored is None else ()
    readers = {file: JsonLines(file) for file in raw if file.suffix != ".parquet"}

    def rows() -> Iterator[Row]:
        for file in raw:
            yield from readers[file].rows() if file in readers else read_rows(file, columns=opened.columns)
        if stored is not None:
            yield from opened.rows(subset=subset, split=split)

    mapped = mapped_rows(rows, opened)

    def about() -> float:
        counts = [reader.about() for reader in readers.values()]
        known = len(counts) == len(files) and all(counts) and subset is None
        return min(sum(counts), limit or math.inf) if known else 0.0

    count = None
    if subset is None and not readers:
        count = sum(map(get("formats", "parquet rows").value, raw)) if stored is None else len(stored)
        count = min(count, limit or count)
    large = LargeComparisons(
        lambda: chosen(read_records(mapped(), tell=False), name, subset=subset, limit=limit),
        about=about,
        files={file: reader for file, reader in readers.items() if is_large(file)},
        count=count,
    )
    if not count:
        next(iter(large))  # raises an error if there is none
    return large


def join_large(parts: Sequence[tuple[str, Items[Comparison]]]) -> LargeComparisons:
    """Like `prb_jax.records.items.joined`, if some comparisons are not in memory."""
    return LargeComparisons(
        lambda: (placed for name, part in parts for placed in part.placed(name)),
        about=lambda: sum(counts) if all(counts := [part.about() for _, part in parts]) else 0.0,
        files={path: file for _, part in parts for path, file in part.files.items()},
        count=sum(len(part) for _, part in parts) if all(part.complete for _, part in parts) else None,
    )
