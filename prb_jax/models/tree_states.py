"""The hidden states of a batch of trees at the positions where heads read them, in float32."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass

import jax
import jax.numpy as jnp

from prb_jax.trees.batches import TreeBatch


def read_places(batch: TreeBatch) -> jax.Array:
    """int32 [B, K]: where in the P + K * R columns of a batch each response's read position is."""
    _, responses, length = batch.responses.shape
    offsets = batch.prefix.shape[1] + length * jnp.arange(responses)
    return jnp.asarray(batch.read) + offsets[None]


@dataclass(frozen=True)
class TreeStates:
    """What a head sees of a forward pass over B trees of K responses.

    Attributes:
      hidden: [B, P + K * R, D], before the last norm, in the activations' dtype.
      batch: the trees.
      norm: the model's last norm, of float32 states.
      at_reads: ``hidden`` is [B, K, D], of the read positions alone: only :meth:`read` can be asked for.
    """

    hidden: jax.Array
    batch: TreeBatch
    norm: Callable[[jax.Array], jax.Array]
    at_reads: bool = False

    def read(self) -> jax.Array:
        """float32 [B, K, D]: each response's state at its read position."""
        if self.at_reads:
            # From here on float32, whatever the rest runs in: bfloat16 rewards make ties.
            return self.norm(self.hidden.astype(jnp.float32))
        return self._at(read_places(self.batch))

    def at_pattern(self, pattern: tuple[int, ...]) -> jax.Array:
        """float32 [B, K, D]: the state at the first token of the last occurrence of ``pattern``.

        It is looked for in each conversation (prefix and one response); where it does not occur the
        state is NaN.
        """
        batch, width = self.batch, self.batch.prefix.shape[1]
        rows, responses, length = batch.responses.shape
        prefix = jnp.broadcast_to(jnp.asarray(batch.prefix)[:, None], (rows, responses, width))
        tokens = jnp.concatenate([prefix, jnp.asarray(batch.responses)], axis=2)
        # The prefix stands on the right of its columns: a conversation is one run of columns.
        starts = width + length - len(pattern) + 1
        if starts < 1:
            return jnp.full((rows, responses, self.hidden.shape[-1]), jnp.nan, jnp.float32)
        found = jnp.ones((rows, responses, starts), bool)
        for offset, token in enumerate(pattern):
            found &= tokens[:, :, offset : offset + starts] == token
        column = jnp.arange(starts)
        first = width - jnp.asarray(batch.prefix_lengths)[:, None, None]
        end = width + jnp.asarray(batch.response_lengths)[:, :, None]
        found &= (column >= first) & (column + len(pattern) <= end)
        last = jnp.max(jnp.where(found, column, -1), axis=2)
        own = width + length * jnp.arange(responses)[None] + (last - width)
        states = self._at(jnp.maximum(jnp.where(last < width, last, own), 0))
        return jnp.where(last[:, :, None] >= 0, states, jnp.nan)

    def along(self, token: int, value: Callable[[jax.Array], jax.Array]) -> tuple[jax.Array, jax.Array]:
        """A value of every place of each conversation, in order, and where ``token`` stands.

        Args:
          token: an id.
          value: float32 states [..., D] to values [...].

        Returns:
          float32 and bool [B, K, P + R]; False at padding.
        """
        batch, width = self.batch, self.batch.prefix.shape[1]
        rows, responses, length = batch.responses.shape
        values = value(self.norm(self.hidden.astype(jnp.float32)))
        first = width - jnp.asarray(batch.prefix_lengths)[:, None]
        in_prefix = (jnp.asarray(batch.prefix) == token) & (jnp.arange(width)[None] >= first)
        inside = jnp.arange(length) < jnp.asarray(batch.response_lengths)[:, :, None]
        in_response = (jnp.asarray(batch.responses) == token) & inside

        def joined(of_prefix: jax.Array, of_responses: jax.Array) -> jax.Array:
            shared = jnp.broadcast_to(of_prefix[:, None], (rows, responses, width))
            return jnp.concatenate([shared, of_responses], axis=2)

        own = values[:, width:].reshape(rows, responses, length)
        return joined(values[:, :width], own), joined(in_prefix, in_response)

    def _at(self, index: jax.Array) -> jax.Array:
        states = jnp.take_along_axis(self.hidden, index[:, :, None], axis=1)
        return self.norm(states.astype(jnp.float32))
