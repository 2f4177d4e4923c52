"""Comparisons of files larger than memory: a sequence whose members are read when they are asked for."""

from __future__ import annotations

import itertools
from bisect import bisect_right
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Final, Protocol, overload

import numpy as np

from prb_jax.data import blocks
from prb_jax.data.comparison import Comparison
from prb_jax.data.field_names import FieldNames
from prb_jax.data.files import Row
from prb_jax.data.hub import short_name
from prb_jax.data.lines import JsonLines
from prb_jax.data.row_groups import ParquetRows
from prb_jax.errors import DataError, quote

SUFFIXES: Final = (".jsonl", ".jsonl.gz", ".parquet")
"""Kinds of files that are read by windows."""

_PACKED: Final = 4


class Rows(Protocol):
    """Undecoded records with random access."""

    def __len__(self) -> int: ...
    def row(self, index: int) -> Row:
        """Return one record; raises DataError where it cannot be read."""
        ...


@dataclass(frozen=True, slots=True)
class Read:
    """A comparison that was read.

    Attributes:
      index: its place in the sequence.
      where: its place in the file.
      comparison: itself; one without an id has a digest of its contents as id.
      named: whether its record has an id.
    """

    index: int
    where: str
    comparison: Comparison
    named: bool


@dataclass(frozen=True)
class HeldRows:
    """Comparisons that were read already, beside large files.

    Attributes:
      place: the name of their source.
      comparisons: themselves.
    """

    place: str
    comparisons: Sequence[Comparison]

    def __len__(self) -> int:
        return len(self.comparisons)

    def row(self, index: int) -> Row:
        """Return one of them."""
        return Row(self.place, self.comparisons[index])


class LargeComparisons(Sequence[Comparison]):
    """Labelled comparisons that are read, and checked, when they are asked for; none of them is held.

    How many there are is known when the files were read to their ends: a reader who goes forward asks :meth:`reach`,
    and not for the length, which reads all that is left. Several processes read the files each for itself.

    Ids are not compared with each other here, and equal records without an id have equal ids: a reader of the whole
    looks after both (`prb_jax.scoring.comparison_table`).

    Args:
      parts: the records, one file after another.
      chosen: int64, which of them; all if not given.
      limit: at most so many of them.
    """

    def __init__(
        self, parts: Sequence[Rows], *, chosen: np.ndarray | None = None, limit: int | None = None
    ) -> None:
        self._parts = parts
        self._growing = [part if isinstance(part, JsonLines | LargeComparisons) else None for part in parts]
        self._starts = [0]  # of each part whose beginning is known
        self._chosen = chosen if chosen is None else chosen[:limit]
        self._limit = limit
        self.listeners: list[Callable[[Read], None]] = []
        """Called with each comparison that is read, in the thread that reads it."""

    def __len__(self) -> int:
        if self._chosen is not None:
            return len(self._chosen)
        if self._limit is not None and self._reach(self._limit) >= self._limit:
            return self._limit
        return sum(map(len, self._parts))

    def __bool__(self) -> bool:
        return self.reach(1) > 0

    def reach(self, stop: int) -> int:
        """Make sure that so many comparisons are known, if there are as many, and return how many are.

        Raises:
          DataError: a file cannot be read.
        """
        if self._chosen is not None:
            return len(self._chosen)
        found = self._reach(stop if self._limit is None else min(stop, self._limit))
        return found if self._limit is None else min(found, self._limit)

    @property
    def known(self) -> int:
        """How many comparisons are known."""
        if self._chosen is not None:
            return len(self._chosen)
        last = len(self._starts) - 1
        growing = self._growing[last]
        found = self._starts[-1] + (len(self._parts[last]) if growing is None else growing.known)
        return found if self._limit is None else min(found, self._limit)

    @property
    def complete(self) -> bool:
        """Whether it is known how many there are."""
        if self._chosen is not None or all(part is None or part.complete for part in self._growing):
            return True
        return self._limit is not None and self.known >= self._limit

    def about(self) -> float:
        """Return about how many there are, by what was read so far; 0 where nothing was."""
        if self.complete:
            return len(self)
        found = [
            len(part) if growing is None else growing.about()
            for part, growing in zip(self._parts, self._growing, strict=True)
        ]
        about = sum(found) if all(found) else 0.0
        return about if self._limit is None else min(about, self._limit)

    @property
    def places(self) -> np.ndarray:
        """int64: which of all records these are."""
        return np.arange(len(self)) if self._chosen is None else self._chosen

    @overload
    def __getitem__(self, index: int) -> Comparison: ...
    @overload
    def __getitem__(self, index: slice) -> list[Comparison]: ...
    def __getitem__(self, index: int | slice) -> Comparison | list[Comparison]:
        if isinstance(index, slice):
            stop = index.stop
            if stop is None or stop < 0 or (index.start or 0) < 0:
                count = len(self)
            else:
                count = min(self.reach(stop), stop)
            return [self.read(each).comparison for each in range(count)[index]]
        if index < 0:
            index += len(self)
        if not 0 <= index < self.reach(index + 1):
            raise IndexError("comparison index out of range")
        return self.read(index).comparison

    def read(self, index: int) -> Read:
        """Return one comparison and where it stands.

        Raises:
          DataError: the record cannot be read, or is none, naming file and line.
        """
        row = self.row(index)
        if isinstance(row.value, Comparison):
            found = Read(index, row.where, row.value, True)
        else:
            comparison = Comparison.from_row(row.value, where=row.where)
            found = Read(index, row.where, comparison, row.value.get("id") is not None)
        for listener in self.listeners:
            listener(found)
        return found

    @classmethod
    def joined(cls, parts: Sequence[tuple[str, Sequence[Comparison]]]) -> LargeComparisons:
        """Return all comparisons of several sources, given with their names, one source after another."""
        return cls(
            [part if isinstance(part, LargeComparisons) else HeldRows(name, part) for name, part in parts]
        )

    def where(self, index: int) -> str:
        """Return the place of one comparison in its file."""
        return self.row(index).where

    def only(self, source: str, *, subset: str | None, limit: int | None) -> LargeComparisons:
        """Return the first so many comparisons of a subset; all records are read once to find a subset.

        Args:
          source: its name, for messages.
          subset: its name; None for all of them.
          limit: most comparisons; None for all of them.

        Raises:
          DataError: there are none.
        """
        if subset is None:
            return LargeComparisons(self._parts, chosen=self._chosen, limit=limit)
        kept, others = [], set()
        for index in self.indices():
            own = self.read(index).comparison.subset
            if own is not None and short_name(own) == short_name(subset):
                kept.append(index)
                if len(kept) == limit:
                    break
            else:
                others.add(own or "(none)")
        if not kept:
            expected = ", ".join(sorted(others))
            raise DataError(f"{source}: no subset {quote(subset)}; expected one of {expected}")
        return self.at(kept)

    def at(self, indices: Sequence[int]) -> LargeComparisons:
        """Return the comparisons at these places."""
        places = np.asarray(indices, np.int64)
        return LargeComparisons(self._parts, chosen=places if self._chosen is None else self._chosen[places])

    def indices(self) -> Iterator[int]:
        """Yield the place of one comparison after another, while the files are read."""
        return itertools.takewhile(lambda index: self.reach(index + 1) > index, itertools.count())

    def row(self, index: int) -> Row:
        """Return the undecoded record of one comparison."""
        part, inside = self._part(index)
        return self._parts[part].row(inside)

    def _reach(self, stop: int) -> int:
        """As :meth:`reach`, of all records."""
        while True:
            part, start = len(self._starts) - 1, self._starts[-1]
            growing = self._growing[part]
            if growing is None:
                found = len(self._parts[part])
            else:
                found = growing.reach(stop - start) if stop > start else growing.known
            if start + found >= stop or len(self._starts) == len(self._parts):
                return start + found
            self._starts.append(start + found)  # this part is read to its end

    def _part(self, index: int) -> tuple[int, int]:
        """The number of the part in which a comparison lies, and its place there."""
        place = index if self._chosen is None else int(self._chosen[index])
        last = self._growing[len(self._starts) - 1]
        if last is None or place >= self._starts[-1] + last.known:
            self._reach(place + 1)
        part = bisect_right(self._starts, place) - 1
        return part, place - self._starts[part]


def reach(comparisons: Sequence[Comparison], stop: int) -> int:
    """Return how many of the first so many comparisons there are; of large files no more are read."""
    if isinstance(comparisons, LargeComparisons):
        return min(stop, comparisons.reach(stop))
    return min(stop, len(comparisons))


def windows(comparisons: Sequence[Comparison], *, first: int, size: int) -> Iterator[range]:
    """Yield the places of comparisons in consecutive parts; of large files no more is read than the next part."""
    start, end = 0, first
    while (stop := reach(comparisons, end)) > start:
        yield range(start, stop)
        start, end = stop, end + size


class Changed(Sequence[Comparison]):
    """Comparisons that are changed one by one when they are asked for."""

    def __init__(self, comparisons: Sequence[Comparison], change: Callable[[Comparison], Comparison]) -> None:
        self._comparisons, self._change = comparisons, change

    def __len__(self) -> int:
        return len(self._comparisons)

    @overload
    def __getitem__(self, index: int) -> Comparison: ...
    @overload
    def __getitem__(self, index: slice) -> list[Comparison]: ...
    def __getitem__(self, index: int | slice) -> Comparison | list[Comparison]:
        if isinstance(index, slice):
            return [self._change(comparison) for comparison in self._comparisons[index]]
        return self._change(self._comparisons[index])


def chosen(comparisons: Sequence[Comparison], indices: Sequence[int]) -> Sequence[Comparison]:
    """Return the comparisons at these places, as a list or, of large files, unread."""
    if isinstance(comparisons, LargeComparisons):
        return comparisons.at(indices)
    return [comparisons[index] for index in indices]


def is_large(path: Path) -> bool:
    """Whether a file is read by windows; compressed ones count four times."""
    try:
        size = path.stat().st_size if path.is_file() else 0
    except OSError:
        return False
    packed = path.name.endswith((".gz", ".parquet"))
    return path.name.endswith(SUFFIXES) and size * (_PACKED if packed else 1) >= blocks.LARGE


def open_rows(path: Path, *, columns: FieldNames) -> JsonLines | ParquetRows:
    """Open a file of one of the kinds in ``SUFFIXES`` for reading by windows."""
    kind = ParquetRows if path.name.endswith(".parquet") else JsonLines
    return kind(path, columns=columns)


def stamp(files: Sequence[Path]) -> list[tuple[str, int, int, int]]:
    """Return what changes where a file changes: its name, size, time and number.

    Raises:
      DataError: one of them is gone.
    """
    try:
        found = [(str(file), file.stat()) for file in files]
    except OSError as error:
        raise DataError(f"{error.filename}: cannot be read: {error.strerror}") from error
    return [(name, facts.st_size, facts.st_mtime_ns, facts.st_ino) for name, facts in found]
