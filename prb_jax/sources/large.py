"""Comparisons of files larger than memory: a sequence whose members are read when they are asked for."""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Final, Protocol, overload

import numpy as np

from prb_jax.data import blocks
from prb_jax.data.comparison import Comparison
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

    Ids are not compared with each other here, and equal records without an id have equal ids: a reader of the whole
    looks after both (`prb_jax.scoring.facts`).

    Args:
      parts: the records, one file after another.
      chosen: int64, which of them; all if not given.
    """

    def __init__(self, parts: Sequence[Rows], *, chosen: np.ndarray | None = None) -> None:
        self._parts = parts
        self._starts = np.cumsum([0, *map(len, parts)])
        self._chosen = chosen
        self.listeners: list[Callable[[Read], None]] = []
        """Called with each comparison that is read, in the thread that reads it."""

    def __len__(self) -> int:
        return int(self._starts[-1]) if self._chosen is None else len(self._chosen)

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
            return [self.read(each).comparison for each in range(len(self))[index]]
        return self.read(range(len(self))[index]).comparison

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
        chosen = np.arange(len(self)) if self._chosen is None else self._chosen
        if subset is not None:
            kept, others = [], set()
            for index, own in enumerate(self._subsets()):
                if own is not None and short_name(own) == short_name(subset):
                    kept.append(index)
                    if len(kept) == limit:
                        break
                else:
                    others.add(own or "(none)")
            if not kept:
                expected = ", ".join(sorted(others))
                raise DataError(f"{source}: no subset {quote(subset)}; expected one of {expected}")
            chosen = chosen[np.asarray(kept, np.int64)]
        return LargeComparisons(self._parts, chosen=chosen[:limit])

    def at(self, indices: Sequence[int]) -> LargeComparisons:
        """Return the comparisons at these places."""
        places = np.asarray(indices, np.int64)
        return LargeComparisons(self._parts, chosen=places if self._chosen is None else self._chosen[places])

    def _subsets(self) -> Iterator[str | None]:
        return (self.read(index).comparison.subset for index in range(len(self)))

    def row(self, index: int) -> Row:
        """Return the undecoded record of one comparison."""
        place = index if self._chosen is None else int(self._chosen[index])
        part = int(np.searchsorted(self._starts, place, side="right")) - 1
        return self._parts[part].row(place - int(self._starts[part]))


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


def open_rows(path: Path) -> JsonLines | ParquetRows:
    """Open a file of one of the kinds in ``SUFFIXES`` for reading by windows."""
    return ParquetRows(path) if path.name.endswith(".parquet") else JsonLines(path)


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
