"""Pooled Bradley-Terry with an offset for each person: the fair strong baseline of personal methods.

    r_u = (v + o_u).e
    sum softplus(-(v + o_u).delta) + (n l2 / 2) |v|^2 + (precision / 2) sum_u |o_u|^2

v and all o_u are fitted together, so that v is not drawn to the people with most choices alone. A new person has
the same prior: o_u is the most probable one given the k comparisons. Hierarchical Bradley-Terry; no single source.
"""

from __future__ import annotations

from dataclasses import dataclass
from functools import partial

import jax
import jax.numpy as jnp
import numpy as np
from jax.sharding import Mesh

from prb_jax.personal.few_shot.choices import Array, Choices, Context, Responses
from prb_jax.personal.few_shot.fitting import (
    ALIKE,
    Pairs,
    Validation,
    mean_loss,
    minimise,
    most_probable,
    pairs_of,
    pooled_direction,
)
from prb_jax.personal.few_shot.protocol import Fitted, Method, State
from prb_jax.personal.few_shot.settings import FewShotSettings, check_numbers


@dataclass(frozen=True, kw_only=True)
class OffsetSettings(FewShotSettings):
    """Settings of pooled Bradley-Terry with offsets.

    Attributes:
      l2: penalties of the pooled direction, of which the validation part chooses one.
      spread: standard deviations of the personal part of a margin under the prior, of which the validation part
        chooses one; the precision is the mean of |delta|^2 over its square. No offsets are tried too.
      steps: updates of the solver at most.
    """

    l2: tuple[float, ...] = (1e-4, 1e-3, 1e-2, 1e-1, 1.0)
    spread: tuple[float, ...] = (0.1, 0.3, 1.0, 3.0)
    steps: int = 100

    def __post_init__(self) -> None:
        super().__post_init__()
        check_numbers(self, above={"l2": 0, "spread": 0}, least={"steps": 1})


@partial(jax.jit, static_argnames="steps")
def _fit(pairs: Pairs, l2: Array, precision: Array, start: Array, offsets: Array, *, steps: int) -> Array:
    total = jnp.sum(pairs.weights)

    def loss(params: tuple[Array, Array]) -> jax.Array:
        v, own = params
        margins = pairs.deltas @ v + jnp.sum(pairs.deltas * own[pairs.users], axis=1)
        penalty = 0.5 * l2 * jnp.sum(v * v) + 0.5 * precision / total * jnp.sum(own * own)
        return mean_loss(margins, pairs.weights) + penalty

    return minimise(loss, (start, offsets), steps=steps)


def precision_of(choices: Choices, spread: float) -> np.float32:
    """Return the precision under which the personal part of a margin has the standard deviation ``spread``."""
    return np.float32(np.mean(np.sum(choices.deltas**2, axis=1)) / spread**2)


def fit(
    seen: Choices, validation: Choices, *, settings: OffsetSettings, key: jax.Array, mesh: Mesh | None = None
) -> Fitted:
    """Fit the direction together with the offsets of the seen people; the offsets are not kept."""
    seen.require("offset", ())
    pooled, l2 = pooled_direction(seen, validation, l2=settings.l2, steps=settings.steps)
    pairs = pairs_of(seen)
    start = (pooled, np.zeros((seen.people, len(pooled)), np.float32))
    nothing = {"l2": np.float32(l2), "spread": np.float32(0), "precision": ALIKE * precision_of(seen, 1.0)}
    fits = [Fitted({"direction": pooled}, nothing, settings)]
    for spread in sorted(settings.spread):
        precision = precision_of(seen, spread)
        start = _fit(pairs, np.float32(l2), precision, *start, steps=settings.steps)
        numbers = {"l2": np.float32(l2), "spread": np.float32(spread), "precision": precision}
        fits.append(Fitted({"direction": np.asarray(start[0])}, numbers, settings))
    return Validation(validation, settings.validation_shots).best(METHOD, fits, key=key, mesh=mesh)


def empty_state(fitted: Fitted) -> State:
    """Return an offset of zero."""
    return {"offset": jnp.zeros_like(fitted.arrays["direction"])}


def adapt(fitted: Fitted, context: Context, key: jax.Array) -> State:
    """Return the most probable offset, float32 [D]."""
    deltas = context.deltas
    offset = most_probable(
        deltas, context.mask, deltas @ fitted.arrays["direction"], fitted.numbers["precision"]
    )
    return {"offset": offset}


def score(fitted: Fitted, state: State, responses: Responses) -> jax.Array:
    """Return (v + o_u).e, float32 [K]."""
    return responses.features @ (fitted.arrays["direction"] + state["offset"])


METHOD = Method("offset", OffsetSettings, fit, adapt, score, empty_state)
