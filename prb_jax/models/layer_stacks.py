"""The stack of a decoder's layers: every parameter is stacked over all L layers, and a scan runs them.

Decoders with layers of several kinds have a stack for each part: :mod:`prb_jax.models.mixed_stacks`.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping
from typing import Any

import jax
import jax.numpy as jnp
from flax import nnx
from jax import lax

from prb_jax.models.config.family import Kind
from prb_jax.models.decoder_layer import DecoderLayer
from prb_jax.seams import get

Kept = Mapping[str, Any]
"""Results of layers besides their output, by part, stacked on axis 0 in layer order."""

Body = Callable[[Kind, jax.Array, nnx.State, jax.Array], tuple[jax.Array, Mapping[str, Any]]]
"""(kind, x, state of the layer, number of the layer) -> (x, kept results of the layer by part)."""


class LayerStacks:
    """Parameters of all layers, which are of one kind; may be created inside a trace.

    Args:
      layers: Layers of a decoder.

    Attributes:
      graphs: Structure of a layer, by its kind.
    """

    def __init__(self, layers: DecoderLayer) -> None:
        self._kind = layers.config.kinds[0]
        graph, self._state = nnx.split(layers)
        self.graphs: dict[Kind, Any] = {self._kind: graph}

    def at(self, layer: int | jax.Array) -> nnx.State:
        """Return the state of one layer, sliced from the stacks."""
        return jax.tree.map(lambda leaf: lax.dynamic_index_in_dim(leaf, layer, keepdims=False), self._state)

    def scan(self, body: Body, x: jax.Array, *, count: int, indexed: bool) -> tuple[jax.Array, Kept]:
        """Run the first ``count`` layers.

        Args:
          body: Function that runs one layer.
          x: States.
          count: Number of layers.
          indexed: If True, read layers through indices instead of slices. Slices copy a part of the stack; gradients
            through indices sum a whole stack for each layer.
        """
        if not count:
            return x, {}
        states = None if indexed else jax.tree.map(lambda leaf: leaf[:count], self._state)

        def one(x: jax.Array, inputs: tuple[jax.Array, Any]) -> tuple[jax.Array, Kept]:
            number, state = inputs
            return body(self._kind, x, self.at(number) if state is None else state, number)

        return lax.scan(one, x, (jnp.arange(count), states))


def stacks_of(layers: DecoderLayer) -> LayerStacks:
    """Return the stacks of a decoder's layers."""
    alike = len(set(layers.config.kinds)) == 1
    return LayerStacks(layers) if alike else get("mixed layers", "stacks").value(layers)
