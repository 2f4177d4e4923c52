"""One forward pass over trees or packed streams, what the head of the model reads out of it, and its programs: pure
jitted functions of the parameters and a batch."""

from __future__ import annotations

import functools
from collections.abc import Callable, Mapping
from typing import Any

import jax
import jax.numpy as jnp
from jax.sharding import Mesh

from prb_jax.checkpoints.load import abstract_params
from prb_jax.models.attention.choice import Attention, wanted_attention
from prb_jax.models.config.decoder import DecoderConfig
from prb_jax.models.decoder import Params, decode_stream, decode_tree
from prb_jax.models.decoder_layer import last_norm
from prb_jax.models.head import States, read_places
from prb_jax.readouts.heads import read_out
from prb_jax.sharding import batch_sharding, parameter_shardings, replicated
from prb_jax.trees.batches import TreeBatch, tree_batch_shardings
from prb_jax.trees.streams import StreamBatch

ScoreFn = Callable[[Params, TreeBatch], jax.Array]
StreamFn = Callable[[Params, StreamBatch], jax.Array]


def score_tree(
    params: Params,
    batch: TreeBatch,
    *,
    config: DecoderConfig,
    dtype: jnp.dtype,
    attention: Attention | None = None,
    mesh: Mesh | None = None,
    lora_scale: float = 1.0,
    remat: str = "none",
    soft_prompt: jax.Array | None = None,
) -> jax.Array:
    """What the head of the configuration reads out: float32 [B, K, n]; of a linear head the logits at each
    response's read position, n of them being labels, of any other one value.

    Args:
      params: nested dict as :func:`prb_jax.checkpoints.load.abstract_params` describes it.
      batch: B trees.
      config: architecture.
      dtype: of activations.
      attention: an implementation of attention; None for the machine's own, see
        :func:`prb_jax.models.attention.choice.choose_attention`.
      mesh: how activations are split; None for one device.
      lora_scale: multiplies the updates of adapters, where ``params`` has any.
      remat: what is kept for the backward pass, one of :data:`REMAT_POLICIES`; see :func:`rematerialised`.
      soft_prompt: float [B, S, D], takes the place of the rows of the embedding (before Gemma's factor) for the first S
        tokens of every prefix; prefixes hold at least S tokens, and their first S ids have no influence.
    """
    reads_only = is_pointwise(config)
    x = decode_tree(
        params,
        batch,
        config=config,
        dtype=dtype,
        attention=attention,
        mesh=mesh,
        lora_scale=lora_scale,
        remat=remat,
        soft_prompt=soft_prompt,
        places=read_places(batch) if reads_only else None,
    )
    norm = functools.partial(last_norm, params, config=config)
    return config.head(params, States(x, batch, norm, at_reads=reads_only))


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
) -> jax.Array:
    """As :func:`score_tree` of packed streams: float32 [S, M, n], of each read place.

    Args:
      params, config, dtype, mesh, lora_scale, remat: as of :func:`score_tree`.
      batch: S streams with M read places each.
      soft_prompts: float [rows, S, D]: the first S ids of every conversation are the number of a row, which takes
        the place of their rows of the embedding (before Gemma's factor).
      differentiated: gradients are taken through the layers.
    """
    reads_only = is_pointwise(config)
    x = decode_stream(
        params,
        batch,
        config=config,
        dtype=dtype,
        mesh=mesh,
        lora_scale=lora_scale,
        remat=remat,
        soft_prompts=soft_prompts,
        differentiated=differentiated,
        reads_only=reads_only,
    )
    norm = functools.partial(last_norm, params, config=config)
    return config.head(params, States(x, batch, norm, at_reads=reads_only))


def is_pointwise(config: DecoderConfig) -> bool:
    """Return whether the head looks at nothing but the read positions: the last layer has less to do, and every
    position can be read."""
    return not config.head.needs


def make_score_fn(
    config: DecoderConfig,
    *,
    mesh: Mesh,
    dtype: jnp.dtype,
    readout: str | None = "logit",
    shardings: Mapping[str, Any] | None = None,
    attention: str = "auto",
) -> ScoreFn:
    """The jitted scorer: (params, TreeBatch) -> rewards float32 [B, K], the same on every device.

    Args:
      config: architecture.
      mesh: devices.
      dtype: of activations.
      readout: see :func:`prb_jax.readouts.heads.choose_readout`; None for all that the head gives, [B, K, n].
      shardings: of the parameters; those of :func:`prb_jax.sharding.parameter_shardings` if not given.
      attention: one of :data:`prb_jax.models.ATTENTIONS`.

    Raises:
      CheckpointError, MeshError: these devices or this dtype have no such attention.
    """
    attend = wanted_attention(mesh, dtype, attention, config=config)
    values = functools.partial(score_tree, config=config, dtype=dtype, mesh=mesh, attention=attend)
    shardings = shardings or parameter_shardings(abstract_params(config), mesh)
    return _jitted(values, readout, (shardings, tree_batch_shardings(mesh)), mesh)


def make_stream_fn(
    config: DecoderConfig,
    *,
    mesh: Mesh,
    dtype: jnp.dtype,
    readout: str | None = "logit",
    shardings: Mapping[str, Any] | None = None,
) -> StreamFn:
    """The jitted scorer of packed streams: (params, StreamBatch) -> rewards float32 [S, M], the same on every device.

    Arguments as of :func:`make_score_fn`; the tables of a batch say which attention it is for.
    """
    values = functools.partial(score_stream, config=config, dtype=dtype, mesh=mesh)
    shardings = shardings or parameter_shardings(abstract_params(config), mesh)
    return _jitted(values, readout, (shardings, batch_sharding(mesh, 1)), mesh)


def _jitted(values: Callable[..., jax.Array], readout: str | None, shardings: Any, mesh: Mesh) -> Any:
    def score(params: Params, batch: TreeBatch | StreamBatch) -> jax.Array:
        read = values(params, batch)
        return read if readout is None else read_out(read, readout)

    return jax.jit(score, in_shardings=shardings, out_shardings=replicated(mesh))
