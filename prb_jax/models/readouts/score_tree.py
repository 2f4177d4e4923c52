"""One forward pass over packed streams, what the head of the model reads out of it, and its program: a pure jitted
function of the parameters and a batch."""

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
from prb_jax.models.head import States
from prb_jax.models.model import bind, parameter_shardings
from prb_jax.models.readouts.rules import read_out
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
    """Return what the head of the configuration reads out at each read place: float32 [S, M, n]; of a linear head the
    logits, n of them being labels, of any other one value.

    Args:
      params: nested dict as :func:`prb_jax.models.checkpoints.load.abstract_params` describes it.
      batch: S streams with M read places each.
      config: architecture.
      dtype: of activations.
      mesh: how activations are split; None for one device.
      lora_scale: multiplies the updates of adapters, where ``params`` has any.
      remat: what is kept for the backward pass, one of :data:`REMAT_POLICIES`; see :func:`rematerialised`.
      soft_prompts: float [rows, S, D]: the first S ids of every conversation are the number of a row, which takes
        the place of their rows of the embedding (before Gemma's factor).
      differentiated: gradients are taken through the layers.
      loads: gains the loads of experts, as in :func:`prb_jax.models.decoder.decode_stream`.
    """
    decoder = bind(config, params)
    # Where every token is read, nothing is saved by reading places apart.
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
    """Return whether the head looks at nothing but the read positions: the last layer has less to do, and every
    position can be read."""
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
    """Return the jitted scorer of a decoder: (params, StreamBatch) -> rewards float32, the same on every device.

    They are [B, K] where the batch says which read places are those of its trees, and else [S, M], of all read
    places. The tables of a batch say which attention computes it.

    Args:
      config: architecture.
      mesh: devices.
      dtype: of activations.
      readout: see :func:`prb_jax.models.readouts.rules.choose_readout`; None for all values, an axis [n].
      shardings: of the parameters; those of :func:`prb_jax.models.model.parameter_shardings` if not given.
    """

    score = functools.partial(stream_rewards, config=config, dtype=dtype, mesh=mesh, readout=readout)
    shardings = shardings or parameter_shardings(abstract_params(config), mesh, config=config)
    of_inputs = (shardings, stream_batch_shardings(mesh))
    return jax.jit(on_any_mesh(score, mesh), in_shardings=of_inputs, out_shardings=replicated(mesh))


def stream_batch_shardings(mesh: Mesh) -> StreamBatch:
    """Return the sharding of each array of a batch whose streams are dealt over the mesh, as :func:`jax.jit` takes
    them."""
    rows: Any = batch_sharding(mesh, 1)
    return StreamBatch(*[rows] * (len(dataclasses.fields(StreamBatch)) - 1), places=replicated(mesh))  # pyright: ignore
