"""Bilinear attention from candidates to a person's posts and choices: the cheapest reader of a profile.

    r(e | memory) = v.e + g sum_m a_m(e) s_m <L^T e, N^T x_m>
    a(e) = softmax over m, and an empty slot, of <Q^T e, K^T x_m> / sqrt(h)

The memory holds every post of the profile (s = 1 for the person's own words and for texts they agree with, -1 for
texts they disagree with), and both responses of each of the k comparisons (s = 1 chosen, -1 rejected). Own words,
votes and comparisons have a gain g each. L and N start as one random projection, so at the start a response is
liked that is similar to the texts the person likes; training learns which similarity counts. Low-rank bilinear
similarity with the attention of Vaswani and others 2017; ours.
"""

from __future__ import annotations

from dataclasses import dataclass
from functools import partial

import jax
import jax.numpy as jnp
import numpy as np
from jax.sharding import Mesh

from prb_jax.personal.few_shot.choices import Array, Choices, Context, Responses
from prb_jax.personal.few_shot.episodes import EpisodeSettings, adapted_loss, fit_episodes
from prb_jax.personal.few_shot.fitting import numpy_rng, pooled_direction
from prb_jax.personal.few_shot.protocol import Fitted, Method, State
from prb_jax.personal.few_shot.settings import check_numbers

OWN_WORDS, VOTE, COMPARISON = range(3)


@dataclass(frozen=True, kw_only=True)
class AttentionSettings(EpisodeSettings):
    """Settings of bilinear attention.

    Attributes:
      width: h, the rank of both similarities.
      gain: g at the start.
      l2: penalties of the pooled direction that v starts as, of which the validation part chooses one.
    """

    width: int = 32
    gain: float = 1.0
    l2: tuple[float, ...] = (1e-3, 1e-2, 1e-1, 1.0)

    def __post_init__(self) -> None:
        super().__post_init__()
        check_numbers(self, above={"l2": 0}, least={"width": 1})


def fit(
    seen: Choices,
    validation: Choices,
    *,
    settings: AttentionSettings,
    key: jax.Array,
    mesh: Mesh | None = None,
) -> Fitted:
    """Train by episodes from the pooled direction and a random projection."""
    seen.require("attention", ())
    pooled, l2 = pooled_direction(seen, validation, l2=settings.l2, steps=100)
    rng, features = numpy_rng(key), len(pooled)
    size = np.sqrt(np.mean(np.sum(np.asarray(seen.features) ** 2, axis=1)))

    def projection(gain: float) -> np.ndarray:
        return (rng.normal(0, gain / size, (features, settings.width))).astype(np.float32)

    # The similarity of values starts near the cosine, the logits near sqrt(h) times the cosine.
    similar, attended = projection(settings.width**-0.5), projection(1.0)
    arrays = {
        "direction": pooled,
        "candidate_value": similar,
        "memory_value": similar.copy(),
        "candidate_key": attended,
        "memory_key": attended.copy(),
        "gains": np.full(3, settings.gain, np.float32),
    }
    start = Fitted(arrays, {"l2": np.float32(l2)}, settings)
    return fit_episodes(METHOD, start, seen, validation, loss=LOSS, key=key, mesh=mesh)


def _state(fitted: Fitted, memory: Array, signs: Array, kinds: Array, mask: Array) -> State:
    arrays = fitted.arrays
    gains = arrays["gains"][kinds] * signs
    return {
        "keys": memory @ arrays["memory_key"],
        "values": (memory @ arrays["memory_value"]) * gains[:, None],
        "mask": mask,
    }


def empty_state(fitted: Fitted) -> State:
    """Return a memory with nothing in it."""
    nothing = jnp.zeros((1, len(fitted.arrays["direction"])), jnp.float32)
    return _state(fitted, nothing, jnp.zeros(1), jnp.zeros(1, jnp.int32), jnp.zeros(1, bool))


def adapt(fitted: Fitted, context: Context, key: jax.Array) -> State:
    """Return the projected memory: keys and values float32 [M + 2 k, h], mask bool [M + 2 k]."""
    count = context.mask.shape[0]
    memory = [context.chosen.features, context.rejected.features]
    signs = [jnp.ones(count), -jnp.ones(count)]
    kinds, mask = [jnp.full(2 * count, COMPARISON)], [context.mask, context.mask]
    posts = context.posts
    if posts is not None:
        voted = jnp.zeros(posts.mask.shape) if posts.signs is None else posts.signs
        memory.append(posts.features)
        signs.append(jnp.where(voted == 0, 1.0, voted))
        kinds.append(jnp.where(voted == 0, OWN_WORDS, VOTE))
        mask.append(posts.mask)
    return _state(fitted, *(jnp.concatenate(each) for each in (memory, signs, kinds, mask)))


def score(fitted: Fitted, state: State, responses: Responses) -> jax.Array:
    """Return v.e and the attended similarities, float32 [K]."""
    arrays = fitted.arrays
    width = arrays["candidate_key"].shape[1]
    logits = responses.features @ arrays["candidate_key"] @ state["keys"].T / np.sqrt(width)
    logits = jnp.where(state["mask"], logits, -1e30)
    logits = jnp.concatenate([logits, jnp.zeros((len(logits), 1))], axis=1)  # the empty slot
    weights = jax.nn.softmax(logits, axis=1)[:, :-1]
    similar = responses.features @ arrays["candidate_value"] @ state["values"].T
    return responses.features @ arrays["direction"] + jnp.sum(weights * similar, axis=1)


METHOD = Method("attention", AttentionSettings, fit, adapt, score, empty_state)
LOSS = partial(adapted_loss, METHOD)
