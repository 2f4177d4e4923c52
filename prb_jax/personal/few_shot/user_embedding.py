"""P-RLHF on features: an embedding of the person conditions a shared network (arXiv 2402.05133).

    individual:  E_u = E_0 + O_u        cluster:  E_u = sum_k softmax(w_u)_k C_k
    r(e | E) = v.e + MLP[e; E]
    L = alpha loss(pair | E_u) + (1 - alpha) loss(pair | E_0),  loss = softplus(-(r_w - r_l))

The published E is a soft prompt before the input of the language model, which `prb train` does with
``persona_embedding``. Here the backbone is frozen, so E conditions a small network that reads the response's state;
the loss, the generic user E_0 and alpha are the published ones. A person at k = 0 is E_0. With comparisons, the
cluster variant fits only w, from the mean of the seen people. The individual variant fits O_u from zero (the published
one stays at E_0). Both have a penalty that pulls them back.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
from flax import nnx

from prb_jax.personal.few_shot.choices import Array, Context, Responses
from prb_jax.personal.few_shot.fitting import FitData, define
from prb_jax.personal.few_shot.networks import (
    MLP,
    JointSettings,
    Network,
    adapt_by_descent,
    arrays_of,
    fit_jointly,
)
from prb_jax.personal.few_shot.protocol import Fitted, State
from prb_jax.records.options import option


@dataclass(frozen=True, kw_only=True)
class UserEmbeddingSettings(JointSettings):
    """Settings of the embedding of a person."""

    width: int = option(16, "width of E", least=1)
    hidden: int = option(64, "width of the network", least=1)
    alpha: float = option(0.5, "share of the loss under the person's own embedding", above=0, most=1)
    offset_penalty: float = option(
        1e-2, "penalty of |O_u|^2 (individual) or |w_u|^2 (cluster) of the seen people", least=0
    )


@dataclass(frozen=True, kw_only=True)
class UserClustersSettings(UserEmbeddingSettings):
    """Settings of the embedding that mixes clusters."""

    clusters: int = option(10, "K", least=2)


class Conditioned(Network):
    """The network that an embedding conditions, the embedding E_0, and the cluster embeddings in that variant."""

    clusters: nnx.Param[Any] | None = None

    def __init__(
        self, direction: np.ndarray, settings: UserEmbeddingSettings, rng: np.random.Generator
    ) -> None:
        super().__init__(direction, settings, rng)
        width, hidden = settings.width, settings.hidden
        self.generic = nnx.Param(np.zeros(width, np.float32))
        self.network = MLP([len(direction) + width, hidden, hidden, 1], jnp.tanh, rng=rng)
        if isinstance(settings, UserClustersSettings):
            self.clusters = nnx.Param(np.zeros((settings.clusters, width), np.float32))

    def embedding(self, parameters: Array) -> jax.Array:
        """E of w where there are clusters, otherwise of O, [..., own]."""
        if self.clusters is not None:
            return jax.nn.softmax(parameters, axis=-1) @ self.clusters[...]
        return self.generic[...] + parameters

    def __call__(self, features: Array, embedding: Array) -> jax.Array:
        """float32 [...] of features [..., D] under E [..., T], broadcast."""
        embedding = jnp.broadcast_to(embedding, (*features.shape[:-1], embedding.shape[-1]))
        rows = jnp.concatenate([features, embedding], axis=-1)
        return features @ self.direction[...] + self.network(rows)[..., 0]


def fit(data: FitData) -> Fitted:
    """Train the network, the embeddings and the parameters of the seen people; of clusters their mean is kept."""
    seen, settings, rng, width = data.seen, data.settings, data.rng(), data.settings.width
    pooled, l2 = data.pooled()
    mixes = isinstance(settings, UserClustersSettings)
    size = settings.clusters if mixes else width
    arrays = arrays_of(Conditioned(pooled, settings, rng))
    people = rng.normal(0, 0.3, (seen.people, size)).astype(np.float32)
    if mixes:
        arrays["clusters"] = rng.normal(0, 1, (size, width)).astype(np.float32)

    def mean(people: np.ndarray) -> dict[str, np.ndarray]:
        return {"mean": people.mean(axis=0)} if mixes else {}

    *layers, last = arrays["network"]
    silent = [*layers, jax.tree.map(np.zeros_like, last)]  # the reward is pooled
    return fit_jointly(
        data,
        {**arrays, "people": people},
        _loss,
        nobody={**arrays, "network": silent, **mean(people)},
        l2=l2,
        mean=mean,
    )


def _loss(params: Any, pairs: Responses, users: Array, settings: UserEmbeddingSettings) -> jax.Array:
    network = Conditioned.of(params, settings)

    def mean(embedding: Array) -> jax.Array:
        rewards = network(pairs.features, embedding)
        return jnp.mean(jax.nn.softplus(rewards[:, 1] - rewards[:, 0]))

    personal = mean(network.embedding(params["people"][users])[:, None])
    generic = mean(params["generic"])
    penalty = settings.offset_penalty * jnp.mean(jnp.sum(params["people"] ** 2, axis=1))
    return settings.alpha * personal + (1 - settings.alpha) * generic + penalty


def empty_state(fitted: Fitted) -> State:
    """Return E_0."""
    return {"embedding": jnp.asarray(fitted.arrays["generic"])}


def adapt(fitted: Fitted, context: Context, key: jax.Array) -> State:
    """Return E, float32 [T], of w or O_u after ``adapt_steps`` of Adam; E_0 at k = 0."""
    arrays, network = fitted.arrays, Conditioned.of(fitted.arrays, fitted.settings)
    start = jnp.asarray(arrays["mean"]) if "mean" in arrays else jnp.zeros_like(arrays["generic"])

    def margins(parameters: Array) -> jax.Array:
        embedding = network.embedding(parameters)
        return network(context.chosen.features, embedding) - network(context.rejected.features, embedding)

    embedding = network.embedding(adapt_by_descent(fitted, context, start, margins))
    return {"embedding": jnp.where(jnp.any(context.mask), embedding, arrays["generic"])}


def score(fitted: Fitted, state: State, responses: Responses) -> jax.Array:
    """Return v.e + MLP[e; E], float32 [K]."""
    return Conditioned.of(fitted.arrays, fitted.settings)(responses.features, state["embedding"])


INDIVIDUAL = define("user_embedding", UserEmbeddingSettings, fit, adapt, score, empty_state)
CLUSTER = define("user_clusters", UserClustersSettings, fit, adapt, score, empty_state)
