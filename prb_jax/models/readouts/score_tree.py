"""Forward pass over packed streams with the read-out of the model's head, and its program: a pure jitted function of
parameters and a batch."""

from __future__ import annotations

import dataclasses
import functools
from collections.abc import Callable, Mapping
from typing import Any

import jax
import jax.numpy as jnp
from jax.sharding import Mesh

from prb_jax.models.checkpoints.load import abstract_params
from prb_jax.models.config.decoder import DecoderConfig
from prb_jax.models.decoder import Params, decode_stream
from prb_jax.models.head import States, read_out
from prb_jax.models.model import bind, parameter_shardings
from prb_jax.platform.sharding import batch_sharding, on_any_mesh, replicated
from prb_jax.trees.streams import StreamBatch

ScoreFn = Callable[[Params, StreamBatch], jax.Array]


def score_stream(
    params: Params,
    batch: StreamBatch,
    *,
    config: DecoderConfig,
    dtype: jnp.dtype,
    mesh: Mesh | None = None,
    lora_scale: float = 1.0,
    remat: str = "none",
    soft_prompts: jax.Array | None = None,
    differentiated: bool = False,
    loads: list[jax.Array] | None = None,
) -> jax.Array:
    """Return the head's values at each read place, float32 [S, M, n]: n label logits of a linear head, or one value of
    any other head.

    Args:
      params: Nested dict; see :func:`prb_jax.models.checkpoints.load.abstract_params`.
      batch: Batch of S streams with M read places each.
      config: Architecture.
      dtype: Dtype of activations.
      mesh: Mesh that splits activations; None for one device.
      lora_scale: Scale of adapter updates, if ``params`` contains adapters.
      remat: Rematerialisation policy; see :func:`prb_jax.models.decoder_layer.rematerialised`.
      soft_prompts: Soft prompts, float [rows, S, D]. The first S ids of every conversation contain the index of a row,
        which replaces their embeddings (before Gemma's factor).
      differentiated: If True, gradients go through the layers.
      loads: List that receives the loads of experts; see :func:`prb_jax.models.decoder.decode_stream`.
    """
    decoder = bind(config, params)
    # If every token is read, a separate selection of places saves nothing.
    reads_only = is_pointwise(config) and batch.reads.shape[1] < batch.tokens.shape[1]
    x = decode_stream(
        decoder,
        batch,
        dtype=dtype,
        mesh=mesh,
        lora_scale=lora_scale,
        remat=remat,
        soft_prompts=soft_prompts,
        differentiated=differentiated,
        reads_only=reads_only,
        loads=loads,
    )
    return config.head(params, States(x, batch, decoder.normed, at_reads=reads_only))


def is_pointwise(config: DecoderConfig) -> bool:
    """Return True if the head uses only the read positions: the last layer then computes less, and every position can
    be read."""
    return not config.head.needs


def stream_rewards(
    params: Params,
    batch: StreamBatch,
    *,
    config: DecoderConfig,
    mesh: Mesh,
    dtype: jnp.dtype,
    readout: str | None,
) -> jax.Array:
    """Return the rewards of a batch; see :func:`make_score_fn`."""
    read = score_stream(params, batch, config=config, dtype=dtype, mesh=mesh)
    read = read if readout is None else read_out(read, readout)
    if batch.places is not None:
        read = jnp.take(read.reshape(-1, *read.shape[2:]), batch.places, axis=0)
    return read


def make_score_fn(
    config: DecoderConfig,
    *,
    mesh: Mesh,
    dtype: jnp.dtype,
    readout: str | None = "logit",
    shardings: Mapping[str, Any] | None = None,
) -> ScoreFn:
    """Return the jitted scorer of a decoder: (params, StreamBatch) -> rewards float32, equal on every device.

    Rewards are [B, K] if the batch assigns read places to trees; otherwise they are [S, M], for all read places. The
    tables of a batch determine its attention.

    Args:
      config: Architecture.
      mesh: Devices.
      dtype: Dtype of activations.
      readout: Rule; see :func:`prb_jax.models.head.choose_readout`. None returns all values, with an axis
        [n].
      shardings: Shardings of the parameters; by default from :func:`prb_jax.models.model.parameter_shardings`.
    """

    score = functools.partial(stream_rewards, config=config, dtype=dtype, mesh=mesh, readout=readout)
    shardings = shardings or parameter_shardings(abstract_params(config), mesh, config=config)
    of_inputs = (shardings, stream_batch_shardings(mesh))
    return jax.jit(on_any_mesh(score, mesh), in_shardings=of_inputs, out_shardings=replicated(mesh))


def stream_batch_shardings(mesh: Mesh) -> StreamBatch:
    """Return the shardings of a batch with streams distributed over the mesh, in the form of :func:`jax.jit`'s
    arguments."""
    rows: Any = batch_sharding(mesh, 1)
    return StreamBatch(*[rows] * (len(dataclasses.fields(StreamBatch)) - 1), places=replicated(mesh))  # pyright: ignore
