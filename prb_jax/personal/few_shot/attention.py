"""Bilinear attention from candidates to a person's posts and choices: the cheapest reader of a profile.

    r(e | memory) = v.e + sum_c g_c sum_{m in c} a_m(e) s_m <L^T e, N^T x_m>
    a(e) = softmax over the m of kind c, and an empty slot, of <Q^T e, K^T x_m> / sqrt(h)

The memory holds every post of the profile (s = 1 for the person's own words and for texts they agree with, -1 for
texts they disagree with), and both responses of each of the k comparisons (s = 1 chosen, -1 rejected). Own words,
votes and comparisons are three kinds c, each with a separate gain and softmax: in one softmax over all kinds, every
further comparison would take weight from the profile. All projections start as the principal directions of the
responses: at the start, a response scores high if it resembles texts that the person likes. v is the direction of
pooled Bradley-Terry and stays fixed: without data on a person, the method equals pooled Bradley-Terry. The gains start
at the minimum of the seen people's loss, a convex problem; training then learns which similarity counts.
Low-rank bilinear similarity with the attention of Vaswani and others 2017; ours.
"""

from __future__ import annotations

from dataclasses import dataclass
from functools import partial
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np

from prb_jax.personal.few_shot.choices import Array, Context, Responses
from prb_jax.personal.few_shot.episodes import EpisodeSettings, People, draw, fit_episodes, people_of
from prb_jax.personal.few_shot.fitting import FitData, define, mean_loss, minimise
from prb_jax.personal.few_shot.pooled import PooledSettings
from prb_jax.personal.few_shot.protocol import Fitted, Floats, State
from prb_jax.records.options import option, same_option

OWN_WORDS, VOTE, COMPARISON = range(KINDS := 3)
MOST_DRAWS = 32
"""Batches of people, at most, on whose queries the start is fitted: about three for each person where it suffices."""

SHARPNESS = 2.0  # the logits at the start: so many times the cosine


@dataclass(frozen=True, kw_only=True)
class AttentionSettings(EpisodeSettings):
    """Settings of bilinear attention."""

    width: int = option(32, "h, the rank of both similarities, at most D", least=1)
    l2: Floats = same_option(PooledSettings, "l2")
    gain_l2: Floats = option(
        (1e-3, 1e-1), "penalties of the gains at the start, of similarities of variance 1; likewise", above=0
    )


def fit(data: FitData) -> Fitted:
    """Fit v, then the gains of the similarity along principal directions, then train all but v by episodes."""
    seen, settings = data.seen, data.settings
    features = np.asarray(seen.features, np.float32)
    directions = principal_directions(features, min(settings.width, features.shape[1]), rng=data.rng())
    size = np.sqrt(np.mean(np.sum((features @ directions) ** 2, axis=1)))
    # Values start as the cosine along these directions, logits as a multiple of it.
    similar = directions / size
    attended = similar * np.sqrt(SHARPNESS * np.sqrt(directions.shape[1]))
    pooled, l2 = data.pooled()
    arrays = {
        "direction": pooled,
        "candidate_value": similar,
        "memory_value": similar.copy(),
        "candidate_key": attended,
        "memory_key": attended.copy(),
        "gains": np.zeros(KINDS, np.float32),
    }
    penalties = np.array(sorted(settings.gain_l2, reverse=True), np.float32)
    solved = _gains(
        data.fitted(arrays, {}),
        people_of(seen, most=settings.most),
        jax.random.fold_in(data.key, 1),
        penalties,
        settings=settings,
        draws=min(MOST_DRAWS, -(-3 * seen.people // settings.batch)),
    )
    candidates = [data.fitted(arrays, {"l2": l2, "gain_l2": penalties[0]})]
    candidates += [
        data.fitted({**arrays, "gains": gains}, {"l2": l2, "gain_l2": gain_l2})
        for gain_l2, gains in zip(penalties, np.asarray(solved), strict=True)
    ]
    return fit_episodes(data, data.best(candidates), fixed=("direction",))


def principal_directions(features: np.ndarray, count: int, *, rng: np.random.Generator) -> np.ndarray:
    """Return the directions of the largest second moments of features [R, D], float32 [D, count], orthonormal, by
    orthogonal iteration."""
    directions = rng.normal(size=(features.shape[1], count)).astype(np.float32)
    for _ in range(8):
        directions, _ = np.linalg.qr(features.T @ (features @ directions))
    return directions.astype(np.float32)


@partial(jax.jit, static_argnames=("settings", "draws"))
def _gains(
    fitted: Fitted,
    people: People,
    key: jax.Array,
    penalties: Array,
    *,
    settings: AttentionSettings,
    draws: int,
) -> Array:
    """The gains [n, 3] of the lowest loss on queries of the seen people under each of the penalties [n]; the reward is
    linear in them."""

    def of_batch(key: jax.Array) -> tuple[Array, Array, Array]:
        episode = draw(people, key, batch=settings.batch, shots=settings.shots)
        states = jax.vmap(adapt, in_axes=(None, 0, None))(fitted, episode.contexts, key)
        of_query = jax.vmap(partial(_similarities, fitted), in_axes=(None, 0))
        similar = jax.vmap(of_query)(states, episode.pairs.features)  # [B, c, 2, kinds]
        pooled = episode.pairs.features @ fitted.arrays["direction"]
        return pooled[:, :, 0] - pooled[:, :, 1], similar[:, :, 0] - similar[:, :, 1], episode.weights

    margins, similar, weights = jax.lax.map(of_batch, jax.random.split(key, draws))
    scale = jnp.sqrt(jnp.sum(similar**2 * weights[..., None], axis=(0, 1, 2)) / jnp.sum(weights)) + 1e-6

    def solve(start: Array, penalty: Array) -> tuple[Any, Any]:
        def loss(gains: Array) -> jax.Array:
            size = 0.5 * penalty * jnp.sum(gains**2)
            return mean_loss(margins + (similar / scale) @ gains, weights) + size

        gains_at_minimum = minimise(loss, start, steps=100)
        return gains_at_minimum, gains_at_minimum  # the next start

    return jax.lax.scan(solve, jnp.zeros(KINDS, jnp.float32), penalties)[1] / scale


def _state(fitted: Fitted, memory: Array, signs: Array, kinds: Array, mask: Array) -> State:
    arrays = fitted.arrays
    return {
        "keys": memory @ arrays["memory_key"],
        "values": (memory @ arrays["memory_value"]) * signs[:, None],
        "kinds": jnp.where(mask, kinds, KINDS),  # of no kind: padding
    }


def empty_state(fitted: Fitted) -> State:
    """Return a memory with nothing in it."""
    nothing = jnp.zeros((1, len(fitted.arrays["direction"])), jnp.float32)
    return _state(fitted, nothing, jnp.zeros(1), jnp.zeros(1, jnp.int32), jnp.zeros(1, bool))


def adapt(fitted: Fitted, context: Context, key: jax.Array) -> State:
    """Return the projected memory: keys and values float32 [M + 2 k, h], kinds int32 [M + 2 k]."""
    count = context.mask.shape[0]
    memory = [context.chosen.features, context.rejected.features]
    signs = [jnp.ones(count), -jnp.ones(count)]
    kinds, mask = [jnp.full(2 * count, COMPARISON)], [context.mask, context.mask]
    posts = context.posts
    if posts is not None:
        memory.append(posts.features)
        signs.append(jnp.where(posts.votes == 0, 1.0, posts.votes))
        kinds.append(jnp.where(posts.votes == 0, OWN_WORDS, VOTE))
        mask.append(posts.mask)
    return _state(fitted, *(jnp.concatenate(parts) for parts in (memory, signs, kinds, mask)))


def _similarities(fitted: Fitted, state: State, features: Array) -> jax.Array:
    """The attended similarity of responses [K, D] to the memory of each kind, float32 [K, 3]."""
    arrays = fitted.arrays
    width = arrays["candidate_key"].shape[1]
    logits = features @ arrays["candidate_key"] @ state["keys"].T / np.sqrt(width)
    similar = features @ arrays["candidate_value"] @ state["values"].T

    def attended(kind: int) -> jax.Array:
        of_kind = jnp.where(state["kinds"] == kind, logits, -1e30)
        of_kind = jnp.concatenate([of_kind, jnp.zeros((len(of_kind), 1))], axis=1)  # the empty slot
        return jnp.sum(jax.nn.softmax(of_kind, axis=1)[:, :-1] * similar, axis=1)

    return jnp.stack([attended(kind) for kind in range(KINDS)], axis=1)


def score(fitted: Fitted, state: State, responses: Responses) -> jax.Array:
    """Return v.e and the attended similarities, float32 [K]."""
    similar = _similarities(fitted, state, responses.features)
    return responses.features @ fitted.arrays["direction"] + similar @ fitted.arrays["gains"]


METHOD = define("attention", AttentionSettings, fit, adapt, score, empty_state, holds_posts=True)
