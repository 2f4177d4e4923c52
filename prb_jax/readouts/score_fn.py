"""The compiled scorer of a model: a pure function of its parameters and a batch of trees."""

from __future__ import annotations

import functools
from collections.abc import Callable, Mapping
from dataclasses import dataclass, replace
from typing import Any

import jax
import jax.numpy as jnp
from jax.sharding import Mesh

from prb_jax.checkpoints.encoder_map import encoder_shardings
from prb_jax.checkpoints.load import abstract_params
from prb_jax.models.attention.choice import wanted_attention
from prb_jax.models.config.decoder import DecoderConfig
from prb_jax.models.config.encoder import EncoderConfig
from prb_jax.models.decoder import Params
from prb_jax.readouts.heads import ReadStates, StatesAndReward, read_out
from prb_jax.readouts.score_tree import score_pairs, score_stream, score_tree
from prb_jax.sharding import parameter_shardings, replicated
from prb_jax.trees.batches import TreeBatch, tree_batch_shardings
from prb_jax.trees.streams import StreamBatch, stream_batch_shardings

ScoreFn = Callable[[Params, TreeBatch], jax.Array]
StreamFn = Callable[[Params, StreamBatch], jax.Array]


def make_score_fn(
    config: DecoderConfig | EncoderConfig,
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
      attention: of a decoder, one of :data:`prb_jax.models.ATTENTIONS`.

    Raises:
      CheckpointError, MeshError: these devices or this dtype have no such attention.
    """
    if isinstance(config, EncoderConfig):
        logits = functools.partial(score_pairs, config=config, dtype=dtype, mesh=mesh)
        shardings = shardings or encoder_shardings(config, mesh)
    else:
        attend = wanted_attention(mesh, dtype, attention, scored=config)
        logits = functools.partial(score_tree, config=config, dtype=dtype, mesh=mesh, attention=attend)
        shardings = shardings or parameter_shardings(abstract_params(config), mesh)

    return _jitted(logits, readout, (shardings, tree_batch_shardings(mesh)), mesh)


def _jitted(logits: Callable[..., jax.Array], readout: str | None, shardings: Any, mesh: Mesh) -> Any:
    def score(params: Params, batch: TreeBatch | StreamBatch) -> jax.Array:
        values = logits(params, batch)
        return values if readout is None else read_out(values, readout)

    return jax.jit(score, in_shardings=shardings, out_shardings=replicated(mesh))


def make_stream_fn(
    config: DecoderConfig,
    *,
    mesh: Mesh,
    dtype: jnp.dtype,
    readout: str | None = "logit",
    shardings: Mapping[str, Any] | None = None,
    attention: str = "auto",
) -> StreamFn:
    """The jitted scorer of packed streams: (params, StreamBatch) -> rewards float32 [S, M], the same on every device.

    Arguments as of :func:`make_score_fn`; with the attention "paged" batches have pages, and tables of blocks with
    any other.
    """
    shardings = shardings or parameter_shardings(abstract_params(config), mesh)
    logits = functools.partial(score_stream, config=config, dtype=dtype, mesh=mesh)
    windows, paged = config.sliding_window is not None, attention == "paged"
    batches = stream_batch_shardings(mesh, windows=windows, paged=paged)
    return _jitted(logits, readout, (shardings, batches), mesh)


@dataclass(frozen=True)
class StateFns:
    """Pure jitted functions that give the states at the read positions, float32 with D as last dimension; with the
    reward behind each state the last dimension is D + 1.

    Attributes:
      tree: of a :class:`TreeBatch`, [B, K, D].
      stream: of a :class:`StreamBatch`, [S, M, D]; None for an encoder, which reads no streams.
    """

    tree: ScoreFn
    stream: StreamFn | None


def make_state_fns(
    config: DecoderConfig | EncoderConfig,
    *,
    mesh: Mesh,
    dtype: jnp.dtype,
    readout: str | None = None,
    quantize: str | None = None,
    attention: str = "auto",
) -> StateFns:
    """Return the functions that read states for a model, whatever its head is.

    Args:
      config, mesh, dtype, attention: as of :func:`make_score_fn`.
      readout: how the head's values become the reward that is given too; None for the states alone.
      quantize: the form in which the parameters are held.
    """
    if readout is None or config.head is None:
        headless = replace(config, head=ReadStates())
    else:
        headless = replace(config, head=StatesAndReward(config.head, readout))
    options: dict[str, Any] = {"mesh": mesh, "dtype": dtype, "readout": None}
    if isinstance(headless, EncoderConfig):
        assert isinstance(config, EncoderConfig)
        return StateFns(make_score_fn(headless, shardings=encoder_shardings(config, mesh), **options), None)
    assert not isinstance(config, EncoderConfig)
    options["shardings"] = parameter_shardings(abstract_params(config, quantize=quantize), mesh)
    options["attention"] = attention
    return StateFns(make_score_fn(headless, **options), make_stream_fn(headless, **options))
