"""What reward models are trained for: the loss of labelled comparisons, as a function of groups of parameters."""

from __future__ import annotations

import dataclasses
from collections.abc import Callable, Mapping, Sequence
from pathlib import Path
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
from jax.sharding import Mesh

from prb_jax.checkpoints.load import abstract_params
from prb_jax.data.reading import read_json
from prb_jax.data.writing import write_json
from prb_jax.errors import CheckpointError, DataError, RunError
from prb_jax.models.attention.choice import wanted_attention
from prb_jax.models.config.decoder import DecoderConfig
from prb_jax.models.decoder import Params
from prb_jax.personal.method import NULL, Method, OfUser, Users
from prb_jax.personal.soft_prompts import RowAdam, SoftPrompts
from prb_jax.processes.sharing import on_first_process
from prb_jax.readouts.score_tree import score_stream, score_tree
from prb_jax.scoring.batching import Batch
from prb_jax.sharding import replicated
from prb_jax.training.config import TrainSettings
from prb_jax.training.losses import LossParts, comparison_loss
from prb_jax.training.step import ParameterGroup, TrainState, TrainStep, make_train_step
from prb_jax.training.weights import Weights, learning_rate, merge, split_params
from prb_jax.trees.streams import StreamBatch

WEIGHTS, USER = "weights", "user"
"""The groups of parameters of a reward model: its own, and those of its method of personalisation."""

USERS = "users.json"  # in the run folder: whose row is which

_TIMES_FASTER = 10.0


@jax.tree_util.register_dataclass
@dataclasses.dataclass(frozen=True, kw_only=True)
class Extras:
    """What a loss needs of a batch besides its tokens. Rows that only fill up the batch are masked.

    Of packed streams, B is [S, C]: each stream has room for C comparisons.
    """

    labels: np.ndarray | jax.Array  # float32 [B, K]
    mask: np.ndarray | jax.Array  # bool [B, K], responses that are present
    margin: np.ndarray | jax.Array  # float32 [B]
    weights: np.ndarray | jax.Array  # float32 [B]
    # int32 [B], of trees, each row's place among the user rows of the step; 0 where no users are trained. In
    # streams the ids of the trees say it.
    users: np.ndarray | jax.Array
    # int32 [S, C, K], of streams, which of the read places of its stream is each response's; None of trees
    places: np.ndarray | jax.Array | None = None


@dataclasses.dataclass(frozen=True, kw_only=True)
class RewardObjective:
    """The rewards of a model in training, and their loss. Both are pure functions of
    (inputs of the groups, frozen parameters, batch, extras).

    Raises:
        CheckpointError: a head with several labels, or no such attention for these devices or this dtype.
    """

    settings: TrainSettings  # of the run
    config: DecoderConfig  # architecture; its head must have one label
    mesh: Mesh  # devices
    method: Method = NULL  # of personalisation

    def __post_init__(self) -> None:
        if self.config.num_labels != 1:
            raise CheckpointError(
                f"training needs a score head with one label, found num_labels={self.config.num_labels}"
            )
        wanted_attention(self.mesh, jnp.dtype(self.settings.dtype), self.settings.attention)

    def split(self, params: Params) -> tuple[dict[str, Any], Params]:
        """Return the arrays that each group of parameters starts with, and those that are not trained."""
        settings = self.settings
        trainable, frozen = split_params(
            params, tuning=settings.tuning, lora=settings.lora, seed=settings.seed
        )
        return {WEIGHTS: trainable, USER: params["embed"]}, frozen

    def rewards(
        self,
        inputs: Mapping[str, Any],
        frozen: Params,
        batch: Batch,
        extras: Extras,
        *,
        differentiated: bool = False,
    ) -> jax.Array:
        """float32 [B, K] of trees, [S, M] of streams; `differentiated` where gradients are taken of them."""
        settings, dtype = self.settings, jnp.dtype(self.settings.dtype)
        trained, prompts = inputs[WEIGHTS], self.method.soft_prompts(inputs[USER])
        options: dict[str, Any] = {
            "config": self.config,
            "dtype": dtype,
            "mesh": self.mesh,
            "lora_scale": settings.lora_scale,
            "remat": settings.remat,
        }
        if isinstance(batch, StreamBatch):
            through = differentiated and ("layers" in trained or prompts is not None)
            logits = score_stream(
                merge(trained, frozen), batch, soft_prompts=prompts, differentiated=through, **options
            )
        else:
            logits = score_tree(
                merge(trained, frozen),
                batch,
                attention=wanted_attention(self.mesh, dtype, settings.attention),
                soft_prompt=None if prompts is None else jnp.take(prompts, jnp.asarray(extras.users), axis=0),
                **options,
            )
        return logits[..., 0]

    def __call__(
        self, inputs: Mapping[str, Any], frozen: Params, batch: Batch, extras: Extras
    ) -> tuple[jax.Array, LossParts]:
        """The sum of the losses, and all sums and denominators: a ``loss_fn`` of
        :func:`prb_jax.training.step.make_train_step`."""
        rewards = self.rewards(inputs, frozen, batch, extras, differentiated=True)
        if extras.places is not None:
            rewards, extras = _by_comparison(rewards, extras)
        parts = comparison_loss(
            rewards,
            labels=jnp.asarray(extras.labels),
            mask=jnp.asarray(extras.mask),
            margin=jnp.asarray(extras.margin),
            weights=jnp.asarray(extras.weights),
            config=self.settings.loss,
        )
        return parts.loss_sum, parts


def _by_comparison(rewards: jax.Array, extras: Extras) -> tuple[jax.Array, Extras]:
    """Rewards [S, M] of streams as [S * C, K], and what belongs to them."""
    places = jnp.asarray(extras.places)
    streams, rows, responses = places.shape
    found = jnp.take_along_axis(rewards, places.reshape(streams, -1), axis=1)
    flat = {
        name: jnp.reshape(jnp.asarray(getattr(extras, name)), (streams * rows, *shape))
        for name, shape in {"labels": (responses,), "mask": (responses,), "margin": (), "weights": ()}.items()
    }
    return found.reshape(streams * rows, responses), dataclasses.replace(extras, **flat, places=None)


def make_reward_step(objective: RewardObjective, *, lengths: Sequence[int]) -> TrainStep:
    """The compiled step of one model, one way of tuning and one mesh; its groups are :data:`WEIGHTS` and :data:`USER`.

    `lengths` of the run are as of :func:`prb_jax.training.weights.learning_rate`.

    Raises:
        MeshError: a mesh axis does not divide a parameter.
    """
    config = objective.config
    sources, frozen = jax.eval_shape(objective.split, abstract_params(config))
    optimizer = objective.settings.optimizer_of(hidden_size=config.hidden_size)
    weights = Weights(optimizer=optimizer, lengths=lengths, trainable=sources[WEIGHTS], mesh=objective.mesh)
    groups: dict[str, ParameterGroup] = {WEIGHTS: weights, USER: objective.method}
    return make_train_step(
        objective,
        groups=groups,
        frozen=frozen,
        zero=LossParts.zero,
        learning_rate=weights.learning_rate,
        mesh=objective.mesh,
    )


def make_rewards(
    objective: RewardObjective, step: TrainStep
) -> Callable[[TrainState, Params, Batch, Extras], jax.Array]:
    """(state, frozen, batch, extras) -> rewards float32, [B, K] of trees and [S, M] of streams, on every device."""

    def rewards(state: TrainState, frozen: Params, batch: Batch, extras: Extras) -> jax.Array:
        return objective.rewards(step.inputs(state), frozen, batch, extras)

    return jax.jit(
        rewards,
        in_shardings=(step.state_shardings, step.frozen_shardings, None, None),
        out_shardings=replicated(objective.mesh),
    )


def make_take(
    objective: RewardObjective, step: TrainStep
) -> Callable[[TrainState, jax.Array | np.ndarray], TrainState]:
    """(state, ids int32 [M]) -> state whose method trains these rows; the state is donated."""

    def take(state: TrainState, ids: jax.Array) -> TrainState:
        return {**state, USER: objective.method.take(state[USER], ids)}

    states = step.state_shardings
    return jax.jit(
        take, in_shardings=(states, replicated(objective.mesh)), out_shardings=states, donate_argnums=0
    )


def method_of_run(
    settings: TrainSettings,
    comparisons: Sequence[OfUser],
    *,
    out: Path,
    width: int,
    lengths: Sequence[int],
    mesh: Mesh,
) -> Method:
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
