"""How much profiles tell of tastes, against what was planted."""

import numpy as np
import pytest

from prb_jax.personal.few_shot.taste_profile import regression_on_profiles


@pytest.mark.parametrize("surprise", [0.05, 0.3, 1.0])
def test_the_share_that_profiles_leave_is_the_planted_one(surprise: float) -> None:
    """Tastes of which profiles tell all but ``surprise`` in one direction, and nothing in another, seen with noise."""
    rng = np.random.default_rng(0)
    people, width = 1500, 5
    profiles = rng.normal(size=(people, width))
    profiles -= profiles.mean(axis=0)
    true = np.zeros((width, 2))
    true[0, 0] = np.sqrt(1 - surprise)
    own = rng.normal(size=(people, 2)) * np.sqrt([surprise, 1])
    tastes = profiles @ true + own
    roots = rng.normal(size=(people, 2, 2))
    likelihoods = roots @ roots.transpose(0, 2, 1)  # precisions, some of them small
    noise = np.einsum("pij,pj->pi", roots, rng.normal(size=(people, 2)))
    told = np.einsum("pij,pj->pi", likelihoods, tastes) + noise
    covariances = np.linalg.inv(likelihoods + np.eye(2))
    means = np.einsum("pij,pj->pi", covariances, told)
    weights, left = regression_on_profiles(profiles, means, covariances)(0.1)
    assert left[0] == pytest.approx(surprise, abs=0.08)
    assert left[1] == pytest.approx(1, abs=0.08)
    assert np.abs(weights - true).max() < 0.12
    # Profiles without information leave everything.
    _, left = regression_on_profiles(rng.permutation(profiles), means, covariances)(0.1)
    assert left.min() > 0.95


def test_few_people_with_long_profiles_are_not_taken_for_told() -> None:
    """A regression in more features than people fits them all, and tells nothing of others."""
    rng = np.random.default_rng(1)
    profiles, tastes = rng.normal(size=(20, 200)), rng.normal(size=(20, 3))
    covariances = np.tile(0.1 * np.eye(3), (20, 1, 1))
    profiles -= profiles.mean(axis=0)
    for penalty in (0.01, 1.0, 100.0):
        weights, left = regression_on_profiles(profiles, tastes, covariances)(penalty)
        assert left.min() > 0.8
    assert np.abs(weights).max() < 0.01  # of the strongest
