"""Where people differ in nothing, no method does worse on the validation part than pooled Bradley-Terry."""

from __future__ import annotations

import dataclasses

import jax
import numpy as np
import pytest

from prb_jax.personal.few_shot.choices import Posts
from prb_jax.personal.few_shot.fitting import FitData
from prb_jax.personal.few_shot.lore import personal_directions
from prb_jax.personal.few_shot.registry import method_named
from prb_jax.study.outcomes import popularity
from tests.personal.few_shot.planted import World, choices_of, world
from tests.sweeps import sweep

KEY, WIDTH = jax.random.key(0), 8
QUICK = {
    "steps": 4, "rounds": 1, "batch": 8, "l2": (0.1,), "pooled_l2": (0.1,), "anchor": (0.1,), "width": 4, "hidden": 4,
    "adapt_steps": 4, "latent": 2, "features": 8, "active": 2, "heads": 2, "rank": 2, "beta": (0.01,), "spread": (9.0,),
    "pull": (1e-3,), "bases": 2,
}  # fmt: skip


@pytest.fixture(scope="module")
def alike() -> World:
    """Few people of one taste, whose choices are noisy: what differs between them is noise."""
    rng = np.random.default_rng(0)
    features = rng.normal(size=(400, WIDTH)).astype(np.float32)
    shared = np.repeat((0.3 * rng.normal(size=WIDTH) @ features.T)[None], 40, axis=0)
    return world(features, shared, seen=12, validation=12, choices=8)


NAMES = "offset lore lore_free pref vpl pal gpo mrm sparse user_embedding user_clusters"


@pytest.mark.parametrize("name", sweep(NAMES.split(), few=(0, 1, 9)))
def test_no_method_is_worse_than_pooled_where_nothing_is_personal(name: str, alike: World) -> None:
    method, pooled, quick = method_named(name), method_named("pooled"), {}
    for setting in dataclasses.fields(method.settings):
        if (value := QUICK.get(setting.name)) is not None:
            several = isinstance(setting.default, tuple) and not isinstance(value, tuple)
            quick[setting.name] = (value,) if several else value
    fitted = method.fit(alike.seen, alike.validation, settings=method.settings(**quick), key=KEY)
    common = pooled.fit(alike.seen, alike.validation, settings=pooled.settings(l2=(0.1,)), key=KEY)
    # the numbers of shots of both
    loss = FitData(pooled, alike.seen, alike.validation, method.settings(), KEY).loss(common)
    assert fitted.numbers["validation_loss"] <= loss + 1e-4


def test_products_of_a_choice_with_itself_are_no_personal_direction() -> None:
    """Taste lies along a short feature, the noise of single choices along a long one."""
    rng, people = np.random.default_rng(1), 400
    deltas = rng.normal(size=(people * 4, 3)) * [6.0, 1.0, 1.0]
    users = np.repeat(np.arange(people, dtype=np.int32), 4)
    tastes = np.zeros((people, 3))
    tastes[:, 1] = 2 * rng.normal(size=people)
    won = rng.random(len(users)) < 1 / (1 + np.exp(-np.sum(deltas * tastes[users], axis=1)))
    features = np.concatenate([deltas, np.zeros_like(deltas)]).astype(np.float32)
    first, second = np.arange(2 * len(users), dtype=np.int32).reshape(2, -1)
    choices = choices_of(features, np.where(won, first, second), np.where(won, second, first), users=users)
    assert abs(personal_directions(choices, np.zeros(3), 1)[1, 0]) > 0.9


def test_popularity_counts_the_votes_of_profiles() -> None:
    items = np.arange(4, dtype=np.int32)
    posts = Posts(
        np.zeros((3, 2, 1), np.float32),
        np.array([[True, True], [True, False], [True, True]]),
        np.array([[1, -1], [1, 0], [1, 1]], np.float32),
        np.array([[2, 3], [2, -1], [3, 3]], np.int32),
    )
    known = {"users": np.array([0, 1], np.int32), "number_of_users": 3, "items": items, "posts": posts}
    choices = choices_of(np.zeros((4, 1), np.float32), [0, 0], [1, 1], **known)
    # the third person made no choice, and is not asked
    np.testing.assert_allclose(popularity(choices), [3 / 4, 1 / 4, 3 / 4, 1 / 3])
