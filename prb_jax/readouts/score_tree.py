"""One forward pass over trees or packed streams, and what the head of the model reads out of it."""

from __future__ import annotations

import functools
from collections.abc import Callable

import jax
import jax.numpy as jnp
from jax.sharding import Mesh

from prb_jax.models.attention.choice import Attention
from prb_jax.models.config.decoder import DecoderConfig
from prb_jax.models.decoder import Params, decode_stream, decode_tree
from prb_jax.models.head import LanguageHead, Linear, Vocabulary
from prb_jax.models.layers import rms_norm
from prb_jax.models.stream_states import StreamStates
from prb_jax.models.tree_states import TreeStates, read_places
from prb_jax.readouts.gated import Gated
from prb_jax.readouts.heads import Mlp
from prb_jax.trees.batches import TreeBatch
from prb_jax.trees.streams import StreamBatch


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
        remat: what is kept for the backward pass, one of :data:`REMAT_POLICIES`; see
            :func:`rematerialised`.
        soft_prompt: float [B, S, D], takes the place of the rows of the embedding (before Gemma's
            factor) for the first S tokens of every prefix; prefixes hold at least S tokens, and their
            first S ids have no influence.
    """
    reads_only = _reads_only(config)
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
    return config.head(params, TreeStates(x, batch, _last_norm(params, config), at_reads=reads_only))


def score_stream(
    params: Params, batch: StreamBatch, *, config: DecoderConfig, dtype: jnp.dtype, mesh: Mesh | None = None
) -> jax.Array:
    """As :func:`score_tree` of packed streams: float32 [S, M, n], of each read place.

    Args:
        params: as of :func:`score_tree`.
        batch: S streams with M read places each.
        config: architecture.
        dtype: of activations.
        mesh: how activations are split; None for one device.
    """
    reads_only = _reads_only(config)
    x = decode_stream(params, batch, config=config, dtype=dtype, mesh=mesh, reads_only=reads_only)
    return config.head(params, StreamStates(x, batch, _last_norm(params, config), at_reads=reads_only))


def _reads_only(config: DecoderConfig) -> bool:
    """Whether the head looks at nothing but the read positions, so that the last layer has less to do."""
    return isinstance(config.head, Linear | LanguageHead | Vocabulary | Mlp) or (
        isinstance(config.head, Gated) and not config.head.needs
    )


def _last_norm(params: Params, config: DecoderConfig) -> Callable[[jax.Array], jax.Array]:
    return functools.partial(
        rms_norm,
        weight=params["final_norm"],
        eps=config.rms_norm_eps,
        plus_one=config.norm_plus_one,
        scale_after_cast=config.norm_scale_after_cast,
    )
