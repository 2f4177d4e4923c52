"""Pooled Bradley-Terry: one direction for everybody, which every personal method must beat.

    r = v.e        mean softplus(-v.delta) + (l2 / 2) |v|^2

Bradley and Terry 1952, on the states of a frozen backbone. The state of a person is empty.
"""

from __future__ import annotations

from dataclasses import dataclass

import jax
import numpy as np
from jax.sharding import Mesh

from prb_jax.personal.few_shot.choices import Choices, Context, Responses
from prb_jax.personal.few_shot.fitting import pooled_direction
from prb_jax.personal.few_shot.protocol import Fitted, Method, State
from prb_jax.personal.few_shot.settings import check_numbers


@dataclass(frozen=True, kw_only=True)
class PooledSettings:
    """Settings of pooled Bradley-Terry.

    Attributes:
      l2: penalties, of which the validation part chooses one.
      steps: updates of the solver at most.
    """

    l2: tuple[float, ...] = (1e-4, 1e-3, 1e-2, 1e-1, 1.0)
    steps: int = 100

    def __post_init__(self) -> None:
        check_numbers(self, above={"l2": 0}, least={"steps": 1})


def fit(
    seen: Choices,
    validation: Choices,
    *,
    settings: PooledSettings,
    key: jax.Array,
    mesh: Mesh | None = None,
) -> Fitted:
    """Fit the direction; the key is not used, since the loss is convex."""
    seen.require("pooled", ())
    direction, l2 = pooled_direction(seen, validation, l2=settings.l2, steps=settings.steps)
    return Fitted({"direction": direction}, {"l2": np.float32(l2)}, settings)


def empty_state(fitted: Fitted) -> State:
    """Return the state of everybody: nothing."""
    return {}


def adapt(fitted: Fitted, context: Context, key: jax.Array) -> State:
    """Return the state of everybody: nothing."""
    return {}


def score(fitted: Fitted, state: State, responses: Responses) -> jax.Array:
    """Return v.e, float32 [K]."""
    return responses.features @ fitted.arrays["direction"]


METHOD = Method("pooled", PooledSettings, fit, adapt, score, empty_state)
