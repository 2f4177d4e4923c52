"""GPO: a transformer reads a person's comparisons in context and scores a response (arXiv 2310.11523).

    context tokens: MLP[delta_i; 1], MLP[-delta_i; -1] and one learned null token;  target token: MLP[e; 0]
    layers of attention with keys only from the context, without positions;  r(e) = (v + H t(e)).e

t(e) is the last layer's normed token of the target. The head H maps it to a direction. The length of t does not grow
with the length of e: a head that gave the reward directly could not separate two responses far out on the same
side. Sign-flipped copies of the context make the order of a pair meaningless, and since r scores single responses,
r(delta) = -r(-delta). The null token defines k = 0. The published head predicts a mean and a deviation of a number
under a Gaussian likelihood; comparisons have no such number, so r is trained by the Bradley-Terry loss. v starts as the
pooled direction; the transformer only learns the personal part. A mask marks padding, never a feature of zero.
"""

from __future__ import annotations

from dataclasses import dataclass

import jax
import jax.numpy as jnp
import numpy as np
from flax import nnx

from prb_jax.personal.few_shot.choices import Array, Context, Responses
from prb_jax.personal.few_shot.episodes import EpisodeSettings, fit_episodes
from prb_jax.personal.few_shot.fitting import FitData, define
from prb_jax.personal.few_shot.networks import MLP, Linear, Network, arrays_of, attend
from prb_jax.personal.few_shot.protocol import Fitted, State
from prb_jax.records.options import option


@dataclass(frozen=True, kw_only=True)
class GPOSettings(EpisodeSettings):
    """Settings of GPO; the paper has width 128, 6 layers, 4 heads, feed-forward 128 and 4 layers of ``embedding``."""

    width: int = option(64, "width of a token", least=1)
    layers: int = option(2, "layers of attention", least=1)
    heads: int = option(4, "attention heads of each layer", least=1)
    embedding: int = option(2, "layers of the MLP that makes a token", least=1)

    def __post_init__(self) -> None:
        super().__post_init__()
        self.check("heads", self.width % self.heads == 0, f"a divisor of width={self.width}")


class Layer(nnx.Module):
    """Attention to the context and a feed-forward, each beside a residual connection."""

    def __init__(self, settings: GPOSettings, rng: np.random.Generator) -> None:
        self.heads = settings.heads
        self.query, self.key, self.value, self.out, self.up, self.down = (
            Linear(settings.width, settings.width, rng=rng) for _ in range(6)
        )

    def __call__(self, x: Array, context: Array, mask: Array) -> jax.Array:
        """Tokens [T, w] after they attend to the context [C, w]."""

        def split(y: Array) -> jax.Array:
            return y.reshape(len(y), self.heads, -1).swapaxes(0, 1)

        queries = split(self.query(_norm(x)))
        keys, values = (split(project(_norm(context))) for project in (self.key, self.value))
        x = x + self.out(attend(queries, keys, values, mask).swapaxes(0, 1).reshape(x.shape))
        return x + self.down(jax.nn.relu(self.up(_norm(x))))


class Transformer(Network):
    """It reads comparisons as tokens, and gives a response its reward beside them."""

    def __init__(self, direction: np.ndarray, settings: GPOSettings, rng: np.random.Generator) -> None:
        super().__init__(direction, settings, rng)
        width, features = settings.width, len(direction)
        self.scale = nnx.Param(np.float32(1))  # of the features
        self.embed = MLP([features + 1, *[width] * settings.embedding], jax.nn.relu, rng=rng)
        self.null = nnx.Param(rng.normal(0, 1, width).astype(np.float32))
        self.layers = nnx.List(Layer(settings, rng) for _ in range(settings.layers))
        self.head = Linear(width, features, rng=rng, gain=0.0)  # the fit before training is pooled

    def tokens(self, features: Array, labels: Array) -> jax.Array:
        """Tokens [T, w] of features [T, D] with labels [T]."""
        return self.embed(jnp.concatenate([features * self.scale[...], labels[:, None]], axis=1))

    def read(self, deltas: Array, mask: Array) -> State:
        """The comparisons [k, D] as every layer sees them."""
        ones = jnp.ones(len(deltas))
        both = [self.tokens(deltas, ones), self.tokens(-deltas, -ones)]
        tokens, states = jnp.concatenate([self.null[...][None], *both]), []
        mask = jnp.concatenate([jnp.ones(1, bool), mask, mask])
        for layer in self.layers:
            states.append(tokens)
            tokens = layer(tokens, tokens, mask)
        return {"tokens": jnp.stack(states), "mask": mask}

    def __call__(self, state: State, features: Array) -> jax.Array:
        """(v + H t(e)).e, float32 [K], of features [K, D]."""
        tokens = self.tokens(features, jnp.zeros(len(features)))
        for layer, context in zip(self.layers, state["tokens"], strict=True):
            tokens = layer(tokens, context, state["mask"])
        direction = self.head(_norm(tokens)) * self.scale[...]
        return jnp.sum((self.direction[...] + direction) * features, axis=1)


def fit(data: FitData) -> Fitted:
    """Train by episodes, each a person with random context and queries."""
    pooled, l2 = data.pooled()
    arrays = arrays_of(Transformer(pooled, data.settings, data.rng()))
    arrays["scale"] = np.float32(1 / np.sqrt(data.seen.mean_square / len(pooled)))
    return fit_episodes(data, data.fitted(arrays, {"l2": l2}))


def _norm(x: Array) -> jax.Array:
    centred = x - jnp.mean(x, axis=-1, keepdims=True)
    return centred / jnp.sqrt(jnp.mean(centred**2, axis=-1, keepdims=True) + 1e-5)


def _network(fitted: Fitted) -> Transformer:
    return Transformer.of(fitted.arrays, fitted.settings)


def empty_state(fitted: Fitted) -> State:
    """Return only the null token, in the form that every layer reads."""
    nothing = jnp.zeros((0, len(fitted.arrays["direction"])), jnp.float32)
    return _network(fitted).read(nothing, jnp.zeros(0, bool))


def adapt(fitted: Fitted, context: Context, key: jax.Array) -> State:
    """Return the context as every layer sees it: tokens float32 [layers, 2 k + 1, w], mask bool [2 k + 1]."""
    return _network(fitted).read(context.deltas, context.mask)


def score(fitted: Fitted, state: State, responses: Responses) -> jax.Array:
    """Return (v + H t(e)).e, float32 [K]."""
    return _network(fitted)(state, responses.features)


METHOD = define("gpo", GPOSettings, fit, adapt, score, empty_state)
