"""VPL: variational preference learning, a latent variable for each person (arXiv 2408.10075).

    h_j = MLP[e_w; e_l],  c = mean_j selfattention(h)_j,  mu and logvar: two linear maps of c, clamped to [-1, 1]
    z = mu + exp(logvar / 2) eps in training, z = mu afterwards;   r(e | z) = v.e + MLP[e; z]
    softplus(-(r_w - r_l)) + w_KL anneal(t) KL,   KL = 0.5 sum (mu^2 + e^logvar - 1 - logvar)

v starts as pooled Bradley-Terry and the last layer of the reward's MLP as 0 (the published model has no v). The fit
before training is therefore pooled, and may be chosen. The latent variable is normalised neither in training nor
afterwards (the published code does only one of the two). At k = 0 it is 0 with variance 1. It may collapse, so its
controls are always printed: active units (the share of dimensions whose mu varies by more than 0.01 over people), KL by
dimension, and the accuracy with z = 0, with another person's z, and with the labels of the context turned round.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, replace
from functools import partial

import jax
import jax.numpy as jnp
import numpy as np

from prb_jax.personal.few_shot.choices import Array, Choices, Context, Responses, UserRows
from prb_jax.personal.few_shot.episodes import Episode, EpisodeSettings, fit_episodes, query_losses
from prb_jax.personal.few_shot.fitting import FitData, define
from prb_jax.personal.few_shot.networks import MLP, Linear, Network, arrays_of, attend
from prb_jax.personal.few_shot.protocol import (
    Fitted,
    Method,
    State,
    accuracy_of,
    adapt_users,
    shuffled_users,
    swapped_labels,
    without_user,
)
from prb_jax.records.options import option


@dataclass(frozen=True, kw_only=True)
class VPLSettings(EpisodeSettings):
    """Settings of VPL; the paper has latent 512 and hidden 512."""

    latent: int = option(32, "dz", least=1)
    hidden: int = option(128, "width of both layers of each MLP", least=1)
    kl: float = option(1e-4, "w_KL", least=0)
    cycles: int = option(4, "cycles of the cosine annealing of w_KL over the training", least=1)
    floor: float = option(0.1, "the least of the annealing", least=0)


class Variational(Network):
    """The encoder of comparisons and the reward."""

    def __init__(self, direction: np.ndarray, settings: VPLSettings, rng: np.random.Generator) -> None:
        super().__init__(direction, settings, rng)
        width, latent, hidden = len(direction), settings.latent, settings.hidden
        self.encoder = MLP([2 * width, hidden, hidden, latent], _leaky, rng=rng)
        self.query, self.key, self.value, self.mean, self.logvar = (
            Linear(latent, latent, rng=rng) for _ in range(5)
        )
        self.reward = MLP([width + latent, hidden, hidden, 1], _leaky, rng=rng, last=0.0)

    def posterior(self, context: Context) -> dict[str, jax.Array]:
        """Mean and logvar of a person's latent variable, float32 [dz]; both zero without comparisons."""
        mask = context.mask
        hidden = self.encoder(jnp.concatenate([context.chosen.features, context.rejected.features], axis=1))
        some = jnp.any(mask)
        allowed = mask | ~some  # at least one key, or gradients would be undefined
        attended = attend(self.query(hidden), self.key(hidden), self.value(hidden), allowed)
        pooled = jnp.sum(attended * mask[:, None], axis=0) / jnp.maximum(jnp.sum(mask), 1)
        both = {"mean": self.mean(pooled), "logvar": self.logvar(pooled)}
        return {name: jnp.where(some, jnp.clip(value, -1, 1), 0.0) for name, value in both.items()}

    def __call__(self, features: Array, z: Array) -> jax.Array:
        """r(e | z), float32 [K], of features [K, D]."""
        rows = jnp.concatenate([features, jnp.broadcast_to(z, (len(features), len(z)))], axis=1)
        return features @ self.direction[...] + self.reward(rows)[:, 0]


def fit(data: FitData) -> Fitted:
    """Train encoder and reward together by episodes."""
    pooled, l2 = data.pooled()
    network = Variational(pooled, data.settings, data.rng())
    return fit_episodes(data, data.fitted(arrays_of(network), {"l2": l2}), loss=_loss)


def _leaky(x: Array) -> jax.Array:
    return jax.nn.leaky_relu(x, 0.2)


def posterior(fitted: Fitted, context: Context) -> dict[str, jax.Array]:
    """Return mean and logvar of a person's latent variable, float32 [dz]; both zero without comparisons."""
    return Variational.of(fitted.arrays, fitted.settings).posterior(context)


def _kl(mean: Array, logvar: Array) -> jax.Array:
    return 0.5 * (mean**2 + jnp.exp(logvar) - 1 - logvar)


def _loss(method: Method, fitted: Fitted, episode: Episode, key: jax.Array, progress: Array) -> jax.Array:
    latent = jax.vmap(partial(posterior, fitted))(episode.contexts)
    noise = jax.random.normal(key, latent["mean"].shape)
    states = {"z": latent["mean"] + jnp.exp(latent["logvar"] / 2) * noise}
    losses = query_losses(method, fitted, states, episode)
    kl = jnp.mean(jnp.sum(_kl(latent["mean"], latent["logvar"]), axis=1))
    settings = fitted.settings
    phase = (progress * settings.cycles) % 1.0
    weight = settings.kl * jnp.maximum(settings.floor, 0.5 * (1 - jnp.cos(jnp.pi * phase)))
    return jnp.sum(losses) / jnp.maximum(jnp.sum(episode.weights), 1) + weight * kl


def empty_state(fitted: Fitted) -> State:
    """Return z = 0."""
    return {"z": jnp.zeros(fitted.settings.latent, jnp.float32)}


def adapt(fitted: Fitted, context: Context, key: jax.Array) -> State:
    """Return z = mu of the person, float32 [dz]."""
    return {"z": posterior(fitted, context)["mean"]}


def score(fitted: Fitted, state: State, responses: Responses) -> jax.Array:
    """Return r(e | z), float32 [K]."""
    return Variational.of(fitted.arrays, fitted.settings)(responses.features, state["z"])


def controls(
    fitted: Fitted, choices: Choices, contexts: UserRows, queries: UserRows, key: jax.Array
) -> Mapping[str, float]:
    """Return the signs of a collapsed latent variable, and the accuracies that it must lie above."""
    states = adapt_users(_POSTERIOR, fitted, choices, contexts, key=key)
    mean, logvar = states["mean"], states["logvar"]
    return {
        "active_units": float(np.mean(np.var(mean, axis=0) > 0.01)),
        "kl_per_dimension": float(np.mean(_kl(mean, logvar))),
        "accuracy": accuracy_of(METHOD, fitted, {"z": mean}, choices, queries),
        "accuracy_z_zero": without_user(METHOD, fitted, choices, queries),
        "accuracy_shuffled_context": shuffled_users(METHOD, fitted, choices, contexts, queries, key),
        "accuracy_swapped_labels": swapped_labels(METHOD, fitted, choices, contexts, queries, key),
    }


METHOD = define("vpl", VPLSettings, fit, adapt, score, empty_state, controls=controls)
_POSTERIOR = replace(METHOD, adapt=lambda fitted, context, key: posterior(fitted, context))
