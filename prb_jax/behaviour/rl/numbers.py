"""The formulas of reinforcement learning from rewards: advantages, penalties and losses, as pure functions of arrays.

Everything is float32 and masked. T runs over the tokens of a response and is always the last axis. ``mask`` is 1 for
real tokens, which are at the beginning of a response. Other axes are free.

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

    advantages: jax.Array  # float32 [..., T], 0 outside the mask
    returns: jax.Array  # float32 [..., T], targets of the value function


def gae(rewards: jax.Array, values: jax.Array, mask: jax.Array, *, gamma: float, lam: float) -> Advantages:
    """Return generalised advantage estimates; the state after the last token of the mask has value 0.

    Args:
      rewards, values: float32 [..., T]; numbers outside the mask have no influence.
      mask: Real tokens, [..., T].
      gamma: Discount.
      lam: Weight of longer returns; 0 looks one step ahead, 1 to the end.
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
    """Return the discounted sum of rewards from each token on, float32 [..., T]: the return of REINFORCE."""
    return gae(rewards, jnp.zeros_like(rewards), mask, gamma=gamma, lam=1.0).advantages


def masked_mean(values: jax.Array, mask: jax.Array) -> jax.Array:
    """Return the mean over all axes within the mask; 0 for an empty mask."""
    mask = mask.astype(jnp.float32)
    return jnp.where(mask > 0, values, 0.0).sum() / jnp.maximum(mask.sum(), 1.0)


def masked_variance(values: jax.Array, mask: jax.Array) -> jax.Array:
    """Return the unbiased variance over all axes within the mask; 0 for a single number."""
    count = mask.astype(jnp.float32).sum()
    squares = masked_mean((values - masked_mean(values, mask)) ** 2, mask)
    return squares * count / jnp.maximum(count - 1.0, 1.0)


def whiten(values: jax.Array, mask: jax.Array, *, shift_mean: bool) -> jax.Array:
    """Return the values divided by their standard deviation, 0 outside the mask.

    Args:
      values, mask: [..., T]; mean and variance are taken over all numbers within the mask.
      shift_mean: Also shifts the mean to 0, as for advantages. Rewards keep their mean, because a reward must not
        change its sign.
    """
    mean = masked_mean(values, mask)
    scaled = (values - mean) * lax.rsqrt(masked_variance(values, mask) + _VARIANCE_FLOOR)
    return jnp.where(mask > 0, scaled if shift_mean else scaled + mean, 0.0)


def kl_estimate(logprobs: jax.Array, reference: jax.Array, estimator: Estimator) -> jax.Array:
    """Return an estimate of KL(policy || reference) for each token that the policy drew, float32 [..., T].

    With x = log p(policy) - log p(reference), k1 is x: unbiased, of either sign. k2 is x^2 / 2: its expected gradient
    is the gradient of the KL. k3 is exp(-x) - 1 + x: unbiased, and never negative.

    Args:
      logprobs, reference: Log-probabilities, float32 [..., T].
      estimator: k1, k2 or k3.
    """
    x = logprobs - reference
    if estimator == "k1":
        return x
    return 0.5 * x**2 if estimator == "k2" else jnp.expm1(-x) + x


def adapted_coefficient(
    coefficient: float, *, kl: float, target: float, horizon: float, samples: int
) -> float:
    """Return the KL coefficient for the next step: it changes by at most a fifth of samples / horizon.

    Args:
      coefficient: Coefficient of this step.
      kl: Measured KL of a whole response.
      target: Target KL.
      horizon: Number of samples after which a constant error of a fifth has changed the coefficient by a fifth.
      samples: Number of samples in this step.
    """
    error = min(max(kl / target - 1.0, -0.2), 0.2)
    return coefficient * (1.0 + error * samples / horizon)


def ended_scores(scores: jax.Array, ended: jax.Array, *, rule: EndRule, value: float) -> jax.Array:
    """Return the scores of responses, changed for responses that did not end with a stop token.

    Args:
      scores: Scores, float32 [...].
      ended: Whether a stop token is the last one, bool [...].
      rule: "none"; "subtract" the value from the score (TRL's ``missing_eos_penalty``); "replace" the score by the
        value (the "N+ implementation details", with -1).
      value: Value of the rule.
    """
    if rule == "none":
        return scores
    return jnp.where(ended, scores, scores - value if rule == "subtract" else value)


def long_scores(scores: jax.Array, lengths: jax.Array, *, free: int, penalty: float) -> jax.Array:
    """Return the scores minus ``penalty`` for each token of a response beyond ``free``."""
    return scores - penalty * jnp.maximum(lengths - free, 0).astype(jnp.float32)


def token_rewards(scores: jax.Array, places: jax.Array, penalties: jax.Array) -> jax.Array:
    """Return the reward of each token: minus its penalty, plus the score of the response at its place.

    Args:
      scores: Scores of responses, float32 [...].
      places: Position of the token that gets the score, int32 [...].
      penalties: Coefficient times the KL, float32 [..., T], 0 outside the mask.
    """
    here = jnp.arange(penalties.shape[-1]) == places[..., None]
    return jnp.where(here, scores[..., None], 0.0) - penalties


def group_advantages(scores: jax.Array, *, baseline: str, scale: bool = False) -> jax.Array:
    """Return the advantage of each response over the others of its prompt, float32 [..., K].

    Args:
      scores: Scores of responses, float32 [..., K], K >= 2.
      baseline: "mean" of the group (GRPO), or "others": the mean of the other responses (RLOO).
      scale: Divides by the standard deviation of the group (GRPO); equal scores stay 0.
    """
    count = scores.shape[-1]
    centred = scores - scores.mean(axis=-1, keepdims=True)
    # Equal scores must give exactly 0, even if their mean is rounded.
    equal = (scores == scores[..., :1]).all(axis=-1, keepdims=True)
    centred = jnp.where(equal, 0.0, centred)
    if baseline == "others":
        return centred * count / (count - 1)
    deviation = jnp.sqrt((centred**2).sum(axis=-1, keepdims=True) / (count - 1))
    return centred / (deviation + _DEVIATION_FLOOR) if scale else centred


def log_ratio(logprobs: jax.Array, old: jax.Array, mask: jax.Array, *, level: Ratio) -> jax.Array:
    """Return the log of new over old probability: for each token, or the mean over a response for all its tokens.

    Args:
      logprobs, old, mask: [..., T].
      level: "token", or "sequence": the geometric mean, as in GSPO.
    """
    difference = jnp.where(mask > 0, logprobs - old, 0.0)
    if level == "token":
        return difference
    lengths = jnp.maximum(mask.astype(jnp.float32).sum(axis=-1, keepdims=True), 1.0)
    return jnp.broadcast_to(difference.sum(axis=-1, keepdims=True) / lengths, difference.shape)


def clipped_policy_loss(
    log_ratios: jax.Array, advantages: jax.Array, *, clip: float
) -> tuple[jax.Array, jax.Array]:
    """Return -min(ratio * A, clip(ratio) * A) for each token, and whether the clip removed the gradient."""
    ratio = jnp.exp(log_ratios)
    free, held = ratio * advantages, jnp.clip(ratio, 1.0 - clip, 1.0 + clip) * advantages
    return -jnp.minimum(free, held), held < free


def clipped_value_loss(
    values: jax.Array, old: jax.Array, returns: jax.Array, *, clip: float | None
) -> jax.Array:
    """Return half the squared error of each value: the larger error of the value itself and of the value clipped around
    the old one. With None nothing is clipped."""
    free = (values - returns) ** 2
    if clip is None:
        return 0.5 * free
    held = old + jnp.clip(values - old, -clip, clip)
    return 0.5 * jnp.maximum(free, (held - returns) ** 2)


def token_weights(mask: jax.Array, mode: Aggregation, *, longest: int) -> jax.Array:
    """Return weights [B, K, T] to sum token losses with. They are computed once for a whole minibatch, so the loss is
    the same for any number of microbatches.

    Args:
      mask: Real tokens, [B, K, T]; a response without tokens does not count as a response.
      mode: "token-mean": every token has the same weight (DAPO); "sequence-mean-token-mean": every response does
        (GRPO); "sequence-mean-token-sum": mean over responses of the sum over tokens; "sequence-mean-token-sum-norm":
        this divided by ``longest`` (Dr. GRPO).
      longest: Maximum tokens of a response.
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
      beta: Strength of the regularisation towards the reference.
      label_smoothing: Probability that a label is wrong.
    """
    margin = beta * (chosen - rejected)
    return -(1 - label_smoothing) * jax.nn.log_sigmoid(margin) - label_smoothing * jax.nn.log_sigmoid(-margin)


def explained_variance(values: jax.Array, returns: jax.Array, mask: jax.Array) -> jax.Array:
    """Return 1 - var(returns - values) / var(returns); 0 if the returns do not vary."""
    spread = masked_variance(returns, mask)
    left = masked_variance(returns - values, mask)
    return jnp.where(spread > _VARIANCE_FLOOR, 1.0 - left / jnp.maximum(spread, _VARIANCE_FLOOR), 0.0)
