"""Random forests of tokens, laid out as streams: conversations that share beginnings of any depth."""

from __future__ import annotations

from dataclasses import dataclass

import numpy as np


@dataclass(frozen=True)
class Forest:
    """A stream of N tokens. Attributes as of :class:`prb_jax.trees.streams.StreamBatch`, of one stream.

    Attributes:
      previous, positions: int32 [N].
      used: real tokens.
      leaves: conversations.
    """

    previous: np.ndarray
    positions: np.ndarray
    used: int
    leaves: int

    def sees(self, window: int | None = None) -> np.ndarray:
        """bool [N, N], whether a query (first axis) sees a key, written down token by token."""
        seen = np.zeros((len(self.previous),) * 2, bool)
        for place in range(self.used):
            key = place
            while key >= 0:
                seen[place, key] = window is None or self.positions[place] - self.positions[key] < window
                key = self.previous[key]
        return seen


def random_forest(seed: int, *, tokens: int, longest: int, trees: int = 4) -> Forest:
    """Trees of three levels (a beginning, which may be empty, questions, responses) until the stream is full."""
    rng = np.random.default_rng(seed)
    previous, positions = np.full(tokens, -1, np.int32), np.zeros(tokens, np.int32)
    used = leaves = 0

    def grow(before: int, levels: int) -> None:
        nonlocal used, leaves
        length = min(int(rng.integers(0 if before < 0 else 1, longest)), tokens - used)
        places = np.arange(used, used + length)
        previous[places] = [before, *places[:-1]][:length]
        positions[places] = np.arange(length) + (positions[before] + 1 if before >= 0 else 0)
        used += length
        end = used - 1 if length else before
        children = 0
        for _ in range(int(rng.integers(0, 4)) if levels else 0):
            if used == tokens:
                break
            grow(end, levels - 1)
            children += 1
        leaves += not children and bool(length)

    for _ in range(trees):
        grow(-1, 2)
    return Forest(previous, positions, used, leaves)
