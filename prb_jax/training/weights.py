"""Weights of a model in training: selection of trained weights, AdamW, and rewards."""

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
from prb_jax.models.lora_config import LoraConfig
from prb_jax.models.model import abstract_model, bind, parameter_shardings
from prb_jax.models.parameter import parameters
from prb_jax.models.readouts.score_tree import score_stream
from prb_jax.platform.sharding import replicated
from prb_jax.seams import get
from prb_jax.training import TUNINGS, Tuning
from prb_jax.training.config import OptimizerSettings, TrainSettings
from prb_jax.training.memory import StepMemory, step_memory
from prb_jax.trees.streams import StreamBatch


@dataclass(frozen=True, kw_only=True)
class Weights:
    """Parameter group of model weights under AdamW, with the interface of
    :class:`prb_jax.personal.method.TrainedMethod`. The state consists of ``params`` (float32) and ``opt``."""

    optimizer: OptimizerSettings  # options with a `learning_rate`
    lengths: Sequence[int]  # lengths of the run; see :func:`learning_rate`
    trainable: Params  # from :func:`split_params`; only shapes are used
    placed: dict[str, Any]  # sharding of each trainable weight
    mesh: Mesh  # devices

    @property
    def learning_rate(self) -> optax.Schedule:
        """Learning rate as a function of the number of completed updates."""
        return learning_rate(self.optimizer, lengths=self.lengths)

    @property
    def _transformation(self) -> optax.GradientTransformation:
        return make_optimizer(self.optimizer, lengths=self.lengths)

    @property
    def shardings(self) -> dict[str, Any]:
        """Shardings of the state; moments are sharded like their parameters."""
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
        """Return a new state from the trainable part of :func:`split_params`."""
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
    """Return the learning rate, float32 [], as a function of the number of completed updates.

    Args:
      options: Options with a `learning_rate`, the peak.
      lengths: Total numbers of updates, ascending; several for a lengthened run. Updates before an earlier end follow
        the schedule of that length, and later updates follow the schedule of the next length. The warm-up belongs to
        the first length.
    """
    assert options.learning_rate is not None
    peak, final = options.learning_rate, options.learning_rate * options.final_share
    warmup = round(options.warmup_share * lengths[0])

    def course(step: jax.Array, length: int) -> jax.Array:
        """Return the rate after the warm-up in a run of this length."""
        after_warmup = length - warmup
        if options.schedule == "constant":
            return jnp.full_like(step, peak)
        if options.schedule == "wsd":
            # A decay longer than the remaining steps starts right after the warm-up.
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
    """Return global-norm clipping, AdamW and the schedule. The state contains two float32 moments per leaf."""
    parts = [] if options.clip_norm is None else [optax.clip_by_global_norm(options.clip_norm)]
    return optax.chain(
        *parts,
        optax.scale_by_adam(b1=options.b1, b2=options.b2, eps=options.eps),
        optax.add_decayed_weights(options.weight_decay, mask=decay_mask),
        optax.scale_by_learning_rate(learning_rate(options, lengths=lengths)),
    )


def decay_mask(tree: Mapping[str, Any]) -> dict[str, Any]:
    """Return a mask of the parameters that decay: matrices, but not norms, biases, sinks and log decays."""
    spared = ("norm", "bias", "scale", "sinks", "log_decay")  # stacked layers turn these into matrices too
    return {
        name: decay_mask(leaf) if isinstance(leaf, Mapping) else leaf.ndim > 1 and not name.endswith(spared)
        for name, leaf in tree.items()
    }


def split_params(
    params: Params, *, config: DecoderConfig, tuning: Tuning, lora: LoraConfig, seed: int
) -> tuple[Params, Params]:
    """Split parameters into two nested dicts (trainable, frozen); :func:`merge` is the inverse.

    Args:
        params: Parameters of the decoder, without adapters.
        config: Architecture.
        tuning: ``head`` trains the score head, ``lora`` the head and new adapters, ``full`` everything.
        lora: Rank and targets of adapters.
        seed: Seed of new adapters.
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
        start = get("projections", "start").value
        return {**start(bind(config, params).layers, lora, seed=seed), **head}, frozen
    raise ValueError(f"tuning: expected one of {', '.join(TUNINGS)}, found {quote(tuning)}")


def merge(trainable: Mapping[str, Any], frozen: Mapping[str, Any]) -> Params:
    """Merge the two parts of :func:`split_params` into one tree for the decoder."""
    merged = dict(frozen)
    for name, leaf in trainable.items():
        both = isinstance(leaf, Mapping) and isinstance(merged.get(name), Mapping)
        merged[name] = merge(leaf, merged[name]) if both else leaf
    return merged


@dataclass(frozen=True, kw_only=True)
class TrainedModel:
    """Functions and shardings of the weights of one model, for one tuning and one mesh."""

    # all parameters -> (trained, frozen)
    split: Callable[[Params], tuple[Params, Params]]
    # (trained, frozen, batch, `prompts` of the step's users or None, `differentiated` if gradients are computed,
    # `loads`, a list that receives the token counts of the experts of a mixture)
    # -> rewards float32, [S, M] of streams or [S] of sequences
    rewards: Callable[..., jax.Array]
    trained: Params  # shapes of the trained weights
    trained_shardings: dict[str, Any]
    frozen_shardings: dict[str, Any]
    width: int  # determines the default learning rate
    memory: StepMemory | None = None  # memory of a step; None for a user's module


def trained_decoder(settings: TrainSettings, config: DecoderConfig, *, mesh: Mesh) -> TrainedModel:
    """Return a decoder for training.

    Raises:
      CheckpointError: The head has several labels.
      MeshError: A mesh axis does not divide a parameter.
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
        remat = memory.policy(batch.tokens.size) if through else "none"
        logits = score_stream(
            params, batch, soft_prompts=prompts, differentiated=through, loads=counted, remat=remat, **options
        )
        return logits[..., 0]

    trained, frozen = jax.eval_shape(split, abstract_params(config))
    of_trained, of_frozen = (parameter_shardings(part, mesh, config=config) for part in (trained, frozen))
    memory = step_memory(
        config,
        settings,
        mesh=mesh,
        trained=trained,
        frozen=frozen,
        trained_shardings=of_trained,
        frozen_shardings=of_frozen,
    )
    return TrainedModel(
        split=split,
        rewards=rewards,
        trained=trained,
        width=config.hidden_size,
        memory=memory,
        trained_shardings=of_trained,
        frozen_shardings=of_frozen,
    )
