"""Concatenated sequences, whose items are looked up on access: data larger than memory."""

from __future__ import annotations

import itertools
from bisect import bisect_right
from collections.abc import Sequence
from typing import Any

import numpy as np

from prb_jax.records.items import Items


class Joined(Items[Any]):
    """Concatenated comparisons, or table rows, of several sequences; each item is looked up on access.

    Args:
      parts: Sequences, in order.
      places: Indices into the concatenated items, int64; all items if not given.
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
        """Return all items, or `count` evenly spaced ones."""
        if len(self) <= count:
            return self
        return [self[int(place)] for place in np.linspace(0, len(self) - 1, count).round()]

    def __getitem__(self, index: Any) -> Any:
        if isinstance(index, slice):
            return [self[place] for place in range(len(self))[index]]
        place = int(self.places[index])
        part = bisect_right(self._starts, place) - 1
        return self._parts[part][place - self._starts[part]]
