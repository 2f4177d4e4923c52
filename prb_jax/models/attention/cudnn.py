"""Attention over packed streams on NVIDIA GPUs by cuDNN's fused attention.

cuDNN supports explicit masks but not trees. Each call therefore computes one block of queries under an explicit mask.
Its keys are the block itself and copies of the earlier keys in the block's table (:mod:`prb_jax.trees.streams`).
The backward pass copies the keys again, a few blocks at a time, and adds up the gradients of the copies block by
block. The keys of a block are distinct, so the sums need no atomic operations, unlike XLA's derivative of the copying.
"""

from __future__ import annotations

import functools
from dataclasses import dataclass
from typing import Any, Literal, NamedTuple

import jax
import jax.numpy as jnp
from jax.sharding import Mesh

from prb_jax.models.attention.choice import StreamAttention
from prb_jax.models.attention.first_use import kernel_fault
from prb_jax.models.attention.mesh import one_by_one
from prb_jax.models.config.decoder import DecoderConfig
from prb_jax.platform.sharding import sequence_parts
from prb_jax.trees.kernel_tables import KeyLayout, KeyTable, with_key_layout
from prb_jax.trees.streams import (
    PackedStream,
    StreamBatch,
    StreamOptions,
    StreamShape,
    make_stream_batch,
    query_order,
)
from prb_jax.trees.tree import build_tree

COPIED_TOKENS = 65_536
"""Maximum number of keys, copies and the queries' keys, that exist at once: 256 MiB for 8 heads of 128 numbers."""

Implementation = Literal["cudnn", "xla"]
"""Implementation of :func:`jax.nn.dot_product_attention`; "xla" runs on any machine, for tests of the masks."""


class KeyFacts(NamedTuple):
    """Visibility between the tokens of a stream, int32."""

    # for blocks of queries: the stream's table; see :class:`prb_jax.trees.kernel_tables.KeyTable`
    keys: jax.Array
    counts: jax.Array
    places: jax.Array  # [blocks, Q], places of the queries of each block
    # for all tokens: [N]; see :class:`prb_jax.trees.streams.StreamBatch`
    until: jax.Array
    positions: jax.Array


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
    """Same as :func:`prb_jax.models.attention.streams.stream_attention`, by cuDNN.

    Products have factors in q's dtype and float32 sums; the softmax is float32.

    Args:
        q, k, v, window, softcap, mesh: Same as there.
        batch: Streams with the table of keys for this window.
        copied_tokens: Limit of copied keys; see :data:`COPIED_TOKENS`.
        implementation: Implementation; see :data:`Implementation`.

    Raises:
        NotImplementedError: A softcap is set; or (from JAX) cuDNN does not support the dtype or the head dim.
        RuntimeError: cuDNN is missing (from JAX).
    """
    if softcap is not None:
        raise NotImplementedError(f"cuDNN's attention does not support softcap, found {softcap:g}")
    call = functools.partial(jax.nn.dot_product_attention, scale=1.0, implementation=implementation)
    table, how = batch.table(window), _Blocks(call, window, copied_tokens)
    if not isinstance(table, KeyTable):
        raise ValueError(f"these streams have no table of keys for a window of {window}")
    streams, blocks = table.counts.shape
    order = query_order(blocks, sequence_parts(mesh)).reshape(-1)
    places = jnp.broadcast_to(
        jnp.arange(q.shape[1]).reshape(blocks, -1), (streams, *(blocks, q.shape[1] // blocks))
    )
    of_queries = [jnp.take(jnp.asarray(x), order, axis=1) for x in (table.keys, table.counts, places)]

    def stream(q: jax.Array, k: jax.Array, v: jax.Array, of_queries: Any, of_keys: Any) -> jax.Array:
        return _stream(how, q, k, v, KeyFacts(*of_queries, *of_keys))

    return one_by_one(stream, mesh)(
        q, k, v, of_queries, [jnp.asarray(x) for x in (batch.until, batch.positions)]
    )


def cudnn_refusal(
    config: DecoderConfig, *, mesh: Mesh | None, dtype: jnp.dtype, trained: bool = False
) -> str | None:
    """Return why cuDNN cannot compute the attention of a model on this machine, or None if it can.

    A small program over packed streams is compiled for the GPU of this process, with gradients if the model is
    ``trained``. JAX and cuDNN thus check head sizes, versions and chips themselves."""
    shards = 1 if mesh is None else mesh.shape["tensor"]
    return _refusal(
        config.num_attention_heads // shards,
        config.num_key_value_heads // shards,
        config.head_dim,
        config.attn_logit_softcapping,
        any(config.layer_windows) and config.sliding_window is not None,
        jnp.dtype(dtype).name,
        trained,
    )


def _not_taken(
    config: DecoderConfig, *, mesh: Mesh | None, dtype: jnp.dtype, trained: bool = False
) -> str | None:
    """Return the reason of :func:`cudnn_refusal` as a message for the user; also checks the numbers."""
    if reason := cudnn_refusal(config, mesh=mesh, dtype=dtype, trained=trained):
        return f"cuDNN does not take this model ({reason})"
    return kernel_fault(CUDNN, cudnn_stream_attention, config, mesh=mesh, takes_softcap=False)


CUDNN = StreamAttention("cuDNN over packed streams", "keys", refusal=_not_taken)


@functools.cache
def _refusal(
    heads: int,
    kv_heads: int,
    head_dim: int,
    softcap: float | None,
    slides: bool,
    dtype: str,
    trained: bool = False,
) -> str | None:
    windows = (None, 48) if slides else (None,)
    q, k = (jax.ShapeDtypeStruct((1, 256, n, head_dim), dtype) for n in (heads, kv_heads))
    tree, options = build_tree([range(200)]), StreamOptions(256, window=48)
    options = with_key_layout(options, KeyLayout(tree.tokens, 1, 128))
    packed = (PackedStream(StreamShape(256, 16), (0,), (0,), tree.tokens),)
    batch = make_stream_batch([tree], packed, options)

    def program(q: jax.Array, k: jax.Array, v: jax.Array) -> list[jax.Array]:
        attend = functools.partial(cudnn_stream_attention, q, k, v, batch=batch, softcap=softcap)
        return [attend(window=window) for window in windows]

    def gradients(q: jax.Array, k: jax.Array, v: jax.Array) -> Any:
        def total(q: jax.Array, k: jax.Array, v: jax.Array) -> jax.Array:
            return sum(jnp.sum(x, dtype=jnp.float32) for x in program(q, k, v))  # pyright: ignore[reportReturnType]

        return jax.grad(total, (0, 1, 2))(q, k, v)

    try:
        jax.jit(gradients if trained else program).lower(q, k, k).compile()
    except (NotImplementedError, RuntimeError, ValueError) as error:
        return str(error).strip().partition("\n")[0] or type(error).__name__
    return None


@dataclass(frozen=True)
class _Blocks:
    """Options for computing the blocks of a stream."""

    call: Any  # function of scaled queries, keys and values
    window: int | None
    copied_tokens: int  # see :data:`COPIED_TOKENS`

    def deal(self, facts: KeyFacts, *arrays: jax.Array) -> list[tuple[jax.Array, ...]]:
        """Arrange arrays [n, ...] in rounds of blocks, with the places and numbers of their keys.

        Each entry is a stack of rounds with c blocks: arrays [rounds, c, Q, ...], places of the queries [rounds, c, Q]
        and of the keys [rounds, c, Q + L], and the number of keys [rounds, c]. The last entry contains the blocks of
        an incomplete round.
        """
        (count, width), queries = facts.keys.shape, facts.places.shape[1]
        # The keys of the block come first, because the copied keys end in padding, which the number of keys cuts off.
        keys = jnp.concatenate([facts.places, facts.keys], axis=1)
        blocks = [x.reshape(count, queries, *x.shape[1:]) for x in arrays]
        stacks = [*blocks, facts.places, keys, facts.counts + queries]
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
        """Compute attention of c blocks: queries [c, Q, heads, H], copies [c, Q + L, G, H], places of both, and
        numbers of keys [c]."""
        query, of_key = place[:, :, None], key[:, None]
        seen = (of_key <= query) & (query < facts.until[of_key])
        if self.window is not None:
            seen &= facts.positions[query] - facts.positions[of_key] < self.window
        return self.call(q, k, v, mask=seen[:, None], key_value_seq_lengths=lengths)


@functools.partial(jax.custom_vjp, nondiff_argnums=(0,))
def _stream(how: _Blocks, q: jax.Array, k: jax.Array, v: jax.Array, facts: KeyFacts) -> jax.Array:
    """Compute one stream, a few blocks at a time: q [n, heads, H], k and v [N, G, H] -> [n, heads, H]."""

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
        # Gradients of padding keys are discarded, because a library may leave arbitrary values there.
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
