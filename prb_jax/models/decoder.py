"""One decoder for every supported family, run by configuration, over packed streams.

The body is a module; around it everything is a pure function under ``jax.jit``. All layers are stacked on a leading
axis and run by ``jax.lax.scan`` with one layer in its body, so compile time does not grow with depth.

Letters: S streams of N tokens, M of which are read, L layers, G kv heads, H head dim, D model, F mlp, V vocabulary.
"""

from __future__ import annotations

import dataclasses
import functools
from typing import Any

import jax
import jax.numpy as jnp
from flax import nnx
from jax import lax
from jax.sharding import Mesh
from jax.typing import DTypeLike

from prb_jax.models.attention.choice import Attention, attend_streams
from prb_jax.models.attention.reads import attend_from_stream_reads, take_places
from prb_jax.models.attention.streams import walks
from prb_jax.models.config.decoder import DecoderConfig
from prb_jax.models.config.families import FAMILIES
from prb_jax.models.decoder_layer import (
    DecoderLayer,
    LayerContext,
    angles_of_layers,
    gatherer,
    norm_of,
    norm_weight,
    rematerialised,
    splits_weights,
)
from prb_jax.models.parameter import Declaring, drawn
from prb_jax.platform.sharding import check_tokens, constrainer
from prb_jax.trees.streams import StreamBatch

Params = dict[str, Any]
"""The arrays of a model: its split state as a nested dict."""


@jax.tree_util.register_dataclass
@dataclasses.dataclass(frozen=True)
class Decoded:
    """A forward pass with all that later tokens need of it."""

    states: jax.Array  # [S, N, D], final hidden states before the last norm
    keys: jax.Array  # [L, S, N, G, H] of every layer, after the rotary embedding
    values: jax.Array  # the same shape


class Decoder(Declaring):
    """The body of a decoder. The layers are one module whose parameters are stacked on axis 0, matrices [L, in, out].

    Args:
        config: architecture.
        rngs: for random weights: matrices have variance 1 / inputs.
        dtype: of the parameters.
    """

    def __init__(self, config: DecoderConfig, *, rngs: nnx.Rngs, dtype: DTypeLike = jnp.float32) -> None:
        self.config = config
        # Scaled embeddings (Gemma) are small so that the residual stream starts at size one everywhere.
        scale = 1.0 / (config.embedding_scale or 1.0)
        size = (config.vocab_size, config.hidden_size)
        self.embed = drawn(
            rngs, *size, scale=scale, dtype=dtype, axes=("vocab", "model"), hf="embed_tokens.weight"
        )

        @nnx.split_rngs(splits=config.num_hidden_layers)
        @nnx.vmap(in_axes=0, out_axes=0)
        def stacked(rngs: nnx.Rngs) -> DecoderLayer:
            kind = FAMILIES[config.model_type].layer or DecoderLayer
            return kind(config, rngs=rngs, dtype=dtype)

        self.layers = stacked(rngs)
        self.final_norm = norm_weight(config, config.hidden_size, hf="norm", dtype=dtype)
        self.close()

    def rows(self, tokens: jax.Array, dtype: jnp.dtype) -> jax.Array:
        """Rows of the embedding for tokens int32 [B, T], before Gemma's factor: [B, T, D] in ``dtype``."""
        return jnp.take(self.embed[...], tokens, axis=0).astype(dtype)

    def scaled(self, x: jax.Array) -> jax.Array:
        """x times the factor that Gemma's embeddings have; x itself in other families."""
        if self.config.embedding_scale is None:
            return x
        # The factor is rounded to the activations' dtype, as Gemma was trained.
        return x * jnp.asarray(self.config.embedding_scale, x.dtype)

    def normed(self, states: jax.Array) -> jax.Array:
        """Return the states [..., D] after the last norm, float32."""
        return norm_of(self.config, states.astype(jnp.float32), self.final_norm)


def decode_stream(
    decoder: Decoder,
    batch: StreamBatch,
    *,
    reads_only: bool,
    loads: list[jax.Array] | None = None,
    **options: Any,
) -> jax.Array:
    """Final hidden states, before the last norm, of the tokens of packed streams, in ``dtype``.

    Arguments as of :func:`prb_jax.models.readouts.score_tree.score_stream`, and

    Args:
        reads_only: [S, M, D], of the read places; the last layer computes queries, attention and mlp there
            alone, but where gradients go through several layers on accelerators. Otherwise [S, N, D], of all
            tokens.
        loads: of a mixture of experts, a list that gains the number of real tokens that each expert got, float32
            [L, E]; without a last layer that computes read places only, if there are others.
    """
    states, (_, counted) = _decode(decoder, batch, reads_only=reads_only, counts=loads is not None, **options)
    if loads is not None:
        loads.append(counted)
    return states


def decode_stream_keeping(decoder: Decoder, batch: StreamBatch, **options: Any) -> Decoded:
    """As :func:`decode_stream` of all tokens, with the keys and values of every layer."""
    states, ((keys, values), _) = _decode(decoder, batch, reads_only=False, keep=True, **options)
    return Decoded(states, keys, values)


def _decode(
    decoder: Decoder,
    batch: StreamBatch,
    *,
    dtype: jnp.dtype,
    reads_only: bool,
    mesh: Mesh | None = None,
    lora_scale: float = 1.0,
    remat: str = "none",
    soft_prompts: jax.Array | None = None,
    differentiated: bool = False,
    keep: bool = False,
    counts: bool = False,
) -> tuple[jax.Array, Any]:
    config = decoder.config
    tokens, positions = jnp.asarray(batch.tokens), jnp.asarray(batch.positions)
    places = jnp.asarray(batch.reads) if reads_only else None
    if mesh is not None:
        check_tokens(mesh, tokens.shape[1])
    constrain, gather, gathers = constrainer(mesh), gatherer(mesh), splits_weights(mesh)
    real = None
    if counts:
        real = (jnp.asarray(batch.until) > jnp.arange(1, tokens.shape[1] + 1)) | (positions > 0)
    x = decoder.rows(tokens, dtype)
    if soft_prompts is not None:
        x = _with_soft_prompts(x, prompts=soft_prompts, batch=batch)
    x = decoder.scaled(x)
    x = constrain(x, ("batch", "tokens", None))

    angles = angles_of_layers(config, positions)
    window = config.sliding_window
    if window is not None and window >= tokens.shape[1]:
        window = None  # no two tokens that see each other are that far apart
    graph, layers = nnx.split(decoder.layers)
    slides, rotates = config.layer_windows, config.layer_rotates
    kinds = jnp.asarray([slides, rotates]).T  # [L, 2]
    mixed = any(slides) and not all(slides) and (window is not None or config.rope[1] is not None)

    def run(
        sliding: bool,
        rotates: jax.Array | bool,
        x: jax.Array,
        state: nnx.State,
        places: jax.Array | None = None,
    ) -> Any:
        query_angles, key_angles = angles(sliding, rotates)
        attend: Attention = attend_streams if places is None else attend_from_stream_reads
        loads: list[jax.Array] | None = [] if counts else None
        context = LayerContext(
            query_angles=query_angles,
            key_angles=key_angles,
            attend=functools.partial(attend, batch=batch, mesh=mesh, window=window if sliding else None),
            constrain=constrain,
            lora_scale=lora_scale,
            places=places,
            mesh=mesh,
            loads=loads,
            real=real if places is None else places > 0,
        )
        x, keys_and_values = nnx.merge(graph, state)(x, context)
        return x, (keys_and_values, loads[0] if loads else None)

    def body(x: jax.Array, inputs: tuple[nnx.State, jax.Array]) -> tuple[jax.Array, Any]:
        state, (is_sliding, is_rotated) = inputs
        state = gather(state)

        def kept(sliding: bool, x: jax.Array) -> tuple[jax.Array, Any]:
            x, (keys_and_values, loads) = run(sliding, is_rotated, x, state)
            return x, (keys_and_values if keep else None, loads)

        if mixed:
            return lax.cond(is_sliding, lambda y: kept(True, y), lambda y: kept(False, y), x)
        return kept(any(slides), x)

    # Of several layers the last one, taken out of the stack, would cost a copy of the stack's gradient, for which
    # accelerators have no room.
    apart = config.num_hidden_layers == 1 or not differentiated or walks(batch, mesh)
    if places is None or not apart:
        inputs = (layers, kinds)
        x, kept = lax.scan(rematerialised(body, remat, gathers=gathers), x, inputs)
        return x if places is None else take_places(x, places), kept

    def at(index: jax.Array | int) -> nnx.State:
        return jax.tree.map(lambda leaf: lax.dynamic_index_in_dim(leaf, index, keepdims=False), layers)

    def indexed(x: jax.Array, inputs: tuple[jax.Array, jax.Array]) -> tuple[jax.Array, Any]:
        return body(x, (at(inputs[0]), inputs[1]))

    count, kept = config.num_hidden_layers - 1, (None, None)
    if count:
        # Without its last layer the stack would be a copy of it, so that it is read through indices; but gradients
        # by indices would be sums of whole stacks, one for each layer.
        stack = jax.tree.map(lambda leaf: leaf[:count], layers) if differentiated else jnp.arange(count)
        run_layer = rematerialised(body if differentiated else indexed, remat, gathers=gathers)
        x, kept = lax.scan(run_layer, x, (stack, kinds[:count]))

    def last(x: jax.Array, state: nnx.State) -> tuple[jax.Array, Any]:
        x, (_, loads) = run(slides[-1], rotates[-1], x, gather(state), places)
        return x, loads

    x, loads = rematerialised(last, remat, gathers=gathers)(x, at(count))
    return x, (None, loads[None] if counts and not count else kept[1])


def _with_soft_prompts(x: jax.Array, *, prompts: jax.Array, batch: StreamBatch) -> jax.Array:
    """x [S, N, D] with the first tokens of every conversation replaced by those rows of prompts that their ids name."""
    positions = jnp.asarray(batch.positions)
    within = jnp.minimum(positions, prompts.shape[1] - 1)
    rows = jnp.minimum(jnp.asarray(batch.tokens), prompts.shape[0] - 1)
    prompt_rows = prompts.astype(x.dtype)[rows, within]
    return jnp.where((positions < prompts.shape[1])[:, :, None], prompt_rows, x)
