"""Sequences of layers of several kinds: a stack of parameters for each part, and a scan over periods.

A parameter of every layer is stacked over all L layers; a parameter of one part (`part` of
:func:`prb_jax.models.parameter.parameter`) is stacked over the layers with this part. The order of kinds repeats with
a period, e.g. three recurrent layers and one layer of softmax attention; layers before the first period, e.g. leading
layers without experts, run before the scan. A period is the body of a scan, and equal neighbours in it are an inner
scan, so each kind is traced a few times regardless of depth.
"""

from __future__ import annotations

import functools
import itertools
from collections.abc import Callable, Mapping
from dataclasses import dataclass
from typing import Any

import jax
import jax.numpy as jnp
from flax import nnx
from jax import lax

from prb_jax.models.config.family import Kind
from prb_jax.models.decoder import Body, Kept, LayerStacks
from prb_jax.models.decoder_layer import DecoderLayer
from prb_jax.models.layers import Row, row_of

_Kinds = tuple[Kind, ...]
_Starts = Callable[[str | None], Any]
"""Part -> number of earlier layers with this part; None counts all layers."""


@dataclass(frozen=True)
class _Run:
    """Adjacent layers of one kind within a section."""

    kind: Kind
    start: int  # first layer within the section
    count: int


class MixedStacks(LayerStacks):
    """Parameters of layers of several kinds.

    Args:
      layers: Layers of a decoder.
      read: Filter; see :class:`prb_jax.models.decoder.LayerStacks`.
    """

    def __init__(self, layers: DecoderLayer, read: Any) -> None:
        self.kinds = layers.config.kinds
        self.graphs: dict[Kind, Any] = {}
        self._states: dict[Kind, nnx.State] = {}
        self._read: dict[Kind, nnx.State] = {}
        for kind in dict.fromkeys(self.kinds):
            parts = nnx.split(_of_kind(layers, kind), read, ...)
            self.graphs[kind], self._read[kind], self._states[kind] = parts
        self._lead, self._period = _division(self.kinds)

    def at(self, layer: Any, take: Callable[..., jax.Array] = row_of) -> nnx.State:
        return self._taken(self.kinds[layer], functools.partial(_count, self.kinds[:layer]), take)

    def scan(self, body: Body, x: jax.Array, *, count: int, indexed: bool) -> tuple[jax.Array, Kept]:
        lead, length = min(self._lead, count), self._period
        periods = (count - lead) // length
        period, end = self.kinds[lead : lead + length], lead + periods * length
        parts: list[Kept] = []

        def run_section(x: jax.Array, first: int, last: int) -> jax.Array:
            """Run a few layers outside the scan."""
            if first == last:
                return x
            kinds, starts = self.kinds[first:last], functools.partial(_count, self.kinds[:first])
            states = None if indexed else self._section(kinds, starts)
            x, values = self._run_layers(body, x, states, kinds, starts)
            parts.append(values)
            return x

        x = run_section(x, 0, lead)
        if periods:
            before = self.kinds[:lead]
            states = None if indexed else self._section(period, functools.partial(_count, before), periods)

            def one(x: jax.Array, inputs: tuple[jax.Array, Any]) -> tuple[jax.Array, Kept]:
                number, states = inputs

                def starts(part: str | None) -> jax.Array:
                    return _count(before, part) + number * _count(period, part)

                return self._run_layers(body, x, states, period, starts)

            x, values = lax.scan(one, x, (jnp.arange(periods), states))
            parts.append(jax.tree.map(lambda leaf: leaf.reshape(-1, *leaf.shape[2:]), values))
        x = run_section(x, end, count)
        return x, _joined(parts)

    def _run_layers(
        self,
        body: Body,
        x: jax.Array,
        states: Mapping[Kind, nnx.State] | None,
        kinds: _Kinds,
        starts: _Starts,
    ) -> tuple[jax.Array, Kept]:
        """Run adjacent layers. Their states are stacked on axis 0, or read through indices if they are None."""
        parts: list[Kept] = []
        for run in _runs(kinds):
            before = functools.partial(_count, kinds[: run.start])

            def one(x: jax.Array, inputs: tuple[Any, Any], run: _Run = run, before: _Starts = before) -> Any:
                offset, state = inputs

                def index(part: str | None) -> Any:
                    return starts(part) + before(part) + offset

                if states is None:
                    state = self._taken(run.kind, index)
                else:
                    state = self._with_rows(run.kind, state, index)
                return body(run.kind, x, state, starts(None) + run.start + offset)

            state = None if states is None else _cut(states[run.kind], before, run.count)
            if run.count == 1:
                x, value = one(x, (0, jax.tree.map(lambda leaf: leaf[0], state)))
                value = jax.tree.map(lambda leaf: leaf[None], value)
            else:
                x, value = lax.scan(one, x, (jnp.arange(run.count), state))
            parts.append(value)
        return x, _joined(parts)

    def _taken(self, kind: Kind, index: _Starts, take: Callable[..., Any] = row_of) -> nnx.State:
        """Return the state of one layer, with its index among the layers of each part."""

        def taken(variable: Any) -> Any:
            return variable.replace(take(variable[...], index(variable.get_metadata("part"))))

        return self._with_rows(kind, _map(taken, self._states[kind]), index)

    def _with_rows(self, kind: Kind, state: nnx.State, index: _Starts) -> nnx.State:
        """Return the state of one layer with the rows that the layer reads itself."""

        def row(variable: Any) -> Any:
            return variable.replace(Row(variable[...], index(variable.get_metadata("part"))))

        return nnx.merge_state(state, _map(row, self._read[kind]))

    def _section(self, kinds: _Kinds, starts: _Starts, repeats: int | None = None) -> dict[Kind, nnx.State]:
        """Return the states of adjacent layers by kind, with a leading axis of ``repeats`` if the kinds repeat."""

        def cut(variable: Any) -> Any:
            part, leaf = variable.get_metadata("part"), variable[...]
            start, count = starts(part), _count(kinds, part)
            if repeats is None:
                return variable.replace(leaf[start : start + count])
            leaf = leaf[start : start + repeats * count]
            return variable.replace(leaf.reshape(repeats, count, *leaf.shape[1:]))

        return {kind: _map(cut, self._states[kind]) for kind in dict.fromkeys(kinds)}


def _of_kind(layers: DecoderLayer, kind: Kind) -> DecoderLayer:
    """Return the layers without the parameters of parts that this kind does not have."""
    part = nnx.merge(*nnx.split(layers))
    for name, value in list(vars(part).items()):
        if isinstance(value, nnx.Variable) and value.get_metadata("part") not in (None, *kind):
            delattr(part, name)
    part.kind = kind
    return part


def _cut(state: nnx.State, before: _Starts, count: int) -> nnx.State:
    def cut(variable: Any) -> Any:
        start = before(variable.get_metadata("part"))
        return variable.replace(variable[...][start : start + count])

    return _map(cut, state)


def _map(function: Callable[[Any], Any], state: nnx.State) -> nnx.State:
    return jax.tree.map(function, state, is_leaf=lambda node: isinstance(node, nnx.Variable))


def _count(kinds: _Kinds, part: str | None) -> int:
    """Return the number of layers with a part; None counts all layers."""
    return len(kinds) if part is None else sum(part in kind for kind in kinds)


@functools.cache
def _division(kinds: _Kinds) -> tuple[int, int]:
    """Return the number of layers before the first period, and the length of a period, with the fewest traced runs."""
    choices = []
    for lead in range(len(kinds)):
        rest = kinds[lead:]
        period = next(length for length in range(1, len(rest) + 1) if rest[length:] == rest[:-length])
        sections = kinds[:lead], rest[:period], rest[: len(rest) % period]
        choices.append((sum(len(_runs(section)) for section in sections), lead + period, lead, period))
    return min(choices)[2:]


def _runs(kinds: _Kinds) -> list[_Run]:
    runs, start = [], 0
    for kind, group in itertools.groupby(kinds):
        count = len(list(group))
        runs.append(_Run(kind, start, count))
        start += count
    return runs


def _joined(sections: list[Kept]) -> Kept:
    """Concatenate the results of adjacent sections, part by part."""
    joined = {}
    for part in dict.fromkeys(part for section in sections for part in section):
        values = [section[part] for section in sections if part in section]
        joined[part] = (
            jax.tree.map(lambda *leaves: jnp.concatenate(leaves), *values) if values[1:] else values[0]
        )
    return joined
