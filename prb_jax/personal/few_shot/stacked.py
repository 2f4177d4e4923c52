"""Stacked empirical Bayes: a weighted mean of the margins of three priors, recalibrated.

    m = slope * (w_0 m_nobody + w_1 m_simple + w_2 m_bayes),   w >= 0, sum w = 1

`bayes` is the prior of the method `bayes`. The simple prior has no directions: it has pooled Bradley-Terry, effects of
texts, equal variance of tastes in all directions, and the similarity to the person's own words. Nobody is the part of
simple without a person. Each part is already a log-odds. Weights and slope minimise the loss on the validation part
(stacking: Wolpert 1992, Breiman 1996). Weights are pulled towards equal weights, because the same few people chose the
numbers of each part. The best single part is tried too.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, replace
from typing import Any

import jax
import numpy as np

from prb_jax.personal.few_shot import bayes, taste_posterior
from prb_jax.personal.few_shot.choices import Context, Responses
from prb_jax.personal.few_shot.fitting import FitData, define
from prb_jax.personal.few_shot.protocol import Fitted, State
from prb_jax.records.options import option

NOBODY, PERSONAL = "nobody", ("simple", "bayes")
PARTS = (NOBODY, *PERSONAL)


@dataclass(frozen=True, kw_only=True)
class StackedSettings(bayes.BayesSettings):
    """Settings of stacked empirical Bayes: the settings of `bayes`, for all parts, and one for the weights."""

    pull: float = option(
        10.0,
        "strength of the pull of the weights towards equal ones, in choices of the validation part",
        above=0,
    )


def fit(data: FitData) -> Fitted:
    """Fit the three priors, then their weights and the slope; the best single part is tried too."""
    of_bayes = replace(data, method=bayes.METHOD)
    parts = bayes.fit_parts(of_bayes)
    margins = np.stack([of_bayes.margins(parts[name])[0] for name in PARTS], axis=1)
    best = min(PARTS, key=lambda name: parts[name].numbers["validation_loss"])
    alone = np.array([float(name == best) for name in PARTS])
    tried = (stack(margins, pull=data.settings.pull), (alone, 1.0))
    return data.best(_together(data, parts, weights, slope) for weights, slope in tried)


def _together(data: FitData, parts: Mapping[str, Fitted], weights: np.ndarray, slope: float) -> Fitted:
    """The parts as one fit, with names that begin with the part's."""
    arrays, numbers = dict[str, Any](), dict[str, Any](slope=slope)
    for name, weight in zip(PARTS, weights, strict=True):
        part = parts[name]
        kept = slice(None) if name == "bayes" else slice(1)  # the others have no directions, but one of zeros
        for key, leaf in part.arrays.items():
            arrays[f"{name}.{key}"] = leaf[:, kept] if key in ("basis", "profile") else leaf
        numbers |= {
            f"{name}.weight": weight,
            **{f"{name}.{key}": value for key, value in part.numbers.items()},
        }
    return data.fitted(arrays, numbers)


def stack(margins: np.ndarray, *, pull: float) -> tuple[np.ndarray, float]:
    """Return the weights of P margins, of sum 1, and the slope, 0.5 to 2, of their weighted mean.

    Args:
      margins: float [m, P], of the chosen response over the rejected one.
      pull: penalty m * loss + pull / 2 * |w - 1/P|^2, in choices.

    Returns:
      float64 [P] and the slope.
    """
    from scipy.optimize import minimize  # scipy takes long to import

    margins = np.asarray(margins, np.float64)
    equal = np.full(margins.shape[1], 1 / margins.shape[1])

    def loss(weights: np.ndarray) -> tuple[float, np.ndarray]:
        total = margins @ weights
        value = np.mean(np.logaddexp(0.0, -total)) + pull / 2 * np.sum((weights - equal) ** 2) / len(margins)
        slopes = -1 / (1 + np.exp(total))
        return float(value), slopes @ margins / len(margins) + pull * (weights - equal) / len(margins)

    # Above 0: uninformative margins then still have a mean.
    found = minimize(loss, equal, jac=True, method="L-BFGS-B", bounds=[(1e-6, None)] * len(equal)).x
    return found / found.sum(), float(np.clip(found.sum(), *bayes.SLOPES))


def part_of(fitted: Fitted, name: str) -> Fitted:
    """Return one of `PARTS` as a fit of `bayes`."""
    start = f"{name}."
    arrays, numbers = (
        {key.removeprefix(start): value for key, value in tree.items() if key.startswith(start)}
        for tree in (fitted.arrays, fitted.numbers)
    )
    return Fitted(arrays, numbers, fitted.settings)


def empty_state(fitted: Fitted) -> State:
    """Return the priors of a person without a profile."""
    return {name: taste_posterior.empty_state(part_of(fitted, name)) for name in PERSONAL}


def adapt(fitted: Fitted, context: Context, key: jax.Array) -> State:
    """Return the posterior of a person under each personal prior."""
    return {name: taste_posterior.adapt(part_of(fitted, name), context, key) for name in PERSONAL}


def score(fitted: Fitted, state: State, responses: Responses) -> jax.Array:
    """Return the weighted mean of the rewards of the parts times the slope, float32 [K]."""
    nobody = part_of(fitted, NOBODY)
    states = {NOBODY: taste_posterior.empty_state(nobody), **state}
    rewards = sum(
        fitted.numbers[f"{name}.weight"]
        * taste_posterior.score(part_of(fitted, name), states[name], responses)
        for name in PARTS
    )
    return fitted.numbers["slope"] * rewards


METHOD = define("stacked", StackedSettings, fit, adapt, score, empty_state, pointwise=False)
