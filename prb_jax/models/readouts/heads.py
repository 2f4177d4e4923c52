"""Read-outs of open reward models as small declarative pieces.

A head names its tensors and computes float32 values [B, K, n] from `States`. Heads are assembled in
:mod:`prb_jax.models.readouts.registry`; the head with several objectives is in
:mod:`prb_jax.models.readouts.gated`. Sizes come from the checkpoint (:meth:`Head.bound`).
"""

from __future__ import annotations

import re
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, replace
from typing import Any, ClassVar, Literal, Self, get_args

import jax
import jax.numpy as jnp
from jax import lax

from prb_jax.errors import CheckpointError, quote
from prb_jax.models.config.fields import FieldReader
from prb_jax.models.encoder_layers import ACTIVATIONS, EncoderActivation, activate, layer_norm
from prb_jax.models.head import HeadTensor, ReadsAnything, Shapes, Sizes, States, dense
from prb_jax.trees.streams import StreamBatch


def at_pattern(states: States, pattern: tuple[int, ...]) -> jax.Array:
    """Return the state at the first token of the last occurrence of ``pattern``, float32 [S, M, D].

    The whole conversation is searched; without an occurrence the state is NaN.
    """
    batch = states.whole
    tokens, previous = jnp.asarray(batch.tokens), jnp.asarray(batch.previous)
    columns = jnp.arange(tokens.shape[1])
    first = jnp.broadcast_to(columns, tokens.shape)
    ends = tokens == pattern[-1]
    for token in reversed(pattern[:-1]):
        before = jnp.take_along_axis(previous, first, axis=1)
        first = jnp.maximum(before, 0)
        ends &= (before >= 0) & (jnp.take_along_axis(tokens, first, axis=1) == token)
    last = jnp.max(jnp.where(_conversations(batch) & ends[:, None], columns, -1), axis=2)
    found = states.at(jnp.take_along_axis(first, jnp.maximum(last, 0), axis=1))
    return jnp.where(last[:, :, None] >= 0, found, jnp.nan)


def along(states: States, token: int, value: Callable[[jax.Array], jax.Array]) -> tuple[jax.Array, jax.Array]:
    """Return a value for every column, and a mask of the columns with ``token`` in each conversation.

    Args:
      token: Token id.
      value: Function from float32 states [..., D] to values [...].

    Returns:
      float32 and bool [S, M, N]; the columns of a conversation are in order.
    """
    values = value(states.norm(states.hidden.astype(jnp.float32)))
    batch = states.whole
    shown = _conversations(batch) & (jnp.asarray(batch.tokens) == token)[:, None]
    return jnp.broadcast_to(values[:, None], shown.shape), shown


def _conversations(batch: StreamBatch) -> jax.Array:
    """Return a mask of the tokens in the conversation of each read place, bool [S, M, N]."""
    end = jnp.asarray(batch.ends)[:, :, None]
    return (jnp.arange(batch.tokens.shape[1]) <= end) & (end < jnp.asarray(batch.until)[:, None])


def check_tensor(
    stored: Shapes, key: str, shape: Sequence[int | None], *, where: str, what: str
) -> tuple[int, ...]:
    """Return the shape of a tensor of a head; None in the expected shape allows any size.

    Raises:
      CheckpointError: The tensor is missing or has another shape.
    """
    if (found := stored.get(key)) is None:
        raise CheckpointError(
            f"{where}: the head tensor '{key}' of the read-out '{what}' is missing and would have to be made up at "
            "random: get the whole checkpoint, side files too, or name another read-out with --readout"
        )
    if len(found) != len(shape) or any(size not in (None, real) for size, real in zip(shape, found)):
        expected = ", ".join("any" if size is None else str(size) for size in shape)
        raise CheckpointError(f"{where}: tensor '{key}': expected shape [{expected}], found {list(found)}")
    return found


Activation = Literal["relu", "selu", "leaky_relu"]

_ACTIVATIONS = {"relu": jax.nn.relu, "selu": jax.nn.selu, "leaky_relu": jax.nn.leaky_relu}
_BATCH_NORM = ("weight", "bias", "running_mean", "running_var")
_BATCH_NORM_EPS = 1e-5  # default of torch


@dataclass(frozen=True, kw_only=True)
class Layer:
    """One linear layer of a checkpoint: ``name``.weight [outputs, inputs], with optional bias and batch norm."""

    name: str
    inputs: int
    outputs: int
    bias: bool
    batch_norm: str | None = None


@dataclass(frozen=True)
class Stack:
    """Linear layers with activations between them: ``prefix``.0, ``prefix``.2, ...; or a single layer, ``prefix``.

    Only the prefix of its tensor names is declared; number and sizes of layers come from the checkpoint. A batch norm,
    recognised by its running statistics, belongs to the layer before it and is applied after the activation.
    """

    prefix: str  # prefix of its tensor names
    activation: Activation = "relu"  # after every layer except the last
    layers: tuple[Layer, ...] = ()  # layers in the checkpoint; empty until :meth:`bound`

    def bound(
        self, stored: Shapes, *, width: int, where: str, what: str, outputs: int | None = None
    ) -> Stack:
        """Return the stack with the layers of the checkpoint.

        Args:
          stored: Shapes of all tensors by name.
          width: Width of the input.
          where, what: Names of the checkpoint and the read-out, for messages.
          outputs: Expected number of outputs, if known.

        Raises:
          CheckpointError: The tensors are missing, or layers do not fit each other; the message names the tensor.
        """
        layers: list[Layer] = []
        size = width
        for name in self._names(stored):
            if f"{name}.running_mean" in stored and layers:
                for part in _BATCH_NORM:
                    check_tensor(stored, f"{name}.{part}", [size], where=where, what=what)
                layers[-1] = replace(layers[-1], batch_norm=name)
                continue
            inputs = size
            size, _ = check_tensor(stored, f"{name}.weight", [None, inputs], where=where, what=what)
            if bias := f"{name}.bias" in stored:
                check_tensor(stored, f"{name}.bias", [size], where=where, what=what)
            layers.append(Layer(name=name, inputs=inputs, outputs=size, bias=bias))
        if not layers:
            check_tensor(
                stored, f"{self.prefix}.weight or {self.prefix}.0.weight", [], where=where, what=what
            )
        if outputs not in (None, size):
            raise CheckpointError(
                f"{where}: tensor '{layers[-1].name}.weight', the last of '{self.prefix}': expected {outputs} outputs, "
                f"found {size}: the layers after it are missing, or this is another read-out"
            )
        return replace(self, layers=tuple(layers))

    def _names(self, stored: Shapes) -> list[str]:
        if f"{self.prefix}.weight" in stored:
            return [self.prefix]
        numbered = re.compile(re.escape(self.prefix) + r"\.(\d+)\.\w+")
        numbers = sorted({int(match[1]) for key in stored if (match := numbered.fullmatch(key))})
        return [f"{self.prefix}.{number}" for number in numbers]

    @property
    def outputs(self) -> int:
        return self.layers[-1].outputs

    def tensors(self) -> tuple[HeadTensor, ...]:
        """Return all tensors that the stack reads from the checkpoint."""
        tensors: list[HeadTensor] = []
        for layer in self.layers:
            vectors = [f"{layer.name}.bias"] if layer.bias else []
            if layer.batch_norm is not None:
                vectors += [f"{layer.batch_norm}.{part}" for part in _BATCH_NORM]
            shape = (layer.outputs, layer.inputs)
            tensors.append(HeadTensor(key=f"{layer.name}.weight", shape=shape, transposed=True))
            tensors += [HeadTensor(key=key, shape=shape[:1]) for key in vectors]
        return tuple(tensors)

    def __call__(self, params: Mapping[str, Any], x: jax.Array) -> jax.Array:
        """Apply the stack to x float32 [..., width]: float32 [..., outputs]."""
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


@dataclass(frozen=True)
class _OneStack(ReadsAnything):
    """A head that consists of one stack of layers, with a fixed number of outputs."""

    stack: Stack

    outputs: ClassVar[int] = 1

    def bound(self, stored: Shapes, config: Mapping[str, Any], *, where: str, what: str) -> Self:
        sizes = {"width": config["hidden_size"], "outputs": self.outputs}
        return replace(self, stack=self.stack.bound(stored, where=where, what=what, **sizes))

    def tensors(self, sizes: Sizes) -> tuple[HeadTensor, ...]:
        return self.stack.tensors()


@dataclass(frozen=True)
class Mlp(_OneStack):
    """A stack of layers with one output, applied at the read position."""

    depth_field: str | None = None
    """Field of ``config.json`` with the number of hidden layers, checked if present."""

    def bound(self, stored: Shapes, config: Mapping[str, Any], *, where: str, what: str) -> Self:
        bound = super().bound(stored, config, where=where, what=what)
        hidden, depth = (
            len(bound.stack.layers) - 1,
            config.get(self.depth_field) if self.depth_field else None,
        )
        if depth not in (None, hidden):
            raise CheckpointError(
                f"{where}: '{self.stack.prefix}' has {hidden} hidden layers, but config.json says "
                f"{self.depth_field}={quote(depth)}: tensors are missing or belong to another model"
            )
        return bound

    def __call__(self, params: Mapping[str, Any], states: States) -> jax.Array:
        return self.stack(params["head"], states.read())


@dataclass(frozen=True)
class Pooled(ReadsAnything):
    """Pooler and classifier on the state of an encoder's first token: W2 act(W1 x + b1) + b2."""

    # pooler, classifier: names of the two linear layers
    pooler: str = "pooler.dense"
    classifier: str = "classifier"
    activation: EncoderActivation = (
        "gelu"  # activation between them: field ``pooler_hidden_act`` of ``config.json``
    )
    # width, labels: D, n; 0 until :meth:`bound`
    width: int = 0
    labels: int = 0

    def bound(self, stored: Shapes, config: Mapping[str, Any], *, where: str, what: str) -> Pooled:
        fields = FieldReader(config, f"{where}/config.json")
        return self._of_size(stored, fields, "pooler_hidden_act", where=where, what=what)

    def _of_size(
        self, stored: Shapes, fields: FieldReader, activation: str, *, where: str, what: str
    ) -> Pooled:
        """Return the head with the sizes of a checkpoint, and the activation in a field of ``config.json``."""
        if (named := fields.text(activation, default="gelu")) not in ACTIVATIONS:
            raise fields.error(activation, f"one of {', '.join(ACTIVATIONS)}")
        labels = stored.get(f"{self.classifier}.weight", (1,))[0]
        bound = replace(
            self, activation=ACTIVATIONS[named], width=fields.integer("hidden_size"), labels=labels
        )
        for tensor in bound.tensors():
            check_tensor(stored, tensor.key, tensor.shape, where=where, what=what)
        return bound

    def tensors(self, sizes: Sizes | None = None) -> tuple[HeadTensor, ...]:
        return tuple(
            tensor
            for name, size in ((self.pooler, self.width), (self.classifier, self.labels))
            for tensor in (
                HeadTensor(key=f"{name}.weight", shape=(size, self.width), transposed=True),
                HeadTensor(key=f"{name}.bias", shape=(size,)),
            )
        )

    def __call__(self, params: Mapping[str, Any], states: States) -> jax.Array:
        tensors, x = params["head"], states.read()
        x = activate(
            dense(x, tensors[f"{self.pooler}.weight"], tensors[f"{self.pooler}.bias"]), self.activation
        )
        return dense(x, tensors[f"{self.classifier}.weight"], tensors[f"{self.classifier}.bias"])


@dataclass(frozen=True)
class NormedPooled(Pooled):
    """Classifier of ModernBERT on a pooled state: W2 norm(act(W1 x)) + b2; W1 may have a bias."""

    pooler: str = "head.dense"
    norm: str = "head.norm"
    # biased, norm_bias: the pooler and the norm have biases; set by :meth:`bound`, like eps
    biased: bool = False
    norm_bias: bool = False
    eps: float = 1e-5

    def bound(self, stored: Shapes, config: Mapping[str, Any], *, where: str, what: str) -> Pooled:
        fields, name = FieldReader(config, f"{where}/config.json"), "classifier_activation"
        biases: dict[str, Any] = {
            "biased": fields.flag("classifier_bias", default=False),
            "norm_bias": fields.flag("norm_bias", default=False),
            "eps": fields.number("norm_eps", default=1e-5),
        }
        return replace(self, **biases)._of_size(stored, fields, name, where=where, what=what)

    def tensors(self, sizes: Sizes | None = None) -> tuple[HeadTensor, ...]:
        whole = super().tensors(sizes)
        norm = [f"{self.norm}.weight", *([f"{self.norm}.bias"] if self.norm_bias else ())]
        return (
            *(tensor for tensor in whole if self.biased or tensor.key != f"{self.pooler}.bias"),
            *(HeadTensor(key=key, shape=(self.width,)) for key in norm),
        )

    def __call__(self, params: Mapping[str, Any], states: States) -> jax.Array:
        tensors = params["head"]
        x = dense(states.read(), tensors[f"{self.pooler}.weight"], tensors.get(f"{self.pooler}.bias"))
        weight, bias = tensors[f"{self.norm}.weight"], tensors.get(f"{self.norm}.bias")
        x = layer_norm(activate(x, self.activation), weight, bias, eps=self.eps)
        return dense(x, tensors[f"{self.classifier}.weight"], tensors[f"{self.classifier}.bias"])


Together = Literal["product", "min", "mean", "last"]
"""Reductions of the values of a response's steps to one reward."""


@dataclass(frozen=True)
class Steps(_OneStack):
    """Process reward: softmax probability of the second of two labels at every step marker, reduced over steps.

    The stack computes the two logits.
    """

    marker: int  # id of the token that ends a step
    marker_text: str = ""  # its text, if the row of the model fixes it
    # ``product``, ``min`` or ``mean`` over all steps, or the ``last`` step. The default is the published choice
    # of a model; ``--readout ROW:min`` etc. choose another.
    together: Together = "product"

    outputs: ClassVar[int] = 2
    ways: ClassVar[tuple[Together, ...]] = get_args(Together)

    @property
    def needs(self) -> tuple[int, ...]:
        return (self.marker,)

    def __call__(self, params: Mapping[str, Any], states: States) -> jax.Array:
        def positive(states_read: jax.Array) -> jax.Array:
            return jax.nn.softmax(self.stack(params["head"], states_read), axis=-1)[..., 1]

        steps, shown = along(states, self.marker, positive)
        if self.together == "last":
            index = jnp.max(jnp.where(shown, jnp.arange(shown.shape[2]), 0), axis=2, keepdims=True)
            return jnp.take_along_axis(steps, index, axis=2)
        if self.together == "mean":
            return jnp.where(shown, steps, 0.0).sum(axis=2, keepdims=True) / shown.sum(axis=2, keepdims=True)
        kept = jnp.where(shown, steps, 1.0)
        return (kept.prod if self.together == "product" else kept.min)(axis=2, keepdims=True)
