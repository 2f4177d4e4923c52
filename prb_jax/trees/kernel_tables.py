"""The steps of the kernel for TPUs over packed streams (:mod:`prb_jax.models.attention.stream_kernel`).

A step takes a block of queries and a block of keys of which one query sees something. Those of one block of queries
follow each other, and in the other order, for derivatives by keys, those of one block of keys. There are as many steps
as pairs of such blocks, whatever room the table has.
"""

from __future__ import annotations

from dataclasses import dataclass, field

import jax
import numpy as np

from prb_jax.errors import short_repr
from prb_jax.trees.stream_tables import meeting_blocks

BLOCK = 512
"""Queries, and keys, of one step of the kernel, at most. One block of scores and what is made of it takes four times
512 x 512 float32 numbers, a quarter of the smallest chip's fast memory."""

LANES = 128  # the least of them: the width of a TPU's vector registers

FIRST, LAST, PARTLY = 1, 2, 4
"""Flags of a step: the first, or last, of its block; some query does not see all keys, so that they are masked."""


@jax.tree_util.register_dataclass
@dataclass(frozen=True)
class StepTable:
    """The steps of S streams of N tokens, in blocks of Q queries or keys, with room for C of them: as many as there
    are where every token sees all before it. int32 arrays."""

    by_query: np.ndarray | jax.Array
    """[S, 3, C], of each step the number of its block of queries, that of its block of keys, and its flags; 0 behind
    the last."""
    by_key: np.ndarray | jax.Array  # the same steps, those of one block of keys together
    count: np.ndarray | jax.Array  # [S, 1], how many there are
    block: int = field(metadata={"static": True})  # Q

    __repr__ = short_repr


def step_table(
    until: np.ndarray, positions: np.ndarray, used: np.ndarray, *, block: int, window: int | None
) -> StepTable:
    """Return the steps of streams.

    Args:
      until, positions: int32 [S, N], see :class:`prb_jax.trees.streams.StreamBatch`; N is a multiple of the block.
      used: of each stream how many tokens it has; what follows is padding.
      block: queries, and keys, of a step.
      window: of sliding layers; None for no window.
    """
    blocks = until.shape[1] // block
    room = blocks * (blocks + 1) // 2
    by_query, by_key = np.zeros((2, len(until), 3, room), np.int32)
    count = np.zeros((len(until), 1), np.int32)
    for row, stream in enumerate(zip(until, positions, used, strict=True)):
        some, every = meeting_blocks(*stream, block=block, window=window)
        some |= np.eye(blocks, dtype=bool)  # padding sees itself
        for steps, (outer, inner) in ((by_query, (0, 1)), (by_key, (1, 0))):
            pairs = np.nonzero(some if outer == 0 else some.T)
            count[row] = len(pairs[0])
            new = np.diff(pairs[0], prepend=-1) != 0
            steps[row, outer, : len(new)], steps[row, inner, : len(new)] = pairs
            query, key = steps[row, :2, : len(new)]
            last = np.append(new[1:], True)
            steps[row, 2, : len(new)] = FIRST * new + LAST * last + PARTLY * ~every[query, key]
    return StepTable(by_query, by_key, count, block)
