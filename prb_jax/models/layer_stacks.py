"""Sequences of layers of one or several kinds: a stack of parameters for each kind, and a scan over periods.

A parameter of every layer is stacked over all L layers; a parameter of one mixer (`mixer` of
:func:`prb_jax.models.parameter.parameter`) is stacked over the layers with this mixer. The order of kinds repeats with
a period, e.g. three recurrent layers and one layer of softmax attention. A period is the body of a scan, and equal
neighbours in it are an inner scan, so each kind is traced once or twice regardless of depth.
"""

from __future__ import annotations

import itertools
from collections.abc import Callable, Mapping
from dataclasses import dataclass
from typing import Any

import jax
import jax.numpy as jnp
from flax import nnx
from jax import lax

from prb_jax.models.decoder_layer import DecoderLayer

Kept = Mapping[str, Any]
"""Results of layers besides their output, by mixer, stacked on axis 0 in layer order."""

Body = Callable[[str, jax.Array, nnx.State, jax.Array], tuple[jax.Array, Any]]
"""(mixer, x, state of the layer, number of the layer) -> (x, kept results of the layer)."""


@dataclass(frozen=True)
class _Run:
    """Adjacent layers of one mixer within a period."""

    mixer: str
    start: int  # first layer within the period
    count: int
    before: int  # earlier layers of this mixer in the period


class LayerStacks:
    """Parameters of all layers, by mixer; may be created inside a trace.

    Args:
      layers: Layers of a decoder.
    """

    def __init__(self, layers: DecoderLayer) -> None:
        self.mixers = layers.config.layer_mixers
        self.graphs: dict[str, Any] = {}
        self._states: dict[str, nnx.State] = {}
        self._order = {mixer: [n for n, of in enumerate(self.mixers) if of == mixer] for mixer in self.mixers}
        for mixer in self._order:
            self.graphs[mixer], self._states[mixer] = nnx.split(_of_mixer(layers, mixer))
        period = next(n for n in range(1, len(self.mixers) + 1) if self.mixers[n:] == self.mixers[:-n])
        self._period = self.mixers[:period]

    def at(self, layer: int) -> nnx.State:
        """Return the state of one layer, sliced from the stacks."""
        mixer = self.mixers[layer]
        return self._taken(mixer, layer, self._order[mixer].index(layer))

    def scan(self, body: Body, x: jax.Array, *, count: int, indexed: bool) -> tuple[jax.Array, Kept]:
        """Run the first ``count`` layers.

        Args:
          body: Function that runs one layer.
          x: States.
          count: Number of layers.
          indexed: If True, read layers through indices instead of slices. Slices copy a part of the stack; gradients
            through indices sum a whole stack for each layer.
        """
        length = len(self._period)
        periods, rest = divmod(count, length)
        kept: dict[str, list[Any]] = {mixer: [] for mixer in self.mixers[:count]}
        if periods:
            numbers = jnp.arange(periods)
            states = {} if indexed else self._by_period(periods)

            def period(x: jax.Array, inputs: tuple[jax.Array, Any]) -> tuple[jax.Array, Any]:
                return self._run_period(body, x, *inputs, self._period, indexed=indexed)

            x, of_periods = lax.scan(period, x, (numbers, states))
            for mixer, values in of_periods.items():
                kept[mixer].append(jax.tree.map(lambda leaf: leaf.reshape(-1, *leaf.shape[2:]), values))
        if rest:
            states = {} if indexed else self._tail(periods, rest)
            run = self._run_period
            x, of_rest = run(body, x, periods, states, self._period[:rest], indexed=indexed)
            for mixer, values in of_rest.items():
                kept[mixer].append(values)
        return x, {mixer: _joined(parts) for mixer, parts in kept.items()}

    def _run_period(
        self,
        body: Body,
        x: jax.Array,
        number: jax.Array | int,
        states: Any,
        mixers: tuple[str, ...],
        *,
        indexed: bool,
    ) -> tuple[jax.Array, dict[str, Any]]:
        """Run the layers of period ``number``; their states are stacked on axis 0 by mixer."""
        kept: dict[str, list[Any]] = {mixer: [] for mixer in mixers}
        for run in _runs(mixers):
            first = number * len(self._period) + run.start
            own = number * self._period.count(run.mixer) + run.before
            state = None if indexed else self._cut(states[run.mixer], run)

            def one(
                x: jax.Array, inputs: tuple[Any, Any], run: _Run = run, first: Any = first, own: Any = own
            ) -> Any:
                offset, state = inputs
                if indexed:
                    state = self._taken(run.mixer, first + offset, own + offset)
                return body(run.mixer, x, state, first + offset)

            if run.count == 1:
                state = jax.tree.map(lambda leaf: leaf[0], state)
                x, value = one(x, (0, state))
                value = jax.tree.map(lambda leaf: leaf[None], value)
            else:
                x, value = lax.scan(one, x, (jnp.arange(run.count), state))
            kept[run.mixer].append(value)
        return x, {mixer: _joined(parts) for mixer, parts in kept.items()}

    def _taken(self, mixer: str, layer: Any, own: Any) -> nnx.State:
        """Return the state of one layer: index ``layer`` in all layers, ``own`` within its mixer."""

        def take(variable: Any) -> Any:
            index = layer if variable.get_metadata("mixer") is None else own
            return variable.replace(lax.dynamic_index_in_dim(variable[...], index, keepdims=False))

        return _map(take, self._states[mixer])

    def _by_period(self, periods: int) -> dict[str, nnx.State]:
        """Return states with an axis of periods before the axis of a period's layers."""

        def split(variable: Any) -> Any:
            leaf, count = variable[...], self._of_period(variable)
            return variable.replace(leaf[: periods * count].reshape(periods, count, *leaf.shape[1:]))

        return {mixer: _map(split, state) for mixer, state in self._states.items()}

    def _tail(self, periods: int, rest: int) -> dict[str, nnx.State]:
        """Return states of the layers after the last complete period."""

        def cut(variable: Any) -> Any:
            start = periods * self._of_period(variable)
            return variable.replace(variable[...][start : start + self._of_period(variable, rest)])

        return {mixer: _map(cut, state) for mixer, state in self._states.items()}

    def _of_period(self, variable: Any, layers: int | None = None) -> int:
        """Return the number of a period's first layers that have this parameter."""
        mixers, mixer = self._period[:layers], variable.get_metadata("mixer")
        return len(mixers) if mixer is None else mixers.count(mixer)

    def _cut(self, state: nnx.State, run: _Run) -> nnx.State:
        def cut(variable: Any) -> Any:
            start = run.start if variable.get_metadata("mixer") is None else run.before
            return variable.replace(variable[...][start : start + run.count])

        return _map(cut, state)


def _of_mixer(layers: DecoderLayer, mixer: str) -> DecoderLayer:
    """Return the layers without the parameters of other mixers."""
    part = nnx.merge(*nnx.split(layers))
    for name, value in list(vars(part).items()):
        if isinstance(value, nnx.Variable) and value.get_metadata("mixer") not in (None, mixer):
            delattr(part, name)
    part.mixer = mixer
    return part


def _map(function: Callable[[Any], Any], state: nnx.State) -> nnx.State:
    return jax.tree.map(function, state, is_leaf=lambda node: isinstance(node, nnx.Variable))


def _runs(mixers: tuple[str, ...]) -> list[_Run]:
    runs, start = [], 0
    for mixer, group in itertools.groupby(mixers):
        count = len(list(group))
        runs.append(_Run(mixer, start, count, mixers[:start].count(mixer)))
        start += count
    return runs


def _joined(parts: list[Any]) -> Any:
    return parts[0] if len(parts) == 1 else jax.tree.map(lambda *leaves: jnp.concatenate(leaves), *parts)
