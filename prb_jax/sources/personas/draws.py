"""Seeded draws whose results are the same on every platform and Python version."""

from __future__ import annotations

import random
from collections.abc import Sequence
from typing import TypeVar

T = TypeVar("T")


class Draws:
    """A stream of random choices.

    Only ``random.Random.random`` is used, the one method that Python promises to keep stable for an
    integer seed; everything else is derived from it here.
    """

    def __init__(self, seed: int) -> None:
        self._uniform = random.Random(seed).random

    def below(self, n: int) -> int:
        """A whole number from 0 to n - 1."""
        return int(self._uniform() * n)

    def chance(self, probability: float) -> bool:
        """True with the given probability."""
        return self._uniform() < probability

    def pick(self, items: Sequence[T]) -> T:
        """One of the items."""
        return items[int(self._uniform() * len(items))]

    def shuffled(self, items: Sequence[T]) -> list[T]:
        """The items in a random order (Fisher-Yates); the argument is left as it is."""
        result = list(items)
        for last in range(len(result) - 1, 0, -1):
            other = int(self._uniform() * (last + 1))
            result[last], result[other] = result[other], result[last]
        return result

    def some(self, items: Sequence[T], n: int) -> list[T]:
        """``n`` different items in a random order."""
        left = list(items)
        for place in range(n):
            other = place + int(self._uniform() * (len(left) - place))
            left[place], left[other] = left[other], left[place]
        return left[:n]
