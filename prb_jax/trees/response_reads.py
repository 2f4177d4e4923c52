"""Places in packed streams of the states that predict the tokens of responses.

The state of the preceding token predicts a token. For the first token of a response, this is the last token of the
prefix, which all responses of a tree share. So R tokens have R + 1 states; the last state has seen all R tokens.

Letters: S streams of N tokens, M states to read in each stream, room for K responses per stream, R tokens of a
response.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass

import jax
import jax.numpy as jnp
import numpy as np

from prb_jax.errors import short_repr
from prb_jax.trees.streams import StreamBatch
from prb_jax.trees.tree import Tree


@jax.tree_util.register_dataclass
@dataclass(frozen=True)
class Reads:
    """Read places of the responses of S streams."""

    # int32 [S, M], places of the state before each token of each response, and of the state of its last token
    places: np.ndarray | jax.Array
    tokens: np.ndarray | jax.Array  # int32 [S, M], token after each of these states; 0 after a last one
    # int32 [S, K, R + 1], indices of each response's states among the M states; 0 at padding
    index: np.ndarray | jax.Array

    __repr__ = short_repr

    def by_response(self, values: jax.Array) -> jax.Array:
        """Return values [S, M] of the states as [S, K, R + 1]."""
        index = jnp.asarray(self.index)
        return jnp.take_along_axis(values, index.reshape(len(index), -1), axis=1).reshape(index.shape)


def response_reads(
    batch: StreamBatch, trees: Sequence[Sequence[Tree]], *, columns: int, room: Callable[[int], int]
) -> Reads:
    """Return the read places of the responses of a host batch.

    Args:
      batch: Packed streams.
      trees: Trees of each stream, in their order.
      columns: R; the index of a longer response covers only its first tokens.
      room: Returns M for the maximum number of states in a stream.
    """
    ends, previous = np.asarray(batch.ends), np.asarray(batch.previous)
    index = np.zeros((*ends.shape, columns + 1), np.int32)
    places: list[list[int]] = [[] for _ in ends]
    tokens: list[list[int]] = [[] for _ in ends]
    for row, of_stream in enumerate(trees):
        responses = [response for tree in of_stream for response in tree.responses]
        for number, response in enumerate(responses):
            at, count, end = len(places[row]), len(response), int(ends[row, number]) + 1
            places[row] += [int(previous[row, end - count]), *range(end - count, end)]
            tokens[row] += [*response.tolist(), 0]
            index[row, number, : count + 1] = np.arange(at, at + count + 1)[: columns + 1]
    padded = np.zeros((2, len(ends), room(max(map(len, places)))), np.int32)
    for row in range(len(ends)):
        padded[:, row, : len(places[row])] = places[row], tokens[row]
    return Reads(padded[0], padded[1], index)
