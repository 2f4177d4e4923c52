"""Streams one by one on a device, and dealt over the devices of a mesh: what attention over packed streams shares."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import jax
from jax import lax
from jax.sharding import Mesh, PartitionSpec

from prb_jax.sharding import RULES


def over_mesh(attend: Callable[..., Any], mesh: Mesh | None) -> Callable[..., Any]:
    """Return attention of one device for a mesh: each device computes its own streams and heads.

    Args:
        attend: of q [S, N, heads, H], k and v [S, N, G, H], and facts, a tree of arrays [S, ...].
        mesh: over which streams and heads are split; None for one device.
    """
    if mesh is None or mesh.size == 1:
        return attend
    states, facts = PartitionSpec(RULES["batch"], None, RULES["heads"]), PartitionSpec(RULES["batch"])
    return jax.shard_map(
        attend,
        mesh=mesh,
        in_specs=(states, states, states, facts),
        out_specs=states,
        check_vma=False,  # kernels do not say over which axes their results vary
    )


def one_by_one(stream: Callable[[Any], jax.Array], arrays: Any) -> jax.Array:
    """Return stream(its arrays) for every stream, one after the other: the leading axis of arrays and result."""
    if len(jax.tree.leaves(arrays)[0]) == 1:
        return stream(jax.tree.map(lambda x: x[0], arrays))[None]
    return lax.map(stream, arrays)
