"""P-RLHF on features: an embedding of the person conditions a shared network (arXiv 2402.05133).

    individual:  E_u = E_0 + O_u        cluster:  E_u = sum_k softmax(w_u)_k C_k
    r(e | E) = v.e + MLP[e; E]
    L = alpha loss(pair | E_u) + (1 - alpha) loss(pair | E_0),  loss = softplus(-(r_w - r_l))

The published E is a soft prompt before the input of the language model, which `prb train` does with
``persona_embedding``. Here the backbone is frozen, so E conditions a small network that reads the response's state;
the loss, the generic user E_0 and alpha are the published ones. A person at k = 0 is E_0. With comparisons, the
cluster variant fits w alone, from the mean of the seen people; the individual one fits O_u from zero (the published
one stays at E_0), both with a penalty that pulls them back.
"""

from __future__ import annotations

from dataclasses import dataclass
from functools import partial
from typing import Any, Literal

import jax
import jax.numpy as jnp
import numpy as np
from jax.sharding import Mesh

from prb_jax.personal.few_shot.choices import Array, Choices, Context, Responses
from prb_jax.personal.few_shot.fitting import (
    JointSettings,
    Validation,
    descend,
    fit_joint,
    numpy_rng,
    pooled_direction,
)
from prb_jax.personal.few_shot.layers import init_mlp, mlp
from prb_jax.personal.few_shot.protocol import Fitted, Method, State
from prb_jax.personal.few_shot.settings import check_numbers

Kind = Literal["individual", "cluster"]


@dataclass(frozen=True, kw_only=True)
class UserEmbeddingSettings(JointSettings):
    """Settings of the embedding of a person.

    Attributes:
      width: of E.
      hidden: width of the network.
      alpha: share of the loss under the person's own embedding, above 0 and at most 1.
      offset_penalty: of |O_u|^2 (individual) or |w_u|^2 (cluster) of the seen people.
      l2: penalties of the pooled direction that v starts as.
    """

    width: int = 16
    hidden: int = 64
    alpha: float = 0.5
    offset_penalty: float = 1e-2
    l2: tuple[float, ...] = (1e-3, 1e-2, 1e-1, 1.0)

    def __post_init__(self) -> None:
        super().__post_init__()
        least = {"width": 1, "hidden": 1, "offset_penalty": 0}
        check_numbers(self, above={"l2": 0, "alpha": 0}, least=least, most={"alpha": 1})


@dataclass(frozen=True, kw_only=True)
class UserClustersSettings(UserEmbeddingSettings):
    """Settings of the embedding that mixes clusters.

    Attributes:
      clusters: K.
    """

    clusters: int = 10

    def __post_init__(self) -> None:
        super().__post_init__()
        check_numbers(self, least={"clusters": 2})


def _fit(
    seen: Choices,
    validation: Choices,
    *,
    settings: UserEmbeddingSettings,
    key: jax.Array,
    mesh: Mesh | None = None,
    kind: Kind,
) -> Fitted:
    method = METHODS[kind]
    seen.require(method.name, ())
    pooled, l2 = pooled_direction(seen, validation, l2=settings.l2, steps=100)
    rng, width = numpy_rng(key), settings.width
    own = settings.clusters if isinstance(settings, UserClustersSettings) else width
    start = {
        "direction": pooled,
        "network": init_mlp(rng, [len(pooled) + width, settings.hidden, settings.hidden, 1]),
        "generic": np.zeros(width, np.float32),
        "people": rng.normal(0, 0.3, (seen.people, own)).astype(np.float32),
    }
    if kind == "cluster":
        start["clusters"] = rng.normal(0, 1, (own, width)).astype(np.float32)
    last = jax.tree.map(np.zeros_like, start["network"][-1])
    nobody = {**start, "network": [*start["network"][:-1], last]}  # the reward is pooled
    own_of_people = nobody.pop("people")
    if kind == "cluster":
        nobody["mean"] = own_of_people.mean(axis=0)
    chosen = {"l2": np.float32(l2), "steps": np.int32(0), "pull": np.float32(max(settings.pull))}
    fits = [Fitted(nobody, chosen, settings)]
    for steps in settings.steps:
        arrays = fit_joint(_LOSSES[kind], start, seen, settings=settings, steps=steps, key=key)
        people = arrays.pop("people")
        if kind == "cluster":
            arrays["mean"] = people.mean(axis=0)
        numbers = {"l2": np.float32(l2), "steps": np.int32(steps)}
        fits += [Fitted(arrays, {**numbers, "pull": np.float32(pull)}, settings) for pull in settings.pull]
    return Validation(validation, settings.validation_shots).best(method, fits, key=key, mesh=mesh)


def _embedding(arrays: Any, own: Array, kind: Kind) -> jax.Array:
    """E of O or of w [..., own]."""
    if kind == "individual":
        return arrays["generic"] + own
    return jax.nn.softmax(own, axis=-1) @ arrays["clusters"]


def _rewards(arrays: Any, features: Array, embedding: Array) -> jax.Array:
    """float32 [...] of features [..., D] under E [..., T], broadcast."""
    embedding = jnp.broadcast_to(embedding, (*features.shape[:-1], embedding.shape[-1]))
    rows = jnp.concatenate([features, embedding], axis=-1)
    return features @ arrays["direction"] + mlp(arrays["network"], rows, jnp.tanh)[..., 0]


def _loss(
    params: Any, pairs: Responses, users: Array, settings: UserEmbeddingSettings, *, kind: Kind
) -> jax.Array:
    def mean(embedding: Array) -> jax.Array:
        rewards = _rewards(params, pairs.features, embedding)
        return jnp.mean(jax.nn.softplus(rewards[:, 1] - rewards[:, 0]))

    own = mean(_embedding(params, params["people"][users], kind)[:, None])
    generic = mean(params["generic"])
    penalty = settings.offset_penalty * jnp.mean(jnp.sum(params["people"] ** 2, axis=1))
    return settings.alpha * own + (1 - settings.alpha) * generic + penalty


def empty_state(fitted: Fitted) -> State:
    """Return E_0."""
    return {"embedding": jnp.asarray(fitted.arrays["generic"])}


def _adapt(fitted: Fitted, context: Context, key: jax.Array, *, kind: Kind) -> State:
    arrays, settings = fitted.arrays, fitted.settings
    start = (
        jnp.asarray(arrays["mean"]) if kind == "cluster" else jnp.zeros_like(jnp.asarray(arrays["generic"]))
    )

    def loss(own: Array) -> jax.Array:
        embedding = _embedding(arrays, own, kind)
        chosen, rejected = (
            _rewards(arrays, each.features, embedding) for each in (context.chosen, context.rejected)
        )
        pull = 0.5 * fitted.numbers["pull"] * jnp.sum((own - start) ** 2)
        return jnp.sum(context.mask * jax.nn.softplus(rejected - chosen)) + pull

    own = descend(loss, start, steps=settings.adapt_steps, rate=settings.adapt_rate)
    return {"embedding": jnp.where(jnp.any(context.mask), _embedding(arrays, own, kind), arrays["generic"])}


def score(fitted: Fitted, state: State, responses: Responses) -> jax.Array:
    """Return v.e + MLP[e; E], float32 [K]."""
    return _rewards(fitted.arrays, responses.features, state["embedding"])


def _method(name: str, settings: type, kind: Kind) -> Method:
    return Method(name, settings, partial(_fit, kind=kind), partial(_adapt, kind=kind), score, empty_state)


INDIVIDUAL = _method("user_embedding", UserEmbeddingSettings, "individual")
CLUSTER = _method("user_clusters", UserClustersSettings, "cluster")
METHODS: dict[Kind, Method] = {"individual": INDIVIDUAL, "cluster": CLUSTER}
_LOSSES = {kind: partial(_loss, kind=kind) for kind in METHODS}
