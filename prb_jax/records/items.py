"""The comparisons of a run: in memory, read sequentially from files larger than memory, or looked up on disk.

Callers test the attributes of :class:`Items`, not the class.
"""

from __future__ import annotations

import itertools
from bisect import bisect_right
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from types import MappingProxyType
from typing import TYPE_CHECKING, Any, TypeVar

from prb_jax.errors import DataError
from prb_jax.records.comparison import Comparison
from prb_jax.records.lines import Row
from prb_jax.seams import get

if TYPE_CHECKING:
    import numpy as np

    from prb_jax.records.large_lines import JsonLines

One = TypeVar("One")


class Items(Sequence[One]):
    """Base class, with methods for comparisons, or rows of them, that are all in memory.

    Attributes:
      in_memory: True if all items are in memory, so each can be compared with all others.
      complete: True if the number of items is known.
      files: Files of JSON lines that are hashed while they are read.
    """

    in_memory: bool = True
    complete: bool = True
    files: Mapping[Path, JsonLines] = MappingProxyType({})

    def about(self) -> float:
        """Return an estimate of the number of items from the part read so far; 0 if unknown."""
        return len(self)

    def placed(self: Items[Comparison], name: str) -> Iterator[Row[Comparison]]:
        """Yield each comparison with its place, or with the name of its source if the place is unknown."""
        return (Row(name, one) for one in self)

    def listen(self, listener: Callable[[int, Row[Comparison]], None]) -> Callable[[int], str] | None:
        """Call `listener` with the index and row of each comparison read from now on, in the reading thread.

        Returns:
          A function from an index to the place in a file; None if all comparisons are already in memory.
        """

    def sample(self, count: int) -> Sequence[One]:
        """Return all comparisons; for data larger than memory, a sample of `count`."""
        return self

    def truncated(self) -> int | None:
        """Return the number of truncated trees; None without prepared tokens."""

    def at(self, places: np.ndarray) -> Items[One]:
        """Return the items at these indices."""
        return Held(self[place] for place in places.tolist())

    def without(self, places: set[int]) -> Items[One]:
        """Return all items except those at these indices."""
        return Held(one for place, one in enumerate(self) if place not in places)

    def changed(self, change: Callable[[One], One]) -> Items[One]:
        """Return the comparisons after `change`, which is applied on reading for large files."""
        return Held(map(change, self))


class Held(list[One], Items[One]):
    """Comparisons in memory: a list."""


def joined(parts: Sequence[tuple[str, Items[Comparison]]]) -> Items[Comparison]:
    """Return the concatenated comparisons of several named sources."""
    if len(parts) == 1:
        return parts[0][1]
    if all(part.in_memory for _, part in parts):
        return Held(comparison for _, part in parts for comparison in part)
    return get("large data", "join").value(parts)


@dataclass(frozen=True)
class Window:
    """Some consecutive comparisons."""

    places: range  # indices of the comparisons
    comparisons: Sequence[Any]
    last: bool  # True for the last window


def windows(comparisons: Iterable[Any], *, first: int, size: int) -> Iterator[Window]:
    """Yield consecutive windows of comparisons; reads only one comparison ahead."""
    source = iter(comparisons)
    start, count, ahead = 0, first, list(itertools.islice(source, 1))

    def read(start: int, count: int) -> Window:
        nonlocal ahead
        part = [*ahead, *itertools.islice(source, count - 1)]
        ahead = list(itertools.islice(source, 1))
        return Window(range(start, start + len(part)), part, not ahead)

    while ahead:
        yield read(start, count)  # no variable keeps the window alive while the next one is read
        start, count = start + count, size


class Joined(Items[Any]):
    """Concatenated comparisons, or table rows, of several sequences; each item is looked up on access.

    Args:
      parts: Sequences, in order.
      places: Indices into the concatenated items, int64; all items if not given.
    """

    in_memory = False

    def __init__(self, parts: Sequence[Any], places: np.ndarray | None = None) -> None:
        self._parts = parts
        import numpy as np  # slow to import

        self._starts = list(itertools.accumulate(map(len, parts), initial=0))
        self.places = np.arange(self._starts[-1]) if places is None else places

    def __len__(self) -> int:
        return len(self.places)

    def at(self, places: np.ndarray) -> Joined:
        return Joined(self._parts, self.places[places])

    def sample(self, count: int) -> Sequence[Any]:
        """Return all items, or `count` evenly spaced ones."""
        if len(self) <= count:
            return self
        import numpy as np

        return [self[int(place)] for place in np.linspace(0, len(self) - 1, count).round()]

    def __getitem__(self, index: Any) -> Any:
        if isinstance(index, slice):
            return [self[place] for place in range(len(self))[index]]
        place = int(self.places[index])
        part = bisect_right(self._starts, place) - 1
        return self._parts[part][place - self._starts[part]]


def stamp(files: Sequence[Path]) -> list[tuple[str, int, int, int]]:
    """Return name, size, modification time and inode of each file, which reveal a change.

    Raises:
      DataError: A file is missing.
    """
    try:
        states = [(str(file), file.stat()) for file in files]
    except OSError as error:
        raise DataError(f"{error.filename}: cannot be read: {error.strerror or error}") from error
    return [(name, facts.st_size, facts.st_mtime_ns, facts.st_ino) for name, facts in states]
