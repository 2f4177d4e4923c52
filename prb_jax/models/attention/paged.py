"""Attention over packed streams on TPUs, for scoring: JAX's Pallas kernel for ragged batches and paged caches.

A stream falls into sequences of the kernel, and the keys of each are its conversation's pages
(:mod:`prb_jax.trees.stream_tables`), which sequences share. The kernel has no backward pass.
"""

from __future__ import annotations

from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
from jax.experimental.pallas.ops.tpu.ragged_paged_attention import ragged_paged_attention
from jax.sharding import Mesh

from prb_jax.models.attention.streams import one_by_one, over_mesh
from prb_jax.trees.kernel_tables import LANES
from prb_jax.trees.stream_tables import PageTable
from prb_jax.trees.streams import StreamBatch

QUERIES = 64
"""Queries of a block. Every block reads all keys of its conversations, so few queries wait for memory; with many, a
short run leaves most of its blocks unused."""

KEYS = 512
"""Keys of a block: with 16 heads of 128 numbers of keys and values and two buffers 4 MiB of fast memory."""

FAST_MEMORY = 64 << 20  # bytes of fast memory that the kernel may take: half of what v5e and v6e have


def paged_attention(
    q: jax.Array,
    k: jax.Array,
    v: jax.Array,
    *,
    batch: StreamBatch,
    window: int | None = None,
    softcap: float | None = None,
    mesh: Mesh | None = None,
) -> jax.Array:
    """As :func:`prb_jax.models.attention.streams.stream_attention`, by a kernel for TPUs that reads pages.

    Products have factors of q's dtype and float32 sums, the softmax is float32. Padding gets zeros.

    Args:
        q, k, v, window, softcap, mesh: as given there.
        batch: the streams, with their pages.
    """
    table = batch.pages
    assert table is not None
    tokens, head_dim = q.shape[1], q.shape[-1]

    def stream(args: tuple[jax.Array, jax.Array, jax.Array, PageTable]) -> jax.Array:
        table = args[-1]
        out = ragged_paged_attention(
            *kernel_arguments(*args),
            sliding_window=window,
            soft_cap=softcap,
            num_kv_pages_per_block=_keys_of_block(table) // table.tokens.shape[-1],
            num_queries_per_block=min(QUERIES, tokens),
            vmem_limit_bytes=FAST_MEMORY,
        )
        # The kernel may leave anything at padding, NaN included.
        real = jnp.arange(tokens) < jnp.asarray(table.starts)[-1]
        return jnp.where(real[:, None, None], out[..., :head_dim], 0)

    return over_mesh(lambda *arrays: one_by_one(stream, arrays), mesh)(q, k, v, table)


def kernel_arguments(
    q: jax.Array, k: jax.Array, v: jax.Array, table: PageTable
) -> tuple[jax.Array, jax.Array, jax.Array, jax.Array, jax.Array, jax.Array]:
    """Return the arrays that the kernel takes for one stream: q [N, heads, H], k and v [N, G, H].

    They are the queries, the pages of keys and values, and of the sequences the lengths of the keys, the pages, the
    first queries and the number.
    """
    tokens, columns = q.shape[0], -q.shape[-1] % LANES  # heads fill whole registers
    q, k, v = (jnp.pad(x, ((0, 0), (0, 0), (0, columns))) if columns else x for x in (q, k, v))
    # Of each kv head, keys and values stand side by side.
    both = jnp.stack([k, v], axis=2).reshape(tokens, -1, q.shape[-1])
    of_sequences: Any = table.keys, table.pages, table.starts, table.sequences
    return q, both[jnp.asarray(table.tokens)], *of_sequences


def visited_blocks(table: PageTable) -> int:
    """Return how many blocks of keys the kernel visits for the first stream of a table, in NumPy, and each kv head.

    A block of queries visits, for every sequence that it holds tokens of, all keys of the sequence.
    """
    starts, keys = np.asarray(table.starts[0]), np.asarray(table.keys[0])
    queries = -(-starts[1:] // QUERIES) - starts[:-1] // QUERIES
    return int((queries * -(-keys // _keys_of_block(table)))[: int(table.sequences[0, 0])].sum())


def _keys_of_block(table: PageTable) -> int:
    page, pages = table.tokens.shape[-1], table.pages.shape[-1]
    return page * max(1, min(KEYS // page, pages))
