"""One decoder for every supported family, run by configuration, over batches of trees or packed streams.

Pure functions of ``(params, batch)`` under ``jax.jit``; :mod:`prb_jax.models.random_params` makes such parameters.
All layers are stacked on a leading axis and run by ``jax.lax.scan``, so compile time does not grow with depth.

Letters: B trees, K responses, P prefix tokens, R response tokens, T = P + K * R, L layers, N heads,
G kv heads, H head dim, D model, F mlp, V vocabulary.
"""

from __future__ import annotations

import dataclasses
import functools
from collections.abc import Callable
from typing import Any

import jax
import jax.numpy as jnp
from jax import lax
from jax.sharding import Mesh

from prb_jax.models.attention.choice import Attention, attention_over, choose_attention
from prb_jax.models.attention.reads import attend_from_reads, attend_from_stream_reads, take_places
from prb_jax.models.config.decoder import DecoderConfig
from prb_jax.models.decoder_layer import (
    Params,
    decoder_layer,
    embedded,
    gatherer,
    rematerialised,
    scaled_embedding,
    splits_weights,
)
from prb_jax.models.rope import rotary_angles
from prb_jax.sharding import check_tokens, constrainer
from prb_jax.trees.batches import Bucket, TreeBatch
from prb_jax.trees.stream_tables import KeyTable, StepTable
from prb_jax.trees.streams import StreamBatch


@jax.tree_util.register_dataclass
@dataclasses.dataclass(frozen=True)
class Decoded:
    """A forward pass with all that later tokens need of it."""

    states: jax.Array  # [B, T, D], final hidden states before the last norm
    keys: jax.Array  # [L, B, T, G, H] of every layer, after the rotary embedding
    values: jax.Array  # the same shape


@dataclasses.dataclass(frozen=True, kw_only=True)
class _Rows:
    """Rows of tokens as the layers see them; only attention knows how the tokens of a row hang together."""

    tokens: jax.Array  # int32 [B, T]
    positions: jax.Array  # int32 [B, T]
    longest: int  # no two tokens that see each other are this far apart
    attend: Attention  # of (q, k, v, window, softcap), from all tokens
    attend_from_places: Attention  # the same from the places that are read
    apart: bool  # the last layer is computed at those places alone


def decode_tree(
    params: Params, batch: TreeBatch, *, places: jax.Array | None = None, **options: Any
) -> jax.Array:
    """Final hidden states, before the last norm, of every token: [B, T, D] in ``dtype``.

    Arguments as of :func:`prb_jax.readouts.score_tree.score_tree`, and

    Args:
        places: int32 [B, K], one in every response: only their states are returned, [B, K, D]. A model of
            a single layer then computes queries, attention and mlp at these places only.
    """
    return _decode_trees(params, batch, places=places, **options)[0]


def decode_tree_keeping(params: Params, batch: TreeBatch, **options: Any) -> Decoded:
    """As :func:`decode_tree`, with the keys and values of every layer."""
    states, (keys, values) = _decode_trees(params, batch, keep=True, **options)
    return Decoded(states, keys, values)


def decode_stream(
    params: Params,
    batch: StreamBatch,
    *,
    reads_only: bool,
    **options: Any,
) -> jax.Array:
    """Final hidden states, before the last norm, of the tokens of packed streams, in ``dtype``.

    Arguments as of :func:`prb_jax.readouts.score_tree.score_stream`, and

    Args:
        reads_only: [S, M, D], of the read places; the last layer computes queries, attention and mlp there
            alone, but where gradients go through the kernel for TPUs and several layers. Otherwise [S, N, D], of all
            tokens.
    """
    return _decode_streams(params, batch, reads_only=reads_only, **options)[0]


def decode_stream_keeping(params: Params, batch: StreamBatch, **options: Any) -> Decoded:
    """As :func:`decode_stream` of all tokens, with the keys and values of every layer."""
    states, (keys, values) = _decode_streams(params, batch, reads_only=False, keep=True, **options)
    return Decoded(states, keys, values)


def _decode_streams(
    params: Params,
    batch: StreamBatch,
    *,
    reads_only: bool,
    soft_prompts: jax.Array | None = None,
    **options: Any,
) -> tuple[jax.Array, Any]:
    mesh, layers = options.get("mesh"), options["config"].num_hidden_layers
    tokens = jnp.asarray(batch.tokens)
    if soft_prompts is not None:
        options["change_embedding"] = functools.partial(_with_soft_prompts, prompts=soft_prompts, batch=batch)
    rows = _Rows(
        tokens=tokens,
        positions=jnp.asarray(batch.positions),
        longest=tokens.shape[1],
        attend=attention_over(batch, mesh),
        attend_from_places=functools.partial(attend_from_stream_reads, batch=batch, mesh=mesh),
        # Accelerators have no room for the copies of the weights that gradients take, see _decode_trees.
        apart=layers == 1
        or not (options.get("differentiated") and isinstance(batch.blocks, StepTable | KeyTable)),
    )
    return _decode(params, rows, places=jnp.asarray(batch.reads) if reads_only else None, **options)


def _decode_trees(
    params: Params,
    batch: TreeBatch,
    *,
    config: DecoderConfig,
    dtype: jnp.dtype,
    attention: Attention | None = None,
    mesh: Mesh | None = None,
    soft_prompt: jax.Array | None = None,
    places: jax.Array | None = None,
    **options: Any,
) -> tuple[jax.Array, Any]:
    bucket = batch.bucket
    shape = {"bucket": bucket, "prefix_lengths": jnp.asarray(batch.prefix_lengths)}
    chosen = choose_attention(mesh, dtype).attend if attention is None else attention
    rows = _Rows(
        tokens=batch.tokens,
        positions=batch.positions,
        longest=bucket.prefix + bucket.response_length,
        attend=functools.partial(chosen, **shape),
        attend_from_places=functools.partial(attend_from_reads, places=places, **shape),
        # With more layers the last one, taken out of the stack, would cost a copy of the stack's gradient.
        apart=config.num_hidden_layers == 1 and attention is None,
    )
    if soft_prompt is not None:
        change = functools.partial(_with_soft_prompt, soft_prompt=soft_prompt, **shape)
        options["change_embedding"] = change
    return _decode(params, rows, config=config, dtype=dtype, mesh=mesh, places=places, **options)


def _decode(
    params: Params,
    rows: _Rows,
    *,
    config: DecoderConfig,
    dtype: jnp.dtype,
    mesh: Mesh | None = None,
    lora_scale: float = 1.0,
    remat: str = "none",
    places: jax.Array | None = None,
    change_embedding: Callable[[jax.Array], jax.Array] | None = None,
    differentiated: bool = False,
    keep: bool = False,
) -> tuple[jax.Array, Any]:
    if mesh is not None:
        check_tokens(mesh, rows.tokens.shape[1])
    constrain, gather, gathers = constrainer(mesh), gatherer(mesh), splits_weights(mesh)
    x = embedded(params, rows.tokens, dtype)
    if change_embedding is not None:
        x = change_embedding(x)
    x = scaled_embedding(x, config)
    x = constrain(x, ("batch", "tokens", None))

    full_rope, sliding_rope = config.rope
    angles = rotary_angles(rows.positions, full_rope)
    sliding_angles = angles if sliding_rope is None else rotary_angles(rows.positions, sliding_rope)
    window = config.sliding_window
    if window is not None and window >= rows.longest:
        window = None  # no two tokens that see each other are that far apart
    layer = functools.partial(decoder_layer, config=config, constrain=constrain, lora_scale=lora_scale)
    slides = config.layer_windows
    mixed = any(slides) and not all(slides) and (window is not None or sliding_rope is not None)

    def run(sliding: bool, x: jax.Array, weights: Params, places: jax.Array | None = None) -> Any:
        attend = rows.attend if places is None else rows.attend_from_places
        attend = functools.partial(attend, window=window if sliding else None)
        return layer(x, weights, angles=sliding_angles if sliding else angles, attend=attend, places=places)

    def body(x: jax.Array, inputs: tuple[Params, jax.Array]) -> tuple[jax.Array, Any]:
        weights, is_sliding = inputs
        weights = gather(weights)

        def kept(sliding: bool, x: jax.Array) -> tuple[jax.Array, Any]:
            x, keys_and_values = run(sliding, x, weights)
            return x, keys_and_values if keep else None

        if mixed:
            return lax.cond(is_sliding, lambda y: kept(True, y), lambda y: kept(False, y), x)
        return kept(any(slides), x)

    if places is None or not rows.apart:
        inputs = (params["layers"], jnp.asarray(slides))
        x, kept = lax.scan(rematerialised(body, remat, gathers=gathers), x, inputs)
        return x if places is None else take_places(x, places), kept

    def at(index: jax.Array | int) -> Params:
        return jax.tree.map(
            lambda leaf: lax.dynamic_index_in_dim(leaf, index, keepdims=False), params["layers"]
        )

    def indexed(x: jax.Array, inputs: tuple[jax.Array, jax.Array]) -> tuple[jax.Array, Any]:
        return body(x, (at(inputs[0]), inputs[1]))

    count = config.num_hidden_layers - 1
    if count:
        # Without its last layer the stack would be a copy of it, so that it is read through indices; but gradients
        # by indices would be sums of whole stacks, one for each layer.
        stack = (
            jax.tree.map(lambda leaf: leaf[:count], params["layers"]) if differentiated else jnp.arange(count)
        )
        run_layer = rematerialised(body if differentiated else indexed, remat, gathers=gathers)
        x, _ = lax.scan(run_layer, x, (stack, jnp.asarray(slides[:count])))
    last = rematerialised(lambda x, w: run(slides[-1], x, gather(w), places)[0], remat, gathers=gathers)
    return last(x, at(count)), None


def _with_soft_prompts(x: jax.Array, *, prompts: jax.Array, batch: StreamBatch) -> jax.Array:
    """x [S, N, D] with the first tokens of every conversation replaced by those rows of prompts that their ids name."""
    positions = jnp.asarray(batch.positions)
    within = jnp.minimum(positions, prompts.shape[1] - 1)
    rows = jnp.minimum(jnp.asarray(batch.tokens), prompts.shape[0] - 1)
    prompt_rows = prompts.astype(x.dtype)[rows, within]
    return jnp.where((positions < prompts.shape[1])[:, :, None], prompt_rows, x)


def _with_soft_prompt(
    x: jax.Array, *, soft_prompt: jax.Array, bucket: Bucket, prefix_lengths: jax.Array
) -> jax.Array:
    """x [B, T, D] with the first S tokens of every prefix replaced by soft_prompt [B, S, D]."""
    tokens = soft_prompt.shape[1]
    index = jnp.arange(bucket.prefix)[None] - (bucket.prefix - prefix_lengths[:, None])
    prompt_rows = jnp.take_along_axis(
        soft_prompt.astype(x.dtype), jnp.clip(index, 0, tokens - 1)[:, :, None], axis=1
    )
    replaced = ((index >= 0) & (index < tokens))[:, :, None]
    prefix = jnp.where(replaced, prompt_rows, x[:, : bucket.prefix])
    return jnp.concatenate([prefix, x[:, bucket.prefix :]], axis=1)
