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
from jax.sharding import Mesh

from prb_jax.errors import DataError
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


@dataclass(frozen=True, kw_only=True)
class PALSettings(JointSettings):
    """Settings of PAL-B.

    Attributes:
      prototypes: K.
      width: of the space of ideal points.
      hidden: width of the MLPs.
      of_prompt: whether prototypes are functions of the question's state, which the data must have then.
      scale: exp(s) at the start.
      l2: penalties of the pooled direction, of which the validation part chooses one.
    """

    prototypes: int = 4
    width: int = 32
    hidden: int = 64
    of_prompt: bool = False
    scale: float = 5.0
    l2: tuple[float, ...] = (1e-3, 1e-2, 1e-1, 1.0)

    def __post_init__(self) -> None:
        super().__post_init__()
        check_numbers(self, above={"scale": 0, "l2": 0}, least={"prototypes": 2, "width": 1, "hidden": 1})
        if self.scale > 100:
            raise DataError(f"PALSettings.scale: expected at most 100, found {self.scale:g}")


def fit(
    seen: Choices, validation: Choices, *, settings: PALSettings, key: jax.Array, mesh: Mesh | None = None
) -> Fitted:
    """Train f, the prototypes, the scale and the weights of the seen people; the mean of these is kept."""
    for part in (seen, validation):
        part.require("pal with of_prompt" if settings.of_prompt else "pal", ("prompts",) * settings.of_prompt)
    rng, features = numpy_rng(key), seen.features.shape[1]
    count, width = settings.prototypes, settings.width
    prototypes: Any = rng.normal(0, 1, (count, width)).astype(np.float32)
    if settings.of_prompt:
        prototypes = init_mlp(rng, [features, settings.hidden, count * width])
    pooled, l2 = pooled_direction(seen, validation, l2=settings.l2, steps=100)
    start = {
        "direction": pooled,
        "map": init_mlp(rng, [features, settings.hidden, width]),
        "prototypes": prototypes,
        "log_scale": np.float32(np.log(settings.scale)),
        "people": rng.normal(0, 0.5, (seen.people, count)).astype(np.float32),
    }
    nobody = {name: leaf for name, leaf in start.items() if name != "people"}
    nobody |= {"log_scale": np.float32(-200), "mean": np.zeros(count, np.float32)}
    chosen = {"l2": np.float32(l2), "steps": np.int32(0), "pull": np.float32(max(settings.pull))}
    fits = [Fitted(nobody, chosen, settings)]
    for steps in settings.steps:
        arrays = fit_joint(_loss, start, seen, settings=settings, steps=steps, key=key)
        people = arrays.pop("people")
        share = np.exp(people - people.max(axis=1, keepdims=True))
        arrays["mean"] = np.log((share / share.sum(axis=1, keepdims=True)).mean(axis=0)).astype(np.float32)
        fits += [
            Fitted(arrays, chosen | {"steps": np.int32(steps), "pull": np.float32(pull)}, settings)
            for pull in settings.pull
        ]
    return Validation(validation, settings.validation_shots).best(METHOD, fits, key=key, mesh=mesh)


def _unit(x: Array) -> jax.Array:
    return x / jnp.sqrt(jnp.sum(x * x, axis=-1, keepdims=True) + 1e-12)


def _prototypes(arrays: Any, responses: Responses, settings: PALSettings) -> jax.Array:
    """float32 [..., K, w]."""
    if not settings.of_prompt:
        return arrays["prototypes"]
    if responses.prompts is None:
        raise DataError("pal with of_prompt needs the states of the questions alone (`prompts`)")
    found = mlp(arrays["prototypes"], responses.prompts, jax.nn.gelu)
    return found.reshape(*found.shape[:-1], settings.prototypes, settings.width)


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
    own = 1e-3 * jnp.mean(jnp.sum(params["people"] ** 2, axis=1))
    return jnp.mean(jax.nn.softplus(rewards[:, 1] - rewards[:, 0])) + own


def empty_state(fitted: Fitted) -> State:
    """Return the logarithm of the mean share of each prototype."""
    return {"weights": jnp.asarray(fitted.arrays["mean"])}


def adapt(fitted: Fitted, context: Context, key: jax.Array) -> State:
    """Return w float32 [K] (before the softmax) after ``adapt_steps`` of Adam from the mean."""
    arrays, settings = fitted.arrays, fitted.settings
    mean = jnp.asarray(arrays["mean"])

    def loss(weights: Array) -> jax.Array:
        chosen, rejected = (
            _rewards(arrays, each, weights, settings) for each in (context.chosen, context.rejected)
        )
        pull = 0.5 * fitted.numbers["pull"] * jnp.sum((weights - mean) ** 2)
        return jnp.sum(context.mask * jax.nn.softplus(rejected - chosen)) + pull

    return {"weights": descend(loss, mean, steps=settings.adapt_steps, rate=settings.adapt_rate)}


def score(fitted: Fitted, state: State, responses: Responses) -> jax.Array:
    """Return v.e + exp(s) cos(f(e), a_u), float32 [K]."""
    return _rewards(fitted.arrays, responses, state["weights"], fitted.settings)


METHOD = Method("pal", PALSettings, fit, adapt, score, empty_state)
