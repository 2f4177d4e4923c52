"""PAL-B: a person's ideal point is a mixture of a few prototypes (arXiv 2406.08469).

    a_u(x) = sum_k softmax(w_u)_k g_k(e(x));   r_u = v.e + exp(s) cos(f(e(x, y)), a_u(x)),   exp(s) <= 100

v is pooled Bradley-Terry (the published model has none), and pooled alone, exp(s) = 0, may be chosen. f and g_k
are MLPs with one hidden layer of GELU. With ``of_prompt`` the prototypes are functions of the question's
state (``prompts``), as published; without it each one is a learned vector, the same for all questions. A new person
is fitted in w alone, pulled to the mean w of the seen people, which is the state at k = 0.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np

from prb_jax.data.options import option
from prb_jax.errors import DataError
from prb_jax.personal.few_shot.choices import Array, Context, Responses
from prb_jax.personal.few_shot.fitting import FitData, define, mean_state
from prb_jax.personal.few_shot.networks import JointSettings, adapt_by_descent, fit_jointly, init_mlp, mlp
from prb_jax.personal.few_shot.protocol import Fitted, State


@dataclass(frozen=True, kw_only=True)
class PALSettings(JointSettings):
    """Settings of PAL-B."""

    prototypes: int = option(4, "K", least=2)
    width: int = option(32, "of the space of ideal points", least=1)
    hidden: int = option(64, "width of the MLPs", least=1)
    of_prompt: bool = option(
        False, "prototypes are functions of the question's state, which the data must have then"
    )
    scale: float = option(5.0, "exp(s) at the start", above=0, most=100)


def fit(data: FitData) -> Fitted:
    """Train f, the prototypes, the scale and the weights of the seen people; the mean of these is kept."""
    seen, settings, rng = data.seen, data.settings, data.rng()
    features, count, width = seen.features.shape[1], settings.prototypes, settings.width
    prototypes: Any = rng.normal(0, 1, (count, width)).astype(np.float32)
    if settings.of_prompt:
        for part in (seen, data.validation):
            part.require("pal with of_prompt", ("prompts",))
        prototypes = init_mlp(rng, [features, settings.hidden, count * width])
    pooled, l2 = data.pooled()
    shared = {
        "direction": pooled,
        "map": init_mlp(rng, [features, settings.hidden, width]),
        "prototypes": prototypes,
    }
    people = rng.normal(0, 0.5, (seen.people, count)).astype(np.float32)

    def log_mean_share(people: np.ndarray) -> dict[str, np.ndarray]:
        share = np.exp(people - people.max(axis=1, keepdims=True))
        share /= share.sum(axis=1, keepdims=True)
        return {"mean": np.log(share.mean(axis=0)).astype(np.float32)}

    return fit_jointly(
        data,
        {**shared, "log_scale": np.float32(np.log(settings.scale)), "people": people},
        _loss,
        nobody={**shared, "log_scale": np.float32(-200), "mean": np.zeros(count, np.float32)},
        l2=l2,
        mean=log_mean_share,
    )


def _unit(x: Array) -> jax.Array:
    return x / jnp.sqrt(jnp.sum(x * x, axis=-1, keepdims=True) + 1e-12)


def _prototypes(arrays: Any, responses: Responses, settings: PALSettings) -> jax.Array:
    """float32 [..., K, w]."""
    if not settings.of_prompt:
        return arrays["prototypes"]
    if responses.prompts is None:
        raise DataError("pal with of_prompt needs the states of the questions alone (`prompts`)")
    points = mlp(arrays["prototypes"], responses.prompts, jax.nn.gelu)
    return points.reshape(*points.shape[:-1], settings.prototypes, settings.width)


def _rewards(arrays: Any, responses: Responses, weights: Array, settings: PALSettings) -> jax.Array:
    """float32 [...] of responses [...], under weights [..., K] before the softmax."""
    share = jax.nn.softmax(weights, axis=-1)
    ideal = jnp.sum(share[..., None] * _prototypes(arrays, responses, settings), axis=-2)
    point = mlp(arrays["map"], responses.features, jax.nn.gelu)
    scale = jnp.exp(jnp.minimum(arrays["log_scale"], np.log(100.0)))
    common = responses.features @ arrays["direction"]
    return common + scale * jnp.sum(_unit(point) * _unit(ideal), axis=-1)


def _loss(params: Any, pairs: Responses, users: Array, settings: PALSettings) -> jax.Array:
    # The pooled direction stays: trained beside f it would learn again, without its penalty, what f already says.
    fixed = {**params, "direction": jax.lax.stop_gradient(params["direction"])}
    rewards = _rewards(fixed, pairs, params["people"][users][:, None], settings)
    penalty = 1e-3 * jnp.mean(jnp.sum(params["people"] ** 2, axis=1))
    return jnp.mean(jax.nn.softplus(rewards[:, 1] - rewards[:, 0])) + penalty


def adapt(fitted: Fitted, context: Context, key: jax.Array) -> State:
    """Return w float32 [K] (before the softmax) after ``adapt_steps`` of Adam from the mean."""

    def margins(weights: Array) -> jax.Array:
        chosen, rejected = (
            _rewards(fitted.arrays, side, weights, fitted.settings)
            for side in (context.chosen, context.rejected)
        )
        return chosen - rejected

    return {"weights": adapt_by_descent(fitted, context, jnp.asarray(fitted.arrays["mean"]), margins)}


def score(fitted: Fitted, state: State, responses: Responses) -> jax.Array:
    """Return v.e + exp(s) cos(f(e), a_u), float32 [K]."""
    return _rewards(fitted.arrays, responses, state["weights"], fitted.settings)


METHOD = define("pal", PALSettings, fit, adapt, score, mean_state)
