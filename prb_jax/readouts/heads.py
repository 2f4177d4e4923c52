"""The read-outs of open reward models as small declarative pieces.

A head names its tensors and computes float32 values [B, K, n] from `States`. What it is made of
is declared in :mod:`prb_jax.readouts.registry` (the head of several objectives is in
:mod:`prb_jax.readouts.gated`); sizes come from the checkpoint (:meth:`Head.bound`).
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, replace
from typing import Any, Literal, get_args

import jax
import jax.numpy as jnp

from prb_jax.errors import CheckpointError, quote
from prb_jax.models.head import Head, HeadTensor, ReadsAnything, Shapes, dense
from prb_jax.models.layers import ACTIVATIONS, EncoderActivation, activate
from prb_jax.models.states import States
from prb_jax.readouts.layers import Stack

READOUTS = ("logit", "first-logit", "last-softmax")
ALL_VALUES = "all-values"
"""The rule of a caller that reads every value of the head itself; no user can name it."""
PAPER_READOUT = "last-softmax"
"""How the paper protocol reads a head with several labels where no rule is named."""


def choose_readout(name: str | None, *, num_labels: int, where: str) -> str:
    """The rule that turns ``num_labels`` logits into a reward.

    ``logit`` takes the only one. A head with several needs a rule by name: ``first-logit`` compares the
    first (RewardBench does), ``last-softmax`` takes the last entry of the softmax (the scripts of
    Personalised RewardBench do).

    Raises:
      CheckpointError: an unknown rule, or none that fits the head.
    """
    if name is not None and name not in READOUTS:
        raise CheckpointError(
            f"{where}: unknown readout {quote(name)}: expected one of {', '.join(READOUTS)}"
        )
    if num_labels == 1:
        if name not in (None, "logit"):
            raise CheckpointError(
                f"{where}: readout {quote(name)} needs several labels, the score head has one"
            )
        return "logit"
    if name in (None, "logit"):
        raise CheckpointError(
            f"{where}: the score head has {num_labels} labels, and nothing says which of them is the reward: "
            f"choose --readout first-logit or last-softmax (protocol paper alone takes {PAPER_READOUT} by itself)"
        )
    return str(name)


def read_out(logits: jax.Array, readout: str) -> jax.Array:
    """Rewards float32 [...] from logits float32 [..., num_labels]; with :data:`ALL_VALUES` all of them, as they are."""
    if readout == ALL_VALUES:
        return logits
    if readout == "last-softmax":
        return jax.nn.softmax(logits.astype(jnp.float32), axis=-1)[..., -1]
    return logits[..., 0]


@dataclass(frozen=True)
class Mlp(ReadsAnything):
    """A stack of layers with one output, at the read position."""

    stack: Stack
    depth_field: str | None = None
    """Field of ``config.json`` with the number of hidden layers, checked where it is present."""

    def bound(self, stored: Shapes, config: Mapping[str, Any], *, where: str, what: str) -> Mlp:
        stack = self.stack.bound(stored, width=config["hidden_size"], where=where, what=what)
        check_outputs(stack, 1, where=where)
        depth = config.get(self.depth_field) if self.depth_field else None
        if depth is not None and depth != len(stack.layers) - 1:
            raise CheckpointError(
                f"{where}: '{stack.prefix}' has {len(stack.layers) - 1} hidden layers, but config.json says "
                f"{self.depth_field}={depth}: tensors are missing or belong to another model"
            )
        return replace(self, stack=stack)

    def tensors(self) -> tuple[HeadTensor, ...]:
        return self.stack.tensors()

    def __call__(self, params: Mapping[str, Any], states: States) -> jax.Array:
        return self.stack(params["head"], states.read())


@dataclass(frozen=True)
class Pooled(ReadsAnything):
    """A pooler and a classifier over the state of an encoder's first token: W2 act(W1 x + b1) + b2.

    Attributes:
      pooler, classifier: names of the two linear layers.
      activation: between them; the field ``pooler_hidden_act`` of ``config.json``.
      width, labels: D, n; 0 until :meth:`bound`.
    """

    pooler: str = "pooler.dense"
    classifier: str = "classifier"
    activation: EncoderActivation = "gelu"
    width: int = 0
    labels: int = 0

    def bound(self, stored: Shapes, config: Mapping[str, Any], *, where: str, what: str) -> Pooled:
        named = config.get("pooler_hidden_act", "gelu")
        if named not in ACTIVATIONS:
            raise CheckpointError(
                f"{where}: field 'pooler_hidden_act' of config.json: expected one of {', '.join(ACTIVATIONS)}, "
                f"found {quote(named)}"
            )
        labels = stored.get(f"{self.classifier}.weight", (1,))[0]
        bound = replace(self, activation=ACTIVATIONS[named], width=config["hidden_size"], labels=labels)
        for tensor in bound.tensors():
            if tensor.key not in stored:
                raise CheckpointError(
                    f"{where}: the head tensor '{tensor.key}' of the read-out '{what}' is missing and would have to be "
                    "made up at random: get the whole checkpoint"
                )
            if stored[tensor.key] != tensor.shape:
                raise CheckpointError(
                    f"{where}: tensor '{tensor.key}': expected shape {list(tensor.shape)}, found "
                    f"{list(stored[tensor.key])}"
                )
        return bound

    def tensors(self) -> tuple[HeadTensor, ...]:
        sizes = ((self.pooler, self.width), (self.classifier, self.labels))
        return tuple(
            tensor
            for name, size in sizes
            for tensor in (
                HeadTensor(key=f"{name}.weight", shape=(size, self.width), transposed=True),
                HeadTensor(key=f"{name}.bias", shape=(size,)),
            )
        )

    def __call__(self, params: Mapping[str, Any], states: States) -> jax.Array:
        tensors = params["head"]
        x = dense(states.read(), tensors[f"{self.pooler}.weight"], tensors[f"{self.pooler}.bias"])
        x = activate(x, self.activation)
        return dense(x, tensors[f"{self.classifier}.weight"], tensors[f"{self.classifier}.bias"])


@dataclass(frozen=True)
class ReadStates(ReadsAnything):
    """The state itself at the read position, float32 [B, K, D] after the last norm: features for other code."""

    def bound(self, stored: Shapes, config: Mapping[str, Any], *, where: str, what: str) -> ReadStates:
        return self

    def tensors(self) -> tuple[HeadTensor, ...]:
        return ()

    def __call__(self, params: Mapping[str, Any], states: States) -> jax.Array:
        return states.read()


@dataclass(frozen=True)
class StatesAndReward:
    """The state at the read position and the reward that a head gives there, float32 [B, K, D + 1]: one pass for both.

    Attributes:
      head: of the model.
      readout: the rule that turns its values into one reward, see :func:`prb_jax.readouts.heads.choose_readout`.
    """

    head: Head
    readout: str

    def bound(self, stored: Shapes, config: Mapping[str, Any], *, where: str, what: str) -> StatesAndReward:
        return replace(self, head=self.head.bound(stored, config, where=where, what=what))

    def tensors(self) -> tuple[HeadTensor, ...]:
        return self.head.tensors()

    @property
    def needs(self) -> tuple[int, ...]:
        return self.head.needs

    def __call__(self, params: Mapping[str, Any], states: States) -> jax.Array:
        rewards = read_out(self.head(params, states), self.readout)
        return jnp.concatenate([states.read(), rewards[..., None].astype(jnp.float32)], axis=-1)


Together = Literal["product", "min", "mean", "last"]
TOGETHER: tuple[Together, ...] = get_args(Together)
"""How the values of a response's steps can become one reward."""


@dataclass(frozen=True)
class Steps:
    """Two labels at every step marker: the softmax probability of the second, put together over the steps.

    Attributes:
      stack: gives the two logits.
      marker, marker_text: the token that ends a step.
      together: ``product``, ``min`` or ``mean`` over all steps, or the ``last`` one. What is published of a
        model is its default; ``--readout ROW:min`` and the like choose another.
    """

    stack: Stack
    marker: int
    marker_text: str
    together: Together = "product"

    def bound(self, stored: Shapes, config: Mapping[str, Any], *, where: str, what: str) -> Steps:
        stack = self.stack.bound(stored, width=config["hidden_size"], where=where, what=what)
        check_outputs(stack, 2, where=where)
        return replace(self, stack=stack)

    def tensors(self) -> tuple[HeadTensor, ...]:
        return self.stack.tensors()

    @property
    def needs(self) -> tuple[int, ...]:
        return (self.marker,)

    def __call__(self, params: Mapping[str, Any], states: States) -> jax.Array:
        def positive(found: jax.Array) -> jax.Array:
            return jax.nn.softmax(self.stack(params["head"], found), axis=-1)[..., 1]

        steps, shown = states.along(self.marker, positive)
        if self.together == "last":
            index = jnp.max(jnp.where(shown, jnp.arange(shown.shape[2]), 0), axis=2, keepdims=True)
            return jnp.take_along_axis(steps, index, axis=2)
        if self.together == "mean":
            return jnp.where(shown, steps, 0.0).sum(axis=2, keepdims=True) / shown.sum(axis=2, keepdims=True)
        kept = jnp.where(shown, steps, 1.0)
        return (kept.prod if self.together == "product" else kept.min)(axis=2, keepdims=True)


def check_outputs(stack: Stack, expected: int, *, where: str) -> None:
    """Raises CheckpointError if a stack does not end in so many outputs."""
    if stack.outputs != expected:
        raise CheckpointError(
            f"{where}: tensor '{stack.layers[-1].name}.weight', the last of '{stack.prefix}': expected {expected} "
            f"outputs, found {stack.outputs}: the layers after it are missing, or this is another read-out"
        )
