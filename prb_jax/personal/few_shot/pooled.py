"""Pooled Bradley-Terry: one direction for everybody, which every personal method must beat.

    r = v.e        mean softplus(-v.delta) + (l2 / 2) |v|^2

Bradley and Terry 1952, on the states of a frozen backbone. The state of a person is empty.
"""

from __future__ import annotations

from dataclasses import dataclass

import jax

from prb_jax.personal.few_shot.choices import Context, Responses
from prb_jax.personal.few_shot.fitting import FitData, define
from prb_jax.personal.few_shot.protocol import Fitted, Floats, MethodSettings, State
from prb_jax.records.options import option


@dataclass(frozen=True, kw_only=True)
class PooledSettings(MethodSettings):
    """Settings of pooled Bradley-Terry."""

    l2: Floats = option(
        (1e-4, 1e-3, 1e-2, 1e-1, 1.0), "penalties, of which the validation part chooses one", above=0
    )
    steps: int = option(100, "updates of the solver at most", least=1)


def fit(data: FitData) -> Fitted:
    """Fit the direction; nothing is drawn, since the loss is convex."""
    direction, l2 = data.pooled(steps=data.settings.steps)
    return data.fitted({"direction": direction}, {"l2": l2})


def adapt(fitted: Fitted, context: Context | None = None, key: jax.Array | None = None) -> State:
    """Return the state of everybody: nothing."""
    return {}


def score(fitted: Fitted, state: State, responses: Responses) -> jax.Array:
    """Return v.e, float32 [K]."""
    return responses.features @ fitted.arrays["direction"]


METHOD = define("pooled", PooledSettings, fit, adapt, score, empty_state=adapt)
