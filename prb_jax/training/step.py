"""One training step: gradients of microbatches are added up, then the optimiser runs once.

``accumulate`` adds a microbatch's gradient sum and its denominators to the state: one compile for each
shape of batch. ``update`` divides, clips, applies the optimiser and clears the sums: one compile. Both
give the state back in place (its buffers are donated) and in the same shardings.

The state is a nested dict: ``trainable`` (float32), ``opt``, ``step`` (int32, updates so far), ``acc``
(sums since the last update), and ``users`` where a user table is trained. Weights that are not trained are
an argument, ``frozen``; they have no optimiser state and no gradient.
"""

from __future__ import annotations

import dataclasses
from collections.abc import Callable, Mapping, Sequence
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
import optax
from jax.sharding import Mesh, NamedSharding

from prb_jax.errors import CheckpointError, quote
from prb_jax.models import REMAT_POLICIES
from prb_jax.models.attention.choice import wanted_attention
from prb_jax.models.config.decoder import DecoderConfig
from prb_jax.models.decoder import Params
from prb_jax.models.lora import LoraConfig, init_lora
from prb_jax.readouts.score_tree import score_tree
from prb_jax.sharding import batch_sharding, parameter_shardings, replicated, to_global
from prb_jax.training import TUNINGS, Tuning
from prb_jax.training.losses import LossParts, comparison_loss
from prb_jax.training.optimizer import learning_rate, make_optimizer
from prb_jax.training.settings import LossSettings, OptimizerSettings
from prb_jax.trees.batches import TreeBatch

TrainState = dict[str, Any]
Metrics = dict[str, jax.Array]


@jax.tree_util.register_dataclass
@dataclasses.dataclass(frozen=True, kw_only=True)
class Extras:
    """What a loss needs of a batch besides its tokens. Rows that only fill up the batch are masked.

    Attributes:
        labels: float32 [B, K].
        mask: bool [B, K], responses that are present.
        margin: float32 [B].
        weights: float32 [B].
        users: int32 [B], each row's place among this step's user rows; 0 where no users are trained.
    """

    labels: np.ndarray | jax.Array
    mask: np.ndarray | jax.Array
    margin: np.ndarray | jax.Array
    weights: np.ndarray | jax.Array
    users: np.ndarray | jax.Array


@dataclasses.dataclass(frozen=True, kw_only=True)
class UserRows:
    """How a table of user vectors is trained: only the rows of one step take part in it.

    ``state["users"]`` is a dict with at least ``table`` [U + 1, S, D], ``rows`` [M, S, D] and ``ids`` int32
    [M], where M, the number of distinct users of a step, is fixed.

    Attributes:
        gather: (table, ids) -> rows, float32 [M, S, D].
        apply: (users, gradient [M, S, D], step int32 []) -> users with the rows ``users["ids"]`` of its
            tables updated; it must drop ids beyond the table (JAX's ``.at[ids]`` does), which is how a
            step that is not finite changes nothing.
        shardings: one for each entry of ``state["users"]``.
    """

    gather: Callable[[jax.Array, jax.Array], jax.Array]
    apply: Callable[[dict[str, jax.Array], jax.Array, jax.Array], dict[str, jax.Array]]
    shardings: Mapping[str, NamedSharding]


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


@dataclasses.dataclass(frozen=True, kw_only=True)
class TrainStep:
    """The compiled functions of training. Build with :func:`make_train_step`.

    Attributes:
        init: trainable parameters (and the ``users`` part, if any) -> state.
        accumulate: (state, frozen, batch, extras) -> state with a microbatch added; the state is donated.
        update: (state) -> (state, metrics); the state is donated. If loss or gradient are not finite,
            nothing but the sums changes, and ``metrics["finite"]`` is 0. Metrics are float32 scalars:
            those of :meth:`prb_jax.training.losses.LossParts.means`, ``grad_norm`` before clipping,
            ``learning_rate``, ``finite``.
        begin_users: (state, ids int32 [M]) -> state with the rows of these users; None without users.
        rewards: (state, frozen, batch, extras) -> rewards float32 [B, K], the same on every device.
        state_shardings: for every leaf of the state.
        frozen_shardings: for every leaf of the frozen parameters.
        mesh: devices.
    """

    init: Callable[..., TrainState]
    accumulate: Callable[[TrainState, Params, TreeBatch, Extras], TrainState]
    update: Callable[[TrainState], tuple[TrainState, Metrics]]
    begin_users: Callable[[TrainState, Any], TrainState] | None
    rewards: Callable[[TrainState, Params, TreeBatch, Extras], jax.Array]
    state_shardings: dict[str, Any]
    frozen_shardings: dict[str, Any]
    mesh: Mesh

    def place(self, batch: TreeBatch, extras: Extras) -> tuple[TreeBatch, Extras]:
        """A microbatch of the host, its rows dealt over the mesh."""

        def put(x: Any) -> jax.Array:
            return to_global(np.asarray(x), batch_sharding(self.mesh, np.ndim(x)))

        return jax.tree.map(put, (batch, extras))


def make_train_step(
    config: DecoderConfig,
    *,
    mesh: Mesh,
    dtype: jnp.dtype,
    loss: LossSettings,
    optimizer: OptimizerSettings,
    lengths: Sequence[int],
    trainable: Params,
    frozen: Params,
    lora_scale: float = 1.0,
    remat: str = "none",
    attention: str = "auto",
    users: UserRows | None = None,
) -> TrainStep:
    """Compiled functions for one model, one way of tuning and one mesh.

    Args:
        config: architecture; its head must have one label.
        mesh: devices.
        dtype: of activations; trainable parameters are float32 throughout.
        loss, optimizer: what is minimised, and how; the optimiser with its peak.
        lengths: see :func:`prb_jax.training.optimizer.learning_rate`.
        trainable, frozen: of :func:`split_params`; only their shapes are looked at.
        lora_scale: see :attr:`prb_jax.models.lora.LoraConfig.scale`.
        remat: see :func:`prb_jax.models.decoder.rematerialised`.
        attention: one of :data:`prb_jax.models.ATTENTIONS`.
        users: how user rows are trained, if they are.

    Raises:
        CheckpointError: a head with several labels, or no such attention for these devices or this dtype.
        ValueError: an unknown policy of rematerialisation.
        MeshError: a mesh axis does not divide a parameter.
    """
    if config.num_labels != 1:
        raise CheckpointError(
            f"training needs a score head with one label, found num_labels={config.num_labels}"
        )
    if remat not in REMAT_POLICIES:
        raise ValueError(f"remat: expected one of {', '.join(REMAT_POLICIES)}, found {quote(remat)}")
    attend = wanted_attention(mesh, dtype, attention)
    transformation = make_optimizer(optimizer, lengths=lengths)
    schedule = learning_rate(optimizer, lengths=lengths)
    shardings = _state_shardings(transformation, trainable, mesh, users)
    frozen_shardings = parameter_shardings(frozen, mesh)
    batch_shardings = TreeBatch(*(batch_sharding(mesh, rank) for rank in (2, 1, 3, 2, 2)))  # pyright: ignore[reportArgumentType]
    extras_shardings = Extras(
        **{  # pyright: ignore[reportArgumentType]
            name: batch_sharding(mesh, rank)
            for name, rank in {"labels": 2, "mask": 2, "margin": 1, "weights": 1, "users": 1}.items()
        }
    )
    everywhere = replicated(mesh)

    def init(trainable: Params, users_state: dict[str, Any] | None) -> TrainState:
        weights = jax.tree.map(lambda leaf: leaf.astype(jnp.float32), trainable)
        state: TrainState = {
            "trainable": weights,
            "opt": transformation.init(weights),
            "step": jnp.zeros((), jnp.int32),
            "acc": {"grads": jax.tree.map(jnp.zeros_like, weights), "parts": LossParts.zero()},
        }
        if users_state is not None:
            state["users"] = dict(users_state)
            state["acc"]["user_rows"] = jnp.zeros(users_state["rows"].shape, jnp.float32)
        return state

    def compute_rewards(
        inputs: dict[str, Any], frozen: Params, batch: TreeBatch, extras: Extras
    ) -> jax.Array:
        rows = inputs.get("user_rows")
        soft_prompt = None if rows is None else jnp.take(rows, jnp.asarray(extras.users), axis=0)
        logits = score_tree(
            merge(inputs["grads"], frozen),
            batch,
            config=config,
            dtype=dtype,
            mesh=mesh,
            attention=attend,
            lora_scale=lora_scale,
            remat=remat,
            soft_prompt=soft_prompt,
        )
        return logits[..., 0]

    def loss_of(
        inputs: dict[str, Any], frozen: Params, batch: TreeBatch, extras: Extras
    ) -> tuple[jax.Array, LossParts]:
        parts = comparison_loss(
            compute_rewards(inputs, frozen, batch, extras),
            labels=jnp.asarray(extras.labels),
            mask=jnp.asarray(extras.mask),
            margin=jnp.asarray(extras.margin),
            weights=jnp.asarray(extras.weights),
            config=loss,
        )
        return parts.loss_sum, parts

    def inputs_of(state: TrainState) -> dict[str, Any]:
        """What the loss is differentiated by, named as the sums in ``acc``."""
        inputs = {"grads": state["trainable"]}
        if "users" in state:
            inputs["user_rows"] = state["users"]["rows"]
        return inputs

    def accumulate(state: TrainState, frozen: Params, batch: TreeBatch, extras: Extras) -> TrainState:
        gradients, parts = jax.grad(loss_of, has_aux=True)(inputs_of(state), frozen, batch, extras)
        acc = {name: jax.tree.map(jnp.add, state["acc"][name], gradients[name]) for name in gradients}
        return {**state, "acc": {**acc, "parts": state["acc"]["parts"] + parts}}

    def update(state: TrainState) -> tuple[TrainState, Metrics]:
        parts: LossParts = state["acc"]["parts"]
        scale = 1.0 / jnp.where(parts.weight_sum > 0, parts.weight_sum, 1.0)
        gradients = jax.tree.map(lambda leaf: leaf * scale, state["acc"]["grads"])
        norm = _global_norm(gradients)
        metrics = {
            **parts.means(),
            "grad_norm": norm,
            "learning_rate": jnp.asarray(schedule(state["step"]), jnp.float32),
        }
        finite = jnp.isfinite(metrics["loss"]) & jnp.isfinite(norm)
        changes, opt = transformation.update(gradients, state["opt"], state["trainable"])
        new = {
            "trainable": optax.apply_updates(state["trainable"], changes),
            "opt": opt,
            "step": state["step"] + 1,
        }
        old = {name: state[name] for name in new}
        user_gradient = state["acc"]["user_rows"] * scale if "users" in state else None
        if user_gradient is not None:
            metrics["user_grad_norm"] = _global_norm(user_gradient)
            finite &= jnp.isfinite(metrics["user_grad_norm"])
        kept = jax.tree.map(lambda a, b: jnp.where(finite, a, b), new, old)
        if user_gradient is not None:
            kept["users"] = _apply_to_users(users, state["users"], user_gradient, state["step"], finite)
        cleared = {name: jax.tree.map(jnp.zeros_like, state["acc"][name]) for name in state["acc"]}
        metrics["finite"] = finite.astype(jnp.float32)
        return {**kept, "acc": {**cleared, "parts": LossParts.zero()}}, metrics

    def begin_users(state: TrainState, ids: jax.Array) -> TrainState:
        assert users is not None
        table = state["users"]
        return {**state, "users": {**table, "rows": users.gather(table["table"], ids), "ids": ids}}

    initialise = jax.jit(init, out_shardings=shardings)
    step_inputs = (shardings, frozen_shardings, batch_shardings, extras_shardings)
    return TrainStep(
        init=lambda trainable, users_state=None: initialise(trainable, users_state),
        accumulate=jax.jit(accumulate, in_shardings=step_inputs, out_shardings=shardings, donate_argnums=0),
        update=jax.jit(
            update, in_shardings=(shardings,), out_shardings=(shardings, everywhere), donate_argnums=0
        ),
        begin_users=None
        if users is None
        else jax.jit(
            begin_users, in_shardings=(shardings, everywhere), out_shardings=shardings, donate_argnums=0
        ),
        rewards=jax.jit(
            lambda state, frozen, batch, extras: compute_rewards(inputs_of(state), frozen, batch, extras),
            in_shardings=step_inputs,
            out_shardings=everywhere,
        ),
        state_shardings=shardings,
        frozen_shardings=frozen_shardings,
        mesh=mesh,
    )


def _global_norm(tree: Any) -> jax.Array:
    return jnp.sqrt(sum((jnp.sum(jnp.square(leaf)) for leaf in jax.tree.leaves(tree)), jnp.float32(0)))


def _apply_to_users(
    users: UserRows | None,
    state: dict[str, jax.Array],
    gradient: jax.Array,
    step: jax.Array,
    learn: jax.Array,
) -> dict[str, jax.Array]:
    """The user table after a step; as it was, without touching all of it, where ``learn`` is False."""
    assert users is not None
    # Rows beyond the table are dropped by scatters.
    ids = jnp.where(learn, state["ids"], state["table"].shape[0])
    return {**users.apply({**state, "ids": ids}, gradient, step), "ids": state["ids"]}


def _state_shardings(
    transformation: optax.GradientTransformation, trainable: Params, mesh: Mesh, users: UserRows | None
) -> dict[str, Any]:
    """One sharding for every leaf: moments and gradient sums are split like their parameter."""
    weights = parameter_shardings(trainable, mesh)
    everywhere = replicated(mesh)
    abstract = jax.tree.map(lambda leaf: jax.ShapeDtypeStruct(leaf.shape, jnp.float32), trainable)
    opt = optax.tree_utils.tree_map_params(
        transformation,
        lambda _, sharding: sharding,
        jax.eval_shape(transformation.init, abstract),
        weights,
        transform_non_params=lambda _: everywhere,
    )
    shardings: dict[str, Any] = {
        "trainable": weights,
        "opt": opt,
        "step": everywhere,
        "acc": {"grads": weights, "parts": jax.tree.map(lambda _: everywhere, LossParts.zero())},
    }
    if users is not None:
        shardings["users"] = dict(users.shardings)
        shardings["acc"]["user_rows"] = users.shardings["rows"]
    return shardings
