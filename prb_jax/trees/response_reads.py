"""Where the tokens of responses are read in packed streams: from the state in front of each.

The state in front of a token is that of the token before it in its conversation. In front of the first token of a
response this is the last token of the prefix, which all responses of a tree share. So R tokens have R + 1 states: the
last one has seen all of them.

Letters: S streams of N tokens, M states that are read in each, K responses that each has room for, R tokens of a
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
    """Where the responses of S streams are read."""

    # int32 [S, M], of the state before each token of each response, and of that behind its last token
    places: np.ndarray | jax.Array
    tokens: np.ndarray | jax.Array  # int32 [S, M], the token after each of these states; 0 behind a last one
    # int32 [S, K, R + 1], which of the M states are those of each response; 0 at padding
    index: np.ndarray | jax.Array

    __repr__ = short_repr

    def by_response(self, values: jax.Array) -> jax.Array:
        """Values [S, M] of the states as [S, K, R + 1]."""
        index = jnp.asarray(self.index)
        return jnp.take_along_axis(values, index.reshape(len(index), -1), axis=1).reshape(index.shape)


def response_reads(
    batch: StreamBatch, trees: Sequence[Sequence[Tree]], *, columns: int, room: Callable[[int], int]
) -> Reads:
    """Return where the responses of a batch of the host are read.

    Args:
      batch: packed streams.
      trees: those of each stream, in their order there.
      columns: R; of longer responses the index has the first tokens.
      room: gives M, from the number of states of the stream with the most of them.
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
