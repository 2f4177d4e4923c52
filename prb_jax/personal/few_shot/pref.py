"""PReF: reward factorisation with an active choice of the next question (arXiv 2503.06358).

    r_u = lam_u^T phi(e),  phi(e) = F^T e in R^J
    sum log sigmoid(lam_u^T [phi(e_w) - phi(e_l)]) - (beta / 2) |Lam|^2

Where people share pairs, F starts from the singular value decomposition of the matrix of pairs and people: the
entry is 1 or -1 for the choice and 0 where there is none, users are V sqrt(S), and F maps the differences of the
features to U sqrt(S) by least squares. Otherwise F starts at random, and ``svd_start`` is 0 among the numbers. F
and all lam are then fitted together. A new person is an L2 logistic regression in R^J, pulled to zero as published
or to the mean of the seen people, as the validation part chooses; the state at k = 0 is that mean.

The next question is the pair of the largest  s'(lam.v)^2 v^T Sigma^-1 v,  Sigma = 0.001 I + sum_i s'(lam.v_i) v_i
v_i^T, over the pairs v_i that the person has answered.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from functools import partial
from typing import Any, Literal

import jax
import jax.numpy as jnp
import numpy as np
from jax.sharding import Mesh
from scipy.sparse import csr_array
from scipy.sparse.linalg import svds

from prb_jax.errors import DataError, quote
from prb_jax.personal.few_shot.choices import Array, Choices, Context, Responses
from prb_jax.personal.few_shot.fitting import (
    ALIKE,
    Pairs,
    Validation,
    mean_loss,
    minimise,
    most_probable,
    numpy_rng,
    pairs_of,
    pooled_direction,
)
from prb_jax.personal.few_shot.protocol import Fitted, Method, State
from prb_jax.personal.few_shot.settings import FewShotSettings, check_numbers


@dataclass(frozen=True, kw_only=True)
class PReFSettings(FewShotSettings):
    """Settings of PReF; of each tuple the validation part chooses one entry.

    Attributes:
      rank: J.
      beta: the penalty of the people's weights.
      pull_to: where a new person's weights are pulled to, ``zero`` or ``mean``.
      l2: the penalty of F, in the mean loss.
      pooled_l2: penalties of the pooled direction, which is tried as the only factor.
      steps: updates of the solver at most.
    """

    rank: int = 6
    beta: tuple[float, ...] = (0.3, 1.0, 3.0, 10.0)
    pull_to: tuple[Literal["zero", "mean"], ...] = ("zero", "mean")
    l2: tuple[float, ...] = (1e-3, 1e-2, 1e-1)
    pooled_l2: tuple[float, ...] = (1e-3, 1e-2, 1e-1, 1.0)
    steps: int = 150

    def __post_init__(self) -> None:
        super().__post_init__()
        check_numbers(self, above={"beta": 0, "l2": 0, "pooled_l2": 0}, least={"rank": 1, "steps": 1})
        if not self.pull_to or not set(self.pull_to) <= {"zero", "mean"}:
            raise DataError(f"PReFSettings.pull_to: expected zero or mean, found {quote(self.pull_to)}")


@partial(jax.jit, static_argnames="steps")
def _fit(pairs: Pairs, l2: Array, factors: Array, people: Array, *, steps: int) -> tuple[Array, Array]:
    total = jnp.sum(pairs.weights)

    def loss(params: tuple[Array, Array]) -> jax.Array:
        f, lam = params
        margins = jnp.sum((pairs.deltas @ f) * lam[pairs.users], axis=1)
        penalty = 0.5 * jnp.sum(lam * lam) / total + 0.5 * l2 * jnp.sum(f * f)
        return mean_loss(margins, pairs.weights) + penalty

    return minimise(loss, (factors, people), steps=steps)


def _svd_start(seen: Choices, rank: int) -> tuple[np.ndarray, np.ndarray] | None:
    """F [D, J] and people [U, J] from the matrix of pairs and people; None where no pair has two people."""
    low, high = np.minimum(seen.chosen, seen.rejected), np.maximum(seen.chosen, seen.rejected)
    pairs, first, row = np.unique(np.stack([low, high], 1), axis=0, return_index=True, return_inverse=True)
    if len(pairs) == len(seen) or rank >= min(len(pairs), seen.people):
        return None
    sign = np.where(seen.chosen == low, 1.0, -1.0)
    shape = (len(pairs), seen.people)
    matrix = csr_array((sign, (row.reshape(-1), seen.person)), shape=shape)
    left, size, right = svds(matrix, k=rank, v0=np.ones(min(shape)))
    assert left is not None
    assert right is not None
    root = np.sqrt(np.maximum(size, 0))
    deltas = seen.deltas[first] * sign[first][:, None]
    ridge = np.mean(np.sum(deltas**2, axis=1)) * 1e-2 * np.eye(deltas.shape[1])
    factors = np.linalg.solve(deltas.T @ deltas + ridge, deltas.T @ (left * root))
    return factors.astype(np.float32), (right.T * root).astype(np.float32)


def fit(
    seen: Choices, validation: Choices, *, settings: PReFSettings, key: jax.Array, mesh: Mesh | None = None
) -> Fitted:
    """Fit F and the people's weights; the mean of these is kept."""
    seen.require("pref", ())
    found = _svd_start(seen, settings.rank)
    if found is None:
        rng, width = numpy_rng(key), seen.features.shape[1]
        factors = rng.normal(0, 1 / np.sqrt(width), (width, settings.rank)).astype(np.float32)
        people = rng.normal(0, 1, (seen.people, settings.rank)).astype(np.float32)
    else:
        factors, people = found
    pooled, l2 = pooled_direction(seen, validation, l2=settings.pooled_l2, steps=100)
    first = np.eye(settings.rank, dtype=np.float32)[
        0
    ]  # nothing personal: one factor, with one weight for everybody
    arrays = {"factors": np.outer(pooled, first).astype(np.float32), "mean": first, "prior": first}
    numbers = {"l2": np.float32(l2), "svd_start": np.float32(0)}
    alone = {
        "beta": ALIKE * np.float32(np.mean((seen.deltas @ pooled) ** 2) + 1e-6),
        "pull_to_mean": np.float32(1),
    }
    pairs, fits = pairs_of(seen), [Fitted(arrays, numbers | alone, settings)]
    for l2 in settings.l2:
        f, lam = _fit(pairs, np.float32(l2), factors, people, steps=settings.steps)
        numbers = {"l2": np.float32(l2), "svd_start": np.float32(found is not None)}
        fits += _priors(np.asarray(f), np.asarray(lam), numbers, settings)
    return Validation(validation, settings.validation_shots).best(METHOD, fits, key=key, mesh=mesh)


def _priors(
    factors: np.ndarray, people: np.ndarray, numbers: Mapping[str, Any], settings: PReFSettings
) -> list[Fitted]:
    """One fit for every prior of a new person's weights."""
    # The scales of F and of the weights are one freedom: the mean square of the seen people's weights is 1.
    scale = float(np.sqrt(np.mean(people**2)) + 1e-12)
    mean, factors = (people.mean(axis=0) / scale).astype(np.float32), (factors * scale).astype(np.float32)
    fits = []
    for beta in settings.beta:
        for pull_to in settings.pull_to:
            to_mean = pull_to == "mean"
            arrays = {"factors": factors, "mean": mean, "prior": mean if to_mean else np.zeros_like(mean)}
            chosen = {"beta": np.float32(beta), "pull_to_mean": np.float32(to_mean)}
            fits.append(Fitted(arrays, {**numbers, **chosen}, settings))
    return fits


def empty_state(fitted: Fitted) -> State:
    """Return the mean weights of the seen people."""
    return {"weights": jnp.asarray(fitted.arrays["mean"])}


def adapt(fitted: Fitted, context: Context, key: jax.Array) -> State:
    """Return the most probable weights, float32 [J]; the mean of the seen people at k = 0."""
    rows = context.deltas @ fitted.arrays["factors"]
    prior = fitted.arrays["prior"]
    found = prior + most_probable(rows, context.mask, rows @ prior, fitted.numbers["beta"])
    return {"weights": jnp.where(jnp.any(context.mask), found, fitted.arrays["mean"])}


def score(fitted: Fitted, state: State, responses: Responses) -> jax.Array:
    """Return lam_u^T phi(e), float32 [K]."""
    return responses.features @ (fitted.arrays["factors"] @ state["weights"])


def next_question(
    fitted: Fitted, state: State, context: Context, first: Responses, second: Responses
) -> jax.Array:
    """Return how much each question of a pool tells by PReF's rule; the next question is the largest.

    Args:
      fitted: fitted by this method.
      state: of the person, from ``context``.
      context: the k comparisons that the person has answered.
      first, second: the two responses of each of Q questions.

    Returns:
      float32 [Q].
    """
    factors, weights = fitted.arrays["factors"], state["weights"]

    def slope(rows: Array) -> jax.Array:
        return jax.nn.sigmoid(rows @ weights) * jax.nn.sigmoid(-(rows @ weights))

    answered = context.deltas @ factors
    curve = slope(answered) * context.mask
    precision = 1e-3 * jnp.eye(len(weights)) + (answered * curve[:, None]).T @ answered
    pool = (first.features - second.features) @ factors
    return slope(pool) ** 2 * jnp.sum(pool * jnp.linalg.solve(precision, pool.T).T, axis=1)


METHOD = Method("pref", PReFSettings, fit, adapt, score, empty_state)
