"""Empirical Bayes: covariance, posterior and probabilities, against what was planted and against float64."""

from __future__ import annotations

from dataclasses import replace
from typing import Any

import jax
import numpy as np
import pytest
from scipy.optimize import approx_fprime, minimize

from prb_jax.personal.few_shot import bayes, taste_posterior
from prb_jax.personal.few_shot.bayes import METHOD, BayesSettings
from prb_jax.personal.few_shot.choices import Posts
from prb_jax.personal.few_shot.fitting import fit_factors
from prb_jax.personal.few_shot.protocol import Fitted, Method, adapt_users, score_users
from prb_jax.personal.few_shot.registry import method_named
from prb_jax.personal.few_shot.taste_prior import taste_covariance
from tests.personal.few_shot.planted import World, choices_of, sigmoid, with_posts, world

KEY = jax.random.key(0)
WIDTH = 6


def tastes(
    people: int, *, size: float, seed: int = 0, rows: int = 4000, **options: int
) -> tuple[World, np.ndarray, np.ndarray]:
    """People whose tastes have two directions of their own, [D, 2], and the taste that all share, [D]."""
    rng = np.random.default_rng(seed)
    features = rng.normal(size=(rows, WIDTH)).astype(np.float32)
    axes = np.linalg.qr(rng.normal(size=(WIDTH, 2)))[0]
    shared = 0.5 * rng.normal(size=WIDTH)
    weights = shared + size * rng.normal(size=(people, 2)) @ axes.T
    return world(features, weights @ features.T, seed=seed, **options), axes, shared


def test_the_covariance_is_the_planted_one_without_the_noise_of_single_choices() -> None:
    size = 0.5
    made, axes, shared = tastes(1510, size=size, seen=1500, validation=5, choices=24)
    whiten, variances, turned = taste_covariance(made.seen, made.seen.deltas @ shared, components=64)
    estimated = whiten @ turned @ np.diag(variances) @ turned.T @ whiten.T
    planted = size**2 * axes @ axes.T
    # Large tastes flatten the slopes that the estimate takes for constant, so that it is somewhat too small.
    assert np.abs(estimated - planted).max() < 0.25 * size**2
    assert np.sum(estimated * planted) / (np.linalg.norm(estimated) * np.linalg.norm(planted)) > 0.98
    assert (np.abs(variances[2:]) < 0.15 * variances[1]).all()


@pytest.mark.slow
def test_strong_tastes_are_fitted_from_the_estimated_directions() -> None:
    """Nearly sure choices: the products say half of the size; fitted directions are nearer to the planted ones."""
    people, size = 60, 4.0
    made, axes, _ = tastes(
        people + 80, size=size, seen=people, validation=20, choices=200, new_choices=64, rows=8000
    )
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
    seen = tastes(30, size=2.0, seen=20, validation=5)[0].seen
    rng, l2 = np.random.default_rng(8), 0.03
    start = rng.normal(size=(WIDTH, 2)).astype(np.float32), rng.normal(size=(20, 2)).astype(np.float32)
    margins = rng.normal(size=len(seen)).astype(np.float32)

    def loss(values: np.ndarray) -> float:
        f, t = values[: 2 * WIDTH].reshape(WIDTH, 2), values[2 * WIDTH :].reshape(20, 2)
        m = margins + np.sum((seen.deltas.astype(np.float64) @ f) * t[seen.person], axis=1)
        return np.logaddexp(0, -m).mean() + 0.5 * l2 * np.sum(f**2) + 0.5 * np.sum(t**2) / len(m)

    def flat(parts: Any) -> np.ndarray:
        return np.concatenate([np.asarray(part, np.float64).reshape(-1) for part in parts])

    ours = flat(fit_factors(seen, margins, np.float32(l2), *start, steps=500))
    best = minimize(loss, flat(start), method="BFGS", options={"maxiter": 2000})
    assert loss(ours) < best.fun + 1e-5
    assert np.linalg.norm(approx_fprime(ours, loss)) < 1e-4


def test_choices_that_share_a_text_tell_nothing_of_a_person() -> None:
    """Each person ranks three texts by chance, and says all three comparisons: no taste, though residuals agree."""
    rng = np.random.default_rng(1)
    people, features = 4000, rng.normal(size=(12000, WIDTH)).astype(np.float32)
    order = np.argsort(rng.random((people, 3)), axis=1) + 3 * np.arange(people)[:, None]
    chosen = np.concatenate([order[:, 0], order[:, 0], order[:, 1]]).astype(np.int32)
    rejected = np.concatenate([order[:, 1], order[:, 2], order[:, 2]]).astype(np.int32)
    fourth = rng.permutation(12000).astype(np.int32)[: 2 * people].reshape(2, -1)  # of other texts
    pairs = np.concatenate([chosen, fourth[0]]), np.concatenate([rejected, fourth[1]])
    choices = choices_of(features, *pairs, users=np.tile(np.arange(people, dtype=np.int32), 4))
    _, variances, _ = taste_covariance(choices, np.zeros(len(choices)), components=64)
    # As if the three comparisons were of different texts: a noise that no person has is taken for taste.
    first, second = np.arange(8 * people, dtype=np.int32).reshape(2, -1)
    apart = replace(choices, features=features[np.concatenate(pairs)], chosen=first, rejected=second)
    _, mistaken, _ = taste_covariance(apart, np.zeros(len(apart)), components=64)
    assert mistaken.min() > 0.05
    assert np.abs(variances).max() < 0.5 * mistaken.min()


@pytest.mark.parametrize(("rest", "profiles"), [(0.0, False), (0.2, False), (0.2, True)])
def test_the_posterior_is_that_of_a_dense_float64_solve(rest: float, profiles: bool) -> None:
    rng = np.random.default_rng(2)
    made, _, _ = tastes(30, size=1.0, seen=20, validation=5)
    # Of each profile one post is of the person's own words, one text is agreed with, one disagreed with, one is none.
    posts = rng.normal(size=(30, 4, WIDTH)).astype(np.float32)
    signs = np.tile(np.array([0, 1, -1, 1], np.float32), (30, 1))
    there = np.tile([True, True, True, False], (30, 1))
    word_mean, vote_mean = rng.normal(size=(2, WIDTH)).astype(np.float32)
    told = np.stack(
        [2 * (posts[:, 0] - word_mean), 0.5 * (posts[:, 1] - vote_mean), -0.5 * (posts[:, 2] - vote_mean)], 1
    )
    basis = (rng.normal(size=(WIDTH, 3)) * 0.7).astype(np.float32)
    direction = rng.normal(size=WIDTH).astype(np.float32)
    moment = (made.seen.deltas.T @ made.seen.deltas / len(made.seen)).astype(np.float32)
    arrays = {"direction": direction, "basis": basis, "items": np.zeros(1, np.float32), "moment": moment}
    numbers = {"isotropic": rest, "word_gain": 2.0, "vote_gain": 0.5, "typical": 0.0}
    of_profile, left, post_mean = np.zeros((WIDTH, 3)), np.ones(3), np.zeros(WIDTH)
    if profiles:
        made = with_posts(made, Posts(posts, there, signs))
        of_profile, left, post_mean = (
            rng.normal(size=(WIDTH, 3)),
            np.array([0.1, 1, 0.5]),
            rng.normal(size=WIDTH),
        )
        told_of = {"profile": of_profile, "left": left, "post_mean": post_mean}
        arrays |= {"word_mean": word_mean, "vote_mean": vote_mean}
        arrays |= {name: values.astype(np.float32) for name, values in told_of.items()}
    means = (np.stack([posts[:, 0], posts[:, 1], -posts[:, 2]]).mean(axis=0) - post_mean) @ of_profile
    fitted = Fitted(arrays, {name: np.float32(number) for name, number in numbers.items()}, BayesSettings())
    rows = made.contexts.first(16)
    states = adapt_users(METHOD, fitted, made.new, rows, key=KEY)
    scores = score_users(METHOD, fitted, states, made.new, made.queries)
    spread = np.append(np.sqrt(left), np.full(WIDTH, np.sqrt(rest)))
    both = np.concatenate([basis, np.eye(WIDTH)], axis=1) * spread
    for user, (places, mask) in enumerate(zip(rows.places, rows.mask, strict=True)):
        deltas = made.new.deltas[places[mask]]
        if profiles:
            deltas = np.concatenate([deltas, told[rows.users[user]]])
        known = direction + basis @ means[rows.users[user]]
        x, m = (deltas.astype(np.float64) @ matrix for matrix in (both, known))
        mode, precision = np.zeros(both.shape[1]), np.eye(both.shape[1])
        for _ in range(100):  # half steps of Newton's method, to the last digits
            slopes = sigmoid(-(m + x @ mode))
            precision = np.eye(len(mode)) + (x * (slopes * (1 - slopes))[:, None]).T @ x
            mode = mode - 0.5 * np.linalg.solve(precision, mode - x.T @ slopes)
        posterior = np.linalg.inv(precision) * spread[:, None] * spread
        covariance = posterior[:3, :3]
        of_rest = np.trace(posterior[3:, 3:] @ moment) / np.trace(moment)
        # A margin in float32 is right to its own size's rounding, in an order of sums that processors choose.
        near = 2 * np.finfo(np.float32).eps * max(1, np.abs(m).max())
        modes = np.append(means[rows.users[user]], np.zeros(WIDTH)) + spread * mode
        np.testing.assert_allclose(states["weights"][user], modes[:3], atol=near)
        np.testing.assert_allclose(states["rest"][user], modes[3:], atol=near)
        np.testing.assert_allclose(states["covariance"][user], covariance, atol=near)
        np.testing.assert_allclose(states["rest_variance"][user], of_rest, atol=near)
        asked = made.queries.places[user][made.queries.mask[user]]
        tested = made.new.deltas[asked].astype(np.float64)
        taste = tested @ basis
        margin = tested @ known + tested @ both @ mode
        variance = np.einsum("qj,jl,ql->q", taste, covariance, taste) + of_rest * np.sum(tested**2, axis=1)
        chosen, rejected = scores[user][made.queries.mask[user]].T
        expected = margin / np.sqrt(1 + np.pi / 8 * variance)
        np.testing.assert_allclose(chosen - rejected, expected, atol=1e-5, rtol=1e-5)


def test_probabilities_hold_and_few_choices_beat_the_pooled_model() -> None:
    made, _, _ = tastes(700, size=1.0, seen=300, validation=100, choices=24, new_choices=64, seed=3)
    fitted = METHOD.fit(made.seen, made.validation, settings=BayesSettings(), key=KEY)
    assert fitted.numbers["scale"] > 0 or fitted.numbers["spread"] > 0
    shares = {k: made.share(METHOD, fitted, k, width=32) for k in (0, 2, 8, 32)}
    assert shares[0] + 0.01 < shares[2] < shares[8] < shares[32]
    assert shares[32] > 0.97
    pooled = method_named("pooled")
    plain = pooled.fit(made.seen, made.validation, settings=pooled.settings(), key=KEY)
    asked = made.queries.mask
    truth = sigmoid(made.query_margins())

    def error(method: Method, fitted: Fitted, shots: int) -> float:
        """How far the probabilities are from the truth, in the mean of each tenth."""
        rows = made.contexts.first(shots, width=32)
        states = adapt_users(method, fitted, made.new, rows, key=KEY)
        scores = score_users(method, fitted, states, made.new, made.queries)[asked]
        # A pair stands once in each direction, so that a label tells nothing.
        said, real = (np.concatenate([p, 1 - p]) for p in (sigmoid(scores[:, 0] - scores[:, 1]), truth))
        tenth = np.minimum((said * 10).astype(int), 9)
        return sum(abs(np.sum((said - real)[tenth == n])) for n in range(10)) / len(said)

    common = error(pooled, plain, 0)
    for shots in (0, 2, 8, 32):
        # pooled says less, and is as near as the sample lets it
        assert error(METHOD, fitted, shots) < min(0.02, common + 0.01), shots


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
    one = {"scale": (1.0,), "basis_l2": (1.0,), "spread": (1.0,), "words": (1.0,)}
    settings = BayesSettings(l2=(1e-3, 1e-2), rank=(2,), **one)
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
    assert taste_posterior.empty_state(fitted)["weights"].shape == (fitted.settings.directions,)


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


@pytest.mark.slow
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
    signs = np.where(agrees, 1, -1).astype(np.float32)
    made = with_posts(made, Posts(features[asked], np.ones(asked.shape, bool), signs, asked))
    few = BayesSettings(l2=(1e-2,), item_precision=(1.0,), rank=(2,), scale=(1.0,), profile_l2=(100.0,))
    fitted = METHOD.fit(made.seen, made.validation, settings=few, key=KEY)
    assert fitted.numbers["text_rank"] > 0
    assert fitted.numbers["vote_gain"] > 0
    shares = [made.share(METHOD, fitted, k, width=12) for k in (0, 12)]
    assert made.share_of_nobody(METHOD, fitted) + 0.05 < shares[0] < shares[1]
    # The two directions are those that were planted, up to a turn.
    ours, planted = (
        np.linalg.qr(axes - axes.mean(axis=0))[0] for axes in (fitted.arrays["texts"][:, :2], loadings)
    )
    assert np.linalg.svd(ours.T @ planted)[1].min() > 0.7


def test_a_slope_makes_margins_that_are_too_small_log_odds() -> None:
    rng = np.random.default_rng(1)
    truth = rng.normal(0, 1.5, 20_000)
    chosen = np.where(rng.random(20_000) < sigmoid(truth), 1, -1)
    assert bayes._best_slope(truth * chosen / 1.3) == pytest.approx(1.3, abs=0.06)
    assert bayes._best_slope(truth * chosen * 1.5) == pytest.approx(1 / 1.5, abs=0.06)
    fitted = Fitted({}, {"slope": np.float32(1.25)}, BayesSettings())
    assert taste_posterior.slope_of(fitted) == 1.25
    assert taste_posterior.slope_of(Fitted({}, {}, BayesSettings())) == 1  # a prior of an earlier version
