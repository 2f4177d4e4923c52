"""Layers that keep less for their backward pass, and weights that are gathered for one layer at a time."""

from __future__ import annotations

import functools
from collections.abc import Callable
from typing import Any

import jax
from flax import nnx
from jax.ad_checkpoint import checkpoint_name
from jax.sharding import Mesh, NamedSharding

from prb_jax.errors import quote
from prb_jax.models.attention.streams import ATTENTION_RESULTS
from prb_jax.models.layers import PROJECTED
from prb_jax.models.parameter import Axes
from prb_jax.platform.sharding import partition_spec

GATHERED = "gathered_weights"
"""Name of the gathered weights of a layer: a backward pass gathers them again instead of keeping them."""


def rematerialised(body: Callable[..., Any], policy: str) -> Callable[..., Any]:
    """Return an equivalent layer body that keeps less for its backward pass.

    Args:
        body: Body of the scan over layers.
        policy: ``none`` keeps everything that derivatives need; ``dots`` keeps the results of projections and of
          attention; ``full`` keeps only the layer's input. None of them keeps gathered weights.

    Raises:
        ValueError: The policy is unknown.
    """
    policies = jax.checkpoint_policies
    kept = {
        "none": policies.save_anything_except_these_names(GATHERED),
        "dots": policies.save_only_these_names(PROJECTED, *ATTENTION_RESULTS),
        "full": None,
    }
    if policy not in kept:
        raise ValueError(f"remat: expected one of {', '.join(kept)}, found {quote(policy)}")
    return jax.checkpoint(body, prevent_cse=False, policy=kept[policy])


def gatherer(mesh: Mesh) -> Callable[[nnx.State], nnx.State]:
    """Return a function that gathers the ``model`` axis of one layer's weights on every device.

    Otherwise the compiler may split a product, which moves the same bytes in many small steps and keeps more of them.
    Gradients are reduced and scattered: each device keeps the sum of its part.
    """

    def gathered(variable: nnx.Variable[Any]) -> nnx.Variable[Any]:
        axes: Axes = variable.get_metadata("axes")
        if "model" not in axes:
            return variable
        kept = [None if axis == "model" else axis for axis in axes]
        split, together = (NamedSharding(mesh, partition_spec(of)) for of in (axes, kept))
        return variable.replace(checkpoint_name(_resharded(split, together, variable[...]), GATHERED))

    return lambda state: jax.tree.map(gathered, state, is_leaf=lambda node: isinstance(node, nnx.Variable))


@functools.partial(jax.custom_vjp, nondiff_argnums=(0, 1))
def _resharded(split: NamedSharding, together: NamedSharding, weight: jax.Array) -> jax.Array:
    return jax.lax.with_sharding_constraint(weight, together)


_resharded.defvjp(
    lambda split, together, weight: (_resharded(split, together, weight), None),
    lambda split, together, kept, gradient: (jax.lax.with_sharding_constraint(gradient, split),),
)
