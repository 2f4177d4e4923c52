"""Stacked empirical Bayes: a weighted mean of the margins of three priors, recalibrated.

    m = slope * (w_0 m_nobody + w_1 m_simple + w_2 m_bayes),   w >= 0, sum w = 1

`bayes` is the prior of the method `bayes`. The simple prior has no directions: it has pooled Bradley-Terry, effects of
texts, equal variance of tastes in all directions, and the similarity to the person's own words. Nobody is the part of
simple without a person. Each part is already a log-odds. Weights and slope minimise the loss on the validation part
(stacking: Wolpert 1992, Breiman 1996).

The numbers of a part are the best of many tried on the same people, of `bayes` of more than of the others: there its
loss is too low. Weights and slope therefore see margins of people who did not choose: the numbers behind the margins of
each fold of the validation part are chosen by the other folds (cross-fitting; van der Laan and others 2007). The
numbers of the parts themselves are chosen by all. The base that all parts share is too, because it favours none.

A validation part has few people, and parts are often nearly equal: weights are pulled towards the share of resamples of
these people in which each part has the lowest loss (Bayesian bootstrap; Yao and others 2018). The pull goes to one part
if it is clearly the best, and to a mean of parts that cannot be told apart.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, fields, replace
from typing import Any

import jax
import numpy as np

from prb_jax.personal.few_shot import bayes, taste_posterior
from prb_jax.personal.few_shot.choices import Context, Responses, contexts_and_queries
from prb_jax.personal.few_shot.cross_fit import CrossFitData
from prb_jax.personal.few_shot.fitting import define
from prb_jax.personal.few_shot.protocol import Fitted, State
from prb_jax.records.options import option

NOBODY, PERSONAL = "nobody", ("simple", "bayes")
PARTS = (NOBODY, *PERSONAL)
RESAMPLES = 1000
FOLDS = 5  # of the people of the validation part


@dataclass(frozen=True, kw_only=True)
class StackedSettings(bayes.BayesSettings):
    """Settings of stacked empirical Bayes: the settings of `bayes`, for all parts, and one for the weights."""

    pull: float = option(
        200.0,
        "strength of the pull of the weights towards how often each part is the best one in resamples of the people "
        "of the validation part, in choices of this part",
        above=0,
    )


def fit(data: CrossFitData) -> Fitted:
    """Fit the three priors, then their weights and the slope."""
    settings = {one.name: getattr(data.settings, one.name) for one in fields(bayes.BayesSettings)}
    of_bayes = replace(data, method=bayes.METHOD, settings=bayes.BayesSettings(**settings))
    parts = bayes.fit_parts(of_bayes)
    margins, people = unchosen_margins(of_bayes)
    toward = shares_of_best(margins, people, rng=data.rng())
    weights, slope = stack(margins, toward=toward, pull=data.settings.pull)
    return data.best([_together(data, parts, weights, slope)])


def unchosen_margins(data: CrossFitData) -> tuple[np.ndarray, np.ndarray]:
    """Return the margins of the parts for people of the validation part, float [m, P], where the numbers are chosen by
    the other folds of these people; and the person of each margin, int [m]."""
    fold = folds_of_people(data)
    whole = bayes.fit_parts(data)
    people = data.validation.users[data.margins(whole[NOBODY])[1]]
    found = np.zeros((len(people), len(PARTS)))
    for number in range(fold.max() + 1):
        here, others = fold[people] == number, (fold >= 0) & (fold != number)
        parts = bayes.fit_parts(data.chosen_by(others)) if others.any() else whole
        found[here] = np.stack([data.margins(parts[name])[0] for name in PARTS], axis=1)[here]
    return found, people


def folds_of_people(data: CrossFitData) -> np.ndarray:
    """Return a fold, 0 to `FOLDS` - 1, of each person of the validation part who is predicted, int [U]; others: -1."""
    queries = contexts_and_queries(data.validation, seed=0)[1]
    people = np.unique(queries.users)
    fold = np.full(data.validation.number_of_users, -1)
    fold[people] = data.rng().permutation(len(people)) % FOLDS
    return fold


def _together(data: CrossFitData, parts: Mapping[str, Fitted], weights: np.ndarray, slope: float) -> Fitted:
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


def shares_of_best(margins: np.ndarray, people: np.ndarray, *, rng: np.random.Generator) -> np.ndarray:
    """Return the share of resamples of people in which each of P margins has the lowest loss, float64 [P].

    A resample gives each person a weight from an exponential distribution (Bayesian bootstrap, Rubin 1981).

    Args:
      margins: float [m, P], of the chosen response over the rejected one.
      people: int [m], person of each margin.
      rng: Generator of the weights.
    """
    person = np.unique(people, return_inverse=True)[1].reshape(-1)
    losses = np.zeros((int(person.max()) + 1, margins.shape[1]))
    np.add.at(losses, person, np.logaddexp(0.0, -margins.astype(np.float64)))
    best = np.argmin(rng.exponential(size=(RESAMPLES, len(losses))) @ losses, axis=1)
    return np.bincount(best, minlength=margins.shape[1]) / RESAMPLES


def stack(margins: np.ndarray, *, toward: np.ndarray, pull: float) -> tuple[np.ndarray, float]:
    """Return the weights of P margins, of sum 1, and the slope, 0.5 to 2, of their weighted mean.

    Args:
      margins: float [m, P], of the chosen response over the rejected one.
      toward: Weights of sum 1 that a part without information gets, float [P].
      pull: penalty m * loss + pull / 2 * |w - toward|^2, in choices.

    Returns:
      float64 [P] and the slope.
    """
    from scipy.optimize import minimize  # scipy takes long to import

    margins = np.asarray(margins, np.float64)

    def loss(weights: np.ndarray) -> tuple[float, np.ndarray]:
        total = margins @ weights
        value = np.mean(np.logaddexp(0.0, -total)) + pull / 2 * np.sum((weights - toward) ** 2) / len(margins)
        slopes = -1 / (1 + np.exp(total))
        return float(value), slopes @ margins / len(margins) + pull * (weights - toward) / len(margins)

    # Above 0: uninformative margins then still have a mean.
    bounds = [(1e-6, None)] * len(toward)
    found = minimize(loss, np.maximum(toward, 1e-6), jac=True, method="L-BFGS-B", bounds=bounds).x
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


METHOD = define(
    "stacked", StackedSettings, fit, adapt, score, empty_state, data=CrossFitData, pointwise=False
)
