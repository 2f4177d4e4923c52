"""Profile in context: the reward of the backbone itself, which saw the person's profile before the question.

    r_u = a s(x, y, profile) + b v.e

s is the backbone's score in context, v the direction of pooled Bradley-Terry; a and b are fitted on the validation
part (``mix``), otherwise a = 1 and b = 0. Nothing is learned of a person: the state is empty and more comparisons
change nothing, unless they stood in the profile.
"""

from __future__ import annotations

from dataclasses import dataclass

import jax
import numpy as np
from jax.sharding import Mesh

from prb_jax.errors import DataError
from prb_jax.personal.few_shot.choices import Choices, Responses
from prb_jax.personal.few_shot.fitting import pooled_direction, two_weights
from prb_jax.personal.few_shot.pooled import PooledSettings, adapt, empty_state
from prb_jax.personal.few_shot.protocol import Fitted, Method, State


@dataclass(frozen=True, kw_only=True)
class ProfileInContextSettings(PooledSettings):
    """Settings of profile in context: those of the pooled direction, and one more.

    Attributes:
      mix: whether the pooled direction is added, with weights that are fitted on the validation part.
    """

    mix: bool = True


def fit(
    seen: Choices,
    validation: Choices,
    *,
    settings: ProfileInContextSettings,
    key: jax.Array,
    mesh: Mesh | None = None,
) -> Fitted:
    """Fit the two weights; the key is not used, since the losses are convex."""
    for part in (seen, validation):
        part.require("profile_in_context", METHOD.needs)
    width = seen.features.shape[1]
    if not settings.mix:
        numbers = {"in_context_weight": np.float32(1), "pooled_weight": np.float32(0)}
        return Fitted({"direction": np.zeros(width, np.float32)}, numbers, settings)
    pooled, l2 = pooled_direction(seen, validation, l2=settings.l2, steps=settings.steps)
    shown = np.asarray(validation.in_context, np.float32)
    weights = two_weights(shown[:, 0] - shown[:, 1], validation.deltas @ pooled)
    numbers = {"in_context_weight": weights[0], "pooled_weight": weights[1], "l2": np.float32(l2)}
    return Fitted({"direction": pooled}, numbers, settings)


def score(fitted: Fitted, state: State, responses: Responses) -> jax.Array:
    """Return a s + b v.e, float32 [K]."""
    if responses.in_context is None:
        raise DataError(
            "profile_in_context needs the scores of the backbone that saw the profile (`in_context`)"
        )
    pooled = responses.features @ fitted.arrays["direction"]
    return (
        fitted.numbers["in_context_weight"] * responses.in_context + fitted.numbers["pooled_weight"] * pooled
    )


METHOD = Method(
    "profile_in_context", ProfileInContextSettings, fit, adapt, score, empty_state, needs=("in_context",)
)
