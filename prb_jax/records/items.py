"""The comparisons of a run: in memory, read sequentially from files larger than memory, or looked up on disk.

Callers test the attributes of :class:`Items`, not the class.
"""

from __future__ import annotations

import itertools
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from types import MappingProxyType
from typing import TYPE_CHECKING, Any, TypeVar

from prb_jax.records.comparison import Comparison
from prb_jax.records.files import Row
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
