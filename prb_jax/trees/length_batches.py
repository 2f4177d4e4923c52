"""Texts dealt by length into batches of few fixed shapes."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

import numpy as np

STEPS = (*range(16, 160, 8), *range(160, 256, 16), *range(256, 513, 32))
"""Lengths of batches; longer ones are powers of two."""


@dataclass(frozen=True)
class LengthBatch:
    """Which texts make up one batch [rows, length]; rows beyond ``indices`` are empty."""

    length: int
    rows: int
    indices: tuple[int, ...]


def plan_lengths(
    lengths: Sequence[int], *, limit: int, tokens_per_batch: int, divisor: int = 1
) -> list[LengthBatch]:
    """Batches of texts of similar length, the longest first.

    Every batch of one length has the same number of rows, so that programs compiled are lengths used. What
    does not fill a batch goes to the next longer length, so that one batch at most is partly empty.

    Args:
      lengths: of the texts in tokens, each at least 1.
      limit: no text is longer.
      tokens_per_batch: padded tokens of a batch stay at or below this where ``divisor`` rows allow it.
      divisor: rows are a multiple of it: the number of parts that a mesh splits a batch into.
    """
    order = np.argsort(np.asarray(lengths, np.int64), kind="stable")
    ordered = np.asarray(lengths, np.int64)[order]
    plan: list[LengthBatch] = []
    start = 0
    for length in _steps(int(ordered[-1]) if len(ordered) else 0, limit):
        rows = max(tokens_per_batch // length // divisor, 1) * divisor
        stop = int(np.searchsorted(ordered, length, side="right"))
        last = stop == len(ordered)
        while stop - start >= rows or (last and stop > start):
            indices = tuple(int(i) for i in order[start : min(start + rows, stop)])
            plan.append(LengthBatch(length, rows, indices))
            start += len(indices)
    return plan[::-1]


def _steps(longest: int, limit: int) -> list[int]:
    """The lengths of batches that texts of at most ``longest`` tokens need."""
    steps = [*STEPS]
    while steps[-1] < longest:
        steps.append(2 * steps[-1])
    needed = [step for step in steps if step < longest]
    needed.append(next((step for step in steps if step >= longest), longest))
    return sorted({min(step, limit) for step in needed})
