"""PAL-B: a person's ideal point is a mixture of a few prototypes (arXiv 2406.08469).

    a_u(x) = sum_k softmax(w_u)_k g_k(e(x));   r_u = v.e + exp(s) cos(f(e(x, y)), a_u(x)),   exp(s) <= 100

v is pooled Bradley-Terry (the published model has none), and only pooled, exp(s) = 0, may be chosen. f and g_k
are MLPs with one hidden layer of GELU. With ``of_prompt`` the prototypes are functions of the question's
state (``prompts``), as published; without it each one is a learned vector, the same for all questions. A new person
gets only a fitted w, pulled to the mean w of the seen people, which is the state at k = 0.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
from flax import nnx

from prb_jax.errors import DataError
from prb_jax.personal.few_shot.choices import Array, Context, Responses
from prb_jax.personal.few_shot.fitting import FitData, define, mean_state
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
class PALSettings(JointSettings):
    """Settings of PAL-B."""

    prototypes: int = option(4, "K", least=2)
    width: int = option(32, "dimensions of the space of ideal points", least=1)
    hidden: int = option(64, "width of the MLPs", least=1)
    of_prompt: bool = option(
        False, "prototypes are functions of the question's state, which the data must have then"
    )
    scale: float = option(5.0, "exp(s) at the start", above=0, most=100)


class IdealPoints(Network):
    """The map of responses and the prototypes."""

    def __init__(self, direction: np.ndarray, settings: PALSettings, rng: np.random.Generator) -> None:
        super().__init__(direction, settings, rng)
        self.settings = settings
        features, count, width = len(direction), settings.prototypes, settings.width
        points = rng.normal(0, 1, (count, width)).astype(np.float32)
        if settings.of_prompt:
            self.prototypes = MLP([features, settings.hidden, count * width], jax.nn.gelu, rng=rng)
        else:
            self.prototypes = nnx.Param(points)
        self.map = MLP([features, settings.hidden, width], jax.nn.gelu, rng=rng)
        self.log_scale = nnx.Param(np.float32(np.log(settings.scale)))

    def points(self, responses: Responses) -> jax.Array:
        """The prototypes, float32 [..., K, w]."""
        if isinstance(self.prototypes, nnx.Param):
            return self.prototypes[...]
        if responses.prompts is None:
            raise DataError("pal with of_prompt needs separate states of the questions (`prompts`)")
        points = self.prototypes(responses.prompts)
        return points.reshape(*points.shape[:-1], self.settings.prototypes, self.settings.width)

    def __call__(self, responses: Responses, weights: Array) -> jax.Array:
        """float32 [...] of responses [...], under weights [..., K] before the softmax."""
        share = jax.nn.softmax(weights, axis=-1)
        ideal = jnp.sum(share[..., None] * self.points(responses), axis=-2)
        point = self.map(responses.features)
        scale = jnp.exp(jnp.minimum(self.log_scale[...], np.log(100.0)))
        common = responses.features @ self.direction[...]
        return common + scale * jnp.sum(_unit(point) * _unit(ideal), axis=-1)


def fit(data: FitData) -> Fitted:
    """Train f, the prototypes, the scale and the weights of the seen people; the mean of these is kept."""
    seen, settings, rng = data.seen, data.settings, data.rng()
    if settings.of_prompt:
        for part in (seen, data.validation):
            part.require("pal with of_prompt", ("prompts",))
    pooled, l2 = data.pooled()
    arrays = arrays_of(IdealPoints(pooled, settings, rng))
    people = rng.normal(0, 0.5, (seen.people, settings.prototypes)).astype(np.float32)

    def log_mean_share(people: np.ndarray) -> dict[str, np.ndarray]:
        share = np.exp(people - people.max(axis=1, keepdims=True))
        share /= share.sum(axis=1, keepdims=True)
        return {"mean": np.log(share.mean(axis=0)).astype(np.float32)}

    return fit_jointly(
        data,
        {**arrays, "people": people},
        _loss,
        nobody={
            **arrays,
            "log_scale": np.float32(-200),
            "mean": np.zeros(settings.prototypes, np.float32),
        },
        l2=l2,
        mean=log_mean_share,
    )


def _unit(x: Array) -> jax.Array:
    return x / jnp.sqrt(jnp.sum(x * x, axis=-1, keepdims=True) + 1e-12)


def _loss(params: Any, pairs: Responses, users: Array, settings: PALSettings) -> jax.Array:
    # The pooled direction stays fixed: with f it would learn the same again, but without its penalty.
    fixed = {**params, "direction": jax.lax.stop_gradient(params["direction"])}
    rewards = IdealPoints.of(fixed, settings)(pairs, params["people"][users][:, None])
    penalty = 1e-3 * jnp.mean(jnp.sum(params["people"] ** 2, axis=1))
    return jnp.mean(jax.nn.softplus(rewards[:, 1] - rewards[:, 0])) + penalty


def adapt(fitted: Fitted, context: Context, key: jax.Array) -> State:
    """Return w float32 [K] (before the softmax) after ``adapt_steps`` of Adam from the mean."""
    network = IdealPoints.of(fitted.arrays, fitted.settings)

    def margins(weights: Array) -> jax.Array:
        return network(context.chosen, weights) - network(context.rejected, weights)

    return {"weights": adapt_by_descent(fitted, context, jnp.asarray(fitted.arrays["mean"]), margins)}


def score(fitted: Fitted, state: State, responses: Responses) -> jax.Array:
    """Return v.e + exp(s) cos(f(e), a_u), float32 [K]."""
    return IdealPoints.of(fitted.arrays, fitted.settings)(responses, state["weights"])


METHOD = define("pal", PALSettings, fit, adapt, score, mean_state)
