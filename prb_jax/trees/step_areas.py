"""Parts of a step of the TPU kernel that are computed, in tiles of 128 queries by 128 keys.

A step takes a block of queries and a block of keys, of which often only a part sees each other: the triangle of a block
with itself, the first queries where a conversation ends, or a run of keys where one begins. The kernel has one body of
code without branches for each *area* below, and the table of a stream names the smallest area that contains everything
visible (:func:`prb_jax.trees.kernel_tables.step_table`). More areas would leave fewer pairs in vain, but more code.
"""

from __future__ import annotations

from functools import cache
from typing import NamedTuple

import numpy as np

TILE = 128  # queries, and keys, of a tile: the width of a TPU's vector registers


class Rectangle(NamedTuple):
    """Tiles of an area."""

    query: int  # first tile of queries
    queries: int
    keys: int  # tiles of keys, from the offset of the step on


Area = tuple[Rectangle, ...]

SEEN = 0  # number of the area of steps in which all queries see all keys: the only one without a mask


@cache
def step_areas(tiles: int) -> tuple[Area, ...]:
    """Return the areas of steps of ``tiles`` by ``tiles`` tiles: whole (twice), triangle, first queries, some keys."""
    whole: Area = (Rectangle(0, tiles, tiles),)
    if tiles == 1:
        return whole, whole
    triangle = tuple(Rectangle(tile, 1, tile + 1) for tile in range(tiles))
    first_queries = [(Rectangle(0, count, tiles),) for count in range(1, tiles)]
    some_keys = [(Rectangle(0, tiles, count),) for count in range(1, tiles)]
    return whole, whole, triangle, *first_queries, *some_keys


def area_tiles(tiles: int) -> np.ndarray:
    """Return the number of tiles that each area computes, int64 [areas]."""
    return np.asarray([sum(part.queries * part.keys for part in area) for area in step_areas(tiles)])


def smallest_areas(meets: np.ndarray, every: np.ndarray) -> tuple[np.ndarray, np.ndarray]:
    """Return the number of the smallest area of each step, and its offset: the first tile of keys. int64 [n] each.

    Args:
      meets: True where some query of a tile sees some key of it, bool [n, tiles of queries, tiles of keys].
      every: True for steps in which all queries see all keys, bool [n].
    """
    numbers, offsets, covers = _covers(meets.shape[1])
    flat = meets.reshape(len(meets), -1).astype(np.int32)
    missed = flat @ (~covers.reshape(len(covers), -1)).T.astype(np.int32)
    chosen = (missed == 0).argmax(axis=1)  # the smallest comes first
    return np.where(every, SEEN, numbers[chosen]), np.where(every, 0, offsets[chosen])


@cache
def _covers(tiles: int) -> tuple[np.ndarray, np.ndarray, np.ndarray]:
    """Return area, offset and covered tiles, bool [n, tiles, tiles], of each masked choice, the smallest first."""
    choices = []
    for number, area in enumerate(step_areas(tiles)):
        longest = max(part.keys for part in area)
        for offset in range(tiles - longest + 1) if number != SEEN else ():
            covered = np.zeros((tiles, tiles), bool)
            for part in area:
                covered[part.query : part.query + part.queries, offset : offset + part.keys] = True
            choices.append((number, offset, covered))
    choices.sort(key=lambda choice: choice[2].sum())
    numbers, offsets, covers = zip(*choices, strict=True)
    return np.asarray(numbers), np.asarray(offsets), np.stack(covers)
