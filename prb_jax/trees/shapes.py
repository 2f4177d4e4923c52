"""Which fixed shapes batches have, and which tree goes into which batch: for scoring and training.

The callers ask for :class:`Shapes` once, with :func:`choose_shapes` from the lengths of their data or with
:func:`fixed_shapes` without any, and then let them put tree after tree into batches. A program is compiled
once for each shape. All choices are functions of lengths and options alone: not of the number of processes,
nor of the work that is done already. So a continued run forms the same batches and gives the same bytes.
"""

from __future__ import annotations

import itertools
from collections import deque
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass

import numpy as np

from prb_jax.errors import short_repr
from prb_jax.trees.batches import Bucket, Sides
from prb_jax.trees.shape_search import ShapeOptions, refine, split_by_k
from prb_jax.trees.stream_tables import round_up


@dataclass(frozen=True)
class PaddedBatch:
    """Which trees make up one batch."""

    bucket: Bucket
    rows: int  # B; those beyond `members` are empty
    members: tuple[int, ...]  # indices of the trees, at most `rows`

    __repr__ = short_repr


@dataclass(frozen=True)
class Shapes:
    """A short list of fixed shapes of batches."""

    # of the batches of each bucket: one size for each, so that compiles are buckets used
    rows: Mapping[Bucket, int]
    options: ShapeOptions
    fill: bool = False  # rows left over in a larger bucket are filled with trees that wait for a smaller one

    def batches(self, lengths: Sequence[Sides] | np.ndarray, members: Sequence[int]) -> list[PaddedBatch]:
        """Put trees into batches: the largest bucket first, so that one that exceeds the memory shows at once.

        A tree goes to the cheapest bucket that holds it (with `fill` to the one of fewest tokens), or, if
        none does, to one of its own on a coarse grid. Within a bucket trees keep their order.

        Args:
          lengths: (p, K, r) of each tree.
          members: the index of each tree.
        """
        order = sorted(self.rows, key=_largest_first)
        if not self.fill:
            order.sort(
                key=lambda bucket: (float(self.options.cell_cost(*bucket.sides)), bucket), reverse=True
            )
        table = np.asarray(lengths, np.int64).reshape(-1, 3)
        chosen = np.full(len(table), -1)
        for number, bucket in enumerate(order):
            chosen[(table <= bucket.sides).all(axis=1)] = number
        waiting = {
            bucket: deque(np.flatnonzero(chosen == number).tolist()) for number, bucket in enumerate(order)
        }
        multiple = self.options.multiple
        for place in np.flatnonzero(chosen < 0).tolist():
            p, k, r = table[place].tolist()  # few distinct buckets arise
            bucket = Bucket(_coarse(p, multiple), 1 << (k - 1).bit_length(), _coarse(r, multiple))
            waiting.setdefault(bucket, deque()).append(place)
        batches: list[PaddedBatch] = []
        order = sorted(waiting, key=_largest_first)
        queues = [waiting[bucket] for bucket in order]
        for number, (bucket, queue) in enumerate(zip(order, queues, strict=True)):
            rows = self.rows.get(bucket) or int(self.options.most_rows(bucket.tokens))
            while queue:
                taken = [queue.popleft() for _ in range(min(rows, len(queue)))]
                for smaller in queues[number + 1 :] if self.fill and len(taken) < rows else []:
                    while smaller and len(taken) < rows and bucket.fits(table[smaller[0]].tolist()):
                        taken.append(smaller.popleft())
                batches.append(PaddedBatch(bucket, rows, tuple(members[place] for place in taken)))
        return batches


def choose_shapes(
    lengths: Sequence[Sides] | np.ndarray,
    *,
    options: ShapeOptions,
    together: Sequence[Sequence[int] | np.ndarray] = (),
    fill: bool = False,
) -> Shapes:
    """Choose at most `max_buckets` shapes for trees of these lengths: least padding for few compiles.

    What is minimised is the cost of all padded rows, in whole batches, and of the compiles.

    Args:
      lengths: (p, K, r) of every tree: prefix length, responses, longest response. Their order decides nothing.
      options: multiples, limits and costs.
      together: indices of trees that will be put into batches at one time, for some such times; the rows of a batch are
        then chosen for them, and are else as many as `tokens_per_batch` allows.
      fill: as for :class:`Shapes`.

    Raises:
      ValueError: no tree, or a length that is not positive (p may be 0).
    """
    table = np.asarray(lengths, np.int64).reshape(-1, 3)
    if table.size == 0 or table[:, 0].min() < 0 or table[:, 1:].min() < 1:
        raise ValueError("expected shapes (p, K, r) with p >= 0, K >= 1, r >= 1, at least one")
    # At least one prefix column keeps every array non-empty.
    units = np.asarray([options.multiple, 1, options.multiple])
    rounded = -(-np.maximum(table, 1) // units) * units
    cells, row_cell, counts = np.unique(rounded, axis=0, return_inverse=True, return_counts=True)
    tops = refine(cells, counts, split_by_k(cells, counts, options), options)
    cheapest = options.row_costs(cells, tops).argmin(axis=0)
    assigned = cheapest[row_cell.reshape(-1)]
    rows: dict[Bucket, int] = {}
    for number in np.unique(cheapest):
        bucket = Bucket(*(int(side) for side in tops[number]))
        counted = np.asarray([(assigned[members] == number).sum() for members in together])
        rows[bucket] = (
            options.best_rows(bucket.tokens, counted) if together else int(options.most_rows(bucket.tokens))
        )
    return Shapes(rows, options, fill)


def fixed_shapes(
    prefixes: Iterable[int],
    responses: Iterable[int],
    lengths: Iterable[int],
    *,
    options: ShapeOptions,
) -> Shapes:
    """Every combination of these P, K and R, whatever the data: shapes that a server can compile before it serves."""
    buckets = [Bucket(*sides) for sides in itertools.product(prefixes, responses, lengths)]
    rows = {bucket: int(options.most_rows(bucket.tokens)) for bucket in buckets}
    return Shapes(rows, options)


def _largest_first(bucket: Bucket) -> tuple[int, Bucket]:
    return -bucket.tokens, bucket


def _coarse(size: int, multiple: int) -> int:
    """Rounded up to a step of an eighth to a quarter of the size."""
    step = round_up(max(multiple, 1 << max(size.bit_length() - 3, 0)), multiple)
    return round_up(max(size, 1), step)
