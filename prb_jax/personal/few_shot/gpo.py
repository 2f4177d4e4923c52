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
from functools import partial
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
from jax.sharding import Mesh

from prb_jax.errors import DataError
from prb_jax.personal.few_shot.choices import Array, Choices, Context, Responses
from prb_jax.personal.few_shot.episodes import EpisodeSettings, adapted_loss, fit_episodes
from prb_jax.personal.few_shot.fitting import numpy_rng, pooled_direction
from prb_jax.personal.few_shot.layers import attend, init_linear, init_mlp, linear, mlp
from prb_jax.personal.few_shot.protocol import Fitted, Method, State
from prb_jax.personal.few_shot.settings import check_numbers


@dataclass(frozen=True, kw_only=True)
class GPOSettings(EpisodeSettings):
    """Settings of GPO; the paper has width 128, 6 layers, 4 heads, feed-forward 128 and 4 layers of the embedding MLP.

    Attributes:
      width: of a token.
      layers: of attention.
      heads: of each layer.
      embedding: layers of the MLP that makes a token.
      l2: penalties of the pooled direction, of which the validation part chooses one.
    """

    width: int = 64
    layers: int = 2
    heads: int = 4
    embedding: int = 2
    l2: tuple[float, ...] = (1e-3, 1e-2, 1e-1, 1.0)

    def __post_init__(self) -> None:
        super().__post_init__()
        check_numbers(self, above={"l2": 0}, least={"width": 1, "layers": 1, "heads": 1, "embedding": 1})
        if self.width % self.heads:
            raise DataError(
                f"GPOSettings.heads: expected a divisor of width={self.width}, found {self.heads}"
            )


def fit(
    seen: Choices, validation: Choices, *, settings: GPOSettings, key: jax.Array, mesh: Mesh | None = None
) -> Fitted:
    """Train by episodes, each a person with random context and queries."""
    seen.require("gpo", ())
    pooled, l2 = pooled_direction(seen, validation, l2=settings.l2, steps=100)
    rng, width = numpy_rng(key), settings.width

    def layer() -> dict[str, Any]:
        names = ("query", "key", "value", "out")
        inner = {name: init_linear(rng, width, width) for name in names}
        return {**inner, "up": init_linear(rng, width, width), "down": init_linear(rng, width, width)}

    arrays = {
        "direction": pooled,
        "scale": np.float32(1 / np.sqrt(np.mean(np.sum(seen.deltas**2, axis=1)) / len(pooled))),
        "embed": init_mlp(rng, [len(pooled) + 1, *[width] * settings.embedding]),
        "null": rng.normal(0, 1, width).astype(np.float32),
        "layers": [layer() for _ in range(settings.layers)],
        "head": init_linear(rng, width, len(pooled), gain=0.0),  # the fit before training is pooled
    }
    start = Fitted(arrays, {"l2": np.float32(l2)}, settings)
    return fit_episodes(METHOD, start, seen, validation, loss=LOSS, key=key, mesh=mesh)


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
    found = attend(queries, keys, values, mask).swapaxes(0, 1).reshape(x.shape)
    x = x + linear(layer["out"], found)
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
    own = linear(fitted.arrays["head"], _norm(tokens)) * fitted.arrays["scale"]
    return jnp.sum((fitted.arrays["direction"] + own) * responses.features, axis=1)


METHOD = Method("gpo", GPOSettings, fit, adapt, score, empty_state)
LOSS = partial(adapted_loss, METHOD)
