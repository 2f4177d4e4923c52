"""Which blocks of queries and keys of a tree meet: the tables of a kernel that walks through blocks.

They follow from the static shape alone. Padding left of the prefix, which is dynamic, only takes blocks away.
"""

from __future__ import annotations

import functools

import numpy as np

from prb_jax.trees.mask import TreeLayout, TreeMask


@functools.lru_cache(maxsize=256)
def key_ranges(mask: TreeMask, *, queries: int, keys: int) -> np.ndarray:
    """For every block of queries, the blocks of keys with anything that one of its queries sees.

    Args:
        mask: the shape of the trees and the window.
        queries, keys: tokens of a block of queries and of one of keys.

    Returns:
        int32 [blocks of queries, 2, 2]: from where to where (exclusive), of the prefix's blocks, and of the
        further ones that hold the responses' own keys. Both rise, none is in both, and one may be empty.
    """
    layout = mask.layout
    prefix, tokens = layout.prefix, layout.tokens
    window = tokens if mask.window is None else mask.window
    starts = range(0, tokens, queries)
    found = np.zeros((len(starts), 2, 2), np.int32)
    for ranges, start in zip(found, starts, strict=True):
        stop = min(start + queries, tokens)
        reached = 0
        # The prefix: from the low end of the window of the query that is nearest to it.
        nearest = start if start < prefix else prefix + _least_inside(layout, start, stop)
        low, high = max(0, nearest - window + 1), min(stop, prefix)
        if low < high:
            reached = -(-high // keys)
            ranges[0] = low // keys, reached
        # The responses: from the first one that the block touches, or from the window of its first query.
        if stop > prefix:
            first = max(start, prefix)
            low = max(first - int(layout.inside(first)), first - window + 1)
            ranges[1] = max(low // keys, reached), max(-(-stop // keys), reached)
    found.flags.writeable = False
    return found


def _least_inside(layout: TreeLayout, start: int, stop: int) -> int:
    """The fewest tokens of its own response that a token of the responses in [start, stop) has before it."""
    inside = int(layout.inside(start))
    return 0 if inside + stop - start > layout.response_length else inside


@functools.lru_cache(maxsize=256)
def query_ranges(mask: TreeMask, *, queries: int, keys: int) -> np.ndarray:
    """The same seen from the keys: for every block of keys, the blocks of queries that visit it.

    Returns:
        int32 [blocks of keys, n, 2], rising; n is the most ranges that a block of keys needs, and the others'
        further ranges are empty. Without a window n is at most two; with one, a block of the prefix is seen
        from the beginning of every response.
    """
    ranges = key_ranges(mask, queries=queries, keys=keys)
    blocks = -(-mask.layout.tokens // keys)
    meets = np.zeros((blocks, len(ranges) + 2), np.int8)  # with an empty column at either end
    for query, pair in enumerate(ranges):
        for low, high in pair:
            meets[low:high, query + 1] = 1
    edges = np.diff(meets, axis=1)
    most = int((edges == 1).sum(axis=1).max())
    found = np.zeros((blocks, most, 2), np.int32)
    for key, edge in enumerate(edges):
        opens, closes = np.flatnonzero(edge == 1), np.flatnonzero(edge == -1)
        found[key, : len(opens)] = np.stack([opens, closes], axis=1)
    found.flags.writeable = False
    return found


def visited_blocks(ranges: np.ndarray) -> int:
    """How many pairs of blocks the tables above hold, padding apart."""
    return int((ranges[..., 1] - ranges[..., 0]).sum())
