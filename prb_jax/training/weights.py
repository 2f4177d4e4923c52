"""The weights of a model in training: which ones are trained, how AdamW changes them, and how they score."""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from typing import Any

import jax
import jax.numpy as jnp
import optax
from jax.sharding import Mesh, NamedSharding

from prb_jax.errors import CheckpointError, quote
from prb_jax.models.checkpoints.load import abstract_params
from prb_jax.models.config.decoder import DecoderConfig
from prb_jax.models.decoder import Params
from prb_jax.models.lora import LoraConfig, init_lora
from prb_jax.models.model import abstract_model, bind, parameter_shardings
from prb_jax.models.parameter import parameters
from prb_jax.models.readouts.score_tree import score_stream
from prb_jax.platform.sharding import replicated
from prb_jax.training import TUNINGS, Tuning
from prb_jax.training.config import OptimizerSettings, TrainSettings
from prb_jax.trees.streams import StreamBatch


@dataclass(frozen=True, kw_only=True)
class Weights:
    """Weights under AdamW: a group of parameters, with the same functions of its state as
    :class:`prb_jax.personal.method.TrainedMethod`. The state: ``params`` (float32) and ``opt``."""

    optimizer: OptimizerSettings  # how they are trained, with a `learning_rate`
    lengths: Sequence[int]  # of the run: see :func:`learning_rate`
    trainable: Params  # of :func:`split_params`; only shapes are looked at
    placed: dict[str, Any]  # sharding of each of them
    mesh: Mesh  # devices

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
        weights = self.placed
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

    def kept(self, state: Mapping[str, Any]) -> dict[str, Any]:
        return dict(state)

    def resume(self, kept: Mapping[str, Any]) -> dict[str, Any]:
        return dict(kept)


def learning_rate(options: OptimizerSettings, *, lengths: Sequence[int]) -> optax.Schedule:
    """Return the rate as a function of the number of updates made so far, float32 [].

    Args:
      options: with a `learning_rate`, the peak.
      lengths: updates of the whole run, ascending; several of a run that was lengthened. Updates before an earlier
        end follow the schedule of that length, and those after it the schedule of the next one. The warm-up is
        that of the first length.
    """
    assert options.learning_rate is not None
    peak, final = options.learning_rate, options.learning_rate * options.final_share
    warmup = round(options.warmup_share * lengths[0])

    def course(step: jax.Array, length: int) -> jax.Array:
        """The rate after the warm-up in a run of this length."""
        after_warmup = length - warmup
        if options.schedule == "constant":
            return jnp.full_like(step, peak)
        if options.schedule == "wsd":
            # A fall that is longer than what the warm-up leaves starts right after it.
            falling = max(1, min(max(1, round(length * options.decay_share)), after_warmup))
            share = jnp.clip((step - (length - falling)) / falling, 0.0, 1.0)
        else:
            share = jnp.clip((step - warmup) / max(1, after_warmup), 0.0, 1.0)
            if options.schedule == "cosine":
                share = 0.5 * (1.0 - jnp.cos(jnp.pi * share))
        return peak + (final - peak) * share

    def rate(step: Any) -> jax.Array:
        step = jnp.asarray(step, jnp.float32)
        value = course(step, lengths[-1])
        for length in reversed(lengths[:-1]):
            value = jnp.where(step < length, course(step, length), value)
        if warmup:
            value = jnp.where(step < warmup, peak * (step + 1.0) / warmup, value)
        return value

    return rate


def make_optimizer(options: OptimizerSettings, *, lengths: Sequence[int]) -> optax.GradientTransformation:
    """Clipping by global norm, AdamW and the schedule. The state holds two float32 moments for each leaf."""
    parts = [] if options.clip_norm is None else [optax.clip_by_global_norm(options.clip_norm)]
    return optax.chain(
        *parts,
        optax.scale_by_adam(b1=options.b1, b2=options.b2, eps=options.eps),
        optax.add_decayed_weights(options.weight_decay, mask=decay_mask),
        optax.scale_by_learning_rate(learning_rate(options, lengths=lengths)),
    )


def decay_mask(tree: Mapping[str, Any]) -> dict[str, Any]:
    """Which leaves of a nested dict of parameters decay: matrices, and no norms, biases, sinks and decays."""
    spared = ("norm", "bias", "scale", "sinks", "log_decay")  # those of stacked layers are matrices too
    return {
        name: decay_mask(leaf) if isinstance(leaf, Mapping) else leaf.ndim > 1 and not name.endswith(spared)
        for name, leaf in tree.items()
    }


def split_params(
    params: Params, *, config: DecoderConfig, tuning: Tuning, lora: LoraConfig, seed: int
) -> tuple[Params, Params]:
    """(trainable, frozen): two nested dicts that :func:`merge` puts together again.

    Args:
        params: of the decoder, without adapters.
        config: architecture.
        tuning: ``head`` trains the score head, ``lora`` the head and new adapters, ``full`` everything.
        lora: rank and targets of adapters.
        seed: of adapters.
    """
    if tuning == "full":
        return dict(params), {}
    declared = parameters(abstract_model(config))
    readout = {path[0] for path, variable in declared if variable.get_metadata("readout")}
    head = {name: leaf for name, leaf in params.items() if name in readout}
    frozen = {name: leaf for name, leaf in params.items() if name not in head}
    if tuning == "head":
        return head, frozen
    if tuning == "lora":
        return {**init_lora(bind(config, params).layers, lora, seed=seed), **head}, frozen
    raise ValueError(f"tuning: expected one of {', '.join(TUNINGS)}, found {quote(tuning)}")


def merge(trainable: Mapping[str, Any], frozen: Mapping[str, Any]) -> Params:
    """The two parts of :func:`split_params` as one tree for the decoder."""
    merged = dict(frozen)
    for name, leaf in trainable.items():
        both = isinstance(leaf, Mapping) and isinstance(merged.get(name), Mapping)
        merged[name] = merge(leaf, merged[name]) if both else leaf
    return merged


@dataclass(frozen=True, kw_only=True)
class TrainedModel:
    """The functions and the layout of the weights of one model, one way of tuning and one mesh."""

    # all parameters -> (those that are trained, the others)
    split: Callable[[Params], tuple[Params, Params]]
    # (trained, frozen, batch, `prompts` of the users of the step or None, `differentiated` where gradients are taken,
    # `loads`, a list that gains the tokens of each expert of a mixture)
    # -> rewards float32, [S, M] of streams or [S] of sequences
    rewards: Callable[..., jax.Array]
    trained: Params  # shapes of what is trained
    trained_shardings: dict[str, Any]
    frozen_shardings: dict[str, Any]
    width: int  # decides the learning rate where none is given


def trained_decoder(settings: TrainSettings, config: DecoderConfig, *, mesh: Mesh) -> TrainedModel:
    """Return a decoder as training sees it.

    Raises:
      CheckpointError: a head with several labels.
      MeshError: a mesh axis does not divide a parameter.
    """
    if config.num_labels != 1:
        raise CheckpointError(
            f"training needs a score head with one label, found num_labels={config.num_labels}"
        )
    options: dict[str, Any] = {
        "config": config,
        "dtype": jnp.dtype(settings.dtype),
        "mesh": mesh,
        "lora_scale": settings.lora_scale,
        "remat": settings.remat,
    }

    def split(params: Params) -> tuple[Params, Params]:
        return split_params(
            params, config=config, tuning=settings.tuning, lora=settings.lora, seed=settings.seed
        )

    def rewards(
        trained: Params,
        frozen: Params,
        batch: StreamBatch,
        *,
        prompts: jax.Array | None,
        differentiated: bool,
        loads: list[jax.Array] | None = None,
    ) -> jax.Array:
        through = differentiated and ("layers" in trained or prompts is not None)
        params = merge(trained, frozen)
        counted = None if config.experts is None else loads
        logits = score_stream(
            params, batch, soft_prompts=prompts, differentiated=through, loads=counted, **options
        )
        return logits[..., 0]

    trained, frozen = jax.eval_shape(split, abstract_params(config))
    return TrainedModel(
        split=split,
        rewards=rewards,
        trained=trained,
        trained_shardings=parameter_shardings(trained, mesh, config=config),
        frozen_shardings=parameter_shardings(frozen, mesh, config=config),
        width=config.hidden_size,
    )
