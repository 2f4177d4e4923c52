"""How much of people's tastes their profiles tell: a regression of tastes that are known only from a few choices.

The tastes t_u of a person have the prior N(A z_u, S), with z_u the mean of the profile's posts and S a diagonal. The
choices give each person a normal likelihood of t_u. A and S are those of the highest density (EM): the posterior of the
tastes given the profile, then ridge regression of its means on the profiles, and the mean square of what this leaves. A
person's own prediction, and what it leaves, comes from the regression without the person.
"""

from __future__ import annotations

from collections.abc import Callable

import numpy as np

ROUNDS = 30
LEAST = 1e-3  # variance of a direction that a profile leaves, at least

Regression = Callable[[float], tuple[np.ndarray, np.ndarray]]


def regression_on_profiles(profiles: np.ndarray, means: np.ndarray, covariances: np.ndarray) -> Regression:
    """Return a function of the penalty, in people, that returns A and S, float64 [D, J] and [J]: in the units of the
    prior N(0, I), at most 1.

    Args:
      profiles: float [P, D], minus their mean.
      means: float [P, J], of the tastes of P people, given their choices under the prior N(0, I).
      covariances: float [P, J, J], of the same posterior.
    """
    people, width = means.shape
    profiles = np.asarray(profiles, np.float64)
    precisions = np.linalg.inv(np.asarray(covariances, np.float64))
    told = np.einsum("pij,pj->pi", precisions, means)
    likelihoods = precisions - np.eye(width)
    products = profiles @ profiles.T
    size, alone = np.trace(products) / people + 1e-12, 1 - 1 / max(people, 2)

    def fit(hat: np.ndarray) -> tuple[np.ndarray, np.ndarray]:
        """The posterior means, centred, and what is left by a linear prediction of them with this matrix [P, P]."""
        others = (alone - np.diagonal(hat))[:, None]
        prior, left, tastes = np.zeros_like(told), np.ones(width), np.zeros_like(told)
        for _ in range(ROUNDS):
            known = np.linalg.inv(likelihoods + np.diag(1 / left))
            tastes = np.einsum("pij,pj->pi", known, told + prior / left)
            tastes -= tastes.mean(axis=0)
            errors = (tastes - hat @ tastes) / others
            prior = tastes - errors
            open_ = np.diagonal(known, axis1=1, axis2=2)
            left = np.maximum(np.mean(errors**2 + open_, axis=0), LEAST)
        return tastes, left

    whole = np.minimum(fit(np.zeros_like(products))[1], 1)

    def of_penalty(l2: float) -> tuple[np.ndarray, np.ndarray]:
        # In the space of the people, who are fewer than the features or not many more.
        inverse = np.linalg.inv(products + l2 * size * np.eye(people))
        tastes, left = fit(products @ inverse)
        return profiles.T @ (inverse @ tastes), np.clip(left / whole, LEAST, 1)

    return of_penalty
