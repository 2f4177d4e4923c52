"""One configurable decoder for every supported family, over packed streams.

The body is a module, called from pure functions under ``jax.jit``. All layers are stacked on a leading axis and run by
``jax.lax.scan`` with one layer in its body, so compile time does not grow with depth.

Dimensions: S streams of N tokens including M read tokens, L layers, G kv heads, H head dim, D model, F mlp, V
vocabulary.
"""

from __future__ import annotations

import collections
import dataclasses
import functools
from collections.abc import Callable, Mapping
from typing import Any

import jax
import jax.numpy as jnp
from flax import nnx
from jax import lax
from jax.sharding import Mesh
from jax.typing import DTypeLike

from prb_jax.models.attention.streams import (
    Attention,
    attend_from_stream_reads,
    stream_attention,
    take_places,
    walks,
)
from prb_jax.models.config.decoder import DecoderConfig
from prb_jax.models.config.family import ATTENTION, EXPERTS, RECURRENT, Kind, known_families
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
from prb_jax.models.layers import Row, row_of
from prb_jax.models.parameter import Declaring, drawn
from prb_jax.platform.sharding import check_tokens, constrainer
from prb_jax.seams import get
from prb_jax.trees.streams import StreamBatch

Kept = Mapping[str, Any]
"""Results of layers besides their output, by part, stacked on axis 0 in layer order."""

Body = Callable[[Kind, jax.Array, nnx.State, jax.Array], tuple[jax.Array, Mapping[str, Any]]]
"""(kind, x, state of the layer, number of the layer) -> (x, kept results of the layer by part)."""


class LayerStacks:
    """Parameters of all layers, which are of one kind; may be created inside a trace.

    Args:
      layers: Layers of a decoder.
      read: Filter of flax for the parameters of which the state of a layer has a :class:`prb_jax.models.layers.Row`.

    Attributes:
      graphs: Structure of a layer, by its kind.
    """

    def __init__(self, layers: DecoderLayer, read: Any) -> None:
        self._kind = layers.config.kinds[0]
        graph, self._read, self._state = nnx.split(layers, read, ...)
        self.graphs: dict[Kind, Any] = {self._kind: graph}

    def at(self, layer: int | jax.Array, take: Callable[..., jax.Array] = row_of) -> nnx.State:
        """Return the state of one layer; ``take`` returns a row of a stack."""
        return self._whole(jax.tree.map(lambda leaf: take(leaf, layer), self._state), layer)

    def _whole(self, state: nnx.State, layer: int | jax.Array) -> nnx.State:
        """Return the state of one layer with the rows that it reads itself."""
        return nnx.merge_state(state, jax.tree.map(lambda leaf: Row(leaf, layer), self._read))

    def scan(self, body: Body, x: jax.Array, *, count: int, indexed: bool) -> tuple[jax.Array, Kept]:
        """Run the first ``count`` layers.

        Args:
          body: Function that runs one layer.
          x: States.
          count: Number of layers.
          indexed: If True, read layers through indices instead of slices. Slices copy a part of the stack; gradients
            through indices sum a whole stack for each layer.
        """
        if not count:
            return x, {}
        states = None if indexed else jax.tree.map(lambda leaf: leaf[:count], self._state)

        def one(x: jax.Array, inputs: tuple[jax.Array, Any]) -> tuple[jax.Array, Kept]:
            number, state = inputs
            state = self.at(number) if state is None else self._whole(state, number)
            return body(self._kind, x, state, number)

        return lax.scan(one, x, (jnp.arange(count), states))


def stacks_of(layers: DecoderLayer, read: Any = False) -> LayerStacks:
    """Return the stacks of a decoder's layers; for ``read`` see :class:`LayerStacks`."""
    alike = len(set(layers.config.kinds)) == 1
    return (LayerStacks if alike else get("mixed layers", "stacks").value)(layers, read)


def read_rows(state: nnx.State) -> nnx.State:
    """Return the state of a layer, with each :class:`prb_jax.models.layers.Row` as an array."""
    return jax.tree.map(Row.read, state, is_leaf=lambda node: isinstance(node, Row))


Params = dict[str, Any]
"""Arrays of a model: its split state as a nested dict."""


@jax.tree_util.register_dataclass
@dataclasses.dataclass(frozen=True)
class Decoded:
    """Result of a forward pass, with the keys, values and states that later tokens need."""

    states: jax.Array  # [S, N, D], final hidden states before the last norm
    keys: jax.Array  # [L, S, N, G, H] of every attention layer, after the rotary embedding
    values: jax.Array  # the same shape
    recurrent: Any = (
        None  # states of recurrent layers from :func:`prb_jax.models.delta_layer.mix`, stacked on axis 0
    )


class Decoder(Declaring):
    """Body of a decoder. The layers are one module with parameters stacked on axis 0, matrices [L, in, out].

    Args:
        config: Architecture.
        rngs: Generators for random weights; matrices have variance 1 / inputs.
        dtype: Dtype of the parameters.
    """

    def __init__(self, config: DecoderConfig, *, rngs: nnx.Rngs, dtype: DTypeLike = jnp.float32) -> None:
        self.config = config
        # Scaled embeddings (Gemma) start small, so the residual stream has unit size in every family.
        scale = 1.0 / (config.embedding_scale or 1.0)
        size = (config.vocab_size, config.hidden_size)
        self.embed = drawn(
            rngs, *size, scale=scale, dtype=dtype, axes=("vocab", "model"), hf="embed_tokens.weight"
        )

        layer_class = known_families()[config.model_type].layer or DecoderLayer

        def stacked(count: int, parts: tuple[str | None, ...]) -> DecoderLayer:
            @nnx.split_rngs(splits=count)
            @nnx.vmap(in_axes=0, out_axes=0)
            def make(rngs: nnx.Rngs) -> DecoderLayer:
                return layer_class(config, rngs=rngs, dtype=dtype, parts=parts)

            return make(rngs)

        layers_of_part = collections.Counter(part for kind in config.kinds for part in kind)
        count = config.num_hidden_layers
        everywhere = tuple(part for part, layers in layers_of_part.items() if layers == count)
        self.layers = stacked(count, (None, *everywhere))
        for part, layers in layers_of_part.items():
            if part in everywhere:
                continue
            of_part = stacked(layers, (part,))
            for name in of_part.order:
                setattr(self.layers, name, getattr(of_part, name))
            self.layers.order += of_part.order
        self.final_norm = norm_weight(config, config.hidden_size, hf="norm", dtype=dtype)
        self.close()

    def rows(self, tokens: jax.Array, dtype: jnp.dtype) -> jax.Array:
        """Return the embeddings of tokens int32 [B, T], before Gemma's factor, [B, T, D] in ``dtype``."""
        return jnp.take(self.embed[...], tokens, axis=0).astype(dtype)

    def scaled(self, x: jax.Array) -> jax.Array:
        """Return x times Gemma's embedding factor; x unchanged in other families."""
        if self.config.embedding_scale is None:
            return x
        # Gemma was trained with the factor rounded to the activations' dtype.
        return x * jnp.asarray(self.config.embedding_scale, x.dtype)

    def normed(self, states: jax.Array) -> jax.Array:
        """Return the states [..., D] after the last norm, float32."""
        return norm_of(self.config, states.astype(jnp.float32), self.final_norm)


def decode_stream(
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
    results: dict[str, Any] | None = None,
    loads: list[jax.Array] | None = None,
) -> jax.Array:
    """Return the final hidden states of packed streams, before the last norm, in ``dtype``.

    For further arguments see :func:`prb_jax.models.readouts.score_tree.score_stream`.

    Args:
        reads_only: If True, return the states at the read positions [S, M, D]; otherwise the states of all tokens [S,
          N, D]. With True, the last layer computes queries, attention and mlp only at the read positions, except when
          gradients go through several layers on accelerators.
        results: Dict that receives the results of all layers besides their output, by part; only for all tokens.
        loads: List that receives the number of real tokens of each expert of a mixture, float32 [L, E], for the layers
          with experts. A last layer that computes only read positions is omitted, unless no other has experts.
    """
    keep, counts = results is not None, loads is not None
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

    angles = angles_of_layers(config, positions, None if batch.long is None else jnp.asarray(batch.long))
    window = config.sliding_window
    if window is not None and window >= tokens.shape[1]:
        window = None  # the window exceeds the distance between any two tokens that see each other
    frozen: Any = False
    if differentiated and walks(batch, mesh):
        frozen = get("rematerialised", "frozen").value(decoder.layers, dtype)
    rows = frozen is not False
    stacks = stacks_of(decoder.layers, frozen)
    slides, rotates = config.layer_windows, config.layer_rotates
    kinds = jnp.asarray([slides, rotates]).T  # [L, 2]
    recur = None
    if config.recurrence is not None:
        of_stream = get("recurrent layers", "stream").value
        recur = functools.partial(of_stream, batch=batch, mesh=mesh, keep=keep)
    mixed = any(slides) and not all(slides) and (window is not None or config.rope[1] is not None)

    def run(
        kind: Kind,
        sliding: bool,
        rotates: jax.Array | bool,
        x: jax.Array,
        state: nnx.State,
        places: jax.Array | None = None,
    ) -> Any:
        query_angles, key_angles = angles(sliding, rotates)
        attend: Attention = stream_attention if places is None else attend_from_stream_reads
        loads: list[jax.Array] | None = [] if counts else None
        context = LayerContext(
            query_angles=query_angles,
            key_angles=key_angles,
            attend=functools.partial(attend, batch=batch, mesh=mesh, window=window if sliding else None),
            constrain=constrain,
            recur=recur,
            lora_scale=lora_scale,
            places=places,
            mesh=mesh,
            loads=loads,
            real=real if places is None else places > 0,
        )
        x, of_mixer = nnx.merge(stacks.graphs[kind], state)(x, context)
        return x, {kind[0]: of_mixer, kind[1]: loads[0] if loads else None}

    def body(kind: Kind, x: jax.Array, state: nnx.State, number: jax.Array) -> tuple[jax.Array, Any]:
        def layer(x: jax.Array, inputs: tuple[nnx.State, jax.Array]) -> tuple[jax.Array, Any]:
            state, (is_sliding, is_rotated) = inputs
            state = gather(read_rows(state))

            def kept(sliding: bool, x: jax.Array) -> tuple[jax.Array, Any]:
                x, results = run(kind, sliding, is_rotated, x, state)
                return x, results if keep else {**results, kind[0]: None}

            if mixed:
                return lax.cond(is_sliding, lambda y: kept(True, y), lambda y: kept(False, y), x)
            return kept(any(slides), x)

        return rematerialised(layer, remat, gathers=gathers, rows=rows)(x, (state, kinds[number]))

    # Slicing the last of several layers from the stack would copy the stack's gradient, which does not fit into the
    # memory of accelerators.
    apart = config.num_hidden_layers == 1 or not differentiated or walks(batch, mesh)
    if places is None or not apart:
        indexed = not differentiated and walks(batch, mesh)
        x, of_layers = stacks.scan(body, x, count=config.num_hidden_layers, indexed=indexed)
        x, counted = x if places is None else take_places(x, places), of_layers.get(EXPERTS)
        if results is not None:
            results.update(of_layers)
    else:
        # Slicing off the last layer would copy the whole stack, so layers are read through indices.
        count = config.num_hidden_layers - 1
        x, of_layers = stacks.scan(body, x, count=count, indexed=not differentiated)

        def last(x: jax.Array, state: nnx.State) -> tuple[jax.Array, Any]:
            x, of_last = run(config.kinds[-1], slides[-1], rotates[-1], x, gather(read_rows(state)), places)
            return x, of_last.get(EXPERTS)

        x, of_last = rematerialised(last, remat, gathers=gathers, rows=rows)(x, stacks.at(count))
        counted = of_layers.get(EXPERTS)
        if counted is None and of_last is not None:
            counted = of_last[None]
    if loads is not None:
        assert counted is not None
        loads.append(counted)
    return x


def decode_stream_keeping(decoder: Decoder, batch: StreamBatch, **options: Any) -> Decoded:
    """Return the result of :func:`decode_stream` for all tokens, with keys and values of every layer and recurrent
    states at the `ends` of the batch."""
    results: dict[str, Any] = {}
    states = decode_stream(decoder, batch, reads_only=False, results=results, **options)
    keys, values = results.get(ATTENTION, (None, None))
    return Decoded(states, keys, values, results.get(RECURRENT))


def _with_soft_prompts(x: jax.Array, *, prompts: jax.Array, batch: StreamBatch) -> jax.Array:
    """Return x [S, N, D] with the first tokens of every conversation replaced by the rows of prompts that their ids
    select."""
    positions = jnp.asarray(batch.positions)
    within = jnp.minimum(positions, prompts.shape[1] - 1)
    rows = jnp.minimum(jnp.asarray(batch.tokens), prompts.shape[0] - 1)
    prompt_rows = prompts.astype(x.dtype)[rows, within]
    return jnp.where((positions < prompts.shape[1])[:, :, None], prompt_rows, x)
