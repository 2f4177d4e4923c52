"""Empirical Bayes: covariance, posterior and probabilities, against what was planted and against float64."""

from __future__ import annotations

from dataclasses import replace
from typing import Any

import jax
import numpy as np
import pytest
from scipy.optimize import minimize

from prb_jax.personal.few_shot import bayes
from prb_jax.personal.few_shot.bayes import METHOD, BayesSettings
from prb_jax.personal.few_shot.choices import Posts
from prb_jax.personal.few_shot.fitting import fit_factors, pairs_of
from prb_jax.personal.few_shot.protocol import Fitted, adapt_users, score_users
from prb_jax.personal.few_shot.registry import method_named
from prb_jax.personal.few_shot.taste_prior import taste_covariance
from tests.personal.few_shot.planted import World, choices_of, sigmoid, with_posts, world

KEY = jax.random.key(0)
WIDTH = 6


def tastes(people: int, *, size: float, seed: int = 0, rows: int = 4000, **options: int) -> World:
    """People whose tastes have two directions of their own."""
    rng = np.random.default_rng(seed)
    features = rng.normal(size=(rows, WIDTH)).astype(np.float32)
    axes = np.linalg.qr(rng.normal(size=(WIDTH, 2)))[0]
    weights = 0.5 * rng.normal(size=WIDTH) + size * rng.normal(size=(people, 2)) @ axes.T
    return world(features, weights @ features.T, seed=seed, **options)


def test_the_covariance_is_the_planted_one_without_the_noise_of_single_choices() -> None:
    size = 0.5
    made = tastes(1510, size=size, seen=1500, validation=5, choices=24)
    rng = np.random.default_rng(0)
    rng.normal(size=(4000, WIDTH))
    axes = np.linalg.qr(rng.normal(size=(WIDTH, 2)))[0]
    shared = 0.5 * rng.normal(size=WIDTH)
    whiten, variances, turned = taste_covariance(made.seen, made.seen.deltas @ shared, components=64)
    found = whiten @ turned @ np.diag(variances) @ turned.T @ whiten.T
    planted = size**2 * axes @ axes.T
    # Large tastes flatten the slopes that the estimate takes for constant, so that it is somewhat too small.
    assert np.abs(found - planted).max() < 0.25 * size**2
    assert np.sum(found * planted) / (np.linalg.norm(found) * np.linalg.norm(planted)) > 0.98
    assert (np.abs(variances[2:]) < 0.15 * variances[1]).all()


def test_strong_tastes_are_fitted_from_the_estimated_directions() -> None:
    """Nearly sure choices: the products say half of the size; fitted directions are nearer to the planted ones."""
    people, size = 60, 4.0
    made = tastes(people + 80, size=size, seen=people, validation=20, choices=200, new_choices=64, rows=8000)
    rng = np.random.default_rng(0)
    rng.normal(size=(8000, WIDTH))
    axes = np.linalg.qr(rng.normal(size=(WIDTH, 2)))[0]
    few = BayesSettings(l2=(1e-2,), rank=(2,), basis_l2=(1e-3,))
    fitted = METHOD.fit(made.seen, made.validation, settings=few, key=KEY)
    assert fitted.numbers["basis_l2"] > 0

    def outside(basis: np.ndarray) -> float:
        """The share of the covariance that lies outside the planted plane."""
        return float(1 - np.sum((axes.T @ basis) ** 2) / np.sum(basis**2))

    whiten, variances, turned = taste_covariance(
        made.seen, made.seen.deltas @ fitted.arrays["direction"], components=64
    )
    estimated = whiten @ turned[:, :2] * np.sqrt(variances[:2])
    assert np.linalg.norm(estimated) < 0.5 * size * np.sqrt(2)
    assert outside(fitted.arrays["basis"]) < 0.5 * outside(estimated)
    assert 0.5 * size < np.linalg.norm(fitted.arrays["basis"]) / np.sqrt(2) < 2 * size


def test_directions_and_tastes_are_those_of_the_lowest_loss_in_float64() -> None:
    made = tastes(30, size=2.0, seen=20, validation=5)
    rng, seen = np.random.default_rng(8), made.seen
    start = rng.normal(size=(WIDTH, 2)).astype(np.float32), rng.normal(size=(20, 2)).astype(np.float32)
    margins, l2 = rng.normal(size=len(seen)).astype(np.float32), 0.03
    deltas, person = seen.deltas.astype(np.float64), seen.person

    def loss(values: np.ndarray) -> tuple[float, np.ndarray]:
        f, t = values[: 2 * WIDTH].reshape(WIDTH, 2), values[2 * WIDTH :].reshape(20, 2)
        m = margins + np.sum((deltas @ f) * t[person], axis=1)
        slopes = -sigmoid(-m)[:, None] / len(m)
        to_tastes = np.zeros_like(t)
        np.add.at(to_tastes, person, slopes * (deltas @ f))
        gradients = deltas.T @ (slopes * t[person]) + l2 * f, to_tastes + t / len(m)
        size = np.logaddexp(0, -m).mean() + 0.5 * l2 * np.sum(f**2) + 0.5 * np.sum(t**2) / len(m)
        return float(size), np.concatenate([one.reshape(-1) for one in gradients])

    def flat(f: Any, t: Any) -> np.ndarray:
        return np.concatenate([np.asarray(f, np.float64).reshape(-1), np.asarray(t, np.float64).reshape(-1)])

    expected = minimize(loss, flat(*start), jac=True, method="BFGS", options={"gtol": 1e-9, "maxiter": 2000})
    ours = flat(*fit_factors(pairs_of(seen), margins, np.float32(l2), *start, steps=500))
    assert loss(ours)[0] < expected.fun + 1e-5
    assert np.linalg.norm(loss(ours)[1]) < 1e-4


def test_choices_that_share_a_text_tell_nothing_of_a_person() -> None:
    """Each person ranks three texts by chance, and says all three comparisons: no taste, though residuals agree."""
    rng = np.random.default_rng(1)
    people, features = 4000, rng.normal(size=(12000, WIDTH)).astype(np.float32)
    order = np.argsort(rng.random((people, 3)), axis=1) + 3 * np.arange(people)[:, None]
    chosen = np.concatenate([order[:, 0], order[:, 0], order[:, 1]]).astype(np.int32)
    rejected = np.concatenate([order[:, 1], order[:, 2], order[:, 2]]).astype(np.int32)
    users = np.tile(np.arange(people, dtype=np.int32), 3)
    other = (
        rng.permutation(12000).astype(np.int32)[: 2 * people].reshape(2, -1)
    )  # a fourth one, of other texts
    users = np.concatenate([users, np.arange(people, dtype=np.int32)])
    pairs = np.concatenate([chosen, other[0]]), np.concatenate([rejected, other[1]])
    choices = choices_of(features, *pairs, users=users)
    _, variances, _ = taste_covariance(choices, np.zeros(len(choices)), components=64)
    # As if the three comparisons were of different texts: a noise that no person has is taken for taste.
    rows = np.concatenate([chosen, other[0], rejected, other[1]])
    apart = replace(
        choices,
        features=features[rows],
        chosen=np.arange(4 * people, dtype=np.int32),
        rejected=np.arange(4 * people, 8 * people, dtype=np.int32),
    )
    _, mistaken, _ = taste_covariance(apart, np.zeros(len(apart)), components=64)
    assert mistaken.min() > 0.05
    assert np.abs(variances).max() < 0.5 * mistaken.min()


@pytest.mark.parametrize(("rest", "profiles"), [(0.0, False), (0.2, False), (0.2, True)])
def test_the_posterior_is_that_of_a_dense_float64_solve(rest: float, profiles: bool) -> None:
    rng = np.random.default_rng(2)
    made = tastes(30, size=1.0, seen=20, validation=5)
    # Of each profile one post is of the person's own words, one text is agreed with, one disagreed with, one is none.
    posts = rng.normal(size=(30, 4, WIDTH)).astype(np.float32)
    signs, there = (
        np.tile(np.array([0, 1, -1, 1], np.float32), (30, 1)),
        np.tile([True, True, True, False], (30, 1)),
    )
    means = {name: rng.normal(size=WIDTH).astype(np.float32) for name in ("word_mean", "vote_mean")}
    told = np.stack([2.0 * (posts[:, 0] - means["word_mean"]), *(
        0.5 * sign * (posts[:, place] - means["vote_mean"]) for place, sign in ((1, 1), (2, -1))
    )], axis=1)  # fmt: skip
    basis = (rng.normal(size=(WIDTH, 3)) * 0.7).astype(np.float32)
    direction = rng.normal(size=WIDTH).astype(np.float32)
    arrays = {"direction": direction, "basis": basis, "items": np.zeros(1, np.float32)}
    numbers = {"isotropic": rest, "word_gain": 2.0, "vote_gain": 0.5, "typical": 0.0}
    if profiles:
        made = with_posts(made, Posts(posts, there, signs))
        zeros = {"post_mean": np.zeros(WIDTH, np.float32), "profile": np.zeros((WIDTH, 3), np.float32)}
        arrays |= means | zeros
    fitted = Fitted(arrays, {name: np.float32(number) for name, number in numbers.items()}, BayesSettings())
    states = adapt_users(METHOD, fitted, made.new, made.contexts.first(16), key=KEY)
    scores = score_users(METHOD, fitted, states, made.new, made.queries)
    rows = made.contexts.first(16)
    for user, (places, mask) in enumerate(zip(rows.places, rows.mask, strict=True)):
        deltas = made.new.deltas[places[mask]]
        if profiles:
            deltas = np.concatenate([deltas, told[rows.users[user]]])
        both = np.concatenate([basis, np.sqrt(np.float32(rest)) * np.eye(WIDTH, dtype=np.float32)], axis=1)
        x, m = (product.astype(np.float64) for product in (deltas @ both, deltas @ direction))
        size = both.shape[1]

        def loss(a: np.ndarray, x: np.ndarray = x, m: np.ndarray = m) -> float:
            return float(np.logaddexp(0, -(m + x @ a)).sum() + 0.5 * a @ a)

        def slope(a: np.ndarray, x: np.ndarray = x, m: np.ndarray = m) -> np.ndarray:
            return a - x.T @ sigmoid(-(m + x @ a))

        mode = minimize(loss, np.zeros(size), jac=slope, method="BFGS", options={"gtol": 1e-10}).x
        for _ in range(5):  # to the last digits
            c = sigmoid(m + x @ mode) * sigmoid(-(m + x @ mode))
            mode = mode - np.linalg.solve(np.eye(size) + (x * c[:, None]).T @ x, slope(mode))
        c = sigmoid(m + x @ mode) * sigmoid(-(m + x @ mode))
        covariance = np.linalg.inv(np.eye(size) + (x * c[:, None]).T @ x)[:3, :3]
        np.testing.assert_allclose(states["weights"][user], mode[:3], atol=1e-6, rtol=1e-6)
        np.testing.assert_allclose(states["rest"][user], np.sqrt(rest) * mode[3:], atol=1e-6, rtol=1e-6)
        np.testing.assert_allclose(states["covariance"][user], covariance, atol=1e-6, rtol=1e-6)
        asked = made.queries.places[user][made.queries.mask[user]]
        tested = made.new.deltas[asked].astype(np.float64)
        taste = tested @ basis
        margin = tested @ direction + tested @ both @ mode
        variance = np.einsum("qj,jl,ql->q", taste, covariance, taste) + rest * np.sum(tested**2, axis=1)
        found = scores[user][made.queries.mask[user]]
        expected = margin / np.sqrt(1 + np.pi / 8 * variance)
        np.testing.assert_allclose(found[:, 0] - found[:, 1], expected, atol=1e-5, rtol=1e-5)


def test_probabilities_hold_and_few_choices_beat_the_pooled_model() -> None:
    made = tastes(700, size=1.0, seen=300, validation=100, choices=24, new_choices=64, seed=3)
    fitted = METHOD.fit(made.seen, made.validation, settings=BayesSettings(), key=KEY)
    assert fitted.numbers["scale"] > 0 or fitted.numbers["spread"] > 0
    shares = {k: made.share(METHOD, fitted, k, width=32) for k in (0, 2, 8, 32)}
    assert shares[0] + 0.01 < shares[2] < shares[8] < shares[32]
    assert shares[32] > 0.97
    pooled = method_named("pooled")
    plain = pooled.fit(made.seen, made.validation, settings=pooled.settings(), key=KEY)
    empty = adapt_users(pooled, plain, made.new, made.contexts.first(0, width=1), key=KEY)
    for shots in (0, 2, 8, 32):
        states = adapt_users(METHOD, fitted, made.new, made.contexts.first(shots, width=32), key=KEY)
        scores = score_users(METHOD, fitted, states, made.new, made.queries)
        # The truth is known: how far is the probability from it, in the mean of each tenth?
        asked = made.queries.places
        common = score_users(pooled, plain, empty, made.new, made.queries)
        users = np.broadcast_to(made.queries.users[:, None], asked.shape)
        truth = sigmoid(
            made.rewards[users, made.new.chosen[asked]] - made.rewards[users, made.new.rejected[asked]]
        )
        errors = []
        for margins in (scores[..., 0] - scores[..., 1], common[..., 0] - common[..., 1]):
            # A pair stands once in each direction, so that a label tells nothing.
            said, real = (
                np.concatenate([p[made.queries.mask], 1 - p[made.queries.mask]])
                for p in (sigmoid(margins), truth)
            )
            tenth = np.minimum((said * 10).astype(int), 9)
            errors.append(sum(abs(np.sum((said - real)[tenth == n])) for n in range(10)) / len(said))
        assert errors[0] < 0.02, (shots, errors)
        # pooled says less, and is as near as the sample lets it
        assert errors[0] < errors[1] + 0.01, (shots, errors)


def test_where_nothing_is_personal_it_is_pooled_bradley_terry() -> None:
    rng = np.random.default_rng(4)
    features = rng.normal(size=(2000, WIDTH)).astype(np.float32)
    shared = np.repeat((rng.normal(size=WIDTH) @ features.T)[None], 120, axis=0)
    made = world(features, shared, seen=80, validation=20)
    fitted = METHOD.fit(made.seen, made.validation, settings=BayesSettings(), key=KEY)
    for shots in (0, 8, 32):
        assert made.share(METHOD, fitted, shots, width=32) > 0.995


@pytest.mark.slow
def test_effects_of_texts_and_profiles_are_learned() -> None:
    rng = np.random.default_rng(5)
    settings = BayesSettings(
        l2=(1e-3, 1e-2), rank=(2,), scale=(1.0,), basis_l2=(1.0,), spread=(1.0,), words=(1.0,)
    )
    features = rng.normal(size=(300, WIDTH)).astype(np.float32)
    opinions = np.repeat(1.5 * rng.normal(size=(1, 300)), 300, axis=0)
    items = np.arange(300, dtype=np.int32)
    made = world(features, opinions, seen=240, validation=30, choices=100, new_choices=100, items=items)
    fitted = METHOD.fit(made.seen, made.validation, settings=settings, key=KEY)
    assert fitted.numbers["item_precision"] > 0
    assert made.share(METHOD, fitted, 0, width=32) > 0.97

    people = 400
    features = rng.normal(size=(3000, WIDTH)).astype(np.float32)
    posts = rng.normal(size=(people, 4, WIDTH)).astype(np.float32)
    weights = 2 * posts.mean(axis=1) * ([1.0] * 3 + [0.0] * (WIDTH - 3))
    made = world(features, weights @ features.T, seen=300, validation=50)
    made = with_posts(made, Posts(posts, np.ones((people, 4), bool)))
    fitted = METHOD.fit(made.seen, made.validation, settings=settings, key=KEY)
    assert fitted.numbers["profile_l2"] > 0
    assert made.share(METHOD, fitted, 0, width=32) > made.share_of_nobody(METHOD, fitted) + 0.1
    assert bayes.empty_state(fitted)["weights"].shape == (fitted.settings.directions,)


@pytest.mark.slow
def test_own_words_tell_a_taste_in_every_direction() -> None:
    rng = np.random.default_rng(6)
    people, width = 300, 24
    features = rng.normal(size=(3000, width)).astype(np.float32)
    weights = 0.5 * rng.normal(size=(people, width))
    words = (weights[:, None] + rng.normal(size=(people, 3, width))).astype(np.float32)
    made = world(features, weights @ features.T, seen=200, validation=50)
    made = with_posts(made, Posts(words, np.ones((people, 3), bool)))
    few = BayesSettings(l2=(1e-3,), rank=(2,), scale=(1.0,), profile_l2=(100.0,))
    fitted = METHOD.fit(made.seen, made.validation, settings=few, key=KEY)
    assert fitted.numbers["word_gain"] > 0
    assert made.share(METHOD, fitted, 0, width=8) > made.share_of_nobody(METHOD, fitted) + 0.1
    assert made.share(METHOD, fitted, 8, width=8) > made.share(METHOD, fitted, 0, width=8) + 0.01


def test_people_who_differ_over_texts_are_told_by_their_votes_whatever_the_features_are() -> None:
    rng = np.random.default_rng(7)
    people, texts = 360, 120
    features = rng.normal(size=(texts, WIDTH)).astype(np.float32)
    loadings, sides = rng.normal(size=(texts, 2)), rng.normal(size=(people, 2))
    opinions = 1.5 * sides @ loadings.T + rng.normal(size=texts)
    items = np.arange(texts, dtype=np.int32)
    made = world(features, opinions, seen=280, validation=40, choices=12, new_choices=24, items=items, seed=7)
    asked = np.stack([rng.permutation(texts)[:12] for _ in range(people)])
    agrees = rng.random(asked.shape) < sigmoid(np.take_along_axis(opinions, asked, axis=1))
    votes = Posts(
        features[asked], np.ones(asked.shape, bool), np.where(agrees, 1, -1).astype(np.float32), asked
    )
    made = with_posts(made, votes)
    few = BayesSettings(l2=(1e-2,), item_precision=(1.0,), rank=(2,), scale=(1.0,), profile_l2=(100.0,))
    fitted = METHOD.fit(made.seen, made.validation, settings=few, key=KEY)
    assert fitted.numbers["text_rank"] > 0
    assert fitted.numbers["vote_gain"] > 0
    shares = [made.share(METHOD, fitted, k, width=12) for k in (0, 12)]
    assert made.share_of_nobody(METHOD, fitted) + 0.05 < shares[0] < shares[1]
    found = fitted.arrays["texts"][:, :2]
    # The two directions are those that were planted, up to a turn.
    basis = [np.linalg.qr(one - one.mean(axis=0))[0] for one in (found, loadings)]
    assert np.linalg.svd(basis[0].T @ basis[1])[1].min() > 0.7
