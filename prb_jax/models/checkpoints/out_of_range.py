"""Search for the tensor of a checkpoint that explains scores that are NaN or all equal."""

from __future__ import annotations

from typing import TYPE_CHECKING, Final

import jax
import jax.numpy as jnp
import numpy as np

from prb_jax.models.checkpoints.hf_map import flatten, leaf_maps
from prb_jax.models.decoder import Params

if TYPE_CHECKING:
    from prb_jax.models.model import Config

LARGEST: Final = 1e18
"""Largest usable weight: activations of about this size overflow when a norm squares them in float32."""


def explain_scores(params: Params, config: Config) -> str:
    """Return a message about weights that may explain the unusable scores of a model.

    The message names the first tensor of the forward pass that is out of range, or else the tensor with the largest
    weight. Each process checks only its shards.
    """
    held = flatten(params)
    places: list[tuple[int, int, str, float]] = []  # layer, index of the leaf, tensor, its largest weight
    for number, leaf in enumerate(leaf_maps(config)):
        array = held.pop(leaf.path, None)
        if array is None:  # quantised
            continue
        before = not leaf.is_head and leaf.name != "final_norm"
        outside = -1 if before else config.num_hidden_layers
        sizes = np.ndenumerate(_largest(array, axes=len(leaf.tensors)))
        for key, (place, size) in zip(leaf.file_keys, sizes, strict=True):
            if leaf.is_head and array.ndim > 1 and size == 0:
                return f"all weights of the tensor '{key}' are 0"
            layer = leaf.layers[place[0]] if leaf.stacked else outside
            places.append((layer, number, key, float(size)))
    for _, _, key, size in sorted(places):
        if not size <= LARGEST:
            return f"the tensor '{key}' has weights of up to {size:.3g}, and those above {LARGEST:g} overflow in a norm"
    _, _, key, size = max(places, key=lambda place: place[3])
    return f"no tensor is out of range, the largest weight is {size:.3g} in '{key}'"


def _largest(array: jax.Array, *, axes: int) -> np.ndarray:
    """Return the largest magnitude in this process's shards per entry of the first axes: float32 [L], [L, E] or []."""
    largest = np.zeros(array.shape[:axes], np.float32)
    for shard in array.addressable_shards:
        values = jnp.abs(shard.data.astype(jnp.float32))
        part = largest[(*shard.index[:axes], ...)]
        np.maximum(
            part, np.asarray(jnp.max(values, axis=tuple(range(axes, array.ndim)), initial=0.0)), out=part
        )
    return largest
