"""Give streams about equal work in attention.

Devices of a mesh wait for the one with the most work. Streams of one shape have the same matrix products, but pairs of
tokens grow with the square of a conversation's length, so equally full streams differ in attention.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import TYPE_CHECKING

import numpy as np

if TYPE_CHECKING:
    from prb_jax.trees.packing import Unit
    from prb_jax.trees.streams import StreamShape

_NEAR = 1.01  # stop when the stream with the most pairs has at most this multiple of the mean
_ROUNDS = 8  # most changes, as a multiple of the number of streams


def with_even_pairs(
    bins: list[list[Unit]], shape: StreamShape, pairs: Callable[[Unit], float]
) -> list[list[Unit]]:
    """Return the units in as many bins, with about equal numbers of pairs.

    Two starts are bettered by exchanging units, and the better result is returned: the bins as they are, and bins
    that are filled anew with regard to pairs.

    Args:
      bins: Units of each stream.
      shape: Shape of all streams.
      pairs: Returns the approximate number of pairs of a unit in attention.
    """
    units = [unit for of_bin in bins for unit in of_bin]
    if len(bins) < 2:
        return bins
    given = np.repeat(np.arange(len(bins)), [len(of_bin) for of_bin in bins])
    problem = _Problem(units, len(bins), shape, pairs)
    tried = [problem.improved(start) for start in (given, problem.filled())]
    best = min((place for place in tried if place is not None), key=problem.most_pairs, default=given)
    return [[units[index] for index in np.flatnonzero(best == number)] for number in range(len(bins))]


class _Problem:
    """Units to place. A placement is the number of each unit's bin, int64 [units]."""

    def __init__(
        self, units: Sequence[Unit], bins: int, shape: StreamShape, pairs: Callable[[Unit], float]
    ) -> None:
        self.bins, self.starts = bins, np.asarray([unit.start for unit in units])
        self.most = np.asarray([shape.tokens, shape.reads, shape.kept], np.int64)
        self.sizes = np.asarray([(unit.tokens, unit.reads, unit.kept) for unit in units], np.int64)
        self.pairs = np.asarray([pairs(unit) for unit in units])

    def most_pairs(self, place: np.ndarray) -> float:
        """Return the pairs of the bin with the most of them."""
        return float(np.bincount(place, weights=self.pairs).max())

    def filled(self) -> np.ndarray:
        """Return a placement: the units with the most pairs a token first, each into the bin that will have the fewest.

        What a bin will have is what it has, and its room filled with the mean of the units that are left. Units that
        fit no bin are put into the roomiest one.
        """
        tokens = self.sizes[:, 0]
        order = np.lexsort((np.asarray(self.starts), -self.pairs / np.maximum(tokens, 1)))
        left_pairs, left_tokens = (x[order][::-1].cumsum()[::-1] for x in (self.pairs, tokens))
        place, work = np.zeros(len(order), np.int64), np.zeros(self.bins)
        room = np.tile(self.most, (self.bins, 1))
        for unit, pairs, rest in zip(order, left_pairs, left_tokens, strict=True):
            fits = (room >= self.sizes[unit]).all(axis=1)
            expected = np.where(fits, work + pairs / max(rest, 1) * room[:, 0], np.inf)
            number = int(expected.argmin() if fits.any() else room[:, 0].argmax())
            place[unit] = number
            room[number] -= self.sizes[unit]
            work[number] += self.pairs[unit]
        return place

    def improved(self, place: np.ndarray) -> np.ndarray | None:
        """Return a placement in which all units fit, after exchanges of units; None if they do not fit.

        Each round takes the bin that is too full, or the one with the most pairs, and makes the exchange, or move of
        a unit to another bin, that helps most.
        """
        place = place.copy()
        room = np.stack([self.most - self.sizes[place == number].sum(axis=0) for number in range(self.bins)])
        work = np.bincount(place, weights=self.pairs, minlength=self.bins)
        # Behind the units, one of no size for each bin stands for a move without anything in exchange.
        sizes = np.concatenate([self.sizes, np.zeros_like(room)])
        costs = np.concatenate([self.pairs, np.zeros(self.bins)])
        for _ in range(_ROUNDS * self.bins):
            excess = np.maximum(-room, 0).sum(axis=1)
            repairs = bool(excess.any())
            if not repairs and work.max() <= _NEAR * work.mean():
                break
            top = int((excess if repairs else work).argmax())
            where = np.concatenate([place, np.arange(self.bins)])
            mine, theirs = np.flatnonzero(place == top), np.flatnonzero(where != top)
            other = where[theirs]
            moved = costs[mine][:, None] - costs[theirs]
            moved_sizes = sizes[mine][:, None] - sizes[theirs]
            lacking = np.maximum(moved_sizes - room[other], 0) + np.maximum(-moved_sizes - room[top], 0)
            lacking, after = lacking.sum(axis=2), np.maximum(work[top] - moved, work[other] + moved)
            if repairs:
                value = np.where(lacking < excess[top] + excess[other], lacking + after / work.sum(), np.inf)
            else:
                value = np.where((lacking == 0) & (after < work[top] * (1 - 1e-6)), after, np.inf)
            one, two = np.unravel_index(value.argmin(), value.shape)
            if not np.isfinite(value[one, two]):
                break
            change, size, target = moved[one, two], moved_sizes[one, two], other[two]
            work[[top, target]] += -change, change
            room[top] += size
            room[target] -= size
            place[mine[one]] = target
            if theirs[two] < len(place):
                place[theirs[two]] = top
        return None if (room < 0).any() else place
