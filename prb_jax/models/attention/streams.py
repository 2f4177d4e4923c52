"""Attention over packed streams (:mod:`prb_jax.trees.streams`) by XLA, for any machine, and its derivative."""

from __future__ import annotations

from typing import Any

import jax
import jax.numpy as jnp
from jax.sharding import Mesh

from prb_jax.models.attention.mesh import over_mesh, sequence_parts
from prb_jax.models.attention.walk import StreamFacts, attend_blocks, with_sinks
from prb_jax.seams import get
from prb_jax.trees.stream_tables import BLOCK, BlockTable, query_order
from prb_jax.trees.streams import StreamBatch


def walks(batch: StreamBatch, mesh: Mesh | None) -> bool:
    """Return whether streams are computed by the program for CPUs, one block after another."""
    platform = jax.default_backend() if mesh is None else mesh.devices.flat[0].platform
    return isinstance(batch.blocks, BlockTable) and platform == "cpu"


def stream_attention(
    q: jax.Array,
    k: jax.Array,
    v: jax.Array,
    *,
    batch: StreamBatch,
    window: int | None = None,
    softcap: float | None = None,
    sinks: jax.Array | None = None,
    mesh: Mesh | None = None,
) -> jax.Array:
    """Return the attention of every token to the tokens that it may see, [S, N, heads, H] in q's dtype.

    Softmax runs in float32; all products accumulate in float32. What it gives for padding is meaningless, and finite.

    Args:
        q: [S, N, heads, H], already scaled.
        k, v: [S, N, G, H].
        batch: the streams, with the table of blocks of this window.
        window: a token sees only the ``window`` last tokens, itself included.
        softcap: scores s become ``softcap * tanh(s / softcap)`` before masking.
        sinks: one more logit of each head [heads] in its softmax, which takes weight and gives nothing.
        mesh: over which streams, heads and queries are split; None for one device.
    """
    table = batch.table(window)
    if not isinstance(table, BlockTable):
        raise ValueError(f"these streams have no table of blocks for a window of {window}")
    places = jnp.broadcast_to(jnp.arange(q.shape[1]).reshape(-1, BLOCK), (*table.keys.shape[:2], BLOCK))
    of_queries = [jnp.asarray(x) for x in (table.keys, table.counts, places)]
    if (parts := sequence_parts(mesh)) > 1:
        order = query_order(table.keys.shape[1], parts).reshape(-1)
        of_queries = [jnp.take(x, order, axis=1) for x in of_queries]
    attend = attend_blocks if walks(batch, mesh) else get("attention", "many blocks").value

    def run(q: jax.Array, k: jax.Array, v: jax.Array, of_queries: Any, of_keys: Any) -> Any:
        return attend(window, softcap, q, k, v, StreamFacts(*of_queries, *of_keys))

    of_keys = [jnp.asarray(x) for x in (batch.until, batch.positions)]
    return with_sinks(*over_mesh(run, mesh)(q, k, v, of_queries, of_keys), sinks)
