"""Forward pass of an encoder over pairs of prompt and response, and its jitted program."""

from __future__ import annotations

import functools
from collections.abc import Callable

import jax
import jax.numpy as jnp
from jax.sharding import Mesh

from prb_jax.models.checkpoints.encoder_folder import encoder_shardings
from prb_jax.models.config.encoder import EncoderConfig
from prb_jax.models.decoder import Params
from prb_jax.models.encoder import bind_encoder, encode_tokens
from prb_jax.models.head import States, read_out
from prb_jax.models.readouts.text_encoder import Pooling, pool
from prb_jax.platform.sharding import batch_sharding, on_any_mesh, replicated
from prb_jax.trees.sequences import SequenceBatch

PairFn = Callable[[Params, SequenceBatch], jax.Array]


def score_pairs(
    params: Params,
    batch: SequenceBatch,
    *,
    config: EncoderConfig,
    dtype: jnp.dtype,
    mesh: Mesh | None = None,
) -> jax.Array:
    """Return the head's values from the first token's state of each sequence, or from the mean of its states if the
    configuration says so, float32 [S, n].

    Args:
      params: Nested dict with the tensors of the head under ``head``.
      batch: Batch of S sequences, each a prompt with a response.
      config: Architecture with a head.
      dtype: Dtype of activations; head and values are float32.
      mesh: Mesh that splits activations; None for one device.
    """
    assert config.head is not None
    tokens, lengths = jnp.asarray(batch.tokens), jnp.asarray(batch.lengths)
    states = encode_tokens(bind_encoder(config, params), tokens, lengths=lengths, dtype=dtype, mesh=mesh)
    if config.modern is not None and config.modern.mean_pooled:
        states = pool(states, lengths, Pooling(mode="mean"))[:, None]
    return config.head(params, States(states[:, :1], None, lambda x: x, at_reads=True))[:, 0]


def pair_rewards(
    params: Params,
    batch: SequenceBatch,
    *,
    config: EncoderConfig,
    mesh: Mesh,
    dtype: jnp.dtype,
    readout: str | None,
) -> jax.Array:
    """Return the rewards of a batch; see :func:`make_pair_fn`."""
    values = score_pairs(params, batch, config=config, dtype=dtype, mesh=mesh)
    rewards = values if readout is None else read_out(values, readout)
    return rewards if batch.places is None else rewards[batch.places]


def make_pair_fn(
    config: EncoderConfig,
    *,
    mesh: Mesh,
    dtype: jnp.dtype,
    readout: str | None = "logit",
) -> PairFn:
    """Return the jitted scorer: rewards float32, equal on every device; [B, K] for a batch with places, else [S].

    Args:
      config: Architecture with a head.
      mesh: Devices.
      dtype: Dtype of activations.
      readout: Rule; see :func:`prb_jax.models.head.choose_readout`. None returns all values, with last axis
        n.
    """

    score = functools.partial(pair_rewards, config=config, dtype=dtype, mesh=mesh, readout=readout)
    shardings = (encoder_shardings(config, mesh), batch_sharding(mesh, 1))
    return jax.jit(on_any_mesh(score, mesh), in_shardings=shardings, out_shardings=replicated(mesh))
