"""What a head sees of a forward pass over trees or packed streams: hidden states where it reads them, in float32."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

import jax
import jax.numpy as jnp

from prb_jax.trees.batches import TreeBatch
from prb_jax.trees.streams import StreamBatch


def read_places(batch: TreeBatch) -> jax.Array:
    """int32 [B, K]: where in the P + K * R columns of a batch each response's read position is."""
    _, responses, length = batch.responses.shape
    offsets = batch.prefix.shape[1] + length * jnp.arange(responses)
    return jnp.asarray(batch.read) + offsets[None]


def states_before_tokens(states: jax.Array, batch: TreeBatch) -> jax.Array:
    """Return the state in front of each token of a response, and the one behind the last token.

    The state in front of a token is that of the token before it. For the first token this is the last token of the
    prefix, which all responses of a tree share.

    Args:
      states: [B, P + K * R, D], the states of a forward pass over `batch`.

    Returns:
      [B, K, R + 1, D].
    """
    rows, responses, length = batch.responses.shape
    width, depth = batch.prefix.shape[1], states.shape[-1]
    first = jnp.broadcast_to(states[:, None, width - 1 : width], (rows, responses, 1, depth))
    return jnp.concatenate([first, states[:, width:].reshape(rows, responses, length, depth)], axis=2)


@dataclass(frozen=True)
class _States:
    """States in T columns of B rows, and K read places of each row.

    Attributes:
      hidden: [B, T, D], before the last norm, in the activations' dtype.
      norm: the model's last norm, of float32 states.
      at_reads: ``hidden`` is [B, K, D], of the read places alone: only :meth:`read` can be asked for.
    """

    hidden: jax.Array
    batch: Any
    norm: Callable[[jax.Array], jax.Array]
    at_reads: bool = False

    @property
    def places(self) -> jax.Array:
        """int32 [B, K]: the columns of the read places."""
        raise NotImplementedError

    def read(self) -> jax.Array:
        """float32 [B, K, D]: the state at each read place."""
        return self._at(None if self.at_reads else self.places)

    def _at(self, places: jax.Array | None) -> jax.Array:
        states = self.hidden
        if places is not None:
            states = jnp.take_along_axis(states, places[:, :, None], axis=1)
        # From here on float32, whatever the rest runs in: bfloat16 rewards make ties.
        return self.norm(states.astype(jnp.float32))


@dataclass(frozen=True)
class TreeStates(_States):
    """What a head sees of a forward pass over B trees of K responses, in T = P + K * R columns."""

    batch: TreeBatch

    @property
    def places(self) -> jax.Array:
        return read_places(self.batch)

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
        in_response = width + length * jnp.arange(responses)[None] + (last - width)
        states = self._at(jnp.maximum(jnp.where(last < width, last, in_response), 0))
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

        of_responses = values[:, width:].reshape(rows, responses, length)
        return joined(values[:, :width], of_responses), joined(in_prefix, in_response)


@dataclass(frozen=True)
class StreamStates(_States):
    """What a head sees of a forward pass over S streams of N tokens with M read places: as :class:`TreeStates`, with
    the read places of a stream in the place of the responses of a tree."""

    batch: StreamBatch

    @property
    def places(self) -> jax.Array:
        return jnp.asarray(self.batch.reads)

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
        """As :meth:`TreeStates.along`: float32 and bool [S, M, N]."""
        values = value(self.norm(self.hidden.astype(jnp.float32)))
        shown = self._conversations() & (jnp.asarray(self.batch.tokens) == token)[:, None]
        return jnp.broadcast_to(values[:, None], shown.shape), shown

    def _conversations(self) -> jax.Array:
        """bool [S, M, N]: which tokens belong to the conversation of each read place."""
        place = jnp.arange(self.batch.tokens.shape[1])
        end = jnp.asarray(self.batch.ends)[:, :, None]
        return (place <= end) & (end < jnp.asarray(self.batch.until)[:, None])


States = TreeStates | StreamStates
