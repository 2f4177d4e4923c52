"""The read-outs of open reward models as small declarative pieces.

A head names its tensors and computes float32 values [B, K, n] from :class:`TreeStates`. What it is made of
is declared in :mod:`prb_jax.readouts.registry`; sizes come from the checkpoint (:meth:`Head.bound`).
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, replace
from typing import Any, Literal, Protocol

import jax
import jax.numpy as jnp

from prb_jax.checkpoints.layout import EMBEDDING_KEY, HEAD_KEY, OUTPUT_EMBEDDING_KEY
from prb_jax.errors import CheckpointError
from prb_jax.readouts.layers import HeadTensor, Shapes, Stack, dense
from prb_jax.readouts.states import TreeStates


class Head(Protocol):
    """What every head does. Heads are frozen and hashable: they are part of a model's configuration."""

    def bound(self, stored: Shapes, config: Mapping[str, Any], *, where: str, what: str) -> Head:
        """The head as a checkpoint has it: sizes filled in.

        Args:
          stored: shapes of the checkpoint's tensors by name.
          config: the raw ``config.json``.
          where, what: the checkpoint and the read-out's name, for messages.

        Raises:
          CheckpointError: a tensor that is missing or does not fit; names it and the remedy.
        """
        ...

    def tensors(self) -> tuple[HeadTensor, ...]:
        """The tensors it reads, apart from those of the ``score`` leaf (:class:`Linear`, :class:`Vocabulary`)."""
        ...

    @property
    def needs(self) -> tuple[int, ...]:
        """A run of ids without which a conversation cannot be read; empty where every one can."""
        ...

    def __call__(self, params: Mapping[str, Any], states: TreeStates) -> jax.Array:
        """Values float32 [B, K, n]; n is 1 but for a linear head with several labels.

        Args:
          params: the model's parameters; ``score`` [D, n] and ``head`` (tensors by name) are the heads'.
        """
        ...


class _ReadsAnything:
    @property
    def needs(self) -> tuple[int, ...]:
        return ()


@dataclass(frozen=True)
class Linear(_ReadsAnything):
    """W x + b at the read position: the head of ``*ForSequenceClassification``.

    Attributes:
      keys: names of the matrix [n, D]; the first one that the checkpoint has is it.
      with_bias: a ``.bias`` beside the matrix is part of the head (else it is a tensor without a place).
      bias: the checkpoint has that bias.
    """

    keys: tuple[str, ...] = (HEAD_KEY,)
    with_bias: bool = False
    bias: bool = False

    @property
    def key(self) -> str:
        return self.keys[0]

    @property
    def bias_key(self) -> str:
        return self.key.removesuffix("weight") + "bias"

    def bound(self, stored: Shapes, config: Mapping[str, Any], *, where: str, what: str) -> Linear:
        key = next((key for key in self.keys if key in stored), None)
        if key is None:
            raise CheckpointError(
                f"{where}: the score head '{self.key}' of the read-out '{what}' is missing and would have to be "
                "made up at random: get the whole checkpoint, side files too, or name another read-out with "
                "--readout"
            )
        found = replace(self, keys=(key,))
        return replace(found, bias=self.with_bias and found.bias_key in stored)

    def tensors(self) -> tuple[HeadTensor, ...]:
        return ()

    def __call__(self, params: Mapping[str, Any], states: TreeStates) -> jax.Array:
        return dense(states.read(), params["score"], params["score_bias"] if self.bias else None)


LINEAR = Linear()
"""The head of a ``*ForSequenceClassification`` of transformers."""


@dataclass(frozen=True)
class Mlp(_ReadsAnything):
    """A stack of layers with one output, at the read position."""

    stack: Stack
    depth_field: str | None = None
    """Field of ``config.json`` with the number of hidden layers, checked where it is present."""

    def bound(self, stored: Shapes, config: Mapping[str, Any], *, where: str, what: str) -> Mlp:
        stack = self.stack.bound(stored, width=config["hidden_size"], where=where, what=what)
        _check_outputs(stack, 1, where=where)
        depth = config.get(self.depth_field) if self.depth_field else None
        if depth is not None and depth != len(stack.layers) - 1:
            raise CheckpointError(
                f"{where}: '{stack.prefix}' has {len(stack.layers) - 1} hidden layers, but config.json says "
                f"{self.depth_field}={depth}: tensors are missing or belong to another model"
            )
        return replace(self, stack=stack)

    def tensors(self) -> tuple[HeadTensor, ...]:
        return self.stack.tensors()

    def __call__(self, params: Mapping[str, Any], states: TreeStates) -> jax.Array:
        return self.stack(params["head"], states.read())


@dataclass(frozen=True)
class Vocabulary(_ReadsAnything):
    """Logits of the language model's vocabulary at the read position.

    Attributes:
      tokens: one id, whose logit is the value; or two, and the value is the softmax probability of the first
        (A against B, yes against no).
      key: the matrix they are rows of: the output embedding, or the input embedding that it is tied to.
    """

    tokens: tuple[int, ...]
    key: str = OUTPUT_EMBEDDING_KEY

    def bound(self, stored: Shapes, config: Mapping[str, Any], *, where: str, what: str) -> Vocabulary:
        key = OUTPUT_EMBEDDING_KEY
        if key not in stored:
            if not config.get("tie_word_embeddings"):
                raise CheckpointError(
                    f"{where}: the read-out '{what}' reads rows of '{key}', which is missing: get the whole "
                    "causal language model"
                )
            key = EMBEDDING_KEY
        rows = stored.get(key, (0,))[0]
        if not all(0 <= token < rows for token in self.tokens):
            raise CheckpointError(
                f"{where}: the read-out '{what}' reads rows {list(self.tokens)}, but '{key}' has {rows}"
            )
        return replace(self, key=key)

    def tensors(self) -> tuple[HeadTensor, ...]:
        return ()

    def __call__(self, params: Mapping[str, Any], states: TreeStates) -> jax.Array:
        logits = dense(states.read(), params["score"])
        return logits if len(self.tokens) == 1 else jax.nn.softmax(logits, axis=-1)[..., :1]


@dataclass(frozen=True, kw_only=True)
class Gated:
    """Several objectives at the read position, mixed by weights: sum_k gate_k value_k.

    Attributes:
      objectives: gives k times q numbers, q for each objective.
      per_objective: q, or the field of ``config.json`` that says it.
      value: what the q numbers say of an objective: its value (``one``, q is 1), quantiles of it (``mean``),
        mean and spread of a normal distribution (``first``), or logits of q bins between 0 and 1 (``bins``).
      transform: name of a matrix [k, k] that values are multiplied with (value row times matrix).
      gate: gives k weights from a state; None where they are fixed.
      weights: the fixed weights.
      gate_at: ids whose last occurrence, at its first token, is where the gate reads (the end of the user's
        turn); by model_type. Empty: the read position.
      temperature: the gate ends in a softmax of its outputs over this; None: no softmax.
      temperature_field: field of ``config.json`` that replaces ``temperature``.
      softmax_field: field of ``config.json`` without which there is no softmax after all.
      scale: name of a tensor [1] that the gate is multiplied with.
    """

    objectives: Stack
    per_objective: int | str = 1
    value: Literal["one", "mean", "first", "bins"] = "one"
    transform: str | None = None
    gate: Stack | None = None
    weights: tuple[float, ...] = ()
    gate_at: tuple[tuple[str, tuple[int, ...]], ...] = ()
    temperature: float | None = None
    temperature_field: str | None = None
    softmax_field: str | None = None
    scale: str | None = None

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
        gate = self.gate.bound(stored, width=width, where=where, what=what) if self.gate else None
        if gate is not None:
            _check_outputs(gate, k, where=where)
        elif len(self.weights) != k:
            raise CheckpointError(
                f"{where}: '{objectives.layers[-1].name}.weight' gives {k} objectives, but the read-out '{what}' "
                f"has {len(self.weights)} weights: this checkpoint has another read-out"
            )
        for key, shape in ((self.transform, (k, k)), (self.scale, (1,))):
            if key is not None and stored.get(key) != shape:
                raise CheckpointError(
                    f"{where}: the head tensor '{key}' of the read-out '{what}': expected shape {list(shape)}, "
                    f"found {list(stored[key]) if key in stored else 'no such tensor'}"
                )
        patterns = dict(self.gate_at)
        if patterns and config.get("model_type") not in patterns:
            raise CheckpointError(
                f"{where}: where the gate of '{what}' reads is known for {', '.join(patterns)}, not for model_type "
                f"{config.get('model_type')!r}"
            )
        temperature = self.temperature
        if self.temperature_field is not None:
            temperature = config.get(self.temperature_field, temperature)
        if self.softmax_field is not None and not config.get(self.softmax_field):
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
        """The ids at which a bound head's gate reads; empty where it reads at the read position."""
        return self.gate_at[0][1] if self.gate_at else ()

    def tensors(self) -> tuple[HeadTensor, ...]:
        found = list(self.objectives.tensors())
        k = self.objectives.outputs // int(self.per_objective)
        if self.gate is not None:
            found.extend(self.gate.tensors())
        if self.transform is not None:
            found.append(HeadTensor(key=self.transform, shape=(k, k)))
        if self.scale is not None:
            found.append(HeadTensor(key=self.scale, shape=(1,)))
        return tuple(found)

    def __call__(self, params: Mapping[str, Any], states: TreeStates) -> jax.Array:
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
            gates = self.gate(tensors, states.at_pattern(self.needs) if self.needs else last)
            if self.temperature is not None:
                gates = jax.nn.softmax(gates / self.temperature, axis=-1)
            if self.scale is not None:
                gates = gates * tensors[self.scale].astype(jnp.float32)
        return (gates * values).sum(axis=-1, keepdims=True)


@dataclass(frozen=True)
class Steps:
    """Two labels at every step marker: the softmax probability of the second, put together over the steps.

    Attributes:
      stack: gives the two logits.
      marker, marker_text: the token that ends a step.
      together: ``product`` or ``min`` over all steps, or the ``last`` one.
    """

    stack: Stack
    marker: int
    marker_text: str
    together: Literal["product", "min", "last"] = "product"

    def bound(self, stored: Shapes, config: Mapping[str, Any], *, where: str, what: str) -> Steps:
        stack = self.stack.bound(stored, width=config["hidden_size"], where=where, what=what)
        _check_outputs(stack, 2, where=where)
        return replace(self, stack=stack)

    def tensors(self) -> tuple[HeadTensor, ...]:
        return self.stack.tensors()

    @property
    def needs(self) -> tuple[int, ...]:
        return (self.marker,)

    def __call__(self, params: Mapping[str, Any], states: TreeStates) -> jax.Array:
        in_prefix, in_response = states.marked(self.marker)
        rows, responses, length = in_response.shape
        width = in_prefix.shape[1]
        logits = self.stack(params["head"], states.everywhere())
        positive = jax.nn.softmax(logits, axis=-1)[..., 1]
        shared = jnp.broadcast_to(positive[:, None, :width], (rows, responses, width))
        steps = jnp.concatenate([shared, positive[:, width:].reshape(rows, responses, length)], axis=2)
        shown = jnp.broadcast_to(in_prefix[:, None], (rows, responses, width))
        shown = jnp.concatenate([shown, in_response], axis=2)
        if self.together == "last":
            index = jnp.max(jnp.where(shown, jnp.arange(shown.shape[2]), 0), axis=2, keepdims=True)
            return jnp.take_along_axis(steps, index, axis=2)
        kept = jnp.where(shown, steps, 1.0)
        return (kept.prod if self.together == "product" else kept.min)(axis=2, keepdims=True)


def _check_outputs(stack: Stack, expected: int, *, where: str) -> None:
    if stack.outputs != expected:
        raise CheckpointError(
            f"{where}: tensor '{stack.layers[-1].name}.weight', the last of '{stack.prefix}': expected {expected} "
            f"outputs, found {stack.outputs}: the layers after it are missing, or this is another read-out"
        )
