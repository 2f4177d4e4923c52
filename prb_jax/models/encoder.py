"""One encoder for BERT and DeBERTa-v2/v3, run by configuration.

As in the decoder, layers are stacked on a leading axis and run by ``jax.lax.scan``, and all is a pure function of
``(params, batch)``.

Letters: B texts, L tokens, N heads, H head dim, D model, E embedding, F mlp.
"""

from __future__ import annotations

from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
from jax import lax
from jax.sharding import Mesh

from prb_jax.models.config.encoder import EncoderConfig, RelativePositions
from prb_jax.models.layers import activate, float32_einsum, project
from prb_jax.sharding import Constrain, constrainer

Params = dict[str, Any]


def encode_tokens(
    params: Params,
    tokens: jax.Array,
    *,
    lengths: jax.Array,
    config: EncoderConfig,
    dtype: jnp.dtype,
    token_types: jax.Array | None = None,
    mesh: Mesh | None = None,
) -> jax.Array:
    """Last hidden states of every token: [B, L, D] in ``dtype``; those of padding are meaningless.

    Args:
      params: nested dict, as :func:`prb_jax.checkpoints.hf_map.leaf_maps` describes it; further entries, as a
        head, are not looked at.
      tokens: int32 [B, L], padded on the right.
      lengths: int32 [B], tokens of each text; 0 in rows that only fill up a batch.
      config: architecture.
      dtype: of activations; norms, softmax and sums are float32.
      token_types: int32 [B, L]; all 0 if not given.
      mesh: how activations are split; None for one device.
    """
    constrain = constrainer(mesh)
    columns = jnp.arange(tokens.shape[1])[None]
    # A row without tokens attends to everything: a softmax over nothing would be NaN.
    seen = (columns < lengths[:, None]) | (lengths == 0)[:, None]
    x = jnp.take(params["words"], tokens, axis=0).astype(jnp.float32)
    if config.absolute_positions:
        x = x + _rows(params["positions"], columns, tokens.shape)
    if config.type_vocab_size:
        kinds = jnp.zeros_like(tokens) if token_types is None else token_types
        x = x + _rows(params["token_types"], kinds, tokens.shape)
    x = x.astype(dtype)
    if "embed_proj" in params:
        x = project(x, params["embed_proj"])
    x = constrain(_layer_norm(x, params, "embed_norm", config), ("batch", None, None))
    distances = None
    if config.relative is not None:
        distances = params["relative"].astype(dtype)
        if config.relative.normed:
            distances = _layer_norm(distances, params, "relative_norm", config)
        distances = distances[distance_rows(tokens.shape[1], config.relative)]

    def body(x: jax.Array, weights: Params) -> tuple[jax.Array, None]:
        return _layer(x, weights, seen=seen, distances=distances, config=config, constrain=constrain), None

    return lax.scan(body, x, params["layers"])[0]


def _rows(table: jax.Array, index: jax.Array, shape: tuple[int, ...]) -> jax.Array:
    rows = jnp.take(table, jnp.clip(index, 0, table.shape[0] - 1), axis=0).astype(jnp.float32)
    return jnp.broadcast_to(rows, (*shape, table.shape[1]))


def _layer(
    x: jax.Array,
    w: Params,
    *,
    seen: jax.Array,
    distances: jax.Array | None,
    config: EncoderConfig,
    constrain: Constrain,
) -> jax.Array:
    """One layer: x [B, L, D], w its parameters without the layer axis, distances [2L - 1, D]."""
    batch, length, width = x.shape
    heads = (config.num_attention_heads, config.head_dim)

    def split(y: jax.Array, name: str) -> jax.Array:
        return project(y, w[name], w[f"{name}_bias"]).reshape(*y.shape[:-1], *heads)

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
    y = project(y.astype(x.dtype).reshape(batch, length, width), w["o"], w["o_bias"])
    x = constrain(_layer_norm(x + y, w, "post_attention_norm", config), ("batch", None, None))
    y = activate(project(x, w["up"], w["up_bias"]), config.hidden_activation)
    y = project(y, w["down"], w["down_bias"])
    return constrain(_layer_norm(x + y, w, "post_mlp_norm", config), ("batch", None, None))


def _layer_norm(x: jax.Array, params: Params, name: str, config: EncoderConfig) -> jax.Array:
    """Layer norm over the last axis, statistics and products in float32."""
    wide = x.astype(jnp.float32)
    centred = wide - jnp.mean(wide, axis=-1, keepdims=True)
    normed = centred * lax.rsqrt(
        jnp.mean(jnp.square(centred), axis=-1, keepdims=True) + config.layer_norm_eps
    )
    weight, bias = params[name].astype(jnp.float32), params[f"{name}_bias"].astype(jnp.float32)
    return (normed * weight + bias).astype(x.dtype)


def distance_rows(length: int, relative: RelativePositions) -> np.ndarray:
    """Rows of the table of distances for d = L - 1, L - 2, ..., -(L - 1): int32 [2L - 1].

    A distance d = query - key has row span + d; where there are buckets, one beyond half of them stands
    for itself no more but shares a row with others of about the same logarithm.

    Args:
      length: L, of the text.
      relative: the model's.
    """
    distance = np.arange(length - 1, -length, -1)
    if relative.buckets > 0:
        # In float32 as transformers does: a bucket's border can hang on the last bit.
        half = relative.buckets // 2
        size = np.where(np.abs(distance) < half, half - 1, np.abs(distance)).astype(np.float32)
        with np.errstate(divide="ignore", invalid="ignore"):
            steps = np.log(size / np.float32(half)) / np.log(np.float32((relative.max_distance - 1) / half))
            far = np.ceil(steps * np.float32(half - 1)) + half
        distance = np.where(size <= half, distance, (far * np.sign(distance))).astype(np.int64)
    return np.clip(distance + relative.span, 0, 2 * relative.span - 1).astype(np.int32)


def distance_scores(vectors: jax.Array, table: jax.Array) -> jax.Array:
    """Products of each token's vector with the one of its distance to every other token.

    No gather over L x L entries: products with the vectors of all 2L - 1 distances, then each row moved
    by one more than the row before it, which is a reshape.

    Args:
      vectors: [B, L, N, H], of the tokens.
      table: [2L - 1, N, H], vectors of the distances L - 1, ..., -(L - 1).

    Returns:
      float32 [B, N, L, L]: entry (i, j) is the product of token i's vector with that of distance i - j.
    """
    batch, length, heads, _ = vectors.shape
    products = float32_einsum("blnh,tnh->bnlt", vectors, table)
    # Entry (i, j) stands in column j + L - 1 - i; with rows of 2L that is place i (2L - 1) + j + L - 1.
    flat = jnp.pad(products, ((0, 0), (0, 0), (0, 0), (0, 1))).reshape(batch, heads, -1)
    moved = lax.slice_in_dim(flat, length - 1, length - 1 + length * (2 * length - 1), axis=2)
    return moved.reshape(batch, heads, length, 2 * length - 1)[..., :length]
