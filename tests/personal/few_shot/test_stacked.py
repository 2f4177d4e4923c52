"""Stacked empirical Bayes: weights against another solver, scores against their parts, and parts on planted people."""

from __future__ import annotations

from dataclasses import fields, replace
from pathlib import Path
from typing import Any

import jax
import numpy as np
import pytest
from scipy.optimize import minimize

from prb_jax.personal.few_shot import bayes
from prb_jax.personal.few_shot.choices import Posts
from prb_jax.personal.few_shot.protocol import adapt_users, repeated, score_users
from prb_jax.personal.few_shot.stacked import METHOD, PARTS, StackedSettings, part_of, stack
from prb_jax.personal.saved import Standard, read_fitted, save_fitted
from tests.personal.few_shot.planted import World, sigmoid, with_posts, world

KEY = jax.random.key(0)
FEW = StackedSettings(
    l2=(1e-2,), item_precision=(1.0,), rank=(2,), scale=(1.0,), basis_l2=(1.0,), spread=(0.5,), profile_l2=(10.0,),
    words=(1.0,), text_rank=(4,), text_scale=(1.0,), directions=2,
)  # fmt: skip
WIDTH = 12
KINDS = ("directions", "isotropic", "both", "nothing", "words", "texts")


def people(kind: str, *, seed: int, users: int = 420, seen: int = 160, validation: int = 60) -> World:
    """People whose tastes differ in the way that is named."""
    rng = np.random.default_rng(seed)
    features = rng.normal(size=(1500, WIDTH)).astype(np.float32)
    axes = np.linalg.qr(rng.normal(size=(WIDTH, 2)))[0]
    along, alike = rng.normal(size=(users, 2)) @ axes.T, rng.normal(size=(users, WIDTH))
    own = {
        "directions": along, "isotropic": 0.35 * alike, "both": 0.7 * along + 0.2 * alike, "nothing": 0 * alike,
        "words": 0.35 * alike, "texts": 0.3 * alike,
    }[kind]  # fmt: skip
    rewards, items = (0.4 * rng.normal(size=WIDTH) + own) @ features.T, np.arange(1500, dtype=np.int32)
    if kind == "texts":  # few, which many people judge, each with an effect of its own
        features, items = features[:200], items[:200]
        rewards = rewards[:, :200] + rng.normal(size=200)
    counts = {"seen": seen, "validation": validation, "choices": 16, "new_choices": 32}
    made = world(features, rewards, seed=seed, items=items, **counts)
    if kind != "words":
        return made
    words = 1.2 * alike[:, None] + rng.normal(size=(users, 3, WIDTH))
    return with_posts(made, Posts(words.astype(np.float32), np.ones((users, 3), bool)))


def test_weights_are_those_of_the_lowest_penalised_loss() -> None:
    rng = np.random.default_rng(0)
    n, pull = 4000, 25.0
    truth = rng.normal(0, 1.5, n)
    margins = truth[:, None] * [0.4, 1.0, -0.2] + rng.normal(0, [0.5, 0.7, 1.0], (n, 3))
    margins *= np.where(rng.random(n) < sigmoid(truth), 1, -1)[:, None]

    def loss(weights: np.ndarray) -> float:
        return -np.log(sigmoid(margins @ weights)).sum() + pull / 2 * np.sum((weights - 1 / 3) ** 2)

    best = minimize(loss, np.ones(3), method="SLSQP", bounds=[(0, None)] * 3, options={"ftol": 1e-14})
    weights, slope = stack(margins, pull=pull)
    assert slope == pytest.approx(best.x.sum(), abs=2e-3)
    assert weights == pytest.approx(best.x / best.x.sum(), abs=2e-3)
    assert weights[2] == pytest.approx(0, abs=1e-5)
    assert weights.sum() == pytest.approx(1)
    assert stack(margins, pull=1e9)[0] == pytest.approx(np.full(3, 1 / 3), abs=1e-5)
    assert stack(10 * margins, pull=1e-3)[1] == bayes.SLOPES[0]
    assert stack(margins / 10, pull=1e-3)[1] == bayes.SLOPES[1]


def test_scores_are_the_weighted_scores_of_the_parts_and_are_saved(tmp_path: Path) -> None:
    made = people("directions", seed=0, users=90, seen=60, validation=20)
    fitted = METHOD.fit(made.seen, made.validation, settings=FEW, key=KEY)
    weights = [float(fitted.numbers[f"{name}.weight"]) for name in PARTS]
    assert min(weights) >= 0
    assert sum(weights) == pytest.approx(1, abs=1e-6)
    of_parts = [float(fitted.numbers[f"{name}.validation_loss"]) for name in PARTS]
    # the best single part is tried too
    assert float(fitted.numbers["validation_loss"]) <= min(of_parts) + 1e-6
    assert part_of(fitted, "nobody").numbers["isotropic"] == 0
    assert part_of(fitted, "simple").numbers["scale"] == 0

    def scores(name: str, shots: int) -> np.ndarray:
        part, rows = part_of(fitted, name), made.contexts.first(shots, width=8)
        states = adapt_users(bayes.METHOD, part, made.new, rows, key=KEY)
        return score_users(bayes.METHOD, part, states, made.new, made.queries)

    # The whole part is the fit of the method itself.
    alone = bayes.METHOD.fit(made.seen, made.validation, settings=FEW, key=KEY)
    of_whole = part_of(fitted, "bayes")
    assert {name: float(value) for name, value in alone.numbers.items()} == pytest.approx(
        {name: float(of_whole.numbers[name]) for name in alone.numbers}
    )
    known = {"model": "x", "opened_with": {}, "width": WIDTH, "inputs": {"model": {}}}
    save_fitted(
        tmp_path / "fitted", METHOD, fitted,
        standard=Standard.none(WIDTH), items=np.zeros((1, 16), np.uint8), features=known,
    )  # fmt: skip
    again = read_fitted(tmp_path / "fitted").fitted
    for shots in (0, 8):
        parts = [weight * scores(name, shots) for name, weight in zip(PARTS, weights, strict=True)]
        expected = float(fitted.numbers["slope"]) * np.sum(parts, axis=0)
        rows = made.contexts.first(shots, width=8)
        for one in (fitted, again):
            states = adapt_users(METHOD, one, made.new, rows, key=KEY)
            found = score_users(METHOD, one, states, made.new, made.queries)
            np.testing.assert_allclose(found, expected, atol=1e-5, rtol=1e-5)
        if not shots:
            nobody = repeated(METHOD.empty_state(fitted), len(made.queries.users))
            found = score_users(METHOD, fitted, nobody, made.new, made.queries)
            np.testing.assert_allclose(found, expected, atol=1e-5, rtol=1e-5)
    names = {one.name for one in fields(StackedSettings)} - {one.name for one in fields(bayes.BayesSettings)}
    assert names == {"pull"}


@pytest.mark.slow
def test_the_best_part_alone_is_chosen_where_a_mean_is_worse() -> None:
    made = people("directions", seed=1)
    fitted = METHOD.fit(made.seen, made.validation, settings=replace(FEW, pull=1e9), key=KEY)  # equal weights
    weights = {name: float(fitted.numbers[f"{name}.weight"]) for name in PARTS}
    assert weights == {"nobody": 0, "simple": 0, "bayes": 1}
    assert fitted.numbers["slope"] == 1
    assert fitted.numbers["validation_loss"] == pytest.approx(
        float(fitted.numbers["bayes.validation_loss"]), abs=1e-6
    )


@pytest.mark.slow
@pytest.mark.parametrize("kind", KINDS)
def test_a_stack_is_not_below_any_of_its_parts(kind: str, record_property: Any) -> None:
    """In the expected accuracy on new people, in the mean of five seeds, at each number of choices."""
    settings = StackedSettings(
        l2=(1e-3, 1e-2), item_precision=(1.0,), rank=(2, 4), scale=(1.0, 3.0), basis_l2=(1.0,), spread=(0.3, 1.0),
        profile_l2=(10.0,), words=(1.0, 3.0), text_rank=(4,), text_scale=(1.0,),
    )  # fmt: skip
    found = []
    for seed in range(10, 15):
        made = people(kind, seed=seed)
        fitted = METHOD.fit(made.seen, made.validation, settings=settings, key=KEY)
        most = sigmoid(np.abs(made.query_margins())).mean()
        for shots in (0, 2, 8):
            parts = [made.share(bayes.METHOD, part_of(fitted, name), shots, width=8) for name in PARTS]
            found.append(most * np.array([*parts, made.share(METHOD, fitted, shots, width=8)]))
    *parts, ours = np.reshape(found, (5, 3, len(PARTS) + 1)).mean(axis=0).T
    record_property("accuracy", np.round([*parts, ours], 4).tolist())
    assert (ours - np.max(parts, axis=0)).min() > -0.003, (parts, ours)
