"""Losses of labelled comparisons: Bradley-Terry over pairs, Plackett-Luce over rankings.

All functions are pure, run in float32 and return sums with their denominators, so microbatches add up
exactly to one large batch. Dimensions: B comparisons, K responses.
"""

from __future__ import annotations

import dataclasses

import jax
import jax.numpy as jnp
import numpy as np

from prb_jax.training.config import LossSettings


@jax.tree_util.register_dataclass
@dataclasses.dataclass(frozen=True, kw_only=True)
class Extras:
    """Inputs of a loss besides tokens, for S streams with capacity for C comparisons each. Padding rows are masked. A
    batch of sequences has no axis S."""

    labels: np.ndarray | jax.Array  # float32 [S, C, K]
    mask: np.ndarray | jax.Array  # bool [S, C, K], true for present responses
    margin: np.ndarray | jax.Array  # float32 [S, C]
    weights: np.ndarray | jax.Array  # float32 [S, C]
    # int32 [S, C, K], index of each response among the positions that its stream reads
    places: np.ndarray | jax.Array

    def by_comparison(self, rewards: jax.Array) -> dict[str, jax.Array]:
        """Return the arguments of :func:`comparison_loss` for rewards [S, M] of streams, or [S] of sequences."""
        arrays = {name: jnp.asarray(value) for name, value in vars(self).items()}
        places = arrays.pop("places")
        if places.ndim == 2:
            return {"rewards": rewards[places], **arrays}
        streams = len(places)
        by_response = jnp.take_along_axis(rewards, places.reshape(streams, -1), axis=1).reshape(places.shape)
        arrays["rewards"] = by_response
        return {name: array.reshape(-1, *array.shape[2:]) for name, array in arrays.items()}


@jax.tree_util.register_dataclass
@dataclasses.dataclass(frozen=True, kw_only=True)
class LossParts:
    """Sums over comparisons, float32 scalars; see :meth:`means`."""

    loss_sum: jax.Array  # weighted losses
    weight_sum: jax.Array  # weights of informative comparisons (with two different labels)
    count: jax.Array  # number of informative comparisons
    # number of wins among them: the best of the top-labelled responses is strictly above the best of the rest
    accuracy_sum: jax.Array
    margin_sum: jax.Array  # sum of their mean r_i - r_j over ordered pairs
    # reward_sum, reward_square_sum, reward_count: over their responses
    reward_sum: jax.Array
    reward_square_sum: jax.Array
    reward_count: jax.Array
    # reward_min, reward_max: over their responses; +inf and -inf before the first one
    reward_min: jax.Array
    reward_max: jax.Array
    expert_loads: jax.Array | None = None  # of a mixture; see :func:`load_balance`

    def __add__(self, other: LossParts) -> LossParts:
        values = {
            field.name: getattr(self, field.name) + getattr(other, field.name)
            for field in dataclasses.fields(LossParts)
            if getattr(self, field.name) is not None
        }
        values["reward_min"] = jnp.minimum(self.reward_min, other.reward_min)
        values["reward_max"] = jnp.maximum(self.reward_max, other.reward_max)
        return LossParts(**values)

    def means(self) -> dict[str, jax.Array]:
        """Return loss (weighted), accuracy, margin, reward_mean, reward_std, reward_min, reward_max, comparisons.

        A mixture of experts adds :func:`load_balance`.
        """
        count = jnp.maximum(self.count, 1.0)
        responses = jnp.maximum(self.reward_count, 1.0)
        mean = self.reward_sum / responses
        return {
            "loss": self.loss_sum / jnp.where(self.weight_sum > 0, self.weight_sum, 1.0),
            "accuracy": self.accuracy_sum / count,
            "margin": self.margin_sum / count,
            "reward_mean": mean,
            "reward_std": jnp.sqrt(jnp.maximum(self.reward_square_sum / responses - mean**2, 0.0)),
            "reward_min": self.reward_min,
            "reward_max": self.reward_max,
            "comparisons": self.count,
            **({} if self.expert_loads is None else load_balance(self.expert_loads)),
        }


def load_balance(loads: jax.Array) -> dict[str, jax.Array]:
    """Measure how evenly tokens are spread over the experts of a mixture, from loads float32 [L, E].

    Returns:
        busiest_expert: Tokens of a layer's busiest expert divided by the mean of its experts, averaged over layers; 1
            is even. idle_experts: share of experts that got no token.
    """
    even = jnp.maximum(loads.mean(axis=-1), 1e-9)
    return {
        "busiest_expert": jnp.mean(loads.max(axis=-1) / even),
        "idle_experts": jnp.mean((loads == 0).astype(jnp.float32)),
    }


def comparison_loss(
    rewards: jax.Array,
    *,
    labels: jax.Array,
    mask: jax.Array,
    margin: jax.Array,
    weights: jax.Array,
    config: LossSettings,
) -> LossParts:
    """Return the loss of B comparisons as sums and denominators.

    A comparison without two present responses with different labels is ignored.

    Args:
        rewards: Rewards, float32 [B, K]; values of absent responses are ignored.
        labels: Labels, float32 [B, K]; a higher label is better, equal labels are not compared.
        mask: Mask of present responses, bool [B, K].
        margin: Margins, float32 [B].
        weights: Weights, float32 [B], at least 0.
        config: Options of the loss.
    """
    mask = mask.astype(bool)
    rewards = jnp.where(mask, rewards.astype(jnp.float32), 0.0)
    # [B, K, K]: response i is labelled above response j.
    above = (labels[:, :, None] > labels[:, None, :]) & mask[:, :, None] & mask[:, None, :]
    pairs = above.sum((1, 2)).astype(jnp.float32)
    informative = pairs > 0
    per_pair = above / jnp.maximum(pairs, 1.0)[:, None, None]
    weights = jnp.where(informative, weights.astype(jnp.float32), 0.0)
    shift = jnp.where(informative, margin.astype(jnp.float32), 0.0) if config.use_margin else 0.0 * weights

    difference = rewards[:, :, None] - rewards[:, None, :]
    if config.kind == "bradley_terry":
        losses = _negative_log_sigmoid(difference - shift[:, None, None], config.label_smoothing)
        loss = jnp.sum(losses * per_pair, axis=(1, 2))
    else:
        loss = _ranking_loss(rewards, above, shift, config.label_smoothing)
    if config.center_rewards_coefficient:
        total = rewards[:, :, None] + rewards[:, None, :]
        loss += config.center_rewards_coefficient * jnp.sum(jnp.square(total) * per_pair, axis=(1, 2))

    counted = informative.astype(jnp.float32)
    seen = mask & informative[:, None]
    return LossParts(
        loss_sum=jnp.sum(loss * weights),
        weight_sum=jnp.sum(weights),
        count=jnp.sum(counted),
        accuracy_sum=jnp.sum(_wins(rewards, labels, mask) * counted),
        margin_sum=jnp.sum(difference * per_pair),
        reward_sum=jnp.sum(rewards * seen),
        reward_square_sum=jnp.sum(jnp.square(rewards) * seen),
        reward_count=jnp.sum(seen.astype(jnp.float32)),
        reward_min=jnp.min(jnp.where(seen, rewards, jnp.inf)),
        reward_max=jnp.max(jnp.where(seen, rewards, -jnp.inf)),
    )


def _negative_log_sigmoid(difference: jax.Array, smoothing: float) -> jax.Array:
    """Return -log sigmoid(d), mixed with -log sigmoid(-d) in the proportion of the smoothing."""
    if smoothing == 0:
        return jax.nn.softplus(-difference)
    return (1 - smoothing) * jax.nn.softplus(-difference) + smoothing * jax.nn.softplus(difference)


def _ranking_loss(rewards: jax.Array, above: jax.Array, margin: jax.Array, smoothing: float) -> jax.Array:
    """Return -log P(ranking), float32 [B]: each response is chosen among itself and all lower-labelled responses.

    Without equal labels this is Plackett-Luce; responses with equal labels do not compete.
    """
    has_rest = above.any(-1)
    # Rows without any lower label would give -inf and a NaN gradient.
    safe = above | ~has_rest[:, :, None]
    rest = jax.nn.logsumexp(jnp.where(safe, rewards[:, None, :], -1e30), axis=-1)
    losses = _negative_log_sigmoid(rewards - rest - margin[:, None], smoothing)
    return jnp.sum(jnp.where(has_rest, losses, 0.0), axis=1)


def _wins(rewards: jax.Array, labels: jax.Array, mask: jax.Array) -> jax.Array:
    """Return 1 where the best of the top-labelled responses is strictly above the best of the rest, float32 [B]."""
    top = jnp.max(jnp.where(mask, labels, -jnp.inf), axis=1, keepdims=True)
    is_top = mask & (labels == top)
    best = jnp.max(jnp.where(is_top, rewards, -jnp.inf), axis=1)
    rest = jnp.max(jnp.where(mask & ~is_top, rewards, -jnp.inf), axis=1)
    return (best > rest).astype(jnp.float32)
