"""Every method recovers a planted model of its own class: at least 0.99 of the Bayes accuracy for new people."""

from collections.abc import Callable
from dataclasses import dataclass, field, replace
from functools import cache
from typing import Any

import jax
import numpy as np
import pytest

from prb_jax.personal.few_shot.choices import Posts
from prb_jax.personal.few_shot.protocol import (
    FewShotSettings,
    adapt_users,
    bytes_per_user,
    score_users,
    shuffled_users,
    swapped_labels,
)
from prb_jax.personal.few_shot.registry import METHODS, method_named
from tests.personal.few_shot.planted import LinearBackbone, World, with_posts, with_tables, world
from tests.sweeps import sweep

USERS, ROWS, WIDTH = 100, 1000, 4
RNG = np.random.default_rng(0)
FEATURES = RNG.normal(size=(ROWS, WIDTH)).astype(np.float32)
SHARED = RNG.normal(size=WIDTH)
KEY = jax.random.key(0)


@cache
def everybody() -> World:
    return world(FEATURES, np.repeat((SHARED @ FEATURES.T)[None], USERS, axis=0))


@cache
def own_directions() -> World:
    offsets = np.random.default_rng(1).normal(size=(USERS, WIDTH)) * 2
    return world(FEATURES, (SHARED + offsets) @ FEATURES.T, new_choices=400)


@cache
def low_rank() -> World:
    rng = np.random.default_rng(2)
    weights = rng.normal(size=(USERS, 2)) + np.array([1, 0])
    return world(
        FEATURES, weights @ (rng.normal(size=(2, WIDTH)) * 2) @ FEATURES.T, pool=400, new_choices=200
    )


@cache
def two_tastes() -> World:
    rng = np.random.default_rng(3)
    axis = rng.normal(size=WIDTH)
    axis *= 2.5 / np.linalg.norm(axis)
    tastes = 0.7 * SHARED + rng.choice([-1, 1], (USERS, 1)) * axis
    return world(FEATURES, tastes @ FEATURES.T, choices=96, new_choices=128)


@cache
def ideal_points() -> World:
    rng = np.random.default_rng(4)
    points = rng.dirichlet([0.5, 0.5], size=USERS) @ rng.normal(size=(2, WIDTH))
    unit, points = (rows / np.linalg.norm(rows, axis=1, keepdims=True) for rows in (FEATURES, points))
    return world(FEATURES, 6 * points @ unit.T, choices=96, new_choices=128)


@cache
def sparse_directions() -> World:
    rng = np.random.default_rng(5)
    features = np.abs(rng.normal(size=(ROWS, WIDTH))) * (rng.random((ROWS, WIDTH)) < 0.4)
    tastes = rng.normal(size=(USERS, WIDTH)) * 2 + SHARED
    return world(features.astype(np.float32), tastes @ features.T, new_choices=400)


@cache
def posts_that_tell() -> World:
    """A response is liked that resembles, in two of four features, the posts that the person agrees with."""
    rng = np.random.default_rng(6)
    posts = rng.normal(size=(USERS, 3, WIDTH)).astype(np.float32)
    signs = rng.choice([-1, 1], size=(USERS, 3)).astype(np.float32)
    liked = np.einsum("um,ume->ue", signs, posts) * [1.5, 1.5, 0, 0]
    made = world(FEATURES, (liked + 0.5 * SHARED) @ FEATURES.T, choices=96)
    return with_posts(made, Posts(posts, np.ones((USERS, 3), bool), signs))


@cache
def groups() -> World:
    """Three groups of people with opinions of their own on texts that everybody judges."""
    rng = np.random.default_rng(7)
    opinions = (rng.normal(size=(3, 300)) * 3)[rng.integers(0, 3, 940)]
    items = np.arange(300, dtype=np.int32)
    return world(FEATURES[:300], opinions, seen=900, choices=150, new_choices=150, items=items)


@cache
def shown() -> World:
    """The backbone that saw the profile knows what is personal, on a scale of its own."""
    made, parts = own_directions(), {}
    for name in ("seen", "validation", "new"):
        choices = getattr(made, name)
        rows = np.stack([choices.chosen, choices.rejected], axis=1)
        personal = made.rewards[choices.users[:, None], rows] - (SHARED @ FEATURES.T)[rows]
        parts[name] = replace(choices, in_context=(7 * personal).astype(np.float32))
    return replace(made, **parts)


@cache
def two_tastes_of_a_backbone() -> World:
    return with_tables(two_tastes(), backbone=LinearBackbone(FEATURES))


L2 = {"l2": (1e-2,)}
EPISODES = {"steps": 500, "rounds": 1, "batch": 32, "shots": 32, "rate": 1e-2}
JOINT = {"steps": (800,), "batch": 256, "rate": 1e-2, "pull": (0.1,)}
SMALL = {**L2, **JOINT, "width": 2, "hidden": 16}
SPARSE = {"features": 8, "active": 4, "spread": (3.0,), "rate": 1e-2}
TRANSFORMER = {"rate": 2e-3, "steps": 800, "width": 32, "layers": 1, "heads": 2}


@dataclass(frozen=True)
class Case:
    """A method, its world, its settings, and the number of shots at which it must have recovered the model."""

    name: str
    made: Callable[[], World]
    settings: dict[str, Any] = field(default_factory=dict)
    shots: int = 32
    personal: bool = True


FAST = [
    Case("pooled", everybody, personal=False),
    Case("offset", own_directions, {**L2, "spread": (5.0,)}, shots=200),
    Case("nearest", groups, {"neighbours": (300,), "shrink": (1.0,), "prior": (0.3,), "mix": False}, 75),
    Case("profile_in_context", shown, L2, personal=False),
]
SLOW = [
    Case("bayes", low_rank, {"rank": (2,)}, shots=100),
    Case("stacked", low_rank, {"rank": (2,)}, shots=100),
    Case("lore_free", low_rank, {**L2, "bases": (2,), "pull": (0.3,), "anchor": (1e-4,)}, shots=100),
    Case("individual", own_directions, {"spread": (3.0, 5.0)}, shots=200),
    Case("lore", two_tastes, {**L2, "bases": (2,), "pull": (0.1,), "anchor": (1e-4,)}),
    Case("pref", low_rank, {"rank": 2, "beta": (0.3,)}, shots=100),
    Case("sparse", sparse_directions, {**L2, **SPARSE}, 200),
    Case("mrm", two_tastes, {**L2, **EPISODES, "rate": 0.03, "inner_steps": 10}, shots=64),
    Case("vpl", two_tastes, {**EPISODES, "hidden": 24, "latent": 4}),
    Case("gpo", two_tastes, {**L2, **EPISODES, **TRANSFORMER}),
    Case("pal", ideal_points, {**JOINT, "steps": (400, 800), "prototypes": 2, "width": 8, "hidden": 24}, 64),
    Case("user_embedding", two_tastes, {**SMALL, "steps": (1500,), "offset_penalty": 1e-3}, 64),
    Case("user_clusters", two_tastes, {**SMALL, "clusters": 2}),
    Case("lora", two_tastes_of_a_backbone, {"clusters": (2,)}),
    Case("lora_users", two_tastes_of_a_backbone, {"own_steps": 50}),
    Case("attention", posts_that_tell, {**L2, **EPISODES, "width": 4}, personal=False),
]


def test_every_method_has_its_planted_model():
    assert sorted(case.name for case in FAST + SLOW) == sorted(METHODS)


@pytest.mark.parametrize("case", sweep(FAST + SLOW, few=range(len(FAST))), ids=lambda case: case.name)
def test_a_planted_model_is_recovered(case, record_property):
    made, method, settings = case.made(), method_named(case.name), case.settings
    if issubclass(method.settings, FewShotSettings):
        settings = {**settings, "validation_shots": (case.shots,)}
    fitted = method.fit(made.seen, made.validation, settings=method.settings(**settings), key=KEY)
    if method.represent is not None:
        made = replace(made, new=method.represent(fitted, made.new))

    def scores(rows: Any, choices: Any = made.new) -> np.ndarray:
        states = adapt_users(method, fitted, choices, rows, key=KEY)
        return score_users(method, fitted, states, choices, made.queries)

    def at(shots: int) -> Any:
        return made.contexts.first(shots, width=case.shots)

    shares = {shots: made.share_of_bayes(scores(at(shots))) for shots in (0, 4, case.shots)}
    nobody = made.share_of_nobody(method, fitted)
    record_property("shares", (nobody, shares))
    assert shares[case.shots] >= 0.99, (nobody, shares)
    # k = 0 is the state of nobody, but for the profile.
    assert made.new.posts is not None or abs(shares[0] - nobody) < 1e-9
    # Padding is told by the mask alone: other rows where it is False change nothing.
    rows = at(4)
    other = replace(rows, places=np.where(rows.mask, rows.places, 7))
    np.testing.assert_array_equal(scores(rows), scores(other))
    if case.personal:
        assert shares[0] + 0.02 < shares[case.shots], shares
        assert shares[4] < shares[case.shots], shares
        others = shuffled_users(method, fitted, made.new, at(case.shots), made.queries, KEY)
        swapped = swapped_labels(method, fitted, made.new, at(case.shots), made.queries, KEY)
        full = np.mean(np.diff(scores(at(case.shots))[made.queries.mask]) < 0)
        assert max(others, swapped) < full - 0.05
    if method.controls is not None:
        figures = method.controls(fitted, made.new, at(case.shots), made.queries, KEY)
        assert figures["accuracy"] > 0.7
        assert all(np.isfinite(value) for value in figures.values())
        record_property("controls", figures)
    states = adapt_users(method, fitted, made.new, at(4), key=KEY)
    assert bytes_per_user(states, len(rows.users)) < 20_000
