"""Stacked empirical Bayes: weights against another solver, scores against their parts, and parts on planted people."""

from __future__ import annotations

from collections import Counter
from collections.abc import Callable
from dataclasses import fields
from functools import partial
from pathlib import Path
from typing import Any

import jax
import numpy as np
import pytest
from scipy.optimize import minimize

from prb_jax.personal.few_shot import bayes
from prb_jax.personal.few_shot.choices import Posts
from prb_jax.personal.few_shot.protocol import Fitted, Method, adapt_users, repeated, score_users
from prb_jax.personal.few_shot.stacked import METHOD, PARTS, StackedSettings, part_of, shares_of_best, stack
from prb_jax.personal.saved import Standard, read_fitted, save_fitted
from tests.personal.few_shot.planted import World, sigmoid, with_posts, world

KEY = jax.random.key(0)
FEW = StackedSettings(
    l2=(1e-2,), item_precision=(1.0,), rank=(2,), scale=(1.0,), basis_l2=(1.0,), spread=(0.5,), profile_l2=(10.0,),
    words=(1.0,), text_rank=(4,), text_scale=(1.0,), directions=2,
)  # fmt: skip
WIDTH = 12
KINDS = ("directions", "isotropic", "both", "nothing", "words", "texts", "search")


def people(kind: str, *, seed: int, users: int = 420, seen: int = 160, validation: int = 60) -> World:
    """People whose tastes differ in the way that is named."""
    rng = np.random.default_rng(seed)
    if kind == "search":
        return people_alike(rng, seed=seed)
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


def people_alike(rng: np.random.Generator, *, seed: int) -> World:
    """People who do not differ: few for validation, many features, texts with effects, and a profile of votes."""
    users, texts, width = 640, 300, 48
    features = rng.normal(size=(texts, width)).astype(np.float32)
    alike = 0.15 * rng.normal(size=width) @ features.T + rng.normal(size=texts)
    counts = {"seen": 300, "validation": 40, "choices": 8, "new_choices": 16}
    items = np.arange(texts, dtype=np.int32)
    made = world(features, np.tile(alike, (users, 1)), seed=seed, items=items, **counts)
    voted = np.stack([rng.permutation(texts)[:8] for _ in range(users)])
    signs = np.where(rng.random(voted.shape) < sigmoid(alike[voted]), 1, -1).astype(np.float32)
    return with_posts(made, Posts(features[voted], np.ones(voted.shape, bool), signs, voted))


def test_weights_are_those_of_the_lowest_penalised_loss() -> None:
    rng = np.random.default_rng(0)
    n, pull, toward = 4000, 25.0, np.array([0.2, 0.5, 0.3])
    truth = rng.normal(0, 1.5, n)
    margins = truth[:, None] * [0.4, 1.0, -0.2] + rng.normal(0, [0.5, 0.7, 1.0], (n, 3))
    margins *= np.where(rng.random(n) < sigmoid(truth), 1, -1)[:, None]

    def loss(weights: np.ndarray) -> float:
        return -np.log(sigmoid(margins @ weights)).sum() + pull / 2 * np.sum((weights - toward) ** 2)

    best = minimize(loss, np.ones(3), method="SLSQP", bounds=[(0, None)] * 3, options={"ftol": 1e-14})
    weights, slope = stack(margins, toward=toward, pull=pull)
    assert slope == pytest.approx(best.x.sum(), abs=2e-3)
    assert weights == pytest.approx(best.x / best.x.sum(), abs=2e-3)
    assert weights[2] == pytest.approx(0, abs=1e-5)
    assert weights.sum() == pytest.approx(1)
    assert stack(margins, toward=toward, pull=1e9)[0] == pytest.approx(toward, abs=1e-5)
    assert stack(10 * margins, toward=toward, pull=1e-3)[1] == bayes.SLOPES[0]
    assert stack(margins / 10, toward=toward, pull=1e-3)[1] == bayes.SLOPES[1]


def test_a_clearly_best_part_has_all_of_the_pull_and_equal_ones_share_it() -> None:
    rng = np.random.default_rng(1)
    people = np.repeat(np.arange(80), 6)
    truth = rng.normal(0, 1.5, len(people))
    chosen = np.where(rng.random(len(people)) < sigmoid(truth), 1, -1)
    poor, one, other = (truth + size * rng.normal(size=len(people)) for size in (4.0, 0.5, 0.5))
    shares = shares_of_best(chosen[:, None] * np.stack([poor, one, other], axis=1), people, rng=rng)
    assert shares.sum() == pytest.approx(1)
    assert shares[0] == 0
    assert shares[1:].min() > 0.05
    # A lower loss that comes from one person is no clear advantage.
    lucky = np.where(people == 7, 3.0, -0.01)
    assert np.logaddexp(0, -lucky).mean() < np.log(2)
    assert 0.3 < shares_of_best(np.stack([0 * lucky, lucky], axis=1), people, rng=rng)[1] < 0.8


PLANTED = {
    "nothing personal, equal parts": (0.0, (0.0, 0.0), (0.1, 0.12, 0.15)),
    "nothing personal, noisy parts": (0.0, (0.0, 0.0), (0.1, 0.2, 0.4)),
    "little taste": (0.4, (0.3, 0.35), (0.1, 0.25, 0.3)),
    "nearly equal parts": (0.3, (0.15, 0.25), (0.1, 0.15, 0.33)),
    "bayes far better": (1.2, (0.1, 0.8), (0.1, 0.15, 0.4)),
    "simple better": (0.8, (0.5, 0.3), (0.1, 0.3, 0.6)),
    "both personal parts": (0.8, (0.5, 0.5), (0.1, 0.6, 0.6)),
}
"""The standard deviation of tastes in a margin, the share of it that the two personal parts have, and the errors of the
three parts."""


@pytest.mark.parametrize("kind", PLANTED)
def test_weights_of_few_people_are_not_worse_than_the_best_part(kind: str, record_property: Any) -> None:
    """Expected accuracy and log-loss of the weights from 60 people with 8 choices, minus the best part, whose
    probabilities are calibrated: the mean over 40 validation parts."""
    taste, shares, errors = PLANTED[kind]

    def draw(rng: np.random.Generator, people: int, each: int) -> tuple[np.ndarray, np.ndarray, np.ndarray]:
        person, n = np.repeat(np.arange(people), each), people * each
        common, own, shared = rng.normal(size=n), taste * rng.normal(size=n), 0.15 * rng.normal(size=n)
        noise = np.sqrt(0.5) * (rng.normal(size=(n, 3)) + rng.normal(size=(people, 3))[person])
        parts = (common + shared)[:, None] + own[:, None] * [0, *shares] + noise * errors
        return parts, common + own, person

    parts, truth, _ = draw(np.random.default_rng(0), 20_000, 1)
    sure = sigmoid(truth)

    def figures(margins: np.ndarray) -> np.ndarray:
        right = np.where(margins > 0, sure, 1 - sure)
        loss = sure * np.logaddexp(0, -margins) + (1 - sure) * np.logaddexp(0, margins)
        return np.array([right.mean(), loss.mean()])

    # Calibrated: each part has the slope of its lowest loss.
    tried = np.linspace(0.3, 3, 55)
    slopes = np.array([tried[np.argmin([figures(slope * one)[1] for slope in tried])] for one in parts.T])
    of_parts = np.array([figures(one) for one in (slopes * parts).T])
    best, found = np.array([of_parts[:, 0].max(), of_parts[:, 1].min()]), []
    for seed in range(40):
        rng = np.random.default_rng([1, seed])
        few, margins, person = draw(rng, 60, 8)
        chosen = np.where(rng.random(len(margins)) < sigmoid(margins), 1, -1)[:, None]
        few = slopes * few * chosen
        weights, slope = stack(few, toward=shares_of_best(few, person, rng=rng), pull=StackedSettings().pull)
        found.append(figures(slope * (slopes * parts) @ weights) - best)
    accuracy, loss = np.mean(found, axis=0)
    record_property("minus the best part", [round(float(accuracy), 5), round(float(loss), 5)])
    assert accuracy > -0.001
    assert loss < 0.001


def test_scores_are_the_weighted_scores_of_the_parts_and_are_saved(tmp_path: Path) -> None:
    made = people("directions", seed=0, users=90, seen=60, validation=20)
    fitted = METHOD.fit(made.seen, made.validation, settings=FEW, key=KEY)
    weights = [float(fitted.numbers[f"{name}.weight"]) for name in PARTS]
    assert min(weights) >= 0
    assert sum(weights) == pytest.approx(1, abs=1e-6)
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


def test_bayes_and_stacked_of_a_split_make_each_fit_once(monkeypatch: pytest.MonkeyPatch) -> None:
    made, fits = people("words", seed=0, users=90, seen=60, validation=20), list[tuple[str, int]]()
    for name in ("with_items", "with_tastes", "with_fitted_basis", "with_profiles", "with_text_tastes"):

        def counted(name: str, whole: Callable[..., Any], data: Any, judged: Any, base: Fitted) -> Any:
            fits.append((name, id(base)))
            return whole(data, judged, base)

        monkeypatch.setattr(bayes, name, partial(counted, name, getattr(bayes, name)))
    settings = {one.name: getattr(FEW, one.name) for one in fields(bayes.BayesSettings)}

    def fit(method: Method, settings: Any, shared: dict[Any, Any]) -> Fitted:
        return method.fit(made.seen, made.validation, settings=settings, key=KEY, shared=shared)

    both: dict[Any, Any] = {}
    together = [fit(bayes.METHOD, bayes.BayesSettings(**settings), both), fit(METHOD, FEW, both)]
    assert set(Counter(fits).values()) == {1}  # by each step from each base, whoever chooses
    assert Counter(name for name, _ in fits)["with_tastes"] == 1
    expected = [fit(bayes.METHOD, bayes.BayesSettings(**settings), {}), fit(METHOD, FEW, {})]
    for ours, alone in zip(together, expected, strict=True):
        assert ours.numbers == alone.numbers
        assert ours.arrays.keys() == alone.arrays.keys()
        assert all(np.array_equal(ours.arrays[name], alone.arrays[name]) for name in ours.arrays)


@pytest.mark.slow
@pytest.mark.parametrize("kind", KINDS)
def test_a_stack_is_not_below_any_of_its_parts(kind: str, record_property: Any) -> None:
    """In the expected accuracy on new people, in the mean of five seeds, at each number of choices.

    Of "search" the validation part chooses among the most fits, and none of them is worth anything.
    """
    settings = StackedSettings()
    if kind != "search":
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
    jax.clear_caches()  # the programs of all kinds would exhaust the memory maps that a process may have
    *parts, ours = np.reshape(found, (5, 3, len(PARTS) + 1)).mean(axis=0).T
    record_property("accuracy", np.round([*parts, ours], 4).tolist())
    assert (ours - np.max(parts, axis=0)).min() > -0.003, (parts, ours)
