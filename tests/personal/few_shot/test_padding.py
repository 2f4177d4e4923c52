"""Rows that are padded to few sizes: few programs, and the same figures."""

from __future__ import annotations

from dataclasses import replace
from typing import Any

import jax
import numpy as np
import pytest

from prb_jax.personal.few_shot import protocol
from prb_jax.personal.few_shot.choices import Choices, contexts_and_queries
from prb_jax.personal.few_shot.fitting import best_direction, fit_direction, pairs_of
from prb_jax.personal.few_shot.offset import METHOD, OffsetSettings
from prb_jax.personal.few_shot.protocol import adapt_users, few_sizes, score_users
from tests.personal.few_shot.planted import choices_of

KEY = jax.random.key(0)


def people(count: int) -> Choices:
    """Five choices of each person."""
    rng = np.random.default_rng(0)
    features = rng.normal(size=(900, 7)).astype(np.float32)
    chosen, rejected = rng.permuted(np.tile(np.arange(900), (5 * count, 1)), axis=1)[:, :2].T
    users = np.repeat(np.arange(count, dtype=np.int32), 5)
    return choices_of(features, chosen.astype(np.int32), rejected.astype(np.int32), users=users)


def test_sizes_are_few_and_at_most_a_quarter_larger() -> None:
    numbers = np.arange(1, 5000)
    sizes = np.array([few_sizes(int(number)) for number in numbers])
    assert (sizes >= numbers).all()
    assert (sizes <= 1.25 * numbers).all()
    assert [few_sizes(number) for number in (1, 7, 8, 9, 16, 17)] == [1, 7, 8, 10, 16, 20]
    assert len(set(sizes.tolist())) < 50
    assert (np.diff(sizes) >= 0).all()


def test_splits_of_almost_equal_sizes_share_programs() -> None:
    fitted = METHOD.fit(people(20), people(20), settings=OffsetSettings(spread=(1.0,)), key=KEY)

    compiled: tuple[Any, ...] = (protocol._adapt, protocol._score, fit_direction)

    def programs() -> list[int]:
        return [one._cache_size() for one in compiled]

    found = []
    for count in (41, 43, 44):
        choices = people(count)
        choices = replace(choices, features=people(44).features)
        contexts, queries = contexts_and_queries(choices, seed=0)
        states = adapt_users(METHOD, fitted, choices, contexts, key=KEY)
        score_users(METHOD, fitted, states, choices, queries)
        best_direction(pairs_of(choices), choices.deltas, (0.1,), steps=20)
        found.append(programs())
    assert found[0] == found[1] == found[2]


def test_people_in_several_calls_have_the_same_states(monkeypatch: pytest.MonkeyPatch) -> None:
    choices = people(43)
    fitted = METHOD.fit(choices, choices, settings=OffsetSettings(spread=(1.0,)), key=KEY)
    contexts, queries = contexts_and_queries(choices, seed=0)

    def scores() -> np.ndarray:
        states = adapt_users(METHOD, fitted, choices, contexts, key=KEY)
        return score_users(METHOD, fitted, states, choices, queries)

    whole = scores()
    monkeypatch.setattr(protocol, "USERS_AT_ONCE", 20)
    np.testing.assert_allclose(scores(), whole, atol=1e-6)
    assert whole.shape[1] == queries.places.shape[1]
    assert (np.isfinite(whole[..., 0]) == queries.mask).all()
