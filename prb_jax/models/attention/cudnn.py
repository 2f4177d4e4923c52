"""Attention over trees on NVIDIA GPUs by cuDNN's fused attention: padded ones, and packed streams.

cuDNN knows causal masks, windows, lengths and masks that are written down, but no trees. A padded tree is two kinds of
calls: the prefix with itself, causal; and every response with its own tokens and its prefix, under a written mask of
only ``R x (R + P)`` numbers. The keys of the prefix are copied for the second kind, a few responses at a time. The
other way, a call with the prefix and a call with the response merged by the logarithms of their denominators, copies
nothing, but :func:`jax.nn.dot_product_attention` rounds these logarithms to bfloat16: of a sum between exp(8) and
exp(16) that is up to 3 %.

Lengths cut off what stands on the right, so prefixes are moved to the left of their columns first.

A packed stream is one kind of call: each block of its tokens, where they lie, with the block itself and with copies of
the keys before it that its table lists (:mod:`prb_jax.trees.stream_tables`), under a written mask of the block. Its
backward pass copies them again, a few blocks at a time, and adds up the gradients of the copies block by block: the
keys of a block are all different, so that their sums need no atomic operations, as XLA's derivative of the copying
does.
"""

from __future__ import annotations

import functools
from dataclasses import dataclass
from typing import Any, Literal

import jax
import jax.numpy as jnp
from jax.sharding import Mesh

from prb_jax.models.attention.blocks import divisor
from prb_jax.models.attention.streams import one_by_one, over_mesh
from prb_jax.models.config.decoder import DecoderConfig
from prb_jax.trees.batches import Bucket
from prb_jax.trees.packing import PackedStream, StreamOptions, StreamShape, with_key_layout
from prb_jax.trees.stream_tables import KEY_COLUMNS, KeyLayout, KeyTable
from prb_jax.trees.streams import StreamBatch, make_stream_batch
from prb_jax.trees.tree import build_tree

COPIED_TOKENS = 65_536
"""The most keys, copied ones and those of the queries, that exist at a time: 256 MiB at 8 heads of 128 numbers."""

Implementation = Literal["cudnn", "xla"]
"""Of :func:`jax.nn.dot_product_attention`; "xla" runs on any machine, to test the masks."""

KeyFacts = tuple[KeyTable, jax.Array, jax.Array]
"""Of a stream: its table of keys, and int32 [N] `until` and positions (:class:`prb_jax.trees.streams.StreamBatch`)."""


def cudnn_attention(
    q: jax.Array,
    k: jax.Array,
    v: jax.Array,
    *,
    bucket: Bucket,
    prefix_lengths: jax.Array,
    window: int | None = None,
    softcap: float | None = None,
    mesh: Mesh | None = None,
    copied_tokens: int = COPIED_TOKENS,
    implementation: Implementation = "cudnn",
) -> jax.Array:
    """The same as :func:`prb_jax.models.attention.blockwise.blockwise_attention`, by cuDNN.

    Products have factors of q's dtype and float32 sums, the softmax is float32. Padding left of a prefix gets zeros.

    Args:
        mesh: over which trees and heads are split; None for one device.
        copied_tokens: see :data:`COPIED_TOKENS`.
        implementation: see :data:`Implementation`.

    Raises:
        NotImplementedError: a softcap, or of JAX: a dtype or a head dim that cuDNN does not know.
        RuntimeError: of JAX: there is no cuDNN.
    """
    call = _fused(softcap, implementation)

    def attend(q: jax.Array, k: jax.Array, v: jax.Array, lengths: jax.Array) -> jax.Array:
        prefix, parts = bucket.prefix, []
        if prefix:
            parts.append(_prefixes(call, q[:, :prefix], k[:, :prefix], v[:, :prefix], lengths, window=window))
        if bucket.tokens > prefix:
            options: Any = {"bucket": bucket, "window": window, "copied_tokens": copied_tokens}
            parts.append(_responses(call, q, k, v, lengths, **options))
        return jnp.concatenate(parts, axis=1)

    # Every device calls cuDNN for its own trees and heads.
    return over_mesh(attend, mesh)(q, k, v, prefix_lengths.astype(jnp.int32))


def cudnn_stream_attention(
    q: jax.Array,
    k: jax.Array,
    v: jax.Array,
    *,
    batch: StreamBatch,
    window: int | None = None,
    softcap: float | None = None,
    mesh: Mesh | None = None,
    copied_tokens: int = COPIED_TOKENS,
    implementation: Implementation = "cudnn",
) -> jax.Array:
    """As :func:`prb_jax.models.attention.streams.stream_attention`, by cuDNN.

    Products have factors of q's dtype and float32 sums, the softmax is float32.

    Args:
        q, k, v, window, softcap, mesh: as given there.
        batch: the streams, with the table of keys of this window.
        copied_tokens, implementation, errors: as of :func:`cudnn_attention`.
    """
    call, table = _fused(softcap, implementation), batch.table(window)
    if not isinstance(table, KeyTable):
        raise ValueError(f"these streams have no table of keys for a window of {window}")
    stream = functools.partial(_stream, _Blocks(call, window, copied_tokens))
    facts = (table, jnp.asarray(batch.until), jnp.asarray(batch.positions))
    return one_by_one(stream, mesh)(q, k, v, facts)


def _fused(softcap: float | None, implementation: Implementation) -> Any:
    """JAX's attention of scaled queries; errors as of :func:`cudnn_attention`."""
    if softcap is not None:
        raise NotImplementedError(f"cuDNN's attention knows no softcap, found {softcap:g}")
    return functools.partial(jax.nn.dot_product_attention, scale=1.0, implementation=implementation)


def cudnn_refusal(
    config: DecoderConfig,
    *,
    mesh: Mesh | None,
    dtype: jnp.dtype,
    streams: bool = False,
    trained: bool = False,
) -> str | None:
    """Return why cuDNN does not compute the attention of a model on this machine, or None where it does.

    A small program is compiled for the process's own GPU, with ``streams`` of packed streams too, and with gradients
    where the model is ``trained``, so what JAX and cuDNN ask of head sizes, versions and chips is asked of them, not
    listed here.
    """
    if mesh is not None and mesh.shape["sequence"] > 1:
        return f"it has all tokens of a tree on one device, found sequence={mesh.shape['sequence']}"
    shards = 1 if mesh is None else mesh.shape["tensor"]
    return _refusal(
        config.num_attention_heads // shards,
        config.num_key_value_heads // shards,
        config.head_dim,
        config.attn_logit_softcapping,
        any(config.layer_windows) and config.sliding_window is not None,
        jnp.dtype(dtype).name,
        streams,
        trained,
    )


@functools.cache
def _refusal(
    heads: int,
    kv_heads: int,
    head_dim: int,
    softcap: float | None,
    slides: bool,
    dtype: str,
    streams: bool,
    trained: bool = False,
) -> str | None:
    bucket, windows = Bucket(64, 2, 32), (None, 48) if slides else (None,)
    q, k = (jax.ShapeDtypeStruct((1, 256, n, head_dim), dtype) for n in (heads, kv_heads))
    lengths = jax.ShapeDtypeStruct((1,), jnp.int32)
    tree, options = build_tree([range(200)]), StreamOptions(256, window=48)
    options = with_key_layout(options, KeyLayout(tree.tokens, 1, 128))
    packed = (PackedStream(StreamShape(256, 16), (0,), (0,), tree.tokens),)
    batch = make_stream_batch([tree], packed, options)

    def program(q: jax.Array, k: jax.Array, v: jax.Array, lengths: jax.Array) -> list[jax.Array]:
        trees = [x[:, : bucket.tokens] for x in (q, k, v)]
        options: Any = {"bucket": bucket, "prefix_lengths": lengths, "softcap": softcap}
        outputs = [cudnn_attention(*trees, window=window, **options) for window in windows]
        if streams:
            attend = functools.partial(cudnn_stream_attention, q, k, v, batch=batch, softcap=softcap)
            outputs += [attend(window=window) for window in windows]
        return outputs

    def gradients(q: jax.Array, k: jax.Array, v: jax.Array, lengths: jax.Array) -> Any:
        def total(q: jax.Array, k: jax.Array, v: jax.Array) -> jax.Array:
            return sum(jnp.sum(x, dtype=jnp.float32) for x in program(q, k, v, lengths))  # pyright: ignore[reportReturnType]

        return jax.grad(total, (0, 1, 2))(q, k, v)

    try:
        jax.jit(gradients if trained else program).lower(q, k, k, lengths).compile()
    except (NotImplementedError, RuntimeError, ValueError) as error:
        return str(error).strip().partition("\n")[0] or type(error).__name__
    return None


@dataclass(frozen=True)
class _Blocks:
    """How the blocks of a stream are computed."""

    call: Any  # of :func:`_fused`
    window: int | None
    copied_tokens: int  # see :data:`COPIED_TOKENS`

    def deal(self, facts: KeyFacts, *arrays: jax.Array) -> list[tuple[jax.Array, ...]]:
        """What is computed at a time: arrays [N, ...] in blocks, with the places and numbers of their keys.

        Each entry is a stack of rounds with c blocks: arrays [rounds, c, Q, ...], places of the queries [rounds, c, Q]
        and of the keys [rounds, c, Q + L], and how many of these there are [rounds, c]. A last entry has the blocks
        that fill no round.
        """
        table, until, _ = facts
        count, width = table.keys.shape
        queries = len(until) // count
        places = jnp.arange(len(until)).reshape(count, queries)
        # The block's own keys first: behind those before it stands padding, which their number cuts off.
        keys = jnp.concatenate([places, jnp.asarray(table.keys)], axis=1)
        blocks = [x.reshape(count, queries, *x.shape[1:]) for x in arrays]
        stacks = [*blocks, places, keys, jnp.asarray(table.counts) + queries]
        rounds = -(-count // max(1, self.copied_tokens // (queries + width)))
        at_once = -(-count // rounds)
        whole = count // at_once * at_once
        dealt = [tuple(x[:whole].reshape(-1, at_once, *x.shape[1:]) for x in stacks)]
        return dealt if whole == count else [*dealt, tuple(x[None, whole:] for x in stacks)]

    def attend(
        self,
        facts: KeyFacts,
        q: jax.Array,
        k: jax.Array,
        v: jax.Array,
        place: jax.Array,
        key: jax.Array,
        lengths: jax.Array,
    ) -> jax.Array:
        """Of c blocks: queries [c, Q, heads, H], copies [c, Q + L, G, H], places of both, and numbers of keys [c]."""
        _, until, positions = facts
        query, of_key = place[:, :, None], key[:, None]
        seen = (of_key <= query) & (query < until[of_key])
        if self.window is not None:
            seen &= positions[query] - positions[of_key] < self.window
        return self.call(q, k, v, mask=seen[:, None], key_value_seq_lengths=lengths)


@functools.partial(jax.custom_vjp, nondiff_argnums=(0,))
def _stream(how: _Blocks, q: jax.Array, k: jax.Array, v: jax.Array, facts: KeyFacts) -> jax.Array:
    """One stream: q [N, heads, H], k and v [N, G, H] -> [N, heads, H], a few blocks at a time."""

    def some(args: tuple[jax.Array, ...]) -> jax.Array:
        blocks, place, key, lengths = args
        return how.attend(facts, blocks, _copies(k, key), _copies(v, key), place, key, lengths)

    parts = [jax.lax.map(some, stack) for stack in how.deal(facts, q)]
    return jnp.concatenate([part.reshape(-1, *q.shape[1:]) for part in parts])


def _stream_backward(
    how: _Blocks, kept: tuple[Any, ...], cotangent: jax.Array
) -> tuple[jax.Array, jax.Array, jax.Array, None]:
    q, k, v, facts = kept

    def some(
        sums: tuple[jax.Array, ...], args: tuple[jax.Array, ...]
    ) -> tuple[tuple[jax.Array, ...], jax.Array]:
        blocks, pulled, place, key, lengths = args
        attend = functools.partial(how.attend, facts, place=place, key=key, lengths=lengths)
        _, pull = jax.vjp(attend, blocks, _copies(k, key), _copies(v, key))
        to_q, *to_copies = pull(pulled)
        # Padding behind the keys goes nowhere. A library may leave anything there.
        real = jnp.arange(key.shape[1]) < lengths[:, None]
        targets = jnp.where(real, key, len(k) + jnp.arange(key.shape[1]))

        def add(block: jax.Array, sums: tuple[jax.Array, ...]) -> tuple[jax.Array, ...]:
            return tuple(
                total.at[targets[block]].add(
                    more[block].astype(total.dtype), mode="drop", unique_indices=True
                )
                for total, more in zip(sums, to_copies, strict=True)
            )

        return jax.lax.fori_loop(0, len(blocks), add, sums), to_q

    sums = tuple(jnp.zeros(x.shape, jnp.float32) for x in (k, v))
    parts: list[jax.Array] = []
    for stack in how.deal(facts, q, cotangent):
        sums, part = jax.lax.scan(some, sums, stack)
        parts.append(part.reshape(-1, *q.shape[1:]))
    to_k, to_v = sums
    return jnp.concatenate(parts), to_k.astype(k.dtype), to_v.astype(v.dtype), None


_stream.defvjp(lambda how, *given: (_stream(how, *given), given), _stream_backward)


def _copies(x: jax.Array, places: jax.Array) -> jax.Array:
    return jnp.take(x, places, axis=0, mode="clip")


def _prefixes(
    call: Any, q: jax.Array, k: jax.Array, v: jax.Array, lengths: jax.Array, *, window: int | None
) -> jax.Array:
    """Prefixes with themselves: q [B, P, N, H], k and v [B, P, G, H] -> [B, P, N, H]."""
    gaps = q.shape[1] - lengths
    real = jnp.maximum(lengths, 1)  # no call gets a row without a key
    out = call(
        *(_moved_left(x, gaps) for x in (q, k, v)),
        is_causal=True,
        query_seq_lengths=real,
        key_value_seq_lengths=real,
        local_window_size=None if window is None else (window - 1, 0),
    )
    # A library may leave anything at padding, NaN included.
    padding = jnp.arange(q.shape[1])[None] < gaps[:, None]
    return jnp.where(padding[:, :, None, None], 0, _moved_left(out, -gaps))


def _responses(
    call: Any,
    q: jax.Array,
    k: jax.Array,
    v: jax.Array,
    lengths: jax.Array,
    *,
    bucket: Bucket,
    window: int | None,
    copied_tokens: int,
) -> jax.Array:
    """Responses with themselves and their prefixes: [B, T, N or G, H] -> [B, K * R, N, H]."""
    rows, (prefix, count, length) = len(q), bucket.sides
    # A window never reaches further back into the prefix than from a response's first token.
    near = prefix if window is None else min(prefix, window - 1)
    lengths = jnp.minimum(lengths, near)
    near_k, near_v = (_moved_left(x[:, prefix - near : prefix], near - lengths) for x in (k, v))
    filling = -(length + near) % KEY_COLUMNS
    mask = _response_mask(length, near, lengths, window=window)
    mask = jnp.pad(mask, ((0, 0), (0, 0), (0, 0), (0, filling)))
    at_once = divisor(count, max(1, copied_tokens // (rows * (length + near))))
    rounds = count // at_once

    def some(arrays: tuple[jax.Array, ...]) -> jax.Array:
        """q, k and v [B, c, R, N or G, H] of c responses of every tree -> [B, c, R, N, H]."""
        q, k, v = arrays

        def keys(of_responses: jax.Array, shared: jax.Array) -> jax.Array:
            copied = jnp.broadcast_to(shared[:, None], (rows, at_once, *shared.shape[1:]))
            joined = jnp.concatenate([of_responses, copied], axis=2)
            joined = jnp.pad(joined, ((0, 0), (0, 0), (0, filling), (0, 0), (0, 0)))
            return joined.reshape(rows * at_once, *joined.shape[2:])

        out = call(
            q.reshape(rows * at_once, *q.shape[2:]),
            keys(k, near_k),
            keys(v, near_v),
            mask=mask if len(mask) == 1 else jnp.repeat(mask, at_once, axis=0),
            key_value_seq_lengths=jnp.repeat(lengths + length, at_once),
        )
        return out.reshape(q.shape)

    def dealt(x: jax.Array) -> jax.Array:
        """[B, T, n, H] -> [rounds, B, c, R, n, H]."""
        responses = x[:, prefix:].reshape(rows, rounds, at_once, length, *x.shape[2:])
        return jnp.moveaxis(responses, 1, 0)

    arrays = (dealt(q), dealt(k), dealt(v))
    if rounds == 1:
        out = some(tuple(x[0] for x in arrays))[None]
    else:
        out = jax.lax.map(some, arrays)
    return jnp.moveaxis(out, 0, 1).reshape(rows, count * length, *q.shape[2:])


def _response_mask(length: int, near: int, lengths: jax.Array, *, window: int | None) -> jax.Array:
    """Who of a response sees whom: bool [1 or B, 1, R, R + near], own tokens first, then the prefix from the left.

    Padding right of the prefix is seen: the number of keys cuts it off.
    """
    query, key, before = jnp.arange(length)[:, None], jnp.arange(length), jnp.arange(near)
    inside = key <= query
    if window is None:
        return jnp.concatenate([inside, jnp.ones((length, near), bool)], axis=1)[None, None]
    inside &= query - key < window
    seen = query + lengths[:, None, None] - before < window
    inside = jnp.broadcast_to(inside, (len(lengths), length, length))
    return jnp.concatenate([inside, seen], axis=2)[:, None]


def _moved_left(x: jax.Array, places: jax.Array) -> jax.Array:
    """x [B, S, n, H] with row b turned by places[b] to the left along S."""
    size = x.shape[1]
    if not size:
        return x
    index = (jnp.arange(size)[None] + places[:, None]) % size
    return jnp.take_along_axis(x, index[:, :, None, None], axis=1)
