"""Attention over packed streams on a mesh: each device computes a part of streams, heads and queries.

The axis ``sequence`` splits the queries of a stream. Keys and values are gathered over this axis in each layer, and
their gradients are summed over it. A token sees only earlier tokens, so the end of a long conversation needs most of
the work. To balance it, a stream is cut into twice as many runs as there are parts, and each part computes one run
from the front and one from the back (:func:`prb_jax.trees.streams.query_order`).
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import jax
import jax.numpy as jnp
from jax import lax
from jax.sharding import Mesh, PartitionSpec

from prb_jax.platform.sharding import RULES, sequence_parts
from prb_jax.trees.streams import query_order

_SEQUENCE = "sequence"


def over_mesh(attend: Callable[..., Any], mesh: Mesh | None, *, split: bool = True) -> Callable[..., Any]:
    """Extend attention on one device to a mesh.

    Args:
        attend: Function of q [S, n, heads, H], k and v [S, N, G, H], facts of the queries and facts of the keys. It
            returns arrays [S, n, heads, ...]. Facts are trees of arrays [S, ...]. In facts of queries the next axis
            contains n tokens, their blocks, or parts, in the order of
            :func:`prb_jax.trees.streams.query_order`.
        mesh: Mesh that splits streams, heads and queries; None for one device.
        split: If True, split the queries; otherwise each part computes all queries.
    """
    if mesh is None or mesh.size == 1:
        return attend
    parts = sequence_parts(mesh) if split else 1
    rows, tokens, heads = RULES["batch"], RULES["tokens"] if split else None, RULES["heads"]
    queries, keys = PartitionSpec(rows, tokens, heads), PartitionSpec(rows, None, heads)

    def part(q: jax.Array, *others: Any) -> Any:
        results = attend(_exchanged(q, parts), *others)
        return jax.tree.map(lambda x: _exchanged(x, parts, back=True), results)

    return jax.shard_map(
        part,
        mesh=mesh,
        in_specs=(queries, keys, keys, PartitionSpec(rows, tokens), PartitionSpec(rows)),
        out_specs=queries,
        check_vma=False,  # kernels do not declare the axes over which their results vary
    )


def one_by_one(stream: Callable[..., Any], mesh: Mesh | None) -> Callable[..., Any]:
    """Same as :func:`over_mesh`, for attention of a single stream: each device computes its streams sequentially."""

    def attend(*arrays: Any) -> Any:
        if len(arrays[0]) == 1:
            return jax.tree.map(lambda x: x[None], stream(*jax.tree.map(lambda x: x[0], arrays)))
        return lax.map(lambda of_stream: stream(*of_stream), arrays)

    return over_mesh(attend, mesh)


def _exchanged(x: jax.Array, parts: int, *, back: bool = False) -> jax.Array:
    """Exchange a device's part [S, n, ...] of a stream from token order to query order; with ``back`` to token
    order."""
    if parts == 1:
        return x
    # Each half of a part moves as a whole to another part.
    owners = {int(run): part for part, runs in enumerate(query_order(2 * parts, parts)) for run in runs}
    halves = []
    for half, which in zip(jnp.split(x, 2, axis=1), (0, 1), strict=True):
        pairs = [(part, owners[2 * part + which]) for part in range(parts)]
        halves.append(lax.ppermute(half, _SEQUENCE, [pair[::-1] for pair in pairs] if back else pairs))
    return jnp.concatenate(halves, axis=1)
