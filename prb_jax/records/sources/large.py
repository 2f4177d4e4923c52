"""Comparisons of files larger than memory: evaluation reads them forward, training those of a prepared folder."""

from __future__ import annotations

import itertools
from bisect import bisect_right
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any, overload

import numpy as np

from prb_jax.errors import DataError
from prb_jax.records.comparison import Comparison
from prb_jax.records.intake import Placed
from prb_jax.records.lines import JsonLines


class LargeComparisons(Sequence[Comparison]):
    """Labelled comparisons that are read forward: every loop over them reads the files again, and keeps none of them.

    How many there are is known when a loop came to the end; their length reads as far. Several processes read the files
    each for itself. Whether ids are distinct is seen in `prb_jax.scoring.comparison_table`.

    Args:
      start: begins a pass over them.
      about: tells about how many there are by what was read so far; 0 where that is not known.
      files: the files of JSON lines whose digests are taken while they are read.
      stamp: of all files, which changes with them.
      count: how many there are, where that is known without reading them.

    Attributes:
      files, stamp: likewise.
      known: how many were read so far.
      complete: whether all were.
    """

    def __init__(
        self,
        start: Callable[[], Iterator[Placed]],
        *,
        about: Callable[[], float] = lambda: 0.0,
        files: Mapping[Path, JsonLines] | None = None,
        stamp: Sequence[Any] = (),
        count: int | None = None,
    ) -> None:
        self._start, self._about = start, about
        self.files, self.stamp = files or {}, stamp
        self.known, self.complete = count or 0, count is not None
        self._listeners: list[Callable[[int, Placed], None]] = []
        self._walk: Iterator[Comparison] = iter(())  # goes on behind the comparison that was looked up last
        self._last: tuple[int, Comparison | None] = (-1, None)

    def placed(self) -> Iterator[Placed]:
        """Yield each comparison with the place where it stands.

        Raises:
          DataError: a file that cannot be read, or a record that is not of the format; names file and line.
        """
        index = -1
        for index, placed in enumerate(self._start()):
            self.known = max(self.known, index + 1)
            for listener in self._listeners:
                listener(index, placed)
            yield placed
        self.complete = True

    def listen(self, listener: Callable[[int, Placed], None]) -> None:
        """Call a function with each comparison that is read from now on and its index, in the thread that reads it."""
        self._listeners.append(listener)
        self._last = (-1, None)

    def __iter__(self) -> Iterator[Comparison]:
        return (placed.comparison for placed in self.placed())

    def __len__(self) -> int:
        if not self.complete:
            for _ in self.placed():
                pass
        return self.known

    def __bool__(self) -> bool:
        return self.known > 0 or next(self.placed(), None) is not None

    def about(self) -> float:
        """Return about how many there are, by what was read so far; 0 where that is not known."""
        return self.known if self.complete else self._about()

    @overload
    def __getitem__(self, index: int) -> Comparison: ...
    @overload
    def __getitem__(self, index: slice) -> list[Comparison]: ...
    def __getitem__(self, index: int | slice) -> Comparison | list[Comparison]:
        """Return one of them: without reading again where the places that are asked for ascend."""
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

    def where(self, index: int) -> str:
        """Return the place of one comparison in its file."""
        return next(itertools.islice(self._start(), index, None)).where

    def without(self, places: set[int]) -> LargeComparisons:
        """Return all but the comparisons at these places."""
        return LargeComparisons(
            lambda: (placed for place, placed in enumerate(self.placed()) if place not in places)
        )

    def changed(self, change: Callable[[Comparison], Comparison]) -> LargeComparisons:
        """Return the comparisons, each of them changed when it is read."""
        return LargeComparisons(
            lambda: (Placed(placed.where, change(placed.comparison)) for placed in self.placed()),
            about=self.about,
        )

    @classmethod
    def joined(cls, parts: Sequence[tuple[str, Sequence[Comparison]]]) -> LargeComparisons:
        """Return all comparisons of several sources, given with their names, one source after another."""
        large = [part for _, part in parts if isinstance(part, LargeComparisons)]
        if len(large) == len(parts) == 1:
            return large[0]

        def start() -> Iterator[Placed]:
            for name, part in parts:
                held = (Placed(name, comparison) for comparison in part)
                yield from part.placed() if isinstance(part, LargeComparisons) else held

        def about() -> float:
            counts = [part.about() if isinstance(part, LargeComparisons) else len(part) for _, part in parts]
            return sum(counts) if all(counts) else 0.0

        files = {path: file for part in large for path, file in part.files.items()}
        count = sum(len(part) for _, part in parts) if all(part.complete for part in large) else None
        return cls(start, about=about, files=files, count=count)


@dataclass(frozen=True)
class Window:
    """Some comparisons that follow one another."""

    places: range  # of the comparisons
    comparisons: Sequence[Comparison]
    last: bool  # whether they are the last ones


def windows(comparisons: Sequence[Comparison], *, first: int, size: int) -> Iterator[Window]:
    """Yield comparisons in consecutive parts; of large files no more is read than the part and one comparison."""
    start, count = 0, first
    if not isinstance(comparisons, LargeComparisons):
        while start < len(comparisons):
            places = range(start, min(start + count, len(comparisons)))
            yield Window(places, comparisons[start : places.stop], places.stop == len(comparisons))
            start, count = places.stop, size
        return
    source = iter(comparisons)
    ahead = list(itertools.islice(source, 1))

    def read(start: int, count: int) -> Window:
        nonlocal ahead
        part = [*ahead, *itertools.islice(source, count - 1)]
        ahead = list(itertools.islice(source, 1))
        return Window(range(start, start + len(part)), part, not ahead)

    while ahead:
        yield read(start, count)  # no name holds it while the next one is read
        start, count = start + count, size


class Joined(Sequence[Any]):
    """Comparisons of several sequences, or rows of tables of them, each looked up when it is asked for.

    Args:
      parts: the sequences, one after another.
      places: int64, indices into all of their items; all of them if not given.
    """

    def __init__(self, parts: Sequence[Any], places: np.ndarray | None = None) -> None:
        self._parts = parts
        self._starts = list(itertools.accumulate(map(len, parts), initial=0))
        self.places = np.arange(self._starts[-1]) if places is None else places

    def __len__(self) -> int:
        return len(self.places)

    def at(self, indices: np.ndarray) -> Joined:
        """Return the ones at these places."""
        return Joined(self._parts, self.places[indices])

    def __getitem__(self, index: Any) -> Any:
        if isinstance(index, slice):
            return [self[place] for place in range(len(self))[index]]
        place = int(self.places[index])
        part = bisect_right(self._starts, place) - 1
        return self._parts[part][place - self._starts[part]]


def stamp(files: Sequence[Path]) -> list[tuple[str, int, int, int]]:
    """Return what changes where a file changes: its name, size, time and number.

    Raises:
      DataError: one of them is gone.
    """
    try:
        states = [(str(file), file.stat()) for file in files]
    except OSError as error:
        raise DataError(f"{error.filename}: cannot be read: {error.strerror or error}") from error
    return [(name, facts.st_size, facts.st_mtime_ns, facts.st_ino) for name, facts in states]
