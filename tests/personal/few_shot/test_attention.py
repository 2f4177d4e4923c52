"""Bilinear attention adds what it knows of a person to pooled Bradley-Terry, and nothing else."""

import jax
import numpy as np
import pytest

from prb_jax.personal.few_shot.choices import Posts
from prb_jax.personal.few_shot.protocol import adapt_users, repeated, score_users
from prb_jax.personal.few_shot.registry import method_named
from tests.personal.few_shot.planted import with_posts, world

KEY = jax.random.key(0)


@pytest.mark.slow
def test_attention_is_pooled_bradley_terry_where_nothing_is_known():
    rng = np.random.default_rng(0)
    features = rng.normal(size=(80, 4)).astype(np.float32)
    posts = rng.normal(size=(24, 3, 4)).astype(np.float32)
    rewards = (rng.normal(size=4) + 2 * posts.mean(1)) @ features.T
    made = world(features, rewards, seen=12, validation=6, choices=12, new_choices=16)
    signs = np.tile(np.array([0, 1, -1], np.float32), (24, 1))  # own words, and two votes
    made = with_posts(made, Posts(posts, np.ones((24, 3), bool), signs))
    pooled, attention = method_named("pooled"), method_named("attention")
    few = {"l2": (1e-2,), "gain_l2": (1e-2,), "steps": 20, "rounds": 1, "batch": 8, "shots": 4, "width": 2}
    fitted = attention.fit(made.seen, made.validation, settings=attention.settings(**few), key=KEY)
    base = pooled.fit(made.seen, made.validation, settings=pooled.settings(l2=(1e-2,)), key=KEY)
    assert np.abs(fitted.arrays["gains"]).min() > 0

    blind, asked = with_posts(made, None).new, made.queries.mask
    alone = score_users(pooled, base, {}, made.new, made.queries)[asked]
    nobody = repeated(attention.empty_state(fitted), len(made.queries.users))
    np.testing.assert_allclose(
        score_users(attention, fitted, nobody, made.new, made.queries)[asked], alone, atol=1e-5
    )
    for shots, known in ((0, False), (4, True)):
        states = adapt_users(attention, fitted, blind, made.contexts.first(shots, width=4), key=KEY)
        scores = score_users(attention, fitted, states, blind, made.queries)[asked]
        assert (np.abs(scores - alone).max() > 0.01) == known
