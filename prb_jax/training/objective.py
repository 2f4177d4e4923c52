"""The step of a reward model: rewards of labelled comparisons, their loss, and the groups of parameters it trains."""

from __future__ import annotations

import dataclasses
from collections.abc import Callable, Mapping, Sequence
from pathlib import Path
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
from jax.sharding import Mesh

from prb_jax.errors import CheckpointError, DataError, RunError
from prb_jax.models.checkpoints.load import abstract_params
from prb_jax.models.config.decoder import DecoderConfig
from prb_jax.models.decoder import Params
from prb_jax.models.model import parameter_shardings
from prb_jax.models.readouts.score_tree import score_stream
from prb_jax.personal.method import NULL, OfUser, TrainedMethod, Users
from prb_jax.personal.soft_prompts import RowAdam, SoftPrompts
from prb_jax.platform.processes.sharing import on_first_process
from prb_jax.platform.sharding import replicated
from prb_jax.records.reading import read_json
from prb_jax.records.writing import write_json
from prb_jax.scoring.batching import Batch
from prb_jax.training.config import LossSettings, TrainSettings
from prb_jax.training.losses import LossParts, comparison_loss
from prb_jax.training.step import ParameterGroup, Split, TrainState, TrainStep, make_train_step
from prb_jax.training.weights import Weights, learning_rate, merge, split_params
from prb_jax.trees.streams import StreamBatch

WEIGHTS, USER = "weights", "user"
"""The groups of parameters of a reward model: its own, and those of its method of personalisation."""

USERS = "users.json"  # in the run folder: whose row is which

_TIMES_FASTER = 10.0

RewardsOf = Callable[..., jax.Array]


@jax.tree_util.register_dataclass
@dataclasses.dataclass(frozen=True, kw_only=True)
class Extras:
    """What a loss needs of a batch besides its tokens: of S streams with room for C comparisons each. Rows that only
    fill up a stream are masked. A batch of sequences has no axis S."""

    labels: np.ndarray | jax.Array  # float32 [S, C, K]
    mask: np.ndarray | jax.Array  # bool [S, C, K], responses that are present
    margin: np.ndarray | jax.Array  # float32 [S, C]
    weights: np.ndarray | jax.Array  # float32 [S, C]
    places: (
        np.ndarray | jax.Array
    )  # int32 [S, C, K], which of the read places of its stream is each response's


@dataclasses.dataclass(frozen=True, kw_only=True)
class RewardStep(TrainStep):
    """The compiled functions of a reward model in training. Build with :func:`make_reward_step`."""

    # (state, frozen, batch) -> rewards float32 [S, M] of streams, [S] of sequences, on every device
    rewards: Callable[[TrainState, Params, Any], jax.Array]
    # (state, ids int32 [M]) -> state whose method trains these rows; the state is donated
    take: Callable[[TrainState, jax.Array | np.ndarray], TrainState]


def make_reward_step(
    settings: TrainSettings,
    config: DecoderConfig,
    *,
    mesh: Mesh,
    lengths: Sequence[int],
    method: TrainedMethod = NULL,
) -> RewardStep:
    """The compiled step of one model, one way of tuning and one mesh; its groups are :data:`WEIGHTS` and :data:`USER`.

    Args:
        settings: of the run.
        config: architecture; its head must have one label.
        mesh: devices.
        lengths: of the run: see :func:`prb_jax.training.weights.learning_rate`.
        method: of personalisation.

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

    def split(params: Params) -> tuple[dict[str, Any], Params]:
        trainable, frozen = split_params(
            params, config=config, tuning=settings.tuning, lora=settings.lora, seed=settings.seed
        )
        return {WEIGHTS: trainable, USER: params["embed"]}, frozen

    def rewards_of(
        inputs: Mapping[str, Any], frozen: Params, batch: StreamBatch, *, differentiated: bool
    ) -> jax.Array:
        trained, prompts = inputs[WEIGHTS], method.soft_prompts(inputs[USER])
        through = differentiated and ("layers" in trained or prompts is not None)
        params = merge(trained, frozen)
        logits = score_stream(params, batch, soft_prompts=prompts, differentiated=through, **options)
        return logits[..., 0]

    sources, frozen = jax.eval_shape(split, abstract_params(config))
    optimizer = settings.optimizer_of(hidden_size=config.hidden_size)
    weights = Weights(
        optimizer=optimizer,
        lengths=lengths,
        trainable=sources[WEIGHTS],
        placed=parameter_shardings(sources[WEIGHTS], mesh, config=config),
        mesh=mesh,
    )
    return reward_step(
        rewards_of,
        settings.loss,
        split=split,
        weights=weights,
        method=method,
        frozen_shardings=parameter_shardings(frozen, mesh, config=config),
    )


def reward_step(
    rewards_of: RewardsOf,
    loss: LossSettings,
    *,
    split: Split,
    weights: Weights,
    method: TrainedMethod,
    frozen_shardings: dict[str, Any],
) -> RewardStep:
    """Return the compiled step of any model that gives rewards.

    Args:
        rewards_of: (inputs of the groups by name, frozen, batch, `differentiated`) -> rewards float32, [S, M] of
            streams or [S] of sequences.
        loss: what is minimised.
        split, frozen_shardings: as of :func:`prb_jax.training.step.make_train_step`.
        weights: the model's own parameters.
        method: of personalisation.
    """
    mesh = weights.mesh

    def loss_fn(
        inputs: Mapping[str, Any], frozen: Params, batch: Batch, extras: Extras
    ) -> tuple[jax.Array, LossParts]:
        rewards = rewards_of(inputs, frozen, batch, differentiated=True)
        parts = comparison_loss(**_by_comparison(rewards, extras), config=loss)
        return parts.loss_sum, parts

    groups: dict[str, ParameterGroup] = {WEIGHTS: weights, USER: method}
    step = make_train_step(
        loss_fn,
        split=split,
        groups=groups,
        frozen_shardings=frozen_shardings,
        zero=LossParts.zero,
        learning_rate=weights.learning_rate,
        mesh=mesh,
    )

    def rewards(state: TrainState, frozen: Params, batch: Batch) -> jax.Array:
        return rewards_of(step.inputs(state), frozen, batch, differentiated=False)

    def take(state: TrainState, ids: jax.Array) -> TrainState:
        return {**state, USER: method.take(state[USER], ids)}

    states, everywhere = step.state_shardings, replicated(mesh)
    return RewardStep(
        **vars(step),
        rewards=jax.jit(
            rewards, in_shardings=(states, step.frozen_shardings, None), out_shardings=everywhere
        ),
        take=jax.jit(take, in_shardings=(states, everywhere), out_shardings=states, donate_argnums=0),
    )


def _by_comparison(rewards: jax.Array, extras: Extras) -> dict[str, jax.Array]:
    """Rewards [S, M] of streams as [S * C, K], or [S] of sequences as [C, K], and what belongs to them."""
    places = jnp.asarray(extras.places)
    if places.ndim == 2:
        of_batch = {name: jnp.asarray(value) for name, value in vars(extras).items() if name != "places"}
        return {"rewards": rewards[places], **of_batch}
    streams, rows, responses = places.shape
    by_response = jnp.take_along_axis(rewards, places.reshape(streams, -1), axis=1)
    shapes = {"labels": (responses,), "mask": (responses,), "margin": (), "weights": ()}
    flat = {
        name: jnp.reshape(jnp.asarray(getattr(extras, name)), (streams * rows, *shape))
        for name, shape in shapes.items()
    }
    return {"rewards": by_response.reshape(streams * rows, responses), **flat}


def method_of_run(
    settings: TrainSettings,
    comparisons: Sequence[OfUser],
    *,
    out: Path,
    width: int,
    lengths: Sequence[int],
    mesh: Mesh,
) -> TrainedMethod:
    """Return the method that a run with a model of this width trains.

    The users that it knows are those of the training data, and are kept in the run folder `out`; without any data they
    are those that the folder names.

    Raises:
      DataError: no comparison has a user.
      RunError: the folder cannot be written, or names no users.
    """
    if settings.method != "persona_embedding":
        return NULL
    options, optimizer = settings.user_embedding, settings.optimizer_of(hidden_size=width)
    assert optimizer.learning_rate is not None
    given = options.learning_rate
    peak = _TIMES_FASTER * optimizer.learning_rate if given is None else given
    return SoftPrompts(
        table=_kept_users(comparisons, out / USERS),
        tokens=options.tokens,
        width=width,
        places=settings.batch.comparisons,
        generic_share=options.generic_share,
        seed=settings.seed,
        optimizer=RowAdam(
            learning_rate=learning_rate(dataclasses.replace(optimizer, learning_rate=peak), lengths=lengths),
            b1=optimizer.b1,
            b2=optimizer.b2,
            eps=optimizer.eps,
            clip_norm=optimizer.clip_norm,
        ),
        mesh=mesh,
    )


def _kept_users(comparisons: Sequence[OfUser], path: Path) -> Users:
    if not comparisons:
        names = read_json(path, error=RunError)
        if not isinstance(names, list) or not all(isinstance(name, str) for name in names):
            raise RunError(f"{path}: expected a list of user ids")
        return Users(tuple(names))
    users = Users.of(comparisons)
    if not users.names:
        raise DataError("method=persona_embedding: no comparison of the training data has a user_id")
    on_first_process(lambda: write_json(path, users.names))
    return users
