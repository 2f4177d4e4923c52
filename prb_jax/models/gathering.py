"""Weights that are split over devices, brought together a layer at a time: once each a pass.

Left to itself the compiler may split a product instead, and then moves the same bytes in many small steps and keeps
more of them.
"""

from __future__ import annotations

import functools
import math
from collections.abc import Callable
from typing import Any

import jax
from jax.ad_checkpoint import checkpoint_name
from jax.sharding import Mesh, NamedSharding

from prb_jax.sharding import RULES, parameter_axes, partition_spec

Gather = Callable[[dict[str, Any]], dict[str, Any]]

# The name of weights brought together for one layer: a backward pass gathers them again, and never keeps them.
GATHERED = "gathered_weights"


def splits_weights(mesh: Mesh | None) -> bool:
    """Whether matrices are split over axes on which the trees, or their tokens, are."""
    return mesh is not None and math.prod(mesh.shape[name] for name in RULES["model"] or ()) > 1


def gatherer(mesh: Mesh | None) -> Gather:
    """A function of one layer's weights that brings their ``model`` axis together on every device.

    Gradients go the other way: each device keeps the sum of its own part. Without a mesh, or where nothing is split,
    it changes nothing.
    """
    if mesh is None or not splits_weights(mesh):
        return lambda weights: weights

    def gather(weights: dict[str, Any]) -> dict[str, Any]:
        whole = {}
        for name, weight in weights.items():
            axes = parameter_axes(f"layers/{name}")[1:]  # the first one is that of the layers
            if "model" not in axes:
                whole[name] = weight
                continue
            split = NamedSharding(mesh, partition_spec(axes))
            together = NamedSharding(
                mesh, partition_spec([None if axis == "model" else axis for axis in axes])
            )
            whole[name] = checkpoint_name(_resharded(split, together, weight), GATHERED)
        return whole

    return gather


@functools.partial(jax.custom_vjp, nondiff_argnums=(0, 1))
def _resharded(split: NamedSharding, together: NamedSharding, weight: jax.Array) -> jax.Array:
    return jax.lax.with_sharding_constraint(weight, together)


def _resharded_forward(
    split: NamedSharding, together: NamedSharding, weight: jax.Array
) -> tuple[jax.Array, None]:
    return _resharded(split, together, weight), None


def _resharded_backward(
    split: NamedSharding, together: NamedSharding, kept: None, gradient: jax.Array
) -> tuple[jax.Array]:
    return (jax.lax.with_sharding_constraint(gradient, split),)


_resharded.defvjp(_resharded_forward, _resharded_backward)
