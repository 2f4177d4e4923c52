"""Attention over packed streams on a mesh: each device computes its own streams, heads and queries.

The axis ``sequence`` splits the queries of a stream; keys and values are gathered over it, layer by layer, and their
gradients are summed over it. A token sees much that stands before it and nothing behind it, so that a part with the end
of a long conversation would have most of the work: of twice as many runs of tokens as there are parts, each part
computes one from the front and one from the back (:func:`prb_jax.trees.stream_tables.query_order`).
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import jax
import jax.numpy as jnp
from jax import lax
from jax.sharding import Mesh, PartitionSpec

from prb_jax.platform.sharding import RULES
from prb_jax.trees.stream_tables import query_order

_SEQUENCE = "sequence"


def sequence_parts(mesh: Mesh | None) -> int:
    """Return into how many parts a mesh splits the queries of a stream."""
    return 1 if mesh is None else mesh.shape[_SEQUENCE]


def over_mesh(attend: Callable[..., Any], mesh: Mesh | None, *, split: bool = True) -> Callable[..., Any]:
    """Return attention of one device for a mesh.

    Args:
        attend: takes q [S, n, heads, H], k and v [S, N, G, H], facts of the queries, and facts of the keys, and returns
            arrays [S, n, heads, ...]. Facts are trees of arrays [S, ...]; those of the queries have an axis of n
            tokens, of their blocks, or of parts behind it, in the order of
            :func:`prb_jax.trees.stream_tables.query_order`.
        mesh: over which streams, heads and queries are split; None for one device.
        split: queries are split; otherwise each part computes all of them.
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
        check_vma=False,  # kernels do not say over which axes their results vary
    )


def one_by_one(stream: Callable[..., jax.Array], mesh: Mesh | None) -> Callable[..., jax.Array]:
    """As :func:`over_mesh`, from attention of a single stream: each device computes its streams one after the other."""

    def attend(*arrays: Any) -> jax.Array:
        if len(arrays[0]) == 1:
            return stream(*jax.tree.map(lambda x: x[0], arrays))[None]
        return lax.map(lambda of_stream: stream(*of_stream), arrays)

    return over_mesh(attend, mesh)


def _exchanged(x: jax.Array, parts: int, *, back: bool = False) -> jax.Array:
    """A device's part [S, n, ...] of a stream's tokens in their order, as its part of the tokens in the order of
    queries; or the way back."""
    if parts == 1:
        return x
    # Both halves of a part go elsewhere whole, each to a part of its own.
    owners = {int(run): part for part, runs in enumerate(query_order(2 * parts, parts)) for run in runs}
    halves = []
    for half, which in zip(jnp.split(x, 2, axis=1), (0, 1), strict=True):
        pairs = [(part, owners[2 * part + which]) for part in range(parts)]
        halves.append(lax.ppermute(half, _SEQUENCE, [pair[::-1] for pair in pairs] if back else pairs))
    return jnp.concatenate(halves, axis=1)
