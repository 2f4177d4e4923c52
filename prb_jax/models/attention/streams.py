"""Attention over packed streams (:mod:`prb_jax.trees.streams`) by XLA, on any machine, with its derivative."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import jax
import jax.numpy as jnp
from jax.sharding import Mesh

from prb_jax.models.attention.walk import StreamFacts, attend_blocks, with_sinks
from prb_jax.platform.sharding import sequence_parts
from prb_jax.seams import get
from prb_jax.trees.stream_tables import BLOCK, BlockTable, query_order
from prb_jax.trees.streams import StreamBatch


def walks(batch: StreamBatch, mesh: Mesh | None) -> bool:
    """Return True if streams are computed by the program for CPUs, one block after another."""
    platform = jax.default_backend() if mesh is None else mesh.devices.flat[0].platform
    return isinstance(batch.blocks, BlockTable) and platform == "cpu"


def on_mesh(attend: Callable[..., Any], mesh: Mesh | None, *, split: bool = True) -> Callable[..., Any]:
    """Return attention for a mesh: see :func:`prb_jax.models.attention.mesh.over_mesh`."""
    if mesh is None or mesh.size == 1:
        return attend
    return get("attention", "over mesh").value(attend, mesh, split=split)


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
    """Return the attention of every token to the tokens that it sees, [S, N, heads, H] in q's dtype.

    The softmax is float32, and all products accumulate in float32. Results for padding are finite but meaningless.

    Args:
        q: Scaled queries [S, N, heads, H].
        k, v: Keys and values [S, N, G, H].
        batch: Streams with the table of blocks for this window.
        window: Number of most recent tokens that a token sees, itself included.
        softcap: Scores s become ``softcap * tanh(s / softcap)`` before masking.
        sinks: Attention sinks [heads]: an additional logit per softmax, without a value.
        mesh: Mesh that splits streams, heads and queries; None for one device.
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
    out, log = on_mesh(run, mesh)(q, k, v, of_queries, of_keys)
    return with_sinks(out, log, sinks)
