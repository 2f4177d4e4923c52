"""Groups of parameters: what a training step knows of the arrays that it trains."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Any, Protocol

import jax
import jax.numpy as jnp
import optax
from jax.sharding import Mesh, NamedSharding

from prb_jax.errors import quote
from prb_jax.models.decoder import Params
from prb_jax.models.lora import LoraConfig, init_lora
from prb_jax.sharding import parameter_shardings, replicated
from prb_jax.training import TUNINGS, Tuning
from prb_jax.training.optimizer import learning_rate, make_optimizer
from prb_jax.training.settings import OptimizerSettings


class ParameterGroup(Protocol):
    """Parameters that are trained together, by one rule. A method of personalisation is one
    (:class:`prb_jax.personal.method.Method`), and so are :class:`Weights`."""

    @property
    def shardings(self) -> Any:
        """One sharding for each leaf of the state."""
        ...

    def start(self, source: Any, /) -> Any:
        """A new state, from the arrays that the group starts with."""
        ...

    def inputs(self, state: Any, /) -> Any:
        """The float32 arrays of the state by which the loss is differentiated."""
        ...

    def update(self, state: Any, gradient: Any, /, *, step: jax.Array, learn: jax.Array) -> Any:
        """The state after one update by a mean gradient; as it was where ``learn`` (bool []) is False.

        Args:
            step: int32 [], updates made so far.
        """
        ...


@dataclass(frozen=True, kw_only=True)
class Weights:
    """Weights of the model under AdamW. The state: ``params`` (float32) and ``opt``.

    Attributes:
        optimizer: how they are trained, with a `learning_rate`.
        lengths: of the run: see :func:`prb_jax.training.optimizer.learning_rate`.
        trainable: of :func:`split_params`; only shapes are looked at.
        mesh: devices.
    """

    optimizer: OptimizerSettings
    lengths: Sequence[int]
    trainable: Params
    mesh: Mesh

    @property
    def learning_rate(self) -> optax.Schedule:
        """The rate as a function of the updates made so far."""
        return learning_rate(self.optimizer, lengths=self.lengths)

    @property
    def _transformation(self) -> optax.GradientTransformation:
        return make_optimizer(self.optimizer, lengths=self.lengths)

    @property
    def shardings(self) -> dict[str, Any]:
        """Moments are split like their parameter."""
        weights = parameter_shardings(self.trainable, self.mesh)
        everywhere = replicated(self.mesh)
        abstract = jax.tree.map(lambda leaf: jax.ShapeDtypeStruct(leaf.shape, jnp.float32), self.trainable)
        transformation = self._transformation
        opt = optax.tree_utils.tree_map_params(
            transformation,
            lambda _, sharding: sharding,
            jax.eval_shape(transformation.init, abstract),
            weights,
            transform_non_params=lambda _: everywhere,
            is_leaf=lambda leaf: isinstance(leaf, NamedSharding),
        )
        return {"params": weights, "opt": opt}

    def start(self, source: Params) -> dict[str, Any]:
        """A new state, from the trainable part of :func:`split_params`."""
        weights = jax.tree.map(lambda leaf: leaf.astype(jnp.float32), source)
        return {"params": weights, "opt": self._transformation.init(weights)}

    def inputs(self, state: Mapping[str, Any]) -> Params:
        return state["params"]

    def update(
        self, state: Mapping[str, Any], gradient: Params, *, step: jax.Array, learn: jax.Array
    ) -> dict[str, Any]:
        changes, opt = self._transformation.update(gradient, state["opt"], state["params"])
        new = {"params": optax.apply_updates(state["params"], changes), "opt": opt}
        return jax.tree.map(lambda a, b: jnp.where(learn, a, b), new, dict(state))


def split_params(
    params: Params, *, tuning: Tuning, lora: LoraConfig | None = None, seed: int = 0
) -> tuple[Params, Params]:
    """(trainable, frozen): two nested dicts that :func:`merge` puts together again.

    Args:
        params: of the decoder, without adapters.
        tuning: ``head`` trains the score head, ``lora`` the head and new adapters, ``full`` everything.
        lora: rank and targets; the defaults if not given.
        seed: of the adapters.
    """
    if tuning == "full":
        return dict(params), {}
    head = {name: leaf for name, leaf in params.items() if name.startswith("score")}
    frozen = {name: leaf for name, leaf in params.items() if name not in head}
    if tuning == "head":
        return head, frozen
    if tuning == "lora":
        return {**init_lora(params, lora or LoraConfig(), seed=seed), **head}, frozen
    raise ValueError(f"tuning: expected one of {', '.join(TUNINGS)}, found {quote(tuning)}")


def merge(trainable: Mapping[str, Any], frozen: Mapping[str, Any]) -> Params:
    """The two parts of :func:`split_params` as one tree for the decoder."""
    merged = dict(frozen)
    for name, leaf in trainable.items():
        both = isinstance(leaf, Mapping) and isinstance(merged.get(name), Mapping)
        merged[name] = merge(leaf, merged[name]) if both else leaf
    return merged
