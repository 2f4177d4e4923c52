"""MRM: a reward whose mixing weights are meta-learned, adapted by a few gradient steps (arXiv 2601.18731).

    r = softmax(w)^T (A e),  A in R^{B x D}
    inner: steps of Adam on w, from a learned start w_0, on the person's comparisons
    outer: sum_u g((L_u - tau) / gamma) L_u,  g the sigmoid, tau the median of the batch; the gate is not detached

The published reward is 0.01 A e. Here A includes the factor: A and the start w_0 have one learning rate, and
with Adam, rows a hundred times as large would learn a hundred times more slowly than w_0.

One inner step, as published, moves each weight by the learning rate at most, so it hardly personalises; the number
of steps and the rate are settings, and the accuracy without adaptation is always printed.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass

import jax
import jax.numpy as jnp
import numpy as np
import optax

from prb_jax.personal.few_shot.choices import Array, Choices, Context, Responses, UserRows
from prb_jax.personal.few_shot.episodes import Episode, EpisodeSettings, fit_episodes, query_losses
from prb_jax.personal.few_shot.fitting import FitData, define
from prb_jax.personal.few_shot.protocol import Fitted, Method, State, accuracy_of, adapt_users, without_user
from prb_jax.records.options import option


@dataclass(frozen=True, kw_only=True)
class MRMSettings(EpisodeSettings):
    """Settings of MRM; the published ones are 2 bases, 1 inner step and an inner rate of 1e-3 to 5e-3."""

    bases: int = option(2, "B, the rows of A, which start around the pooled direction", least=2)
    inner_steps: int = option(5, "updates of w for a person", least=1)
    inner_rate: float = option(0.3, "their learning rate", above=0)
    gamma: float = option(0.5, "the width of the gate", above=0)
    rate: float = option(3e-3, "learning rate at the start of a cosine schedule", above=0)


def fit(data: FitData) -> Fitted:
    """Train A and w_0 by episodes: each person's loss is that after the inner steps."""
    pooled, l2 = data.pooled()
    rng, bases = data.rng(), data.settings.bases
    rows = pooled + rng.normal(0, 1 / np.sqrt(data.seen.mean_square), (bases, len(pooled)))
    arrays = {"rows": rows.astype(np.float32), "start": rng.normal(0, 1, bases).astype(np.float32)}
    same = np.tile(pooled, (bases, 1)).astype(np.float32)  # whatever the weights are, the reward is pooled
    nobody = data.fitted({**arrays, "rows": same}, {"l2": l2})
    return fit_episodes(data, data.fitted(arrays, {"l2": l2}), loss=_loss, also=(nobody,))


def _loss(method: Method, fitted: Fitted, episode: Episode, key: jax.Array, progress: Array) -> jax.Array:
    states = jax.vmap(adapt, in_axes=(None, 0, None))(fitted, episode.contexts, key)
    losses, counts = query_losses(method, fitted, states, episode), jnp.sum(episode.weights, axis=1)
    of_person = jnp.sum(losses, axis=1) / jnp.maximum(counts, 1)
    known = counts > 0
    middle = jnp.nanmedian(jnp.where(known, of_person, jnp.nan))
    gate = jax.nn.sigmoid((of_person - middle) / fitted.settings.gamma)
    return jnp.sum(jnp.where(known, gate * of_person, 0.0)) / jnp.maximum(jnp.sum(known), 1)


def empty_state(fitted: Fitted) -> State:
    """Return the learned start w_0."""
    return {"weights": jnp.asarray(fitted.arrays["start"])}


def adapt(fitted: Fitted, context: Context, key: jax.Array) -> State:
    """Return w float32 [B] (before the softmax) after the inner steps."""
    rows = context.deltas @ fitted.arrays["rows"].T
    count = jnp.maximum(jnp.sum(context.mask), 1)

    def loss(weights: Array) -> jax.Array:
        return jnp.sum(context.mask * jax.nn.softplus(-(rows @ jax.nn.softmax(weights)))) / count

    # eps_root keeps the derivative of Adam's square root finite where the gradient is zero.
    solver = optax.adam(fitted.settings.inner_rate, eps_root=1e-12)
    start = jnp.asarray(fitted.arrays["start"])

    def step(carry: tuple[Array, optax.OptState], _: None) -> tuple[tuple[Array, optax.OptState], None]:
        weights, state = carry
        updates, state = solver.update(jax.grad(loss)(weights), state)
        return (jnp.asarray(optax.apply_updates(weights, updates)), state), None

    (weights, _), _ = jax.lax.scan(step, (start, solver.init(start)), length=fitted.settings.inner_steps)
    return {"weights": weights}


def score(fitted: Fitted, state: State, responses: Responses) -> jax.Array:
    """Return softmax(w)^T (A e), float32 [K]."""
    return responses.features @ (fitted.arrays["rows"].T @ jax.nn.softmax(state["weights"]))


def controls(
    fitted: Fitted, choices: Choices, contexts: UserRows, queries: UserRows, key: jax.Array
) -> Mapping[str, float]:
    """Return the accuracy with and without adaptation, and how far w moves."""
    states = adapt_users(METHOD, fitted, choices, contexts, key=key)
    moved = np.abs(states["weights"] - np.asarray(fitted.arrays["start"]))
    return {
        "accuracy": accuracy_of(METHOD, fitted, states, choices, queries),
        "accuracy_no_adaptation": without_user(METHOD, fitted, choices, queries),
        "largest_move_of_a_weight": float(moved.max()),
    }


METHOD = define("mrm", MRMSettings, fit, adapt, score, empty_state, controls=controls)
