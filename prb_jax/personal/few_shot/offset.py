"""Pooled Bradley-Terry with an offset for each person: the fair strong baseline of personal methods.

    r_u = (v + o_u).e
    sum softplus(-(v + o_u).delta) + (n l2 / 2) |v|^2 + (precision / 2) sum_u |o_u|^2

v and all o_u are fitted together; otherwise the people with most choices would dominate v. A new person has
the same prior: o_u is the most probable one given the k comparisons. Hierarchical Bradley-Terry; no single source.
"""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass
from functools import partial

import jax
import jax.numpy as jnp
import numpy as np

from prb_jax.personal.few_shot.choices import Array, Choices, Context, Responses
from prb_jax.personal.few_shot.fitting import (
    IMMOVABLE,
    ChoicePairs,
    FitData,
    define,
    mean_loss,
    minimise,
    most_probable,
    pairs_of,
)
from prb_jax.personal.few_shot.protocol import FewShotSettings, Fitted, Floats, State, few_sizes
from prb_jax.records.options import option


@dataclass(frozen=True, kw_only=True)
class OffsetSettings(FewShotSettings):
    """Settings of pooled Bradley-Terry with offsets; of each tuple the validation part chooses one entry."""

    l2: Floats = option((1e-4, 1e-3, 1e-2, 1e-1, 1.0), "penalties of the pooled direction", above=0)
    spread: Floats = option(
        (0.1, 0.3, 1.0, 3.0),
        "standard deviations of the personal part of a margin under the prior; the precision is the mean of |delta|^2 "
        "over its square. No offsets are tried too",
        above=0,
    )
    steps: int = option(100, "updates of the solver at most", least=1)


@partial(jax.jit, static_argnames="steps")
def _fit(
    pairs: ChoicePairs, l2: Array, precision: Array, start: Array, offsets: Array, *, steps: int
) -> Array:
    total = jnp.sum(pairs.weights)

    def loss(params: tuple[Array, Array]) -> jax.Array:
        v, o = params
        margins = pairs.deltas @ v + jnp.sum(pairs.deltas * o[pairs.users], axis=1)
        penalty = 0.5 * l2 * jnp.sum(v * v) + 0.5 * precision / total * jnp.sum(o * o)
        return mean_loss(margins, pairs.weights) + penalty

    return minimise(loss, (start, offsets), steps=steps)


def precision_of(choices: Choices, spread: float) -> np.float32:
    """Return the precision under which the personal part of a margin has the standard deviation ``spread``."""
    return np.float32(choices.mean_square / spread**2)


def fit(data: FitData) -> Fitted:
    """Fit the direction together with the offsets of the seen people; the offsets are not kept."""
    seen, settings = data.seen, data.settings
    pooled, l2 = data.pooled(steps=settings.steps)

    def candidates() -> Iterator[Fitted]:
        nothing = {"l2": l2, "spread": 0.0, "precision": IMMOVABLE * precision_of(seen, 1.0)}
        yield data.fitted({"direction": pooled}, nothing)
        pairs, start = pairs_of(seen), (pooled, np.zeros((few_sizes(seen.people), len(pooled)), np.float32))
        for spread in sorted(settings.spread):
            precision = precision_of(seen, spread)
            start = _fit(pairs, l2, precision, *start, steps=settings.steps)
            numbers = {"l2": l2, "spread": spread, "precision": precision}
            yield data.fitted({"direction": np.asarray(start[0])}, numbers)

    return data.best(candidates())


def empty_state(fitted: Fitted) -> State:
    """Return an offset of zero."""
    return {"offset": jnp.zeros_like(fitted.arrays["direction"])}


def adapt(fitted: Fitted, context: Context, key: jax.Array) -> State:
    """Return the most probable offset, float32 [D]."""
    deltas = context.deltas
    common = deltas @ fitted.arrays["direction"]
    return {"offset": most_probable(deltas, context.mask, common, fitted.numbers["precision"])}


def score(fitted: Fitted, state: State, responses: Responses) -> jax.Array:
    """Return (v + o_u).e, float32 [K]."""
    return responses.features @ (fitted.arrays["direction"] + state["offset"])


METHOD = define("offset", OffsetSettings, fit, adapt, score, empty_state)
