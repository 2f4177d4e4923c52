"""The hidden states of packed streams at the positions where heads read them, in float32."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass

import jax
import jax.numpy as jnp

from prb_jax.trees.streams import StreamBatch


@dataclass(frozen=True)
class StreamStates:
    """What a head sees of a forward pass over S streams of N tokens with M read places.

    It is to streams what :class:`prb_jax.models.tree_states.TreeStates` is to trees, with the read places of a
    stream in the place of the responses of a tree.

    Attributes:
      hidden: [S, N, D], before the last norm, in the activations' dtype.
      batch: the streams.
      norm: the model's last norm, of float32 states.
      at_reads: ``hidden`` is [S, M, D], of the read places alone: only :meth:`read` can be asked for.
    """

    hidden: jax.Array
    batch: StreamBatch
    norm: Callable[[jax.Array], jax.Array]
    at_reads: bool = False

    def read(self) -> jax.Array:
        """float32 [S, M, D]: the state at each read place."""
        if self.at_reads:
            return self.norm(self.hidden.astype(jnp.float32))
        return self._at(jnp.asarray(self.batch.reads))

    def at_pattern(self, pattern: tuple[int, ...]) -> jax.Array:
        """float32 [S, M, D]: the state at the first token of the last occurrence of ``pattern``.

        It is looked for in each whole conversation; where it does not occur the state is NaN.
        """
        tokens, previous = jnp.asarray(self.batch.tokens), jnp.asarray(self.batch.previous)
        first = jnp.broadcast_to(jnp.arange(tokens.shape[1]), tokens.shape)
        found = tokens == pattern[-1]
        for token in reversed(pattern[:-1]):
            before = jnp.take_along_axis(previous, first, axis=1)
            first = jnp.maximum(before, 0)
            found &= (before >= 0) & (jnp.take_along_axis(tokens, first, axis=1) == token)
        shown = self._conversations() & found[:, None]
        last = jnp.max(jnp.where(shown, jnp.arange(tokens.shape[1]), -1), axis=2)
        states = self._at(jnp.take_along_axis(first, jnp.maximum(last, 0), axis=1))
        return jnp.where(last[:, :, None] >= 0, states, jnp.nan)

    def along(self, token: int, value: Callable[[jax.Array], jax.Array]) -> tuple[jax.Array, jax.Array]:
        """As :meth:`prb_jax.models.tree_states.TreeStates.along`: float32 and bool [S, M, N]."""
        values = value(self.norm(self.hidden.astype(jnp.float32)))
        shown = self._conversations() & (jnp.asarray(self.batch.tokens) == token)[:, None]
        return jnp.broadcast_to(values[:, None], shown.shape), shown

    def _conversations(self) -> jax.Array:
        """bool [S, M, N]: which tokens belong to the conversation of each read place."""
        place = jnp.arange(self.batch.tokens.shape[1])
        end = jnp.asarray(self.batch.ends)[:, :, None]
        return (place <= end) & (end < jnp.asarray(self.batch.until)[:, None])

    def _at(self, places: jax.Array) -> jax.Array:
        states = jnp.take_along_axis(self.hidden, places[:, :, None], axis=1)
        return self.norm(states.astype(jnp.float32))
