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

from prb_jax.errors import DataError
from prb_jax.personal.few_shot.choices import Responses
from prb_jax.personal.few_shot.fitting import FitData, define, two_weights
from prb_jax.personal.few_shot.pooled import PooledSettings, adapt
from prb_jax.personal.few_shot.protocol import Fitted, State
from prb_jax.records.options import option


@dataclass(frozen=True, kw_only=True)
class ProfileInContextSettings(PooledSettings):
    """Settings of profile in context: the settings of the pooled direction, and one more."""

    mix: bool = option(
        True, "the pooled direction is added, with weights that are fitted on the validation part"
    )


def fit(data: FitData) -> Fitted:
    """Fit the two weights; nothing is drawn, since the losses are convex."""
    if not data.settings.mix:
        none = np.zeros(data.seen.features.shape[1], np.float32)
        return data.fitted({"direction": none}, {"in_context_weight": 1.0, "pooled_weight": 0.0})
    pooled, l2 = data.pooled(steps=data.settings.steps)
    shown = np.asarray(data.validation.in_context, np.float32)
    shown_weight, common = two_weights(shown[:, 0] - shown[:, 1], data.validation.deltas @ pooled)
    return data.fitted(
        {"direction": pooled}, {"in_context_weight": shown_weight, "pooled_weight": common, "l2": l2}
    )


def score(fitted: Fitted, state: State, responses: Responses) -> jax.Array:
    """Return a s + b v.e, float32 [K]."""
    if responses.in_context is None:
        raise DataError(
            "profile_in_context needs the scores of the backbone that saw the profile (`in_context`)"
        )
    pooled = responses.features @ fitted.arrays["direction"]
    numbers = fitted.numbers
    return numbers["in_context_weight"] * responses.in_context + numbers["pooled_weight"] * pooled


METHOD = define(
    "profile_in_context", ProfileInContextSettings, fit, adapt, score, adapt, needs=("in_context",)
)
