"""Sparse features: a person's weights on a few named directions that can be read (after WIMHF, arXiv 2510.26202).

    z(d) = top_s relu(W (d - b) + c) in R^F,  d = the difference of two responses
    mean |d - (b + Z z(d))|^2                 a sparse autoencoder of the differences, s of F features active
    r_u(w) - r_u(l) = (beta + b_u).[z(delta) - z(-delta)]

beta is the logistic regression of everybody on the features, b_u the most probable deviation of the person under a
Gaussian prior: coefficient j is the person's extra preference for feature j compared with others. For K responses the
difference is twice the distance to the mean of all responses; for a pair this is delta. `strongest` lists the pairs
that show a feature, for people (or a model) to name it; `coefficients` reads a person.
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
    ChoicePairs,
    FitData,
    best_direction,
    define,
    immovable_precision,
    most_probable,
)
from prb_jax.personal.few_shot.networks import train
from prb_jax.personal.few_shot.protocol import FewShotSettings, Fitted, Floats, State
from prb_jax.records.options import option


@dataclass(frozen=True, kw_only=True)
class SparseSettings(FewShotSettings):
    """Settings of sparse features; of each tuple the validation part chooses one entry."""

    features: int = option(64, "F", least=1)
    active: int = option(8, "s, the features of one difference that are not zero", least=1)
    spread: Floats = option(
        (0.1, 0.3, 1.0, 3.0), "standard deviations of the personal part of a margin under the prior", above=0
    )
    l2: Floats = option((1e-4, 1e-3, 1e-2, 1e-1), "penalties of beta", above=0)
    steps: int = option(1000, "updates of the autoencoder", least=1)
    batch: int = option(512, "differences in an update", least=1)
    rate: float = option(3e-3, "its learning rate", above=0)

    def __post_init__(self) -> None:
        super().__post_init__()
        self.check("active", self.active <= self.features, f"at most features={self.features}")


def _encode(arrays: dict[str, Array], differences: Array, active: int) -> jax.Array:
    """z, float32 [..., F], of differences [..., D]."""
    raw = jax.nn.relu((differences - arrays["center"]) @ arrays["encoder"] + arrays["threshold"])
    least = jax.lax.top_k(raw, active)[0][..., -1:]
    return jnp.where(raw >= jnp.maximum(least, 1e-12), raw, 0.0)


def _signed(arrays: dict[str, Array], differences: Array, active: int) -> jax.Array:
    """z(d) - z(-d): its sign turns with the order of the pair."""
    return _encode(arrays, differences, active) - _encode(arrays, -differences, active)


@partial(jax.jit, static_argnames="settings")
def _autoencoder(
    deltas: Array, start: dict[str, Array], key: jax.Array, *, settings: SparseSettings
) -> dict[str, Array]:
    def loss(arrays: dict[str, Array], key: jax.Array, progress: Array) -> jax.Array:
        rows, signs = jax.random.split(key)
        drawn = deltas[jax.random.randint(rows, (settings.batch,), 0, len(deltas))]
        drawn = drawn * jax.random.rademacher(signs, (settings.batch, 1), jnp.float32)  # either order
        decoder = arrays["decoder"] / (jnp.linalg.norm(arrays["decoder"], axis=1, keepdims=True) + 1e-9)
        rebuilt = arrays["center"] + _encode(arrays, drawn, settings.active) @ decoder
        return jnp.mean(jnp.sum((drawn - rebuilt) ** 2, axis=1)) / jnp.mean(jnp.sum(drawn**2, axis=1))

    return train(loss, start, steps=settings.steps, rate=settings.rate, key=key)


_signed_jit = jax.jit(_signed, static_argnames="active")


def fit(data: FitData) -> Fitted:
    """Fit the autoencoder on all differences, then beta; choose the penalties on the validation part."""
    settings, deltas, active = data.settings, data.seen.deltas, data.settings.active
    width = deltas.shape[1]
    directions = data.rng().normal(size=(settings.features, width)).astype(np.float32)
    directions /= np.linalg.norm(directions, axis=1, keepdims=True)
    start = {
        "center": np.zeros(width, np.float32),
        "encoder": directions.T.copy(),
        "threshold": np.zeros(settings.features, np.float32),
        "decoder": directions,
    }
    arrays = jax.tree.map(np.asarray, _autoencoder(deltas, start, data.key, settings=settings))
    rows = np.asarray(_signed_jit(arrays, deltas, active=active))
    live = np.mean(rows != 0, axis=0) > 0
    scale = (np.sqrt(np.mean(rows**2, axis=0)) + 1e-6).astype(np.float32)
    arrays["scale"] = np.where(live, 1 / scale, 0).astype(np.float32)
    rows = rows * arrays["scale"]
    held = np.asarray(_signed_jit(arrays, data.validation.deltas, active=active)) * arrays["scale"]
    pairs = ChoicePairs(rows, np.asarray(data.seen.users), np.ones(len(rows), np.float32))
    beta, l2 = best_direction(pairs, held, settings.l2, steps=100)
    pooled, pooled_l2 = data.pooled()

    def candidates() -> Iterator[Fitted]:
        nothing = {"direction": pooled, "beta": np.zeros(settings.features, np.float32)}  # nothing personal
        facts = {"live_features": live.sum()}
        yield data.fitted(
            {**arrays, **nothing},
            {"l2": pooled_l2, "spread": 0.0, "precision": immovable_precision(rows), **facts},
        )
        for spread in settings.spread:
            precision = np.mean(np.sum(rows**2, axis=1)) / spread**2
            numbers = {"l2": l2, "spread": spread, "precision": precision, **facts}
            yield data.fitted({**arrays, "beta": beta, "direction": np.zeros(width, np.float32)}, numbers)

    return data.best(candidates())


def _rows(fitted: Fitted, differences: Array) -> jax.Array:
    return _signed(fitted.arrays, differences, fitted.settings.active) * fitted.arrays["scale"]


def empty_state(fitted: Fitted) -> State:
    """Return a deviation of zero."""
    return {"deviation": jnp.zeros_like(fitted.arrays["beta"])}


def adapt(fitted: Fitted, context: Context, key: jax.Array) -> State:
    """Return the most probable deviation, float32 [F]."""
    rows = _rows(fitted, context.deltas)
    offset = rows @ fitted.arrays["beta"] + context.deltas @ fitted.arrays["direction"]
    return {"deviation": most_probable(rows, context.mask, offset, fitted.numbers["precision"])}


def score(fitted: Fitted, state: State, responses: Responses) -> jax.Array:
    """Return half of (beta + b_u).[z(d) - z(-d)] + w.e, float32 [K], d twice the difference to the mean response.

    w is the pooled direction where nothing personal was chosen, and 0 otherwise.
    """
    differences = 2 * (responses.features - jnp.mean(responses.features, axis=0))
    personal = 0.5 * _rows(fitted, differences) @ (fitted.arrays["beta"] + state["deviation"])
    return personal + responses.features @ fitted.arrays["direction"]


def coefficients(fitted: Fitted, state: State) -> np.ndarray:
    """Return the person's coefficients b_u beside everybody's beta, float32 [F, 2], in margin at a typical pair."""
    return np.stack([np.asarray(state["deviation"]), np.asarray(fitted.arrays["beta"])], axis=1)


def strongest(fitted: Fitted, choices: Choices, *, count: int = 5) -> tuple[np.ndarray, np.ndarray]:
    """Return for each feature the choices that show it most, int32 [F, count], and its signed activation there.

    A positive activation: the chosen response has more of the feature.
    """
    rows = np.asarray(_signed_jit(fitted.arrays, choices.deltas, active=fitted.settings.active))
    rows = rows * fitted.arrays["scale"]
    places = np.argsort(-np.abs(rows), axis=0, kind="stable")[:count].T
    return places.astype(np.int32), np.take_along_axis(rows.T, places, axis=1)


METHOD = define("sparse", SparseSettings, fit, adapt, score, empty_state, pointwise=False)
