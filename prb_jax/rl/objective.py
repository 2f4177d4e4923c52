"""What a policy is trained for: losses of a microbatch, as functions of groups of parameters.

The weights of tokens are made once for a whole minibatch and add up to the mean that was asked for, so the sum over
microbatches is the loss, in however many it is computed.
"""

from __future__ import annotations

import dataclasses
import functools
from collections.abc import Mapping
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np

from prb_jax.models.decoder import Params
from prb_jax.rl.forward import Actor, token_logprobs, token_states, token_values
from prb_jax.rl.numbers import (
    clipped_policy_loss,
    clipped_value_loss,
    dpo_loss,
    kl_estimate,
    log_ratio,
)
from prb_jax.rl.settings import PpoSettings
from prb_jax.training.groups import merge
from prb_jax.training.step import LossFn
from prb_jax.trees.batches import TreeBatch

POLICY, VALUE = "policy", "value"
"""The groups of parameters: those of the policy, and those of the value function, where there is one."""

Array = np.ndarray | jax.Array


@jax.tree_util.register_dataclass
@dataclasses.dataclass(frozen=True, kw_only=True)
class Targets:
    """What the loss of rollouts needs of a microbatch besides its tokens. All are 0 where nothing is real.

    Attributes:
      weights: float32 [B, K, R], with which losses of tokens are summed up: `prb_jax.rl.numbers.token_weights`.
      counts: float32 [B, K, R], the same for numbers that are only reported: the mean over tokens.
      old: float32 [B, K, R], log-probabilities when the tokens were drawn.
      reference: float32 [B, K, R], under the reference.
      advantages: float32 [B, K, R].
      kl: float32 [B], the coefficient of the KL in the loss.
      value_weights: float32 [B, K, R + 1].
      values, returns: float32 [B, K, R + 1], as they were, and as they should have been.
    """

    weights: Array
    counts: Array
    old: Array
    reference: Array
    advantages: Array
    kl: Array
    value_weights: Array
    values: Array
    returns: Array


@jax.tree_util.register_dataclass
@dataclasses.dataclass(frozen=True, kw_only=True)
class Pairs:
    """What the loss of pairs needs; of the two responses the first is the chosen one.

    Attributes:
      mask: float32 [B, 2, R].
      reference: float32 [B, 2, R], log-probabilities under the reference.
      weights: float32 [B], which add up to 1 over the minibatch.
    """

    mask: Array
    reference: Array
    weights: Array


@jax.tree_util.register_dataclass
@dataclasses.dataclass(frozen=True, kw_only=True)
class Texts:
    """What the loss of preferred responses needs.

    Attributes:
      weights: float32 [B, 1, R], of tokens, which add up to 1 over the minibatch.
    """

    weights: Array


@jax.tree_util.register_dataclass
@dataclasses.dataclass(frozen=True)
class Sums:
    """Sums over microbatches; their weights add up to 1 over a minibatch."""

    values: dict[str, jax.Array]

    @property
    def weight_sum(self) -> jax.Array:
        """Gradients are sums that are means already."""
        return jnp.ones((), jnp.float32)

    def __add__(self, other: Sums) -> Sums:
        return Sums({name: value + other.values[name] for name, value in self.values.items()})

    def means(self) -> dict[str, jax.Array]:
        """Return the sums by name."""
        return dict(self.values)


ROLLOUT_SUMS = ("loss", "policy_loss", "value_loss", "kl_loss", "entropy", "clip_share", "old_kl")
PAIR_SUMS = ("loss", "accuracy", "margin")
TEXT_SUMS = ("loss", "entropy")


def no_sums(settings: PpoSettings) -> Sums:
    """Return the sums of nothing."""
    names = {"dpo": PAIR_SUMS, "sft": TEXT_SUMS}.get(settings.algorithm, ROLLOUT_SUMS)
    return Sums({name: jnp.zeros((), jnp.float32) for name in names})


def loss_of(actor: Actor, settings: PpoSettings) -> LossFn:
    """Return what an update of these settings minimises, as :func:`prb_jax.training.step.make_train_step` takes it."""
    losses = {"dpo": pair_loss, "sft": text_loss}
    return functools.partial(losses.get(settings.algorithm, rollout_loss), actor, settings)


def rollout_loss(
    actor: Actor,
    settings: PpoSettings,
    inputs: Mapping[str, Any],
    frozen: Params,
    batch: TreeBatch,
    targets: Targets,
) -> tuple[jax.Array, Sums]:
    """Return the loss of rollouts and its sums."""
    loss = settings.loss
    states, logprobs, entropy = _read_responses(actor, inputs, frozen, batch)
    losses = rollout_losses(logprobs, targets, settings)
    sums = {**losses, "entropy": (entropy * targets.counts).sum(), "value_loss": jnp.zeros(())}
    total = sums["policy_loss"] + sums["kl_loss"]
    if loss.entropy_coefficient:
        total = total - loss.entropy_coefficient * (entropy * targets.weights).sum()
    if settings.with_values:
        if settings.value.trunk == "own":
            states = token_states(actor, merge(inputs[VALUE], frozen), batch)
        values = token_values(inputs[VALUE], states)
        errors = clipped_value_loss(
            values, jnp.asarray(targets.values), jnp.asarray(targets.returns), clip=loss.value_clip
        )
        sums["value_loss"] = (errors * targets.value_weights).sum()
        total = total + loss.value_coefficient * sums["value_loss"]
    return total, Sums({"loss": total, **sums})


def _read_responses(
    actor: Actor, inputs: Mapping[str, Any], frozen: Params, batch: TreeBatch
) -> tuple[jax.Array, jax.Array, jax.Array]:
    """The policy's states of a batch, and log-probability and entropy of each token of its responses [B, K, R]."""
    params = merge(inputs[POLICY], frozen)
    states = token_states(actor, params, batch)
    return states, *token_logprobs(actor, params, states[:, :, :-1], jnp.asarray(batch.responses))


def rollout_losses(logprobs: jax.Array, targets: Targets, settings: PpoSettings) -> dict[str, jax.Array]:
    """Return the policy's losses and what is reported of them, each summed up by its weights.

    The KL of a token stands beside the clipped loss and is multiplied by no ratio: times one of a whole response it
    would have a gradient that is not its own.

    Args:
      logprobs: float32 [B, K, R], of the tokens under the policy of now.
      targets: of the microbatch.
      settings: of the run.
    """
    weights, counts = jnp.asarray(targets.weights), jnp.asarray(targets.counts)
    real = counts > 0
    old, advantages = jnp.asarray(targets.old), jnp.asarray(targets.advantages)
    ratios = log_ratio(logprobs, old, real, level=settings.loss.ratio)
    policy, clipped = clipped_policy_loss(ratios, advantages, clip=settings.loss.clip)
    kl_loss = jnp.zeros((), jnp.float32)
    if not settings.kl_in_reward:
        kl = kl_estimate(logprobs, jnp.asarray(targets.reference), settings.kl_estimator)
        kl_loss = (jnp.where(real, kl, 0.0) * weights * jnp.asarray(targets.kl)[:, None, None]).sum()
    moved = kl_estimate(old, logprobs, "k1")
    return {
        "policy_loss": (jnp.where(real, policy, 0.0) * weights).sum(),
        "kl_loss": kl_loss,
        "clip_share": (clipped * counts).sum(),
        "old_kl": (jnp.where(real, moved, 0.0) * counts).sum(),
    }


def pair_loss(
    actor: Actor,
    settings: PpoSettings,
    inputs: Mapping[str, Any],
    frozen: Params,
    batch: TreeBatch,
    pairs: Pairs,
) -> tuple[jax.Array, Sums]:
    """Return the loss of DPO and its sums."""
    loss = settings.loss
    _, logprobs, _ = _read_responses(actor, inputs, frozen, batch)
    mask, weights = jnp.asarray(pairs.mask), jnp.asarray(pairs.weights)
    ratios = (jnp.where(mask > 0, logprobs - jnp.asarray(pairs.reference), 0.0)).sum(axis=-1)
    chosen, rejected = ratios[:, 0], ratios[:, 1]
    losses = dpo_loss(chosen, rejected, beta=loss.dpo_beta, label_smoothing=loss.label_smoothing)
    total = (losses * weights).sum()
    sums = {
        "loss": total,
        "accuracy": ((chosen > rejected) * weights).sum(),
        "margin": (loss.dpo_beta * (chosen - rejected) * weights).sum(),
    }
    return total, Sums(sums)


def text_loss(
    actor: Actor,
    settings: PpoSettings,
    inputs: Mapping[str, Any],
    frozen: Params,
    batch: TreeBatch,
    texts: Texts,
) -> tuple[jax.Array, Sums]:
    """Return the cross-entropy of preferred responses, the mean over their tokens, and its sums."""
    _, logprobs, entropy = _read_responses(actor, inputs, frozen, batch)
    weights = jnp.asarray(texts.weights)
    total = -(logprobs * weights).sum()
    return total, Sums({"loss": total, "entropy": (entropy * weights).sum()})
