"""LoRe: a low-rank basis of rewards that all people share, and the weights of each person on it (arXiv 2504.14439).

    r_u = phi(w_u)^T V^T e        V in R^{D x B}, w_u in R^B
    sum_u (1 / |D_u|) sum_i softplus(-delta_i^T V phi(w_u)) + a sum_j |V_j - V_ref|^2

``lore`` is the published method: phi is the softmax, so a person mixes the basis. In ``lore_free`` phi is the
identity, so a person may dislike a direction. V_ref is the direction of the backbone's true score head, or of
pooled Bradley-Terry. For a new person only w is fitted, pulled to the mean w of the seen people, which is the state
at k = 0:

    sum_i softplus(-delta_i^T V phi(w)) + (pull / 2) |w - w_mean|^2

The free weights are scaled to make their covariance over the seen people the identity. A pull of 1 is then the prior
that the seen people suggest.
"""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass
from functools import partial
from typing import Literal

import jax
import jax.numpy as jnp
import numpy as np

from prb_jax.errors import DataError
from prb_jax.personal.few_shot.choices import Array, Choices, Context, Responses
from prb_jax.personal.few_shot.fitting import (
    ChoicePairs,
    FitData,
    define,
    immovable_precision,
    mean_state,
    minimise,
    most_probable,
    pairs_of,
)
from prb_jax.personal.few_shot.networks import adapt_by_descent
from prb_jax.personal.few_shot.protocol import FewShotSettings, Fitted, Floats, Ints, Method, State
from prb_jax.records.options import option


@dataclass(frozen=True, kw_only=True)
class LoReFreeSettings(FewShotSettings):
    """Settings of LoRe with free weights; of each tuple the validation part chooses one entry."""

    bases: Ints = option((4, 8), "B, the number of directions", least=2)
    anchor: Floats = option((1e-2, 1e-1, 1.0), "a, the pull of the basis to its reference", least=0)
    pull: Floats = option(
        (0.3, 1.0, 3.0, 10.0, 30.0, 100.0), "pull of a new person's weights to the mean weights", above=0
    )
    reference: Literal["head", "pooled"] = option(
        "pooled", "head, the score head of the backbone (from base_scores, which it must explain), or pooled"
    )
    l2: Floats = option((1e-4, 1e-3, 1e-2, 1e-1, 1.0), "penalties of the pooled direction", above=0)
    steps: int = option(150, "updates of the solver at most", least=1)


@dataclass(frozen=True, kw_only=True)
class LoReSettings(LoReFreeSettings):
    """Settings of LoRe with softmax weights, which a new person is fitted in step by step."""

    adapt_steps: int = option(100, "updates of the weights of a new person", least=1)
    adapt_rate: float = option(0.1, "their learning rate", above=0)


def head_direction(choices: Choices) -> np.ndarray:
    """Return the direction of the backbone's score head in the features, float32 [D].

    Raises:
      DataError: If the features do not explain the scores, because the head reads other features.
    """
    choices.require("lore with reference=head", ("base_scores",))
    features = np.asarray(choices.features, np.float64)
    scores = np.asarray(choices.base_scores, np.float64)
    columns = np.concatenate([features, np.ones((len(features), 1))], axis=1)
    solution = np.linalg.lstsq(columns, scores, rcond=None)[0]
    unexplained = np.var(scores - columns @ solution) / max(np.var(scores), 1e-30)
    if unexplained > 1e-3:
        raise DataError(
            "lore with reference=head: expected base_scores that are linear in the features, "
            f"found {unexplained:.1%} of their variance unexplained; use reference=pooled"
        )
    return solution[:-1].astype(np.float32)


def personal_directions(choices: Choices, direction: Array, count: int) -> np.ndarray:
    """Return the directions in which people differ most, float32 [D, count], of length 1.

    They have the largest sums of products of the gradients at the shared ``direction``, over pairs of different choices
    of one person. The product of a choice with itself is noise in every direction.
    """
    deltas = choices.deltas
    if (available := min(choices.people, deltas.shape[1])) < count:
        raise DataError(f"expected at least {count} seen people and features, found {available}")
    slope = 1 / (1 + np.exp(np.clip(deltas @ np.asarray(direction), -50, 50)))
    slopes = (slope[:, None] * deltas).astype(np.float64)
    slopes -= slopes.mean(axis=0)
    sums = np.zeros((choices.people, deltas.shape[1]))
    np.add.at(sums, choices.person, slopes)
    weights = 1 / np.bincount(choices.person)
    products = (sums * weights[:, None]).T @ sums - (slopes * weights[choices.person, None]).T @ slopes
    return np.linalg.eigh(products)[1][:, ::-1][:, :count].astype(np.float32)


def _start(data: FitData, reference: np.ndarray, bases: int, *, simplex: bool) -> tuple[Array, Array]:
    """The basis [D, B] and the weights of the seen people [U, B] before training."""
    seen, rng = data.seen, data.rng()
    scale = 1 / np.sqrt(seen.mean_square / len(reference))
    directions = personal_directions(seen, reference, bases - 1) * scale
    weights = rng.normal(0, 0.1, (seen.people, bases)).astype(np.float32)
    if not simplex:
        weights[:, 0] += 1
        return np.concatenate([reference[:, None], directions], axis=1), weights
    # Corners of a simplex around the reference, in the directions in which people differ.
    corners = np.linalg.qr(rng.normal(size=(bases, bases)))[0]
    corners -= corners.mean(axis=0)
    spread = np.linalg.svd(corners)[2][: bases - 1]
    return (reference[:, None] + 2 * directions @ spread @ corners.T).astype(np.float32), weights


@partial(jax.jit, static_argnames=("steps", "simplex"))
def _fit(
    pairs: ChoicePairs,
    share: Array,
    reference: Array,
    anchor: Array,
    basis: Array,
    weights: Array,
    *,
    steps: int,
    simplex: bool,
) -> tuple[Array, Array]:
    people = weights.shape[0]

    def loss(params: tuple[Array, Array]) -> jax.Array:
        v, w = params
        mixed = jax.nn.softmax(w, axis=-1) if simplex else w
        margins = jnp.sum((pairs.deltas @ v) * mixed[pairs.users], axis=1)
        fit = jnp.sum(share[pairs.users] * pairs.weights * jax.nn.softplus(-margins)) / people
        # A small ridge: without it the scales of V and w, or of only one person's w, are free.
        spread = jnp.sum((w - jnp.mean(w, axis=0)) ** 2) / people
        return fit + anchor * jnp.sum((v - reference[:, None]) ** 2) + 1e-3 * spread

    return minimise(loss, (basis, weights), steps=steps)


def fit(data: FitData, *, simplex: bool) -> Fitted:
    """Fit the basis together with the weights of the seen people; the mean of these is kept."""
    seen, settings = data.seen, data.settings
    pooled, l2 = data.pooled()
    reference = head_direction(seen) if settings.reference == "head" else pooled
    pairs, share = pairs_of(seen), (1 / np.bincount(seen.person)).astype(np.float32)

    def candidates() -> Iterator[Fitted]:
        # Nothing personal: the pooled direction, whatever the weights are.
        bases = min(settings.bases)
        mean = np.zeros(bases) if simplex else np.eye(bases)[0]
        every = np.ones(bases) if simplex else mean
        arrays = {"basis": np.outer(pooled, every).astype(np.float32), "mean": mean.astype(np.float32)}
        numbers = {"bases": np.int32(bases), "anchor": max(settings.anchor), "l2": l2}
        yield data.fitted(arrays, {**numbers, "pull": immovable_precision(seen.deltas @ pooled)})
        for bases in settings.bases:
            basis, weights = _start(data, reference, bases, simplex=simplex)
            for anchor in sorted(settings.anchor, reverse=True):
                parts = (pairs, share, reference, np.float32(anchor), basis, weights)
                basis, weights = _fit(*parts, steps=settings.steps, simplex=simplex)
                kept, people = np.asarray(basis), np.asarray(weights)
                if not simplex:
                    covariance = np.cov(people.T.astype(np.float64)) + 1e-8 * np.eye(bases)
                    root = np.linalg.cholesky(covariance)
                    kept, people = kept @ root, np.linalg.solve(root, people.T).T
                arrays = {"basis": kept.astype(np.float32), "mean": people.mean(axis=0).astype(np.float32)}
                numbers |= {"bases": np.int32(bases), "anchor": anchor}
                yield from (data.fitted(arrays, {**numbers, "pull": pull}) for pull in settings.pull)

    return data.best(candidates())


def adapt(fitted: Fitted, context: Context, key: jax.Array, *, simplex: bool) -> State:
    """Return the weights w float32 [B]: the most probable ones, or of a simplex those before the softmax after
    ``adapt_steps`` of Adam from the mean."""
    rows, mean = context.deltas @ fitted.arrays["basis"], jnp.asarray(fitted.arrays["mean"])
    if simplex:
        return {"weights": adapt_by_descent(fitted, context, mean, lambda w: rows @ jax.nn.softmax(w))}
    return {"weights": mean + most_probable(rows, context.mask, rows @ mean, fitted.numbers["pull"])}


def score(fitted: Fitted, state: State, responses: Responses, *, simplex: bool) -> jax.Array:
    """Return phi(w)^T V^T e, float32 [K]."""
    weights = jax.nn.softmax(state["weights"]) if simplex else state["weights"]
    return responses.features @ (fitted.arrays["basis"] @ weights)


def _method(name: str, settings: type, *, simplex: bool) -> Method:
    fit_, adapt_, score_ = (partial(part, simplex=simplex) for part in (fit, adapt, score))
    return define(name, settings, fit_, adapt_, score_, mean_state)


LORE = _method("lore", LoReSettings, simplex=True)
LORE_FREE = _method("lore_free", LoReFreeSettings, simplex=False)
