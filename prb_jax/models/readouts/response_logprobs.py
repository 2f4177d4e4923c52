"""Log-probabilities of responses in packed streams under a language model.

Dimensions: S streams of N tokens, M responses read per stream, D width, V vocabulary.
"""

from __future__ import annotations

import functools
from collections.abc import Callable, Mapping
from typing import Any, TypeVar

import jax
import jax.numpy as jnp
from jax import lax
from jax.sharding import Mesh

from prb_jax.models import Together
from prb_jax.models.attention.streams import take_places
from prb_jax.models.config.decoder import DecoderConfig
from prb_jax.models.decoder import Decoder, Params, decode_stream
from prb_jax.models.model import bind
from prb_jax.models.readouts.score_tree import ScoreFn, stream_batch_shardings
from prb_jax.models.vocabulary_heads import LanguageHead
from prb_jax.platform.sharding import on_any_mesh, replicated
from prb_jax.trees.streams import StreamBatch

Values = TypeVar("Values")

LOGITS_AT_ONCE = 1 << 24
"""Approximate number of logits in memory at once."""


def map_logprobs(
    decoder: Decoder,
    params: Params,
    states: jax.Array,
    tokens: jax.Array,
    read: Callable[[jax.Array, jax.Array], Values],
    *,
    dtype: jnp.dtype,
    needed: jax.Array | None = None,
) -> Values:
    """Return arrays [S, N, ...] computed from the log-probabilities after each of N states.

    States are processed in runs because the logits of all states would be [S, N, V].

    Args:
      decoder: Decoder with the head of a language model in its configuration.
      params: Parameters, including the head.
      states: States before the last norm [S, N, D].
      tokens: Tokens int32 [S, N].
      read: Function from log-probabilities [S, R, V] and tokens [S, R] to arrays [S, R, ...].
      dtype: Dtype of the logits' factors.
      needed: Mask bool [S, N]; a run without needed states is skipped and returns zeros.
    """
    head = decoder.config.head
    assert isinstance(head, LanguageHead)
    streams, count, _ = states.shape
    run = max(1, min(count, LOGITS_AT_ONCE // (streams * decoder.config.vocab_size)))
    padding = -count % run

    def in_runs(x: jax.Array) -> jax.Array:
        padded = jnp.pad(x, ((0, 0), (0, padding), *((0, 0),) * (x.ndim - 2)))
        return padded.reshape(streams, -1, run, *x.shape[2:]).swapaxes(0, 1)

    def of_run(states: jax.Array, tokens: jax.Array) -> Values:
        logits = head.next_token(params, decoder.normed(states).astype(dtype))
        return read(logits - jax.nn.logsumexp(logits, axis=-1, keepdims=True), tokens)

    def of_needed(states: jax.Array, tokens: jax.Array, needed: jax.Array) -> Values:
        def zeros(*given: jax.Array) -> Values:
            return jax.tree.map(lambda x: jnp.zeros(x.shape, x.dtype), jax.eval_shape(of_run, *given))

        return lax.cond(jnp.any(needed), of_run, zeros, states, tokens)

    runs = map(in_runs, (states, tokens) if needed is None else (states, tokens, needed))
    values = lax.map(lambda part: (of_run if needed is None else of_needed)(*part), tuple(runs))
    return jax.tree.map(
        lambda x: x.swapaxes(0, 1).reshape(streams, count + padding, *x.shape[3:])[:, :count], values
    )


def response_logprobs(
    params: Params,
    batch: StreamBatch,
    *,
    config: DecoderConfig,
    mesh: Mesh,
    dtype: jnp.dtype,
    together: Together,
) -> jax.Array:
    """Return the log-probability of each response, float32 [S, M], or [B, K] if the batch has places of trees.

    A response consists of all tokens from its read place to its end.
    """
    decoder = bind(config, params)
    states = decode_stream(decoder, batch, dtype=dtype, mesh=mesh, reads_only=False)
    tokens, previous, reads, ends = map(jnp.asarray, (batch.tokens, batch.previous, batch.reads, batch.ends))

    def within(columns: jax.Array) -> jax.Array:
        """Return a mask of the columns of each response, bool [S, M, N]."""
        return (reads[:, :, None] <= columns[:, None]) & (columns[:, None] <= ends[:, :, None])

    # The tokens of responses come first, to skip the logits of prompts, most of a stream.
    needed = within(jnp.broadcast_to(jnp.arange(tokens.shape[1]), tokens.shape)).any(axis=1)
    order = jnp.argsort(~needed, axis=1, stable=True)

    def ordered(x: jax.Array) -> jax.Array:
        return jnp.take_along_axis(x, order, axis=1)

    def of_token(logprobs: jax.Array, tokens: jax.Array) -> jax.Array:
        return jnp.take_along_axis(logprobs, tokens[..., None], axis=-1)[..., 0]

    before = take_places(states, jnp.maximum(ordered(previous), 0))
    values = map_logprobs(
        decoder, params, before, ordered(tokens), of_token, dtype=dtype, needed=ordered(needed)
    )
    values = jnp.where(within(order), values[:, None], 0.0)
    if together == "norm":
        rewards = -jnp.sqrt(jnp.sum(values**2, axis=-1))
    else:
        rewards = values.sum(axis=-1) / ((ends - reads + 1) if together == "average" else 1)
    return rewards if batch.places is None else jnp.take(rewards.reshape(-1), batch.places)


def make_logprob_fn(
    config: DecoderConfig,
    *,
    mesh: Mesh,
    dtype: jnp.dtype,
    together: Together,
    shardings: Mapping[str, Any],
) -> ScoreFn:
    """Return the jitted :func:`response_logprobs`: (params, StreamBatch) -> float32, equal on every device."""
    program = functools.partial(response_logprobs, config=config, mesh=mesh, dtype=dtype, together=together)
    of_inputs = (shardings, stream_batch_shardings(mesh))
    return jax.jit(on_any_mesh(program, mesh), in_shardings=of_inputs, out_shardings=replicated(mesh))
