"""Stacks of linear layers: the building block of every head with more than one matrix.

A stack is declared by the names of its tensors alone; how many layers it has, how wide they are and
whether they have biases is read from the checkpoint (:meth:`Stack.bound`).
"""

from __future__ import annotations

import re
from collections.abc import Mapping
from dataclasses import dataclass, replace
from typing import Any, Literal

import jax
import jax.numpy as jnp
from jax import lax

from prb_jax.errors import CheckpointError
from prb_jax.models.head import HeadTensor, Shapes, dense

Activation = Literal["relu", "selu", "leaky_relu"]

_ACTIVATIONS = {"relu": jax.nn.relu, "selu": jax.nn.selu, "leaky_relu": jax.nn.leaky_relu}
_BATCH_NORM = ("weight", "bias", "running_mean", "running_var")
_BATCH_NORM_EPS = 1e-5  # torch's


@dataclass(frozen=True, kw_only=True)
class Layer:
    """One linear layer of a checkpoint: ``name``.weight [outputs, inputs], and what else there is of it."""

    name: str
    inputs: int
    outputs: int
    bias: bool
    batch_norm: str | None = None


@dataclass(frozen=True)
class Stack:
    """Linear layers with an activation between them: ``prefix``.0, ``prefix``.2, ...; or one, ``prefix``.

    Attributes:
      prefix: what the names of its tensors start with.
      activation: after every layer but the last.
      layers: as found in the checkpoint; empty until :meth:`bound`.

    A batch norm, known by its running statistics, belongs to the layer before it and acts after the
    activation.
    """

    prefix: str
    activation: Activation = "relu"
    layers: tuple[Layer, ...] = ()

    def bound(self, stored: Shapes, *, width: int, where: str, what: str) -> Stack:
        """The stack as the checkpoint has it.

        Args:
          stored: shapes of all tensors by name.
          width: of what goes in.
          where, what: the checkpoint and the read-out, for messages.

        Raises:
          CheckpointError: no such tensors, or layers that do not fit each other; names the tensor.
        """
        layers: list[Layer] = []
        size = width
        for name in self._names(stored):
            if f"{name}.running_mean" in stored:
                for part in _BATCH_NORM:
                    key = f"{name}.{part}"
                    if stored.get(key) != (size,) or not layers:
                        raise _wrong(where, what, key, f"[{size}]", stored.get(key))
                layers[-1] = replace(layers[-1], batch_norm=name)
                continue
            key, bias = f"{name}.weight", f"{name}.bias"
            shape = stored.get(key)
            if shape is None:
                raise _wrong(where, what, key, "", None)
            if len(shape) != 2 or shape[1] != size:
                raise _wrong(where, what, key, f"[any, {size}]", shape)
            if bias in stored and stored[bias] != shape[:1]:
                raise _wrong(where, what, bias, f"[{shape[0]}]", stored[bias])
            size = shape[0]
            layers.append(Layer(name=name, inputs=shape[1], outputs=size, bias=bias in stored))
        if not layers:
            raise _wrong(
                where, what, f"{self.prefix}.weight or {self.prefix}.0.weight", "a linear layer", None
            )
        return replace(self, layers=tuple(layers))

    def _names(self, stored: Shapes) -> list[str]:
        if f"{self.prefix}.weight" in stored:
            return [self.prefix]
        numbered = re.compile(re.escape(self.prefix) + r"\.(\d+)\.\w+")
        numbers = sorted({int(found[1]) for key in stored if (found := numbered.fullmatch(key))})
        return [f"{self.prefix}.{number}" for number in numbers]

    @property
    def outputs(self) -> int:
        return self.layers[-1].outputs

    def tensors(self) -> tuple[HeadTensor, ...]:
        """Everything that it reads from the checkpoint."""
        found: list[HeadTensor] = []
        for layer in self.layers:
            shape = (layer.outputs, layer.inputs)
            found.append(HeadTensor(key=f"{layer.name}.weight", shape=shape, transposed=True))
            if layer.bias:
                found.append(HeadTensor(key=f"{layer.name}.bias", shape=shape[:1]))
            if layer.batch_norm is not None:
                found.extend(
                    HeadTensor(key=f"{layer.batch_norm}.{part}", shape=shape[:1]) for part in _BATCH_NORM
                )
        return tuple(found)

    def __call__(self, params: Mapping[str, Any], x: jax.Array) -> jax.Array:
        """x float32 [..., width] -> float32 [..., outputs]."""
        for number, layer in enumerate(self.layers):
            bias = params[f"{layer.name}.bias"] if layer.bias else None
            x = dense(x, params[f"{layer.name}.weight"], bias)
            if number + 1 < len(self.layers):
                x = _ACTIVATIONS[self.activation](x)
            if layer.batch_norm is not None:
                scale, shift, mean, variance = (
                    params[f"{layer.batch_norm}.{part}"].astype(jnp.float32) for part in _BATCH_NORM
                )
                x = (x - mean) * lax.rsqrt(variance + _BATCH_NORM_EPS) * scale + shift
        return x


def _wrong(where: str, what: str, key: str, expected: str, found: tuple[int, ...] | None) -> CheckpointError:
    if found is None:
        return CheckpointError(
            f"{where}: the head tensor '{key}' of the read-out '{what}' is missing and would have to be made up at "
            "random: get the whole checkpoint, side files too, or name another read-out with --readout"
        )
    return CheckpointError(f"{where}: tensor '{key}': expected shape {expected}, found {list(found)}")
