"""GPO: a transformer reads a person's comparisons in context and scores a response (arXiv 2310.11523).

    context tokens: MLP[delta_i; 1], MLP[-delta_i; -1] and one learned null token;  target token: MLP[e; 0]
    layers of attention whose keys are the context alone, without positions;  r(e) = (v + H t(e)).e

t(e) is the last layer's normed token of the target. The head H makes a direction of it: the length of t does not grow
with that of e, so that a head which gave the reward itself could not tell apart two responses that lie far out on one
side. Sign-flipped copies of the context make the order of a pair meaningless, and since r scores single responses,
r(delta) = -r(-delta). The null token defines k = 0. The published head predicts a mean and a deviation of a number
under a Gaussian likelihood; comparisons have no such number, so r is trained by the Bradley-Terry loss. v starts as the
pooled direction, so that the transformer learns what is personal. A mask tells the padding, never a feature of zero.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np

from prb_jax.data.options import option
from prb_jax.personal.few_shot.choices import Array, Context, Responses
from prb_jax.personal.few_shot.episodes import EpisodeSettings, fit_episodes
from prb_jax.personal.few_shot.fitting import FitData, define
from prb_jax.personal.few_shot.networks import attend, init_linear, init_mlp, linear, mlp
from prb_jax.personal.few_shot.protocol import Fitted, State


@dataclass(frozen=True, kw_only=True)
class GPOSettings(EpisodeSettings):
    """Settings of GPO; the paper has width 128, 6 layers, 4 heads, feed-forward 128 and 4 layers of ``embedding``."""

    width: int = option(64, "of a token", least=1)
    layers: int = option(2, "of attention", least=1)
    heads: int = option(4, "of each layer", least=1)
    embedding: int = option(2, "layers of the MLP that makes a token", least=1)

    def __post_init__(self) -> None:
        super().__post_init__()
        self.check("heads", self.width % self.heads == 0, f"a divisor of width={self.width}")


def fit(data: FitData) -> Fitted:
    """Train by episodes, each a person with random context and queries."""
    pooled, l2 = data.pooled()
    rng, settings = data.rng(), data.settings
    width, features = settings.width, len(pooled)
    names = ("query", "key", "value", "out", "up", "down")
    arrays = {
        "direction": pooled,
        "scale": np.float32(1 / np.sqrt(data.seen.mean_square / features)),
        "embed": init_mlp(rng, [features + 1, *[width] * settings.embedding]),
        "null": rng.normal(0, 1, width).astype(np.float32),
        "layers": [{name: init_linear(rng, width, width) for name in names} for _ in range(settings.layers)],
        "head": init_linear(rng, width, features, gain=0.0),  # the fit before training is pooled
    }
    return fit_episodes(data, data.fitted(arrays, {"l2": l2}))


def _norm(x: Array) -> jax.Array:
    centred = x - jnp.mean(x, axis=-1, keepdims=True)
    return centred / jnp.sqrt(jnp.mean(centred**2, axis=-1, keepdims=True) + 1e-5)


def _embed(fitted: Fitted, features: Array, labels: Array) -> jax.Array:
    rows = jnp.concatenate([features * fitted.arrays["scale"], labels[:, None]], axis=1)
    return mlp(fitted.arrays["embed"], rows, jax.nn.relu)


def _layer(layer: Any, x: Array, context: Array, mask: Array, heads: int) -> jax.Array:
    """Tokens [T, w] after one layer in which they attend to the context [C, w]."""

    def split(y: Array) -> jax.Array:
        return y.reshape(len(y), heads, -1).swapaxes(0, 1)

    queries = split(linear(layer["query"], _norm(x)))
    keys, values = (split(linear(layer[name], _norm(context))) for name in ("key", "value"))
    attended = attend(queries, keys, values, mask).swapaxes(0, 1).reshape(x.shape)
    x = x + linear(layer["out"], attended)
    return x + linear(layer["down"], jax.nn.relu(linear(layer["up"], _norm(x))))


def _read(fitted: Fitted, deltas: Array, mask: Array) -> State:
    tokens = jnp.concatenate(
        [
            fitted.arrays["null"][None],
            _embed(fitted, deltas, jnp.ones(len(deltas))),
            _embed(fitted, -deltas, -jnp.ones(len(deltas))),
        ]
    )
    mask = jnp.concatenate([jnp.ones(1, bool), mask, mask])
    states = []
    for layer in fitted.arrays["layers"]:
        states.append(tokens)
        tokens = _layer(layer, tokens, tokens, mask, fitted.settings.heads)
    return {"tokens": jnp.stack(states), "mask": mask}


def empty_state(fitted: Fitted) -> State:
    """Return the null token alone, as every layer sees it."""
    nothing = jnp.zeros((0, len(fitted.arrays["direction"])), jnp.float32)
    return _read(fitted, nothing, jnp.zeros(0, bool))


def adapt(fitted: Fitted, context: Context, key: jax.Array) -> State:
    """Return the context as every layer sees it: tokens float32 [layers, 2 k + 1, w], mask bool [2 k + 1]."""
    return _read(fitted, context.deltas, context.mask)


def score(fitted: Fitted, state: State, responses: Responses) -> jax.Array:
    """Return (v + H t(e)).e, float32 [K]."""
    tokens = _embed(fitted, responses.features, jnp.zeros(len(responses.features)))
    for index, layer in enumerate(fitted.arrays["layers"]):
        tokens = _layer(layer, tokens, state["tokens"][index], state["mask"], fitted.settings.heads)
    direction = linear(fitted.arrays["head"], _norm(tokens)) * fitted.arrays["scale"]
    return jnp.sum((fitted.arrays["direction"] + direction) * responses.features, axis=1)


METHOD = define("gpo", GPOSettings, fit, adapt, score, empty_state)
