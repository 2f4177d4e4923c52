"""Comparisons that begin alike, so that the beginning is computed once: found in the token ids, by nothing else.

Trees are put into the order of their prefixes. Neighbours in this order share the longest beginnings, so that
the lengths of these beginnings say all: how many tokens any run of neighbours needs, and where it is best cut.
"""

from __future__ import annotations

import itertools
from collections.abc import Callable, Sequence
from dataclasses import dataclass

import numpy as np

from prb_jax.errors import short_repr
from prb_jax.trees.tree import Tree, common_run

LEAST_SHARED = 48
"""Beginnings shorter than this (the opening of a chat template) are not worth a block of attention of their own."""


@dataclass(frozen=True, eq=False)
class SortedTrees:
    """Trees in the order of their prefixes.

    Attributes:
      order: int64 [n], the index of the tree at each place.
      tokens: int64 [n], tokens of the tree at each place, computed alone; equal responses count once, but for trees of
        a kernel, of which these are the places that they take.
      reads: int64 [n], its responses.
      shared: int64 [n], how many tokens it begins with that the tree at the place before begins with too; 0
        where that is fewer than :data:`LEAST_SHARED` and not the whole prefix of both, and at place 0.
    """

    order: np.ndarray
    tokens: np.ndarray
    reads: np.ndarray
    shared: np.ndarray

    __repr__ = short_repr


@dataclass(frozen=True)
class Unit:
    """Trees that go into one stream together: a run of places of :class:`SortedTrees`.

    Attributes:
      start, stop: the places.
      tokens: that they need, shared beginnings once.
      reads: their responses.
    """

    start: int
    stop: int
    tokens: int
    reads: int


def sort_trees(
    trees: Sequence[Tree], *, share: bool = True, size: Callable[[Tree], int] | None = None
) -> SortedTrees:
    """Put trees in the order of their prefixes, equal ones in their own order.

    Args:
      trees: in any order.
      share: without it every tree is taken alone, in the order given.
      size: of a tree computed alone, if it is not the number of its tokens.
    """
    count = len(trees)
    order = list(range(count))
    if share:
        # Big-endian bytes sort as the ids do.
        keys = [tree.prefix.astype(">i4").tobytes() for tree in trees]
        order.sort(key=keys.__getitem__)
    shared = np.zeros(count, np.int64)
    for place in range(1, count if share else 0):
        before, prefix = trees[order[place - 1]].prefix, trees[order[place]].prefix
        run = common_run([before, prefix])
        # Equal ones are one, however short: equal conversations then have equal scores, to the last bit.
        shared[place] = run if run >= LEAST_SHARED or run == len(before) == len(prefix) else 0
    return SortedTrees(
        order=np.asarray(order, np.int64),
        tokens=np.asarray([(size or _distinct_tokens)(trees[index]) for index in order], np.int64),
        reads=np.asarray([len(trees[index].responses) for index in order], np.int64),
        shared=shared,
    )


def _distinct_tokens(tree: Tree) -> int:
    """Tokens of a tree whose equal responses are computed once."""
    repeated = len(tree.responses) - len({response.tobytes() for response in tree.responses})
    if not repeated:
        return tree.tokens
    return len(tree.prefix) + sum(len(ids) // 4 for ids in {each.tobytes() for each in tree.responses})


def divide(trees: SortedTrees, *, most_tokens: int, most_reads: int) -> list[Unit]:
    """Cut the sorted trees into units that fit a stream, so that as little as possible is computed twice.

    Trees without a common beginning are never in one unit. A beginning whose trees do not fit together is
    repeated; so is nothing else. A single tree that does not fit is a unit of its own all the same.
    """
    tokens_before = np.concatenate([[0], np.cumsum(trees.tokens)])
    reads_before = np.concatenate([[0], np.cumsum(trees.reads)])
    shared_before = np.concatenate([[0], np.cumsum(trees.shared)])

    def unit(start: int, stop: int) -> Unit:
        tokens = tokens_before[stop] - tokens_before[start] - (shared_before[stop] - shared_before[start + 1])
        return Unit(start, stop, int(tokens), int(reads_before[stop] - reads_before[start]))

    def fits(found: Unit) -> bool:
        return found.tokens <= most_tokens and found.reads <= most_reads

    units: list[Unit] = []
    starts = np.flatnonzero(trees.shared == 0)
    waiting = [(int(a), int(b)) for a, b in zip(starts, [*starts[1:], len(trees.order)], strict=True)]
    while waiting:
        start, stop = waiting.pop()
        whole = unit(start, stop)
        if fits(whole) or stop - start == 1:
            units.append(whole)
            continue
        inner = trees.shared[start + 1 : stop]
        least = int(inner.min())
        cuts = [start, *(start + 1 + np.flatnonzero(inner == least)).tolist(), stop]
        current: Unit | None = None
        for low, high in itertools.pairwise(cuts):
            child = unit(low, high)
            if not fits(child) and high - low > 1:
                waiting.append((low, high))
                child = None
            if current is not None and child is not None and 4 * least > child.tokens:
                joined = unit(current.start, high)
                if fits(joined):
                    current = joined
                    continue
            if current is not None:
                units.append(current)
            current = child
        if current is not None:
            units.append(current)
    return sorted(units, key=lambda each: each.start)
