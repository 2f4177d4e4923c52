"""The comparisons of a run: in memory, read forward from files larger than memory, or looked up on the disk.

Whoever is given comparisons asks them what can be done with them, and not of which class they are.
"""

from __future__ import annotations

import itertools
from bisect import bisect_right
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from types import MappingProxyType
from typing import Any, TypeVar

import numpy as np

from prb_jax.errors import DataError
from prb_jax.records.comparison import Comparison
from prb_jax.records.lines import JsonLines, Row
from prb_jax.seams import get

One = TypeVar("One")


class Items(Sequence[One]):
    """The base class: its methods are right for comparisons, or rows of them, that are all in memory.

    Attributes:
      in_memory: whether all of them are there, so that each may be compared with all others.
      complete: whether it is known how many they are.
      files: the files of JSON lines whose digests are taken while they are read.
    """

    in_memory: bool = True
    complete: bool = True
    files: Mapping[Path, JsonLines] = MappingProxyType({})

    def about(self) -> float:
        """Return about how many there are, by what was read so far; 0 where that is not known."""
        return len(self)

    def placed(self: Items[Comparison], name: str) -> Iterator[Row[Comparison]]:
        """Yield each comparison with the place where it stands: the name of its source, if nothing else is known."""
        return (Row(name, one) for one in self)

    def listen(self, listener: Callable[[int, Row[Comparison]], None]) -> Callable[[int], str] | None:
        """Call a function with each comparison that is read from now on and its index, in the thread that reads it.

        Returns:
          A function from an index to the place in a file; None if nothing is left to be read, and so to be listened to.
        """

    def sample(self, count: int) -> Sequence[One]:
        """Return all comparisons; of data larger than memory `count` that speak for all."""
        return self

    def truncated(self) -> int | None:
        """Return how many of their trees were cut; None where no tokens are known."""

    def at(self, places: np.ndarray) -> Items[One]:
        """Return the ones at these places."""
        return Held(self[place] for place in places.tolist())

    def without(self, places: set[int]) -> Items[One]:
        """Return all but the ones at these places."""
        return Held(one for place, one in enumerate(self) if place not in places)

    def changed(self, change: Callable[[One], One]) -> Items[One]:
        """Return the comparisons, each of them changed; of large files, when it is read."""
        return Held(map(change, self))


class Held(list[One], Items[One]):
    """Comparisons in memory: a list."""


def joined(parts: Sequence[tuple[str, Items[Comparison]]]) -> Items[Comparison]:
    """Return all comparisons of several sources, given with their names, one source after another."""
    if len(parts) == 1:
        return parts[0][1]
    if all(part.in_memory for _, part in parts):
        return Held(comparison for _, part in parts for comparison in part)
    return get("large data", "join").value(parts)


@dataclass(frozen=True)
class Window:
    """Some comparisons that follow one another."""

    places: range  # of the comparisons
    comparisons: Sequence[Any]
    last: bool  # whether they are the last ones


def windows(comparisons: Iterable[Any], *, first: int, size: int) -> Iterator[Window]:
    """Yield comparisons in consecutive parts; no more is read than the part and one comparison."""
    source = iter(comparisons)
    start, count, ahead = 0, first, list(itertools.islice(source, 1))

    def read(start: int, count: int) -> Window:
        nonlocal ahead
        part = [*ahead, *itertools.islice(source, count - 1)]
        ahead = list(itertools.islice(source, 1))
        return Window(range(start, start + len(part)), part, not ahead)

    while ahead:
        yield read(start, count)  # no name holds it while the next one is read
        start, count = start + count, size


class Joined(Items[Any]):
    """Comparisons of several sequences, or rows of tables of them, each looked up when it is asked for.

    Args:
      parts: the sequences, one after another.
      places: int64, indices into all of their items; all of them if not given.
    """

    in_memory = False

    def __init__(self, parts: Sequence[Any], places: np.ndarray | None = None) -> None:
        self._parts = parts
        self._starts = list(itertools.accumulate(map(len, parts), initial=0))
        self.places = np.arange(self._starts[-1]) if places is None else places

    def __len__(self) -> int:
        return len(self.places)

    def at(self, places: np.ndarray) -> Joined:
        return Joined(self._parts, self.places[places])

    def sample(self, count: int) -> Sequence[Any]:
        """Return all of them, or `count` evenly spaced ones."""
        if len(self) <= count:
            return self
        return [self[int(place)] for place in np.linspace(0, len(self) - 1, count).round()]

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
