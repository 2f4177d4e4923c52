"""PReF: reward factorisation with an active choice of the next question (arXiv 2503.06358).

    r_u = lam_u^T phi(e),  phi(e) = F^T e in R^J
    sum log sigmoid(lam_u^T [phi(e_w) - phi(e_l)]) - (beta / 2) |Lam|^2

Where people share pairs, F starts from the singular value decomposition of the matrix of pairs and people: the
entry is 1 or -1 for the choice and 0 for a pair that the person did not answer, users are V sqrt(S), and F maps
the differences of the features to U sqrt(S) by least squares. Otherwise F starts at random, and the number
``svd_start`` is 0. F and all lam are then fitted together. A new person is an L2 logistic regression in R^J, pulled
to zero as published or to the mean of the seen people, as the validation part chooses; the state at k = 0 is that
mean.

The next question is the pair of the largest  s'(lam.v)^2 v^T Sigma^-1 v,  Sigma = 0.001 I + sum_i s'(lam.v_i) v_i
v_i^T, over the pairs v_i that the person has answered.
"""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass
from itertools import product
from typing import Literal

import jax
import jax.numpy as jnp
import numpy as np
from scipy.sparse import csr_array
from scipy.sparse.linalg import svds

from prb_jax.personal.few_shot.choices import Array, Choices, Context, Responses
from prb_jax.personal.few_shot.fitting import (
    FitData,
    define,
    fit_factors,
    immovable_precision,
    mean_state,
    most_probable,
)
from prb_jax.personal.few_shot.protocol import FewShotSettings, Fitted, Floats, State
from prb_jax.records.options import option


@dataclass(frozen=True, kw_only=True)
class PReFSettings(FewShotSettings):
    """Settings of PReF; of each tuple the validation part chooses one entry."""

    rank: int = option(6, "J", least=1)
    beta: Floats = option((0.3, 1.0, 3.0, 10.0), "the penalty of the people's weights", above=0)
    pull_to: tuple[Literal["zero", "mean"], ...] = option(
        ("zero", "mean"), "target of the pull of a new person's weights"
    )
    l2: Floats = option((1e-3, 1e-2, 1e-1), "the penalty of F, in the mean loss", above=0)
    pooled_l2: Floats = option(
        (1e-3, 1e-2, 1e-1, 1.0),
        "penalties of the pooled direction, which is tried as the only factor",
        above=0,
    )
    steps: int = option(150, "updates of the solver at most", least=1)


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


def fit(data: FitData) -> Fitted:
    """Fit F and the people's weights; the mean of these is kept."""
    seen, settings, rank = data.seen, data.settings, data.settings.rank
    start = _svd_start(seen, rank)
    if from_svd := start is not None:
        factors, people = start
    else:
        rng, width = data.rng(), seen.features.shape[1]
        factors = rng.normal(0, 1 / np.sqrt(width), (width, rank)).astype(np.float32)
        people = rng.normal(0, 1, (seen.people, rank)).astype(np.float32)
    pooled, pooled_l2 = data.pooled(settings.pooled_l2)

    def candidates() -> Iterator[Fitted]:
        first = np.eye(rank, dtype=np.float32)[0]  # nothing personal: one factor, one weight for everybody
        arrays = {"factors": np.outer(pooled, first).astype(np.float32), "mean": first, "prior": first}
        numbers = {
            "l2": pooled_l2,
            "svd_start": 0.0,
            "beta": immovable_precision(seen.deltas @ pooled),
            "pull_to_mean": 1.0,
        }
        yield data.fitted(arrays, numbers)
        nothing = np.zeros(len(seen), np.float32)
        for l2 in settings.l2:
            f, lam = fit_factors(seen, nothing, np.float32(l2), factors, people, steps=settings.steps)
            # The scales of F and of the weights are one freedom: the mean square of the seen people's weights is 1.
            scale = float(np.sqrt(np.mean(lam**2)) + 1e-12)
            mean = (lam.mean(axis=0) / scale).astype(np.float32)
            arrays = {"factors": (f * scale).astype(np.float32), "mean": mean}
            for beta, pull_to in product(settings.beta, settings.pull_to):
                prior = mean if pull_to == "mean" else np.zeros_like(mean)
                numbers = {"l2": l2, "svd_start": float(from_svd), "beta": beta}
                numbers["pull_to_mean"] = float(pull_to == "mean")
                yield data.fitted({**arrays, "prior": prior}, numbers)

    return data.best(candidates())


def adapt(fitted: Fitted, context: Context, key: jax.Array) -> State:
    """Return the most probable weights, float32 [J]; the mean of the seen people at k = 0."""
    rows = context.deltas @ fitted.arrays["factors"]
    prior = fitted.arrays["prior"]
    weights = prior + most_probable(rows, context.mask, rows @ prior, fitted.numbers["beta"])
    return {"weights": jnp.where(jnp.any(context.mask), weights, fitted.arrays["mean"])}


def score(fitted: Fitted, state: State, responses: Responses) -> jax.Array:
    """Return lam_u^T phi(e), float32 [K]."""
    return responses.features @ (fitted.arrays["factors"] @ state["weights"])


def next_question(
    fitted: Fitted, state: State, context: Context, first: Responses, second: Responses
) -> jax.Array:
    """Return the information of Q questions about a person by PReF's rule, float32 [Q]; the largest is asked next.
    Each question compares ``first`` and ``second`` responses; ``context`` contains the person's earlier answers."""
    factors, weights = fitted.arrays["factors"], state["weights"]

    def slope(rows: Array) -> jax.Array:
        return jax.nn.sigmoid(rows @ weights) * jax.nn.sigmoid(-(rows @ weights))

    answered = context.deltas @ factors
    curve = slope(answered) * context.mask
    precision = 1e-3 * jnp.eye(len(weights)) + (answered * curve[:, None]).T @ answered
    pool = (first.features - second.features) @ factors
    return slope(pool) ** 2 * jnp.sum(pool * jnp.linalg.solve(precision, pool.T).T, axis=1)


METHOD = define("pref", PReFSettings, fit, adapt, score, mean_state)
