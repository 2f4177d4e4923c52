"""Individual Bradley-Terry: a direction for each person, from only their comparisons.

    r_u = v_u.e        sum_i softplus(-v_u.delta_i) + (precision / 2) |v_u|^2

The upper bound for people with very many choices, and chance at k = 0. The penalty is compulsory, since fewer
comparisons than features can always be separated. Bradley and Terry 1952.
"""

from __future__ import annotations

from dataclasses import dataclass

import jax
import jax.numpy as jnp
import numpy as np

from prb_jax.personal.few_shot.choices import Context, Responses
from prb_jax.personal.few_shot.fitting import FitData, define, most_probable
from prb_jax.personal.few_shot.offset import precision_of
from prb_jax.personal.few_shot.protocol import FewShotSettings, Fitted, Floats, State
from prb_jax.records.options import option


@dataclass(frozen=True, kw_only=True)
class IndividualSettings(FewShotSettings):
    """Settings of individual Bradley-Terry."""

    spread: Floats = option(
        (0.3, 1.0, 3.0, 10.0),
        "standard deviations of a margin under the prior, of which the validation part chooses one; the precision is "
        "the mean of |delta|^2 over its square",
        above=0,
    )


def fit(data: FitData) -> Fitted:
    """Choose the precision; nothing is learned from one person about another."""
    empty = {"none": np.zeros(data.seen.features.shape[1], np.float32)}
    return data.best(
        data.fitted(empty, {"spread": spread, "precision": precision_of(data.seen, spread)})
        for spread in data.settings.spread
    )


def empty_state(fitted: Fitted) -> State:
    """Return a direction of zero, under which all responses tie."""
    return {"direction": jnp.zeros_like(fitted.arrays["none"])}


def adapt(fitted: Fitted, context: Context, key: jax.Array) -> State:
    """Return the most probable direction, float32 [D]."""
    nothing = jnp.zeros(context.mask.shape, jnp.float32)
    return {"direction": most_probable(context.deltas, context.mask, nothing, fitted.numbers["precision"])}


def score(fitted: Fitted, state: State, responses: Responses) -> jax.Array:
    """Return v_u.e, float32 [K]."""
    return responses.features @ state["direction"]


METHOD = define("individual", IndividualSettings, fit, adapt, score, empty_state)
