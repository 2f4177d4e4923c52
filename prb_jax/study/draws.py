"""Tastes and choices drawn from the prior that `bayes` estimated."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import replace

import jax
import numpy as np
from jax.sharding import Mesh

from prb_jax.personal.few_shot.bayes import METHOD
from prb_jax.personal.few_shot.choices import Choices, UserRows
from prb_jax.personal.few_shot.protocol import Fitted, adapt_users
from prb_jax.personal.few_shot.taste_posterior import pooled_margins, shrinkage
from prb_jax.personal.few_shot.taste_prior import judgements_of


def prior_sampler(fitted: Fitted, seen: Choices) -> Callable[[np.random.Generator], Fitted]:
    """Return a function that draws the mean taste and the effects of texts of a prior from their posterior, and
    multiplies margins by the slope of the prior.

    Estimates are shrunk: a prior with the estimated mean taste and effects would make choices less certain than
    people's choices. The posterior given the choices of the seen people is normal (Laplace). A draw solves its linear
    equations with noise on the right-hand side (Papandreou and Yuille 2010). The mean and effects of a prior without a
    penalty are not drawn. A slope above 1 means that margins of the validation part are larger than estimated, e.g. if
    texts differ more than any penalty of the settings allows.
    """
    from scipy.linalg import cho_factor, cho_solve  # scipy takes long to import
    from scipy.sparse.linalg import LinearOperator, cg

    numbers, arrays = fitted.numbers, fitted.arrays
    if not numbers.get("l2", 0.0) > 0:
        return lambda rng: _scaled(fitted)
    rows = judgements_of(seen, votes=bool(numbers["counted"]))
    shrink = shrinkage(fitted, rows).astype(np.float64)
    sure = 1 / (1 + np.exp(-shrink * pooled_margins(fitted, rows)))
    weights = shrink**2 * sure * (1 - sure)
    deltas, width = rows.deltas.astype(np.float64), rows.deltas.shape[1]
    texts = rows.typical + 1 if numbers["item_precision"] else 0
    precision = np.full(width + texts, float(numbers["item_precision"]))
    precision[:width] = float(numbers["l2"]) * len(deltas)

    def margins(values: np.ndarray) -> np.ndarray:
        values = values.reshape(-1)
        effects = values[width:]
        apart = effects[rows.texts[:, 0]] - effects[rows.texts[:, 1]] if texts else 0.0
        return deltas @ values[:width] + apart

    def transposed(values: np.ndarray) -> np.ndarray:
        features = deltas.T @ values
        if not texts:
            return features
        chosen, rejected = (np.bincount(rows.texts[:, side], values, texts) for side in (0, 1))
        return np.concatenate([features, chosen - rejected])

    size = (width + texts, width + texts)

    def hessian(values: np.ndarray) -> np.ndarray:
        return transposed(weights * margins(values)) + precision * values.reshape(-1)

    # Preconditioned by the blocks of features and of texts, the latter a diagonal.
    factor = cho_factor((weights[:, None] * deltas).T @ deltas + np.diag(precision[:width]))
    diagonal = precision[width:]
    if texts:
        diagonal = diagonal + sum(np.bincount(rows.texts[:, side], weights, texts) for side in (0, 1))

    def preconditioned(values: np.ndarray) -> np.ndarray:
        values = values.reshape(-1)
        return np.concatenate([cho_solve(factor, values[:width]), values[width:] / diagonal])

    operators = (hessian, preconditioned)
    whole, scale = (LinearOperator(size, matvec=one) for one in operators)  # pyright: ignore[reportCallIssue] - the stubs know no matvec

    def draw(rng: np.random.Generator) -> Fitted:
        noise = transposed(np.sqrt(weights) * rng.standard_normal(len(deltas)))
        noise += np.sqrt(precision) * rng.standard_normal(len(precision))
        drawn, _ = cg(whole, noise, rtol=1e-4, maxiter=1000, M=scale)
        changed, moved = {"direction": (arrays["direction"] + drawn[:width]).astype(np.float32)}, {}
        if texts:
            effects = np.append(arrays["items"], numbers["typical"]) + drawn[width:]
            changed["items"], moved["typical"] = effects[:-1].astype(np.float32), np.float32(effects[-1])
        return _scaled(replace(fitted, arrays=arrays | changed, numbers=numbers | moved))

    return draw


SCALED = ("direction", "items", "basis", "texts")


def _scaled(fitted: Fitted) -> Fitted:
    """Return the prior of margins that are larger by its slope; the new slope is 1. Posts reveal as much as before."""
    numbers, slope = fitted.numbers, fitted.numbers.get("slope", np.float32(1))
    powers = {"typical": 1, "isotropic": 2, "word_gain": -1, "vote_gain": -1}
    moved = {name: numbers[name] * slope**power for name, power in powers.items() if name in numbers}
    arrays = {name: rows * slope if name in SCALED else rows for name, rows in fitted.arrays.items()}
    return replace(fitted, arrays=arrays, numbers=numbers | moved | {"slope": np.float32(1)})


def draw_choices(
    prior: Fitted, choices: Choices, *, rng: np.random.Generator, mesh: Mesh | None = None
) -> tuple[Choices, np.ndarray]:
    """Draw people's tastes from the prior of `bayes`, and their choices between the same responses.

    Returns:
      Choices with the drawn outcomes, and the true margin of each drawn choice, float64 [n].
    """
    users = np.arange(choices.number_of_users, dtype=np.int32)
    nothing = np.zeros((len(users), 1), np.int32)
    rows = UserRows(users, nothing, nothing > 0)
    known = adapt_users(METHOD, prior, choices, rows, key=jax.random.key(0), mesh=mesh)
    means, roots = known["weights"], np.linalg.cholesky(known["covariance"].astype(np.float64))
    drawn = means + np.einsum("ujl,ul->uj", roots, rng.standard_normal(means.shape))
    basis = np.asarray(prior.arrays["basis"])
    tastes = drawn[:, : basis.shape[1]] @ basis.T + known["rest"]
    tastes += np.sqrt(known["rest_variance"])[:, None] * rng.standard_normal(tastes.shape)
    margins = np.asarray(pooled_margins(prior, judgements_of(choices, votes=False)), np.float64)
    margins += np.einsum("nd,nd->n", choices.deltas, tastes[choices.users])
    if "texts" in prior.arrays:
        apart = np.subtract(*np.asarray(prior.arrays["texts"])[choices.texts.T])
        margins += np.einsum("nt,nt->n", apart, drawn[choices.users, basis.shape[1] :])
    turned = rng.random(len(choices)) > 1 / (1 + np.exp(-margins))
    made = replace(
        choices,
        chosen=np.where(turned, choices.rejected, choices.chosen).astype(np.int32),
        rejected=np.where(turned, choices.chosen, choices.rejected).astype(np.int32),
        in_context=None,
    )
    return made, np.where(turned, -margins, margins)
