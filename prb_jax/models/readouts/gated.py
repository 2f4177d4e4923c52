"""Read-out with several objectives and a gate: ArmoRM, QRM, URM and LDL."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, replace
from typing import Any, Literal

import jax
import jax.numpy as jnp

from prb_jax.errors import CheckpointError, quote
from prb_jax.models.config.fields import FieldReader
from prb_jax.models.head import HeadTensor, Shapes, Sizes, States, dense
from prb_jax.models.readouts.heads import Stack, at_pattern, check_tensor


@dataclass(frozen=True, kw_only=True)
class Gated:
    """Weighted sum of several objectives at the read position: sum_k gate_k value_k."""

    objectives: Stack  # returns k times q numbers, q per objective
    per_objective: int | str = 1  # q, or the field of ``config.json`` with q
    # meaning of an objective's q numbers: its value (``one``, q is 1), quantiles (``mean``), mean and spread of a
    # normal distribution (``first``), or logits of q bins between 0 and 1 (``bins``)
    value: Literal["one", "mean", "first", "bins"] = "one"
    # name of a matrix [k, k] that multiplies the values (value row times matrix)
    transform: str | None = None
    gate: Stack | None = None  # returns k weights from a state; None for fixed weights
    weights: tuple[float, ...] = ()  # fixed weights
    # ids by model_type: the gate reads at the first token of their last occurrence (the end of the user's turn).
    # Empty: the read position.
    gate_at: tuple[tuple[str, tuple[int, ...]], ...] = ()
    temperature: float | None = None  # temperature of the softmax over the gate's outputs; None: no softmax
    temperature_field: str | None = None  # field of ``config.json`` that replaces ``temperature``
    softmax_field: str | None = None  # field of ``config.json`` that enables the softmax
    scale: str | None = None  # name of a tensor [1] that multiplies the gate

    def bound(self, stored: Shapes, config: Mapping[str, Any], *, where: str, what: str) -> Gated:
        width = config["hidden_size"]
        objectives = self.objectives.bound(stored, width=width, where=where, what=what)
        q = config.get(self.per_objective) if isinstance(self.per_objective, str) else self.per_objective
        if type(q) is not int or q < 1 or objectives.outputs % q:
            raise CheckpointError(
                f"{where}: '{objectives.layers[-1].name}.weight' has {objectives.outputs} outputs: expected a "
                f"multiple of the {q!r} numbers for each objective ({self.per_objective!r} in config.json)"
            )
        k = objectives.outputs // q
        gate = self.gate.bound(stored, width=width, where=where, what=what, outputs=k) if self.gate else None
        if gate is None and len(self.weights) != k:
            raise CheckpointError(
                f"{where}: '{objectives.layers[-1].name}.weight' gives {k} objectives, but the read-out '{what}' "
                f"has {len(self.weights)} weights: this checkpoint has another read-out"
            )
        for key, shape in ((self.transform, (k, k)), (self.scale, (1,))):
            if key is not None:
                check_tensor(stored, key, shape, where=where, what=what)
        patterns = dict(self.gate_at)
        if patterns and config.get("model_type") not in patterns:
            raise CheckpointError(
                f"{where}: where the gate of '{what}' reads is known for {', '.join(patterns)}, not for model_type "
                f"{quote(config.get('model_type'))}"
            )
        temperature = self.temperature
        fields = FieldReader(config, f"{where}/config.json")
        if self.temperature_field is not None:
            temperature = fields.number(self.temperature_field, default=temperature)
        if self.softmax_field is not None and not fields.flag(self.softmax_field, default=False):
            temperature = None
        return replace(
            self,
            objectives=objectives,
            per_objective=q,
            gate=gate,
            gate_at=tuple((kind, ids) for kind, ids in self.gate_at if kind == config.get("model_type")),
            temperature=temperature,
        )

    @property
    def needs(self) -> tuple[int, ...]:
        """Return the ids at which a bound head's gate reads; empty if it reads at the read position."""
        return self.gate_at[0][1] if self.gate_at else ()

    def tensors(self, sizes: Sizes) -> tuple[HeadTensor, ...]:
        tensors = list(self.objectives.tensors())
        k = self.objectives.outputs // int(self.per_objective)
        if self.gate is not None:
            tensors.extend(self.gate.tensors())
        if self.transform is not None:
            tensors.append(HeadTensor(key=self.transform, shape=(k, k)))
        if self.scale is not None:
            tensors.append(HeadTensor(key=self.scale, shape=(1,)))
        return tuple(tensors)

    def __call__(self, params: Mapping[str, Any], states: States) -> jax.Array:
        tensors, last = params["head"], states.read()
        numbers = self.objectives(tensors, last)
        numbers = numbers.reshape(*numbers.shape[:-1], -1, int(self.per_objective))
        if self.value == "mean":
            values = numbers.mean(axis=-1)
        elif self.value == "bins":
            at = jnp.linspace(0.0, 1.0, int(self.per_objective), dtype=jnp.float32)
            values = (jax.nn.softmax(numbers, axis=-1) * at).sum(axis=-1)
        else:
            values = numbers[..., 0]
        if self.transform is not None:
            values = dense(values, tensors[self.transform])
        if self.gate is None:
            gates = jnp.asarray(self.weights, jnp.float32)
        else:
            gates = self.gate(tensors, at_pattern(states, self.needs) if self.needs else last)
            if self.temperature is not None:
                gates = jax.nn.softmax(gates / self.temperature, axis=-1)
            if self.scale is not None:
                gates = gates * tensors[self.scale].astype(jnp.float32)
        return (gates * values).sum(axis=-1, keepdims=True)
