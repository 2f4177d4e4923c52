"""Individual Bradley-Terry: a direction for each person, of their comparisons alone.

    r_u = v_u.e        sum_i softplus(-v_u.delta_i) + (precision / 2) |v_u|^2

The upper bound for people with very many choices, and chance at k = 0. The penalty is compulsory, since fewer
comparisons than features can always be separated. Bradley and Terry 1952.
"""

from __future__ import annotations

from dataclasses import dataclass

import jax
import jax.numpy as jnp
import numpy as np
from jax.sharding import Mesh

from prb_jax.personal.few_shot.choices import Choices, Context, Responses
from prb_jax.personal.few_shot.fitting import Validation, most_probable
from prb_jax.personal.few_shot.offset import precision_of
from prb_jax.personal.few_shot.protocol import Fitted, Method, State
from prb_jax.personal.few_shot.settings import FewShotSettings, check_numbers


@dataclass(frozen=True, kw_only=True)
class IndividualSettings(FewShotSettings):
    """Settings of individual Bradley-Terry.

    Attributes:
      spread: standard deviations of a margin under the prior, of which the validation part chooses one; the precision
        is the mean of |delta|^2 over its square.
    """

    spread: tuple[float, ...] = (0.3, 1.0, 3.0, 10.0)

    def __post_init__(self) -> None:
        super().__post_init__()
        check_numbers(self, above={"spread": 0})


def fit(
    seen: Choices,
    validation: Choices,
    *,
    settings: IndividualSettings,
    key: jax.Array,
    mesh: Mesh | None = None,
) -> Fitted:
    """Choose the precision; nothing is learned from one person about another."""
    seen.require("individual", ())
    empty = {"none": np.zeros(seen.features.shape[1], np.float32)}
    fits = [
        Fitted(empty, {"spread": np.float32(spread), "precision": precision_of(seen, spread)}, settings)
        for spread in settings.spread
    ]
    return Validation(validation, settings.validation_shots).best(METHOD, fits, key=key, mesh=mesh)


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


METHOD = Method("individual", IndividualSettings, fit, adapt, score, empty_state)
