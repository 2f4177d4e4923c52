"""Turn scores of rollouts into advantages of tokens: one compiled function of the arrays of a whole step.

Letters: B prompts, K rollouts of each, R columns of tokens. Values and returns have R + 1 columns, because the last
state of a rollout has seen all of its tokens.
"""

from __future__ import annotations

import functools
from dataclasses import dataclass

import jax
import jax.numpy as jnp

from prb_jax.behaviour.rl.numbers import (
    discounted,
    ended_scores,
    explained_variance,
    gae,
    group_advantages,
    kl_estimate,
    long_scores,
    token_rewards,
    whiten,
)
from prb_jax.behaviour.rl.settings import PpoSettings


@jax.tree_util.register_dataclass
@dataclass(frozen=True, kw_only=True)
class Credit:
    """Training signal of a step for each token."""

    advantages: jax.Array  # float32 [B, K, R]
    returns: jax.Array  # float32 [B, K, R + 1]
    value_mask: jax.Array  # float32 [B, K, R + 1], states whose value is trained
    numbers: dict[str, jax.Array]  # float32 [] by name, to report


@functools.partial(jax.jit, static_argnames="settings")
def credit(
    scores: jax.Array,
    ended: jax.Array,
    lengths: jax.Array,
    logprobs: jax.Array,
    reference: jax.Array,
    values: jax.Array,
    coefficient: jax.Array,
    *,
    settings: PpoSettings,
) -> Credit:
    """Return advantages and returns of all tokens of a step.

    Args:
      scores: Scores of the reward, float32 [B, K].
      ended: Whether a stop token is the last one, bool [B, K].
      lengths: Tokens of each rollout, int32 [B, K].
      logprobs, reference: Log-probabilities under the policy that drew them, and the reference, float32 [B, K, R];
        used only if the KL is part of the reward.
      values: Values of the value function, float32 [B, K, R + 1]; 0 without one.
      coefficient: Coefficient of the KL, float32 [].
      settings: Settings of the run.
    """
    chosen, algorithm = settings.advantage, settings.algorithm
    columns = logprobs.shape[-1]
    mask = (jnp.arange(columns) < lengths[..., None]).astype(jnp.float32)
    scored = ended_scores(scores, ended, rule=settings.scoring.no_end, value=settings.scoring.value_of_no_end)
    scored = long_scores(
        scored, lengths, free=settings.scoring.free_tokens, penalty=settings.scoring.token_penalty
    )
    kl = jnp.where(mask > 0, kl_estimate(logprobs, reference, settings.kl_estimator), 0.0)
    penalties = coefficient * kl if settings.kl_in_reward else jnp.zeros_like(kl)
    at_end = chosen.value_at_end and settings.with_values
    # One more column than tokens: the state after the last token, if it is used.
    penalties = jnp.pad(penalties, ((0, 0), (0, 0), (0, 1)))
    value_mask = (jnp.arange(columns + 1) < lengths[..., None] + int(at_end)).astype(jnp.float32)
    rewards = token_rewards(scored, lengths if at_end else lengths - 1, penalties)
    returns = jnp.zeros_like(rewards)
    if algorithm == "ppo":
        if chosen.whiten_rewards:
            rewards = whiten(rewards, value_mask, shift_mean=False)
        estimate = gae(rewards, values, value_mask, gamma=chosen.gamma, lam=chosen.lam)
        advantages, returns = estimate.advantages[..., :-1] * mask, estimate.returns * value_mask
        if chosen.whiten:
            advantages = whiten(advantages, mask, shift_mean=True)
    elif algorithm == "reinforce++":
        advantages = whiten(discounted(rewards[..., :-1], mask, gamma=chosen.gamma), mask, shift_mean=True)
    else:
        totals = rewards.sum(axis=-1)
        baseline = "others" if algorithm == "rloo" else "mean"
        scale = algorithm == "grpo" and chosen.scale_groups
        advantages = group_advantages(totals, baseline=baseline, scale=scale)[..., None] * mask
    equal = (scored == scored[:, :1]).all(axis=-1) & (scored.shape[1] > 1)
    numbers = {
        "reward": scores.mean(),
        "reward_deviation": scores.std(),
        "score": scored.mean(),
        "length": lengths.astype(jnp.float32).mean(),
        "ended_share": ended.astype(jnp.float32).mean(),
        "equal_groups": equal.astype(jnp.float32).sum(),
    }
    if settings.with_values:
        numbers["explained_variance"] = explained_variance(values, returns, value_mask)
    return Credit(advantages=advantages, returns=returns, value_mask=value_mask, numbers=numbers)
