"""Caches of keys and values, and the decoder step for one more token.

A *prefix cache* contains the prompt of each tree. It is filled from a packed stream that contains the prompt, and is
then only read, by all samples of the tree. A *suffix cache* contains the tokens that each sample adds, in a fixed
number of columns. A new token attends to both. The two attentions are merged by their maxima and sums (log-sum-exp),
so the caches are never concatenated.

Recurrent layers keep states instead of keys and values: see :mod:`prb_jax.models.delta_cache`.

Caches have one array per layer, and the layers run in a Python loop instead of a scan: a scan would copy the weights
and caches of a layer out of the stack for every token.

Dimensions: B trees, S samples per tree, P prefix columns, M suffix columns, L layers, N heads, G kv heads, H head dim,
D model. For streams: S streams of N tokens, F prompts per stream.
"""

from __future__ import annotations

import functools
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any

import jax
import jax.numpy as jnp
import numpy as np
from flax import nnx
from jax import lax
from jax.sharding import Mesh

from prb_jax.errors import short_repr
from prb_jax.models.config.decoder import DecoderConfig
from prb_jax.models.config.family import ATTENTION, RECURRENT
from prb_jax.models.decoder import Decoder, Params, decode_stream_keeping, stacks_of
from prb_jax.models.decoder_layer import LayerContext, angles_of_layers, gatherer
from prb_jax.models.layers import float32_einsum, from_bits, in_bits, product, soft_capped, with_sinks
from prb_jax.models.model import bind
from prb_jax.platform.sharding import Constrain, constrainer
from prb_jax.seams import get
from prb_jax.trees.streams import StreamBatch

if TYPE_CHECKING:
    from prb_jax.models.delta_cache import RecurrentPrefix, RecurrentSuffix
    from prb_jax.models.delta_layer import EndStates

Arrays = tuple[jax.Array, ...]

_HIDDEN = -1e30  # below every score but finite: subtracting minus infinity would give NaN


@jax.tree_util.register_dataclass
@dataclass(frozen=True)
class PrefixCache:
    """Prompts of B trees, right-aligned."""

    keys: Arrays  # one array per attention layer [B, G, P, H], after the rotary embedding
    values: Arrays  # the same shapes
    lengths: jax.Array  # int32 [B], real tokens
    recurrent: tuple[RecurrentPrefix, ...] = ()  # one per recurrent layer

    __repr__ = short_repr

    @property
    def columns(self) -> int:
        """P, the number of columns."""
        return self.keys[0].shape[2]


@jax.tree_util.register_dataclass
@dataclass(frozen=True)
class SuffixCache:
    """Tokens that S samples add to each tree, left-aligned."""

    keys: Arrays  # one array per attention layer [B, S, G, M, H]
    values: Arrays
    lengths: jax.Array  # int32 [B, S], tokens written so far
    recurrent: tuple[RecurrentSuffix, ...] = ()  # one per recurrent layer

    __repr__ = short_repr


@jax.tree_util.register_dataclass
@dataclass(frozen=True)
class StreamCache:
    """Keys and values of S packed streams of N tokens, in stream order."""

    keys: jax.Array  # [L, S, N, G, H] of the attention layers, after the rotary embedding
    values: jax.Array  # the same shape
    recurrent: EndStates | None = None  # recurrent layers, stacked on axis 0

    __repr__ = short_repr


@jax.tree_util.register_dataclass
@dataclass(frozen=True)
class Moves:
    """Assignment of prompts in S streams, at most F per stream, to B trees. All arrays are int32.

    A mesh splits streams and trees into the same S parts, one stream each. A part contains B / S consecutive trees,
    which take prompts only from its stream.
    """

    places: np.ndarray | jax.Array  # [S, F, P], tokens of the prompts, right-aligned; padding is arbitrary
    lengths: np.ndarray | jax.Array  # [S, F], tokens per prompt
    trees: np.ndarray | jax.Array  # [S, F], indices within the part; B / S for no tree
    ends: np.ndarray | jax.Array  # [S, F], index of each prompt among the prompts that end in its stream

    __repr__ = short_repr


def empty_prefix(config: DecoderConfig, *, trees: int, columns: int, dtype: jnp.dtype) -> PrefixCache:
    """Return a cache of B = ``trees`` empty prompts."""
    shape = (trees, config.num_key_value_heads, columns, config.head_dim)
    states = _of_recurrent(config, "no prompts", trees=trees, dtype=dtype)
    return PrefixCache(*_blank(config, shape, dtype), jnp.zeros((trees,), jnp.int32), states)


def empty_suffix(
    config: DecoderConfig, *, trees: int, samples: int, columns: int, dtype: jnp.dtype
) -> SuffixCache:
    """Return a cache of B * S = ``trees * samples`` samples without a token."""
    shape = (trees, samples, config.num_key_value_heads, columns, config.head_dim)
    updates = _of_recurrent(config, "no samples", trees=trees, samples=samples, columns=columns, dtype=dtype)
    return SuffixCache(*_blank(config, shape, dtype), jnp.zeros((trees, samples), jnp.int32), updates)


def _blank(config: DecoderConfig, shape: tuple[int, ...], dtype: jnp.dtype) -> tuple[Arrays, Arrays]:
    """Return keys and values of all attention layers, as separate arrays because caches are donated."""
    layers = range(config.layer_mixers.count(ATTENTION))
    keys, values = (tuple(jnp.zeros(shape, dtype) for _ in layers) for _ in range(2))
    return keys, values


def _of_recurrent(config: DecoderConfig, blank: str, **sizes: Any) -> tuple[Any, ...]:
    """Create a blank cache for each recurrent layer, by the seam of this name."""
    if config.recurrence is None:
        return ()
    make = get("recurrent layers", blank).value
    return tuple(make(config.recurrence, **sizes) for _ in range(config.layer_mixers.count(RECURRENT)))


def read_stream(
    params: Params,
    batch: StreamBatch,
    *,
    config: DecoderConfig,
    dtype: jnp.dtype,
    mesh: Mesh | None = None,
    lora_scale: float = 1.0,
) -> StreamCache:
    """Read prompts packed into streams; for arguments see :func:`prb_jax.models.readouts.score_tree.score_stream`."""
    decoder = bind(config, params)
    decoded = decode_stream_keeping(decoder, batch, dtype=dtype, mesh=mesh, lora_scale=lora_scale)
    return StreamCache(decoded.keys, decoded.values, decoded.recurrent)


def put_prefixes(held: PrefixCache, stream: StreamCache, moves: Moves) -> PrefixCache:
    """Return the prefix cache with some prompts replaced by prompts of streams."""
    places, lengths, trees = map(jnp.asarray, (moves.places, moves.lengths, moves.trees))

    def put(old: jax.Array, tokens: jax.Array) -> jax.Array:
        new = jax.vmap(lambda of_part, places: of_part[places])(tokens, places)
        return put_rows(old, new.swapaxes(2, 3), trees)

    def put_states(number: int, old: RecurrentPrefix) -> RecurrentPrefix:
        of_layer = jax.tree.map(lambda leaf: leaf[number], stream.recurrent)
        new = get("recurrent layers", "prompts of streams").value(of_layer, jnp.asarray(moves.ends), lengths)
        return jax.tree.map(lambda held, read: put_rows(held, read.astype(held.dtype), trees), old, new)

    return PrefixCache(
        tuple(map(put, held.keys, stream.keys)),
        tuple(map(put, held.values, stream.values)),
        put_rows(held.lengths, lengths, trees),
        tuple(map(put_states, range(len(held.recurrent)), held.recurrent)),
    )


def put_rows(old: jax.Array, new: jax.Array, trees: jax.Array) -> jax.Array:
    """Return ``old`` [B, ...] with ``new`` [S, F, ...] written to rows ``trees`` [S, F]; see :class:`Moves`."""
    of_parts = old.reshape(len(trees), -1, *old.shape[1:])
    # Mapped over the parts: each device writes its rows, without a gather.
    put = jax.vmap(lambda rows, more, places: rows.at[places].set(more, mode="drop"))
    return put(of_parts, new, trees).reshape(old.shape)


def layers_of(decoder: Decoder) -> tuple[nnx.State, ...]:
    """Return the state of each layer, sliced from the stack once for many tokens."""
    stacks = stacks_of(decoder.layers)
    return tuple(stacks.at(number) for number in range(decoder.config.num_hidden_layers))


def extend(
    params: Params,
    layers: tuple[nnx.State, ...],
    tokens: jax.Array,
    prefix: PrefixCache,
    suffix: SuffixCache,
    *,
    config: DecoderConfig,
    dtype: jnp.dtype,
    mesh: Mesh | None = None,
    lora_scale: float = 1.0,
) -> tuple[jax.Array, SuffixCache]:
    """Run the decoder on one more token per sample.

    Args:
      params: Parameters of the embedding and the last norm.
      layers: Result of :func:`layers_of`.
      tokens: Next token of each sample, int32 [B, S].
      prefix, suffix: Caches of the earlier tokens; a full suffix (``lengths`` = M) is not written to.
      config, dtype, mesh, lora_scale: Same as in :func:`read_stream`.

    Returns:
      Normed states [B, S, D] in ``dtype``, and the suffix with the new tokens.
    """
    tried = try_tokens(
        params, layers, tokens[..., None], suffix.lengths[..., None], prefix, suffix,
        config=config, dtype=dtype, mesh=mesh, lora_scale=lora_scale,
    )  # fmt: skip
    states = bind(config, params).normed(tried.states[:, :, 0]).astype(dtype)
    return states, take_tried(suffix, tried, jnp.zeros_like(suffix.lengths))


@jax.tree_util.register_dataclass
@dataclass(frozen=True)
class Tried:
    """Candidate tokens, C per sample, run without being written to the caches: a tree of one-token responses."""

    states: jax.Array  # [B, S, C, D], before the last norm
    keys: Arrays  # one array per attention layer [B, S, C, G, H]
    values: Arrays
    recurrent: tuple[RecurrentSuffix, ...] = ()  # one per recurrent layer, axis 2 = C, no columns

    __repr__ = short_repr


def try_tokens(
    params: Params,
    layers: tuple[nnx.State, ...],
    tokens: jax.Array,
    places: jax.Array,
    prefix: PrefixCache,
    suffix: SuffixCache,
    *,
    config: DecoderConfig,
    dtype: jnp.dtype,
    mesh: Mesh | None = None,
    lora_scale: float = 1.0,
) -> Tried:
    """Run C candidate tokens per sample, each independent of the others; the caches are only read.

    Args:
      params, layers, prefix, suffix, config, dtype, mesh, lora_scale: Same as in :func:`extend`.
      tokens: Candidate tokens, int32 [B, S, C].
      places: Number of tokens of the sample that each candidate follows, at most ``suffix.lengths``, int32 [B, S, C].
    """
    split = constrainer(mesh)
    gather = gatherer(mesh)
    shape = tokens.shape

    def constrain(x: jax.Array, axes: Any) -> jax.Array:
        # The second axis contains samples instead of tokens, so it must not be sharded.
        return split(x, [None if axis == "tokens" else axis for axis in axes])

    decoder = bind(config, params)
    graphs = stacks_of(decoder.layers).graphs
    flat = tokens.reshape(shape[0], -1)
    x = constrain(decoder.scaled(decoder.rows(flat, dtype)), ("batch", None, None))
    positions = prefix.lengths[:, None] + places.reshape(flat.shape)
    angles = angles_of_layers(config, positions)
    kept: dict[str, list[Any]] = {mixer: [] for mixer in config.layer_mixers}
    for number, state in enumerate(layers):
        slides, kind = config.layer_windows[number], config.kinds[number]
        mixer = kind[0]
        own = len(kept[mixer])  # index of the layer among the layers of its mixer
        attend, recur = _attend, None
        if mixer == ATTENTION:
            attend = functools.partial(
                _attend,
                prefix=(prefix.keys[own], prefix.values[own], prefix.lengths),
                suffix=(suffix.keys[own], suffix.values[own], places),
                window=config.sliding_window if slides else None,
                constrain=constrain,
            )
        else:
            of_layer: dict[str, Any] = {"prefix": prefix.recurrent[own], "suffix": suffix.recurrent[own]}
            recur = functools.partial(get("recurrent layers", "over caches").value, places=places, **of_layer)
        query_angles, key_angles = angles(slides, config.layer_rotates[number])
        context = LayerContext(
            query_angles=query_angles,
            key_angles=key_angles,
            attend=attend,
            constrain=constrain,
            recur=recur,
            lora_scale=lora_scale,
            mesh=mesh,
            splits_tokens=False,
        )
        x, of_mixer = nnx.merge(graphs[kind], gather(state))(x, context)
        kept[mixer].append(of_mixer)
    keys, values = (
        tuple(pair[which].reshape(*shape, *pair[which].shape[2:]) for pair in kept.get(ATTENTION, ()))
        for which in (0, 1)
    )
    return Tried(x.reshape(*shape, -1), keys, values, tuple(kept.get(RECURRENT, ())))


def take_tried(suffix: SuffixCache, tried: Tried, which: jax.Array) -> SuffixCache:
    """Return the suffix with candidate token ``which`` int32 [B, S] of each sample appended."""

    def put(cache: jax.Array, token: jax.Array, place: jax.Array) -> jax.Array:
        return cache.at[:, place].set(token, mode="drop")

    # Mapped over B and S instead of indexed: each device then writes its rows, without a gather.
    put_all = jax.vmap(jax.vmap(put))

    def put_bits(cache: jax.Array, tokens: jax.Array, places: jax.Array) -> jax.Array:
        return from_bits(put_all(in_bits(cache), in_bits(tokens), places), cache.dtype)

    # Nothing is above infinity, so this is the length. But XLA knows only by the states that the caches are read before
    # they are written; otherwise a loop over tokens copies all caches twice for each token.
    ends = suffix.lengths + (tried.states[:, :, 0, 0] > jnp.inf)

    def written(cache: jax.Array, new: jax.Array) -> jax.Array:
        chosen = jnp.take_along_axis(new, which.reshape(*which.shape, *[1] * (new.ndim - 2)), axis=2)[:, :, 0]
        return lax.platform_dependent(cache, chosen.astype(cache.dtype), ends, cpu=put_bits, default=put_all)

    return SuffixCache(
        tuple(map(written, suffix.keys, tried.keys)),
        tuple(map(written, suffix.values, tried.values)),
        suffix.lengths + 1,
        jax.tree.map(written, suffix.recurrent, tried.recurrent),
    )


def keep_suffix(prefix: PrefixCache, suffix: SuffixCache, which: jax.Array, counts: jax.Array) -> PrefixCache:
    """Append the first tokens of one sample to each prompt, so that they need not be read again.

    Args:
      prefix: Prompts, with room for the tokens.
      suffix: Tokens of the samples.
      which: Index of the sample, int32 [B].
      counts: Number of its tokens, int32 [B]; 0 leaves a prompt unchanged.
    """

    def longer(old: jax.Array, new: jax.Array) -> jax.Array:
        chosen = jnp.take_along_axis(new, which[:, None, None, None, None], axis=1)[:, 0]
        both = jnp.concatenate([old, chosen], axis=2)
        cut = functools.partial(lax.dynamic_slice_in_dim, slice_size=old.shape[2], axis=1)
        return jax.vmap(cut)(both, counts)

    return PrefixCache(
        tuple(map(longer, prefix.keys, suffix.keys)),
        tuple(map(longer, prefix.values, suffix.values)),
        prefix.lengths + counts,
        tuple(
            get("recurrent layers", "longer prompts").value(before, added, which, counts)
            for before, added in zip(prefix.recurrent, suffix.recurrent, strict=True)
        ),
    )


def _attend(
    q: jax.Array,
    k: jax.Array,
    v: jax.Array,
    *,
    prefix: tuple[jax.Array, jax.Array, jax.Array],
    suffix: tuple[jax.Array, jax.Array, jax.Array],
    window: int | None,
    softcap: float | None,
    constrain: Constrain,
    sinks: jax.Array | None = None,
) -> jax.Array:
    """Return attention of C tokens per sample to the prefix, the sample's suffix and the token itself, [B, S * C, N,
    H].

    Args:
      q: Scaled queries [B, S * C, N, H]; k and v [B, S * C, G, H] belong to the same tokens.
      prefix: Keys and values [B, G, P, H] and lengths [B].
      suffix: Keys and values [B, S, G, M, H], and the number of them that each token sees [B, S, C].
      window: Sliding window of the layer.
      softcap: Scores s become ``softcap * tanh(s / softcap)``.
      constrain: Function that sets the sharding of the queries.
      sinks: Additional logit of each head [N] in its softmax.
    """
    (pk, pv, prefix_lengths), (sk, sv, lengths) = prefix, suffix
    heads, head_dim = q.shape[2:]
    trees, samples, tried = lengths.shape
    kv_heads, columns, places = k.shape[2], pk.shape[2], sk.shape[3]
    group = heads // kv_heads
    # All tokens of a sample read the same caches, so tokens act as further heads: [B, S, G, C * group, H].
    grouped = q.reshape(trees, samples, tried, kv_heads, group, head_dim).transpose(0, 1, 3, 2, 4, 5)
    flat = grouped.reshape(trees, samples, kv_heads, tried * group, head_dim)
    by_tree = flat.transpose(0, 2, 1, 3, 4).reshape(trees, kv_heads, samples * tried * group, head_dim)
    by_tree = constrain(by_tree, ("batch", "heads", None, None))
    k, v = (x.reshape(trees, samples, tried, kv_heads, head_dim) for x in (k, v))

    capped = functools.partial(soft_capped, softcap=softcap)
    # Prefix scores: [B, G, S, C, group, P]. Its last token is one position before the suffix.
    column = jnp.arange(columns)
    seen = (column >= columns - prefix_lengths[:, None])[:, None, None]
    seen = jnp.broadcast_to(seen, (trees, samples, tried, columns))
    if window is not None:
        seen = seen & (lengths[..., None] + columns - column < window)
    before = capped(product(by_tree, pk, (3, 3), batch=2))
    before = before.reshape(trees, kv_heads, samples, tried, group, columns)
    before = jnp.where(seen[:, None, :, :, None], before, _HIDDEN)

    # Suffix scores: [B, S, G, C, group, M]; score of the token itself: [B, S, G, C, group].
    place = jnp.arange(places)
    written = place < lengths[..., None]
    if window is not None:
        written = written & (lengths[..., None] - place < window)
    added = capped(product(flat, sk, (4, 4), batch=3))
    added = added.reshape(trees, samples, kv_heads, tried, group, places)
    added = jnp.where(written[:, :, None, :, None], added, _HIDDEN)
    own_scores = capped(float32_einsum("bsgcnh,bscgh->bsgcn", grouped, k))

    # Merge the three parts: with the largest score m, each is a sum of exp(score - m) and of weighted values.
    def by_sample(x: jax.Array) -> jax.Array:
        return x.swapaxes(1, 2)  # [B, G, S, ...] to [B, S, G, ...] and back

    top = jnp.maximum(jnp.maximum(by_sample(before.max(axis=-1)), added.max(axis=-1)), own_scores)
    weights_before = jnp.exp(before - by_sample(top)[..., None])
    weights_added = jnp.exp(added - top[..., None])
    weight_own = jnp.exp(own_scores - top)
    total = by_sample(weights_before.sum(axis=-1)) + weights_added.sum(axis=-1) + weight_own
    wide = weights_before.reshape(trees, kv_heads, samples * tried * group, columns).astype(pv.dtype)
    mixed = product(wide, pv, (3, 2), batch=2)
    mixed = by_sample(mixed.reshape(trees, kv_heads, samples, tried * group, head_dim))
    narrow = weights_added.reshape(trees, samples, kv_heads, tried * group, places).astype(sv.dtype)
    mixed = mixed + product(narrow, sv, (4, 3), batch=3)
    mixed = mixed.reshape(grouped.shape)
    values = v.transpose(0, 1, 3, 2, 4)[:, :, :, :, None]
    mixed = (mixed + weight_own[..., None] * values.astype(jnp.float32)) / total[..., None]
    out = mixed.transpose(0, 1, 3, 2, 4, 5).reshape(q.shape)
    log = (top + jnp.log(total)).transpose(0, 1, 3, 2, 4).reshape(q.shape[:-1])
    return with_sinks(out, log, sinks).astype(q.dtype)
