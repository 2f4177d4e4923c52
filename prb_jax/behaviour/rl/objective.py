"""Objectives of policies: log-probabilities of every token of the responses of a batch, and losses of these.

Responses are read in packed streams: see :mod:`prb_jax.trees.response_reads`.

Token weights are computed once for a whole minibatch and sum to the requested mean. The sum over microbatches is
therefore the loss, however many there are.

Letters: B streams, K response slots in each, R response tokens, M states that are read in each, V vocabulary, D model.
"""

from __future__ import annotations

import dataclasses
import functools
from collections.abc import Callable, Iterator, Mapping
from typing import TYPE_CHECKING, Any

import jax
import jax.numpy as jnp
import numpy as np
from jax import lax
from jax.sharding import Mesh

from prb_jax.behaviour.rl.numbers import (
    clipped_policy_loss,
    clipped_value_loss,
    kl_estimate,
    log_ratio,
    token_weights,
)
from prb_jax.behaviour.rl.sections import LABELLED
from prb_jax.behaviour.rl.settings import PpoSettings
from prb_jax.models.attention.streams import take_places, walks
from prb_jax.models.checkpoints.load import abstract_params
from prb_jax.models.config.decoder import DecoderConfig
from prb_jax.models.decoder import Params, decode_stream
from prb_jax.models.head import LINEAR, dense
from prb_jax.models.layers import without_unit_axes
from prb_jax.models.model import bind, narrow_matrices, parameter_shardings
from prb_jax.models.vocabulary_heads import LanguageHead
from prb_jax.platform.sharding import constrainer
from prb_jax.seams import get
from prb_jax.training.memory import StepMemory, step_memory
from prb_jax.training.step import TrainStep, make_train_step
from prb_jax.training.weights import Weights, merge, split_params
from prb_jax.trees.response_reads import Reads
from prb_jax.trees.streams import StreamBatch
from prb_jax.trees.tree import Tree

if TYPE_CHECKING:
    from prb_jax.behaviour.rl.rollouts import Rollouts

POLICY, VALUE = "policy", "value"
"""The groups of parameters: the policy, and the value function if there is one."""

FEW_READS, FEW_READS_OF_WALKS = 4, 1.5
"""The last layer computes only the read places if they are at most one in so many tokens of a stream. On CPUs reads
walk through the keys in blocks, so more may be read; elsewhere a read attends to all keys of its stream."""

LOGITS_AT_ONCE = 1 << 24
"""Approximate number of logits in memory at a time: the tokens of a response are processed in runs."""

LOGITS_IN_CACHE, LEAST_RUN = 1 << 20, 128
"""On CPUs, this many logits stay in the cache between passes. Runs have a minimum length; otherwise reading the matrix
of the head would dominate."""

Array = np.ndarray | jax.Array


@dataclasses.dataclass(frozen=True)
class Actor:
    """The static parts of a policy in training."""

    settings: PpoSettings  # settings of the run
    config: DecoderConfig  # architecture, with a :class:`prb_jax.models.vocabulary_heads.LanguageHead`
    mesh: Mesh  # devices

    @property
    def dtype(self) -> jnp.dtype:
        """Type of activations."""
        return jnp.dtype(self.settings.dtype)

    @property
    def temperature(self) -> float:
        """Temperature at which tokens are drawn."""
        labelled = self.settings.algorithm in LABELLED
        return 1.0 if labelled else self.settings.rollout.temperature

    @property
    def critic(self) -> DecoderConfig:
        """Architecture of the value function: one value for each state."""
        return dataclasses.replace(self.config, head=LINEAR, num_labels=1)

    def split(self, params: Params) -> tuple[dict[str, Params], Params]:
        """Return the initial arrays of each group, and the frozen arrays, which form the reference.

        The reference is the initial model, so a value function with a separate trunk also shares the frozen weights.
        With full tuning, the frozen weights are a copy of all weights; sft needs no copy.
        """
        settings = self.settings
        trainable, frozen = split_params(
            params, config=self.config, tuning=settings.tuning, lora=settings.lora, seed=settings.seed
        )
        if settings.tuning == "full" and settings.algorithm != "sft":
            frozen = {**params, "layers": narrow_matrices(params["layers"], self.config, self.dtype)}
        sources = {POLICY: trainable}
        if settings.with_values:
            value = abstract_params(self.critic)["score"]
            head = {"score": jnp.zeros(value.shape, jnp.float32)}
            if settings.value.trunk == "shared":
                trunk: Params = {}
            elif settings.tuning == "full":
                trunk = {name: leaf for name, leaf in params.items() if name != "lm_head"}
            else:
                start = get("projections", "start").value
                trunk = start(bind(self.config, params).layers, settings.lora, seed=settings.seed + 1)
            sources[VALUE] = {**trunk, **head}
        return sources, frozen

    def shapes(self) -> tuple[dict[str, Params], Params]:
        """Return the shapes of :meth:`split`."""
        return jax.eval_shape(self.split, abstract_params(self.config))

    def placed(self, sources: Mapping[str, Params]) -> dict[str, Any]:
        """Return the shardings of the initial arrays of each group."""
        configs = {POLICY: self.config, VALUE: self.critic}
        return {name: parameter_shardings(sources[name], self.mesh, config=configs[name]) for name in sources}

    @functools.cached_property
    def memory(self) -> StepMemory:
        """Memory of an update, which decides on rematerialisation."""
        sources, frozen = self.shapes()
        own = self.settings.with_values and self.settings.value.trunk == "own"
        shardings: dict[str, Any] = {
            "trained_shardings": self.placed(sources),
            "frozen_shardings": parameter_shardings(frozen, self.mesh, config=self.config),
        }
        sizes: dict[str, Any] = {"trained": sources, "frozen": frozen, "trunks": 2 if own else 1}
        return step_memory(self.config, self.settings, mesh=self.mesh, **sizes, **shardings)


@jax.tree_util.register_dataclass
@dataclasses.dataclass(frozen=True, kw_only=True)
class Targets:
    """Inputs of a loss for a microbatch besides its tokens: 0 at padding, None if the loss does not use them."""

    # float32 [B, K, R], for token losses: `prb_jax.behaviour.rl.numbers.token_weights`; [B, 2] for pairs. They sum to 1
    # over the minibatch.
    weights: Array
    # float32 [B, K, R], the same for reported numbers: the mean over tokens
    counts: Array | None = None
    # float32 [B, 2, R], for pairs; the first response of each is the chosen one
    mask: Array | None = None
    # float32 [B, K, R], log-probabilities when the tokens were drawn; None if these are the current ones
    old: Array | None = None
    reference: Array | None = None  # float32 [B, K, R], under the reference
    advantages: Array | None = None  # float32 [B, K, R]
    kl: Array | None = None  # float32 [B, K], coefficient of the KL in the loss
    value_weights: Array | None = None  # float32 [B, K, R + 1]
    # values, returns: float32 [B, K, R + 1], old values and their targets
    values: Array | None = None
    returns: Array | None = None


@jax.tree_util.register_dataclass
@dataclasses.dataclass(frozen=True)
class Means:
    """Sums over microbatches; their weights sum to 1 over a minibatch."""

    values: dict[str, jax.Array]
    # float32 [B, K, R] of each microbatch, log-probabilities of its tokens, if no earlier pass has read them
    logprobs: tuple[jax.Array, ...] = ()

    @property
    def weight_sum(self) -> jax.Array:
        """1, because gradients are sums that already are means."""
        return jnp.ones((), jnp.float32)

    def __add__(self, other: Means) -> Means:
        values = {name: value + other.values[name] for name, value in self.values.items()}
        return Means(values, self.logprobs + other.logprobs)

    def means(self) -> dict[str, jax.Array]:
        """Return the sums by name."""
        return dict(self.values)


Extras = tuple[Reads, Targets]
"""Inputs of a loss besides a batch."""


@dataclasses.dataclass(frozen=True, kw_only=True)
class Objective:
    """Training objective of an algorithm: :data:`FROM_REWARDS` for rollouts; `dpo.py` and `sft.py` define others."""

    # (actor, inputs of the groups by name, frozen, batch, extras) -> (loss, its sums)
    loss: Callable[[Actor, Mapping[str, Any], Params, StreamBatch, Extras], tuple[jax.Array, Means]]
    # (batch of a step, rows of a minibatch, settings) -> targets of the minibatch, [rows, K, ...]
    targets: Callable[[Rollouts, np.ndarray, PpoSettings], Targets]
    # (comparisons, policy, profile_posts=, max_length=) -> trees of labelled responses; None if the policy draws
    encode: Callable[..., Iterator[Tree]] | None = None
    has_reference: bool = True  # whether the loss needs log-probabilities from before the update


def make_policy_step(actor: Actor, objective: Objective) -> TrainStep:
    """Return the compiled functions of an update of policy and value function together."""
    settings = actor.settings
    sources, frozen = actor.shapes()
    lengths, policy = (settings.steps * settings.batch.updates,), settings.optimizer
    given = settings.value.learning_rate
    value = policy if given is None else dataclasses.replace(policy, learning_rate=given)
    weights = {
        name: Weights(
            optimizer=value if name == VALUE else policy,
            lengths=lengths,
            trainable=source,
            placed=placed,
            mesh=actor.mesh,
        )
        for (name, source), placed in zip(sources.items(), actor.placed(sources).values(), strict=True)
    }
    return make_train_step(
        functools.partial(objective.loss, actor),
        split=actor.split,
        groups=weights,
        frozen_shardings=parameter_shardings(frozen, actor.mesh, config=actor.config),
        learning_rate=weights[POLICY].learning_rate,
        mesh=actor.mesh,
    )


def token_states(
    actor: Actor, params: Params, batch: StreamBatch, reads: Reads, *, differentiated: bool = False
) -> jax.Array:
    """Return the normed states at the read places, float32 [B, M, D]; set `differentiated` if gradients are taken."""
    options: dict[str, Any] = {
        "dtype": actor.dtype,
        "mesh": actor.mesh,
        "lora_scale": actor.settings.lora_scale,
        "remat": actor.memory.policy(batch.tokens.size) if differentiated else "none",
    }
    places = jnp.asarray(reads.places)
    # With separate reads, the last layer attends only from read places to all keys of the stream, else from all tokens.
    few = FEW_READS_OF_WALKS if walks(batch, actor.mesh) else FEW_READS
    apart = few * places.shape[1] <= batch.tokens.shape[1]
    batch = dataclasses.replace(batch, reads=places)
    decoder = bind(actor.config, params)
    x = decode_stream(decoder, batch, reads_only=apart, differentiated=differentiated, **options)
    return decoder.normed(x if apart else take_places(x, places))


def token_logprobs(
    actor: Actor, params: Params, states: jax.Array, reads: Reads
) -> tuple[jax.Array, jax.Array]:
    """Return the log-probability of each token, and the entropy of the distribution that it was drawn from.

    Both are float32 [B, K, R], at the temperature of the actor. Logits are computed for a run of tokens, used and
    dropped; the backward pass recomputes them.

    Args:
      actor: Static parts of the policy.
      params: Parameters of the policy.
      states: Normed states, float32 [B, M, D].
      reads: Read positions of the responses.
    """
    head = actor.config.head
    assert isinstance(head, LanguageHead)
    rows, length, _ = states.shape
    of_token = rows * actor.config.vocab_size
    run = LOGITS_AT_ONCE // of_token
    if actor.mesh.devices.flat[0].platform == "cpu":
        run = min(run, max(LOGITS_IN_CACHE // of_token, LEAST_RUN))
    run = max(1, min(length, run))
    runs = -(-length // run)
    constrain = constrainer(actor.mesh)

    def divided(x: jax.Array) -> jax.Array:
        x = jnp.pad(x, [(0, 0), (0, runs * run - length), *[(0, 0)] * (x.ndim - 2)])
        return jnp.moveaxis(x.reshape(rows, runs, run, *x.shape[2:]), 1, 0)

    @jax.checkpoint
    def one(part: tuple[jax.Array, jax.Array]) -> tuple[jax.Array, jax.Array]:
        x, drawn = part
        logits = constrain(head.logits(params, x) / actor.temperature, ("batch", None, "vocab"))
        logprobs = jax.nn.log_softmax(without_unit_axes(logits), axis=-1)
        # The gradient of a masked sum fuses with the softmax's; the gradient of an index would be stored separately.
        is_drawn = lax.broadcasted_iota(drawn.dtype, logprobs.shape, logprobs.ndim - 1) == without_unit_axes(
            drawn[..., None]
        )
        of_drawn = jnp.where(is_drawn, logprobs, 0.0).sum(axis=-1)
        spread = logprobs if actor.settings.loss.entropy_coefficient else lax.stop_gradient(logprobs)
        entropy = -(jnp.exp(spread) * spread).sum(axis=-1)
        return of_drawn.reshape(drawn.shape), entropy.reshape(drawn.shape)

    by_run = lax.map(one, (divided(states), divided(jnp.asarray(reads.tokens))))
    logprobs, entropy = (jnp.moveaxis(x, 0, 1).reshape(rows, -1)[:, :length] for x in by_run)
    return reads.by_response(logprobs)[:, :, :-1], reads.by_response(entropy)[:, :, :-1]


def token_values(
    actor: Actor,
    inputs: Mapping[str, Any],
    frozen: Params,
    batch: StreamBatch,
    reads: Reads,
    states: jax.Array,
    *,
    differentiated: bool = False,
) -> jax.Array:
    """Return the values of each state, float32 [B, K, R + 1]; `states` belong to the policy."""
    if actor.settings.value.trunk == "own":
        trunk = merge(inputs[VALUE], frozen)
        states = token_states(actor, trunk, batch, reads, differentiated=differentiated)
    return reads.by_response(dense(states, inputs[VALUE]["score"])[..., 0])


def read_policy(
    actor: Actor, inputs: Mapping[str, Any], frozen: Params, batch: StreamBatch, reads: Reads
) -> tuple[jax.Array, jax.Array, jax.Array]:
    """Return the states of the policy in training, and log-probability and entropy of each response token."""
    policy = merge(inputs[POLICY], frozen)
    states = token_states(actor, policy, batch, reads, differentiated=True)
    return states, *token_logprobs(actor, policy, states, reads)


def rollout_loss(
    actor: Actor, inputs: Mapping[str, Any], frozen: Params, batch: StreamBatch, extras: Extras
) -> tuple[jax.Array, Means]:
    """Return the loss of rollouts and its sums."""
    (reads, targets), settings, loss = extras, actor.settings, actor.settings.loss
    states, logprobs, entropy = read_policy(actor, inputs, frozen, batch, reads)
    losses = rollout_losses(logprobs, targets, settings)
    sums = {**losses, "entropy": (entropy * jnp.asarray(targets.counts)).sum(), "value_loss": jnp.zeros(())}
    total = sums["policy_loss"] + sums["kl_loss"]
    if loss.entropy_coefficient:
        total = total - loss.entropy_coefficient * (entropy * targets.weights).sum()
    if settings.with_values:
        values = token_values(actor, inputs, frozen, batch, reads, states, differentiated=True)
        errors = clipped_value_loss(
            values, jnp.asarray(targets.values), jnp.asarray(targets.returns), clip=loss.value_clip
        )
        sums["value_loss"] = (errors * jnp.asarray(targets.value_weights)).sum()
        total = total + loss.value_coefficient * sums["value_loss"]
    read = (lax.stop_gradient(logprobs),) if settings.reads_while_updating else ()
    return total, Means({"loss": total, **sums}, read)


def rollout_losses(logprobs: jax.Array, targets: Targets, settings: PpoSettings) -> dict[str, jax.Array]:
    """Return the policy's losses and reported numbers, each summed with its weights.

    The KL of a token is added to the clipped loss and not multiplied by a ratio: with the ratio of a whole response,
    its gradient would be wrong.

    Args:
      logprobs: Log-probabilities of the tokens under the current policy, float32 [B, K, R].
      targets: Targets of the microbatch.
      settings: Settings of the run.
    """
    weights, counts = jnp.asarray(targets.weights), jnp.asarray(targets.counts)
    real = counts > 0
    old = lax.stop_gradient(logprobs) if targets.old is None else jnp.asarray(targets.old)
    advantages = jnp.asarray(targets.advantages)
    ratios = log_ratio(logprobs, old, real, level=settings.loss.ratio)
    policy, clipped = clipped_policy_loss(ratios, advantages, clip=settings.loss.clip)
    kl_loss = jnp.zeros((), jnp.float32)
    if not settings.kl_in_reward:
        kl = kl_estimate(logprobs, jnp.asarray(targets.reference), settings.kl_estimator)
        kl_loss = (jnp.where(real, kl, 0.0) * weights * jnp.asarray(targets.kl)[:, :, None]).sum()
    moved = kl_estimate(old, logprobs, "k1")
    return {
        "policy_loss": (jnp.where(real, policy, 0.0) * weights).sum(),
        "kl_loss": kl_loss,
        "clip_share": (clipped * counts).sum(),
        "old_kl": (jnp.where(real, moved, 0.0) * counts).sum(),
    }


def rollout_targets(batch: Rollouts, rows: np.ndarray, settings: PpoSettings) -> Targets:
    """Return the targets of :func:`rollout_loss` for a minibatch."""
    assert batch.credit is not None
    mask, credit = batch.mask[rows], batch.credit
    value_mask = np.asarray(credit.value_mask)[rows]
    mode, longest = settings.loss.aggregation, settings.rollout.max_new_tokens
    return Targets(
        weights=np.asarray(token_weights(jnp.asarray(mask), mode, longest=longest)),
        counts=mask / mask.sum(),
        old=None if settings.reads_while_updating else batch.logprobs[rows],
        reference=batch.reference[rows],
        advantages=np.asarray(credit.advantages)[rows],
        kl=np.ones(mask.shape[:2], np.float32) * np.float32(batch.kl),
        value_weights=value_mask / value_mask.sum(),
        values=batch.values[rows],
        returns=np.asarray(credit.returns)[rows],
    )


FROM_REWARDS = Objective(loss=rollout_loss, targets=rollout_targets)
"""The objective of every algorithm that draws rollouts."""
