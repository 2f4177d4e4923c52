"""One forward pass over trees or packed streams, and what the head of the model reads out of it."""

from __future__ import annotations

import functools

import jax
import jax.numpy as jnp
from jax import lax
from jax.sharding import Mesh

from prb_jax.models.attention.choice import Attention
from prb_jax.models.config.decoder import DecoderConfig
from prb_jax.models.config.encoder import EncoderConfig
from prb_jax.models.decoder import Params, decode_stream, decode_tree
from prb_jax.models.decoder_layer import last_norm
from prb_jax.models.encoder import encode_tokens
from prb_jax.models.states import StreamStates, TreeStates, read_places
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
    return config.head(params, TreeStates(x, batch, norm, at_reads=reads_only))


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
        params: as of :func:`score_tree`.
        batch: S streams with M read places each.
        config: architecture.
        dtype: of activations.
        mesh: how activations are split; None for one device.
        lora_scale, remat: as of :func:`score_tree`.
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
    return config.head(params, StreamStates(x, batch, norm, at_reads=reads_only))


def score_pairs(
    params: Params,
    batch: TreeBatch,
    *,
    config: EncoderConfig,
    dtype: jnp.dtype,
    mesh: Mesh | None = None,
) -> jax.Array:
    """Logits float32 [B, K, n] of an encoder, which reads every response together with its prompt, in both directions.

    A tree's prefix cannot be computed once here, as its states depend on what follows. Each response's sequence,
    prefix and response side by side, is one run of columns, so that batches are those of trees.

    Args:
      params: nested dict, with the tensors of the head under ``head``.
      batch: B trees.
      config: architecture, with a head.
      dtype: of activations; head and logits are float32.
      mesh: how activations are split; None for one device.
    """
    assert config.head is not None
    prefix, prefix_lengths = jnp.asarray(batch.prefix), jnp.asarray(batch.prefix_lengths)
    starts = prefix.shape[1] - prefix_lengths

    def first_state(response: tuple[jax.Array, jax.Array]) -> jax.Array:
        tokens, lengths = response
        states = encode_tokens(
            params,
            jnp.concatenate([prefix, tokens], axis=1),
            lengths=prefix_lengths + lengths,
            starts=starts,
            config=config,
            dtype=dtype,
            mesh=mesh,
        )
        return jnp.take_along_axis(states, starts[:, None, None], axis=1)[:, 0]

    # One response after the other: memory does not grow with their number.
    responses = (
        jnp.asarray(batch.responses).swapaxes(0, 1),
        jnp.asarray(batch.response_lengths).swapaxes(0, 1),
    )
    first = lax.map(first_state, responses).swapaxes(0, 1)
    return config.head(params, TreeStates(first, batch, lambda x: x, at_reads=True))


def is_pointwise(config: DecoderConfig) -> bool:
    """Return whether the head looks at nothing but the read positions: the last layer has less to do, and every
    position can be read."""
    return not config.head.needs
