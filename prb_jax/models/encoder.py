"""One configurable encoder for BERT and DeBERTa-v2/v3, and the body of ModernBERT.

As in the decoder, layers are stacked on a leading axis and run by ``jax.lax.scan``.

Dimensions: B texts, L tokens, N heads, H head dim, D model, E embedding, F mlp.
"""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
from flax import nnx
from jax import lax
from jax.sharding import Mesh
from jax.typing import DTypeLike

from prb_jax.models.config.encoder import EncoderConfig, RelativePositions
from prb_jax.models.encoder_layers import activate, layer_norm, run_stack
from prb_jax.models.layers import float32_einsum, project
from prb_jax.models.model import abstract, add_head
from prb_jax.models.modern_encoder import ModernLayer, declare_input_norms, normed, run_layers
from prb_jax.models.parameter import Axes, Declaring, drawn, parameter
from prb_jax.platform.sharding import Constrain, constrainer

# Parameter names of a layer in a checkpoint.
_BERT = {
    "q": "attention.self.query", "k": "attention.self.key", "v": "attention.self.value",
    "o": "attention.output.dense", "post_attention_norm": "attention.output.LayerNorm", "up": "intermediate.dense",
    "down": "output.dense", "post_mlp_norm": "output.LayerNorm",
}  # fmt: skip
_NAMES: Mapping[str, Mapping[str, str]] = {
    "bert": _BERT,
    "deberta-v2": {
        **_BERT,
        "q": "attention.self.query_proj", "k": "attention.self.key_proj", "v": "attention.self.value_proj",
        "relative_k": "attention.self.pos_key_proj", "relative_q": "attention.self.pos_query_proj",
    },
}  # fmt: skip


def _declare_norm(
    module: Declaring,
    name: str,
    hf: str,
    config: EncoderConfig,
    dtype: DTypeLike,
    tensors: tuple[str, ...] | None = None,
) -> None:
    """Declare the layer norm ``name`` of a module: a weight, and the bias ``{name}_bias`` if the tensors have one."""
    for suffix, start, tensor in zip(("", "_bias"), (jnp.ones, jnp.zeros), tensors or config.norm_names):
        values = start((config.hidden_size,), dtype)
        setattr(module, f"{name}{suffix}", parameter(values, axes=(None,), hf=f"{hf}.{tensor}"))


def _layer_norm(module: nnx.Module, name: str, x: jax.Array, config: EncoderConfig) -> jax.Array:
    """Apply a layer norm of a module."""
    weight, bias = (getattr(module, f"{name}{suffix}")[...] for suffix in ("", "_bias"))
    return layer_norm(x, weight, bias, eps=config.layer_norm_eps)


class EncoderLayer(Declaring):
    """Attention in both directions and an mlp, each with a residual connection followed by a norm."""

    def __init__(self, config: EncoderConfig, *, rngs: nnx.Rngs, dtype: DTypeLike) -> None:
        self.config = config
        width, mlp, names = config.hidden_size, config.intermediate_size, _NAMES[config.model_type]

        def linear(name: str, inputs: int, outputs: int, axes: Axes) -> None:
            matrix = drawn(
                rngs, inputs, outputs, dtype=dtype, axes=axes, hf=f"{names[name]}.weight", turned=True
            )
            axis = None if axes[1] == "model" else axes[1]
            bias = parameter(jnp.zeros((outputs,), dtype), axes=(axis,), hf=f"{names[name]}.bias")
            setattr(self, name, matrix)
            setattr(self, f"{name}_bias", bias)

        relative, into = config.relative, ("model", "heads")
        further = ()
        if relative is not None and not relative.shared:
            further = ("relative_k",) * relative.content_to_position + (
                "relative_q",
            ) * relative.position_to_content
        for name in ("q", "k", "v", *further):
            linear(name, width, width, into)
        linear("o", width, width, ("heads", "model"))
        _declare_norm(self, "post_attention_norm", names["post_attention_norm"], config, dtype)
        linear("up", width, mlp, ("model", "mlp"))
        linear("down", mlp, width, ("mlp", "model"))
        _declare_norm(self, "post_mlp_norm", names["post_mlp_norm"], config, dtype)
        self.close()

    def project(self, name: str, x: jax.Array) -> jax.Array:
        """Apply a matrix and its bias to x [..., I]: [..., O]."""
        return project(x, getattr(self, name)[...], getattr(self, f"{name}_bias")[...])

    def __call__(
        self, x: jax.Array, *, seen: jax.Array, distances: jax.Array | None, constrain: Constrain
    ) -> jax.Array:
        """Run the layer on x [B, L, D].

        Args:
          x: States.
          seen: Mask of visible tokens, bool [B, L].
          distances: Embeddings of distances [2L - 1, D].
          constrain: Function that sets the sharding of activations.
        """
        config = self.config
        batch, length, width = x.shape
        heads = (config.num_attention_heads, config.head_dim)

        def split(y: jax.Array, name: str) -> jax.Array:
            return self.project(name, y).reshape(*y.shape[:-1], *heads)

        q, k, v = (constrain(split(x, name), ("batch", None, "heads", None)) for name in "qkv")
        scores = float32_einsum("bqnh,bknh->bnqk", q, k)
        terms = 1
        if distances is not None and config.relative is not None:
            relative = config.relative
            if relative.content_to_position:
                terms += 1
                scores += distance_scores(q, split(distances, "k" if relative.shared else "relative_k"))
            if relative.position_to_content:
                terms += 1
                # The score of (i, j) is key j's product with distance i - j: seen from j, that distance is -(j - i).
                queries = split(distances[::-1], "q" if relative.shared else "relative_q")
                scores += distance_scores(k, queries).swapaxes(2, 3)
        scores = scores * (terms * config.head_dim) ** -0.5
        weights = jax.nn.softmax(jnp.where(seen[:, None, None], scores, -jnp.inf), axis=-1)
        y = float32_einsum("bnqk,bknh->bqnh", weights.astype(x.dtype), v)
        y = self.project("o", y.astype(x.dtype).reshape(batch, length, width))
        x = constrain(_layer_norm(self, "post_attention_norm", x + y, config), ("batch", None, None))
        y = self.project("down", activate(self.project("up", x), config.hidden_activation))
        return constrain(_layer_norm(self, "post_mlp_norm", x + y, config), ("batch", None, None))


def _stacked(kind: type[Any], config: EncoderConfig, *, rngs: nnx.Rngs, dtype: DTypeLike) -> Any:
    """Return the layers of one class as one module, with a leading axis of layers."""

    @nnx.split_rngs(splits=config.num_hidden_layers)
    @nnx.vmap(in_axes=0, out_axes=0)
    def make(rngs: nnx.Rngs) -> Declaring:
        return kind(config, rngs=rngs, dtype=dtype)

    return make(rngs)


class Encoder(Declaring):
    """Body of an encoder; the layers are one module with parameters stacked on axis 0.

    Args:
      config: Architecture.
      rngs: Generators for random weights.
      dtype: Dtype of the parameters.
    """

    def __init__(self, config: EncoderConfig, *, rngs: nnx.Rngs, dtype: DTypeLike = jnp.float32) -> None:
        self.config = config
        width, size = config.hidden_size, config.embedding_size

        def table(hf: str, rows: int, columns: int, *, turned: bool = False) -> nnx.Param:
            # Vocabulary sizes have few divisors, so tables are split only by width.
            name = f"{hf}.weight"
            return drawn(
                rngs, rows, columns, scale=0.02, dtype=dtype, axes=(None, "model"), hf=name, turned=turned
            )

        words = "embeddings.word_embeddings" if config.modern is None else "embeddings.tok_embeddings"
        self.words = table(words, config.vocab_size, size)
        if config.modern is not None:
            self._declare_modern(rngs=rngs, dtype=dtype)
            return
        if config.absolute_positions:
            self.positions = table("embeddings.position_embeddings", config.max_position_embeddings, size)
        if config.type_vocab_size:
            self.token_types = table("embeddings.token_type_embeddings", config.type_vocab_size, size)
        if size != width:
            self.embed_proj = table("embeddings.embed_proj", size, width, turned=True)
        _declare_norm(self, "embed_norm", "embeddings.LayerNorm", config, dtype)
        if config.relative is not None:
            self.relative = table("encoder.rel_embeddings", 2 * config.relative.span, width)
            if config.relative.normed:
                _declare_norm(self, "relative_norm", "encoder.LayerNorm", config, dtype)

        self.layers: Any = _stacked(EncoderLayer, config, rngs=rngs, dtype=dtype)
        self.close()

    def _declare_modern(self, *, rngs: nnx.Rngs, dtype: DTypeLike) -> None:
        """Declare the layers and the norms of ModernBERT."""
        config = self.config
        assert config.modern is not None
        tensors = config.norm_names[: 1 + config.modern.norm_bias]
        _declare_norm(self, "embed_norm", "embeddings.norm", config, dtype, tensors)
        self.layers = _stacked(ModernLayer, config, rngs=rngs, dtype=dtype)
        declare_input_norms(self.layers, dtype=dtype)
        _declare_norm(self, "final_norm", "final_norm", config, dtype, tensors)
        self.close()


class HeadedEncoder(Encoder):
    """An encoder with the tensors of its head, if it has one; for arguments see :class:`Encoder`."""

    def __init__(self, config: EncoderConfig, *, rngs: nnx.Rngs, dtype: DTypeLike = jnp.float32) -> None:
        super().__init__(config, rngs=rngs, dtype=dtype)
        if config.head is not None:
            add_head(self, config.head, config, rngs=rngs, dtype=dtype)


def bind_encoder(config: EncoderConfig, params: Mapping[str, Any]) -> Encoder:
    """Return the body of an encoder with these arrays; further entries, such as a head, are ignored."""
    module = abstract(Encoder, config, frozenset())
    return nnx.merge(nnx.graphdef(module), {name: params[name] for name in module.order})


def encode_tokens(
    encoder: Encoder,
    tokens: jax.Array,
    *,
    lengths: jax.Array,
    dtype: jnp.dtype,
    token_types: jax.Array | None = None,
    mesh: Mesh | None = None,
) -> jax.Array:
    """Return the last hidden states, [B, L, D] in ``dtype``; states of padding are meaningless.

    Args:
      encoder: Architecture and weights.
      tokens: Tokens int32 [B, L], padded on the right.
      lengths: Number of tokens of each text, int32 [B]; 0 in padding rows of a batch.
      dtype: Dtype of activations; norms, softmax and sums are float32.
      token_types: Token types int32 [B, L]; 0 by default.
      mesh: Mesh that splits activations; None for one device.
    """
    config, constrain = encoder.config, constrainer(mesh)
    columns = jnp.arange(tokens.shape[1])[None]
    # A row without tokens attends to everything, because a softmax over no tokens would be NaN.
    seen = (columns < lengths[:, None]) | (lengths == 0)[:, None]
    x = jnp.take(encoder.words[...], tokens, axis=0).astype(jnp.float32)
    if config.absolute_positions:
        x = x + _rows(encoder.positions[...], columns, tokens.shape)
    if config.type_vocab_size:
        kinds = jnp.zeros_like(tokens) if token_types is None else token_types
        x = x + _rows(encoder.token_types[...], kinds, tokens.shape)
    x = x.astype(dtype)
    if config.modern is not None:
        x = constrain(normed(encoder, "embed_norm", x, config), ("batch", None, None))
        x = run_layers(encoder.layers, x, seen=seen, constrain=constrain)
        return normed(encoder, "final_norm", x, config)
    if config.embedding_size != config.hidden_size:
        x = project(x, encoder.embed_proj[...])
    x = constrain(_layer_norm(encoder, "embed_norm", x, config), ("batch", None, None))
    distances = None
    if config.relative is not None:
        distances = encoder.relative[...].astype(dtype)
        if config.relative.normed:
            distances = _layer_norm(encoder, "relative_norm", distances, config)
        distances = distances[distance_rows(tokens.shape[1], config.relative)]
    graph, layers = nnx.split(encoder.layers)

    def body(x: jax.Array, state: nnx.State) -> jax.Array:
        return nnx.merge(graph, state)(x, seen=seen, distances=distances, constrain=constrain)

    return run_stack(body, x, layers)


def _rows(table: jax.Array, index: jax.Array, shape: tuple[int, ...]) -> jax.Array:
    rows = jnp.take(table, jnp.clip(index, 0, table.shape[0] - 1), axis=0).astype(jnp.float32)
    return jnp.broadcast_to(rows, (*shape, table.shape[1]))


def distance_rows(length: int, relative: RelativePositions) -> np.ndarray:
    """Return rows of the distance table for d = L - 1, L - 2, ..., -(L - 1): int32 [2L - 1].

    A distance d = query - key has row span + d. With buckets, distances beyond half of their number share rows with
    distances of a similar logarithm.

    Args:
      length: L, the length of the text.
      relative: Relative positions of the model.
    """
    distance = np.arange(length - 1, -length, -1)
    if relative.buckets > 0:
        # In float32 like transformers: the last bit can decide the border of a bucket.
        half = relative.buckets // 2
        size = np.where(np.abs(distance) < half, half - 1, np.abs(distance)).astype(np.float32)
        with np.errstate(divide="ignore", invalid="ignore"):
            steps = np.log(size / np.float32(half)) / np.log(np.float32((relative.max_distance - 1) / half))
            far = np.ceil(steps * np.float32(half - 1)) + half
        distance = np.where(size <= half, distance, (far * np.sign(distance))).astype(np.int64)
    return np.clip(distance + relative.span, 0, 2 * relative.span - 1).astype(np.int32)


def distance_scores(vectors: jax.Array, table: jax.Array) -> jax.Array:
    """Return products of each token's vector with the vectors of its distances to all tokens.

    Instead of a gather over L x L entries, each vector is multiplied by the vectors of all 2L - 1 distances. Each
    row is then shifted by one more than the previous row, which is a reshape.

    Args:
      vectors: Vectors of the tokens [B, L, N, H].
      table: Vectors of the distances L - 1, ..., -(L - 1) [2L - 1, N, H].

    Returns:
      float32 [B, N, L, L]: entry (i, j) is the product of token i's vector with the vector of distance i - j.
    """
    batch, length, heads, _ = vectors.shape
    products = float32_einsum("blnh,tnh->bnlt", vectors, table)
    # Entry (i, j) is in column j + L - 1 - i; with rows of length 2L its index is i (2L - 1) + j + L - 1.
    flat = jnp.pad(products, ((0, 0), (0, 0), (0, 0), (0, 1))).reshape(batch, heads, -1)
    moved = lax.slice_in_dim(flat, length - 1, length - 1 + length * (2 * length - 1), axis=2)
    return moved.reshape(batch, heads, length, 2 * length - 1)[..., :length]
