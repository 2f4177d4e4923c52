"""The numbers of reinforcement learning from rewards: advantages, penalties and losses, as pure functions of arrays.

Everything is float32 and masked. T runs over the tokens of a response and is always the last axis; ``mask`` is 1 where
a token is real, and the real tokens of a response stand at its beginning. Other axes are free.

Sources: GAE: Schulman et al. 2015 (1506.02438), equation 16; clipping: Schulman et al. 2017 (1707.06347), equation 7;
k1, k2, k3: Schulman 2020, "Approximating KL divergence"; adaptive coefficient: Ziegler et al. 2019 (1909.08593),
section 2.2; group advantages: Shao et al. 2024 (2402.03300) and Ahmadian et al. 2024 (2402.14740); REINFORCE++: Hu 2025
(2501.03262); DPO: Rafailov et al. 2023 (2305.18290), equation 7, with label smoothing as in Mitchell 2023.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import Literal

import jax
import jax.numpy as jnp
from jax import lax

Estimator = Literal["k1", "k2", "k3"]
Aggregation = Literal[
    "token-mean", "sequence-mean-token-mean", "sequence-mean-token-sum", "sequence-mean-token-sum-norm"
]
Ratio = Literal["token", "sequence"]
EndRule = Literal["none", "subtract", "replace"]

_VARIANCE_FLOOR = 1e-8
_DEVIATION_FLOOR = 1e-4


@jax.tree_util.register_dataclass
@dataclass(frozen=True)
class Advantages:
    """How much better each token is than expected."""

    advantages: jax.Array  # float32 [..., T], 0 where the mask is
    returns: jax.Array  # float32 [..., T], which the value function should have given


def gae(rewards: jax.Array, values: jax.Array, mask: jax.Array, *, gamma: float, lam: float) -> Advantages:
    """Return generalised advantage estimates; the state after the last one of the mask is worth 0.

    Args:
      rewards, values: float32 [..., T]; what stands outside the mask has no influence.
      mask: [..., T].
      gamma: discount.
      lam: weight of longer returns; 0 looks one step ahead, 1 to the end.
    """
    mask = mask.astype(jnp.float32)
    rewards, values = jnp.where(mask > 0, rewards, 0.0), jnp.where(mask > 0, values, 0.0)
    following = jnp.concatenate([values[..., 1:], jnp.zeros_like(values[..., :1])], axis=-1)
    deltas = (rewards + gamma * following - values) * mask

    def back(later: jax.Array, delta: jax.Array) -> tuple[jax.Array, jax.Array]:
        now = delta + gamma * lam * later
        return now, now

    start = jnp.zeros_like(deltas[..., 0])
    _, backwards = lax.scan(back, start, jnp.moveaxis(deltas, -1, 0), reverse=True)
    advantages = jnp.moveaxis(backwards, 0, -1) * mask
    return Advantages(advantages, advantages + values)


def discounted(rewards: jax.Array, mask: jax.Array, *, gamma: float) -> jax.Array:
    """Return the discounted sum of the rewards from each token on, float32 [..., T]: REINFORCE's return."""
    return gae(rewards, jnp.zeros_like(rewards), mask, gamma=gamma, lam=1.0).advantages


def masked_mean(values: jax.Array, mask: jax.Array) -> jax.Array:
    """Return the mean over all axes where the mask is; 0 where it is nowhere."""
    mask = mask.astype(jnp.float32)
    return jnp.where(mask > 0, values, 0.0).sum() / jnp.maximum(mask.sum(), 1.0)


def masked_variance(values: jax.Array, mask: jax.Array) -> jax.Array:
    """Return the unbiased variance over all axes where the mask is; 0 of a single number."""
    count = mask.astype(jnp.float32).sum()
    squares = masked_mean((values - masked_mean(values, mask)) ** 2, mask)
    return squares * count / jnp.maximum(count - 1.0, 1.0)


def whiten(values: jax.Array, mask: jax.Array, *, shift_mean: bool) -> jax.Array:
    """Return the values divided by their standard deviation, 0 outside the mask.

    Args:
      values, mask: [..., T]; mean and variance are those of all numbers within the mask.
      shift_mean: also moves the mean to 0. Advantages are whitened so; rewards keep their mean, for a reward of a sign
        must not become one of the other.
    """
    mean = masked_mean(values, mask)
    scaled = (values - mean) * lax.rsqrt(masked_variance(values, mask) + _VARIANCE_FLOOR)
    return jnp.where(mask > 0, scaled if shift_mean else scaled + mean, 0.0)


def kl_estimate(logprobs: jax.Array, reference: jax.Array, estimator: Estimator) -> jax.Array:
    """Return an estimate of KL(policy || reference) for each token that the policy drew, float32 [..., T].

    With x = log p(policy) - log p(reference), k1 is x: unbiased, of either sign. k2 is x^2 / 2, whose expected gradient
    is that of the KL. k3 is exp(-x) - 1 + x: unbiased, and never negative.

    Args:
      logprobs, reference: float32 [..., T].
      estimator: k1, k2 or k3.
    """
    x = logprobs - reference
    if estimator == "k1":
        return x
    return 0.5 * x**2 if estimator == "k2" else jnp.expm1(-x) + x


def adapted_coefficient(
    coefficient: float, *, kl: float, target: float, horizon: float, samples: int
) -> float:
    """Return the coefficient of the KL for the next step: it grows by at most a fifth of samples / horizon.

    Args:
      coefficient: of this step.
      kl: of a whole response, as it was measured.
      target: as it should be.
      horizon: samples after which a constant error of a fifth has changed the coefficient by a fifth.
      samples: of this step.
    """
    error = min(max(kl / target - 1.0, -0.2), 0.2)
    return coefficient * (1.0 + error * samples / horizon)


def ended_scores(scores: jax.Array, ended: jax.Array, *, rule: EndRule, value: float) -> jax.Array:
    """Return the scores of responses, changed where one did not end by itself.

    Args:
      scores: float32 [...].
      ended: bool [...], whether a stop token is the last one.
      rule: "none"; "subtract": the value is taken away (TRL's ``missing_eos_penalty``); "replace": the value stands in
        place of the score (the "N+ implementation details", with -1).
      value: of the rule.
    """
    if rule == "none":
        return scores
    return jnp.where(ended, scores, scores - value if rule == "subtract" else value)


def long_scores(scores: jax.Array, lengths: jax.Array, *, free: int, penalty: float) -> jax.Array:
    """Return the scores less ``penalty`` for each token of a response beyond ``free``."""
    return scores - penalty * jnp.maximum(lengths - free, 0).astype(jnp.float32)


def token_rewards(scores: jax.Array, places: jax.Array, penalties: jax.Array) -> jax.Array:
    """Return what each token is given: minus its penalty, and at its place the score of the response.

    Args:
      scores: float32 [...].
      places: int32 [...], the token that gets the score.
      penalties: float32 [..., T], the coefficient times the KL, 0 outside the mask.
    """
    here = jnp.arange(penalties.shape[-1]) == places[..., None]
    return jnp.where(here, scores[..., None], 0.0) - penalties


def group_advantages(scores: jax.Array, *, baseline: str, scale: bool = False) -> jax.Array:
    """Return how much better each response is than the others of its prompt, float32 [..., K].

    Args:
      scores: float32 [..., K], K >= 2.
      baseline: "mean" of the group (GRPO), or "others": the mean of the other responses (RLOO).
      scale: divides by the standard deviation of the group (GRPO); equal scores stay 0.
    """
    count = scores.shape[-1]
    centred = scores - scores.mean(axis=-1, keepdims=True)
    # Equal scores give exactly 0, whatever their mean rounds to.
    equal = (scores == scores[..., :1]).all(axis=-1, keepdims=True)
    centred = jnp.where(equal, 0.0, centred)
    if baseline == "others":
        return centred * count / (count - 1)
    deviation = jnp.sqrt((centred**2).sum(axis=-1, keepdims=True) / (count - 1))
    return centred / (deviation + _DEVIATION_FLOOR) if scale else centred


def log_ratio(logprobs: jax.Array, old: jax.Array, mask: jax.Array, *, level: Ratio) -> jax.Array:
    """Return the log of the new over the old probability: of each token, or the mean of the response for all of its.

    Args:
      logprobs, old, mask: [..., T].
      level: "token" or "sequence", which is the geometric mean, as in GSPO.
    """
    difference = jnp.where(mask > 0, logprobs - old, 0.0)
    if level == "token":
        return difference
    lengths = jnp.maximum(mask.astype(jnp.float32).sum(axis=-1, keepdims=True), 1.0)
    return jnp.broadcast_to(difference.sum(axis=-1, keepdims=True) / lengths, difference.shape)


def clipped_policy_loss(
    log_ratios: jax.Array, advantages: jax.Array, *, clip: float
) -> tuple[jax.Array, jax.Array]:
    """Return -min(ratio * A, clip(ratio) * A) of each token, and whether the clip took the gradient away."""
    ratio = jnp.exp(log_ratios)
    free, held = ratio * advantages, jnp.clip(ratio, 1.0 - clip, 1.0 + clip) * advantages
    return -jnp.minimum(free, held), held < free


def clipped_value_loss(
    values: jax.Array, old: jax.Array, returns: jax.Array, *, clip: float | None
) -> jax.Array:
    """Return half the squared error of each value; the larger one of the value itself and of the value held near the
    old one. None holds nothing."""
    free = (values - returns) ** 2
    if clip is None:
        return 0.5 * free
    held = old + jnp.clip(values - old, -clip, clip)
    return 0.5 * jnp.maximum(free, (held - returns) ** 2)


def token_weights(mask: jax.Array, mode: Aggregation, *, longest: int) -> jax.Array:
    """Return weights [B, K, T] with which a loss of tokens is summed up; made once for a whole minibatch, they give the
    same loss in however many microbatches it is computed.

    Args:
      mask: [B, K, T]; a response without a token counts as no response.
      mode: "token-mean": every token counts alike (DAPO); "sequence-mean-token-mean": every response does (GRPO);
        "sequence-mean-token-sum": the mean over responses of the sum over tokens; "sequence-mean-token-sum-norm": that
        divided by ``longest`` (Dr. GRPO).
      longest: most tokens of a response.
    """
    mask = mask.astype(jnp.float32)
    lengths = mask.sum(axis=-1, keepdims=True)
    responses = jnp.maximum((lengths > 0).sum(), 1)
    if mode == "token-mean":
        return mask / jnp.maximum(mask.sum(), 1.0)
    if mode == "sequence-mean-token-mean":
        return mask / jnp.maximum(lengths, 1.0) / responses
    return mask / responses / (longest if mode == "sequence-mean-token-sum-norm" else 1.0)


def dpo_loss(
    chosen: jax.Array, rejected: jax.Array, *, beta: float, label_smoothing: float = 0.0
) -> jax.Array:
    """Return the loss of pairs, float32 [...].

    Args:
      chosen, rejected: log p(policy) - log p(reference) of a whole response.
      beta: how strongly the policy is held to the reference.
      label_smoothing: probability that a label is wrong.
    """
    margin = beta * (chosen - rejected)
    return -(1 - label_smoothing) * jax.nn.log_sigmoid(margin) - label_smoothing * jax.nn.log_sigmoid(-margin)


def explained_variance(values: jax.Array, returns: jax.Array, mask: jax.Array) -> jax.Array:
    """Return 1 - var(returns - values) / var(returns); 0 where the returns do not vary."""
    spread = masked_variance(returns, mask)
    left = masked_variance(returns - values, mask)
    return jnp.where(spread > _VARIANCE_FLOOR, 1.0 - left / jnp.maximum(spread, _VARIANCE_FLOOR), 0.0)
