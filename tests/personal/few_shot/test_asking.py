"""Questions that tell much are asked first; heads, features and people are what they are said to be."""

from dataclasses import replace

import jax
import numpy as np
import pytest

from prb_jax.errors import DataError
from prb_jax.personal.few_shot import pref, sparse
from prb_jax.personal.few_shot.choices import Context, Responses
from prb_jax.personal.few_shot.lore import head_direction
from prb_jax.personal.few_shot.protocol import Fitted
from tests.personal.few_shot.planted import choices_of, sigmoid


def test_the_rule_of_pref_learns_more_from_few_questions_than_chance():
    rng, width, pool_size, people, asked = np.random.default_rng(0), 4, 60, 24, 6
    lengths = rng.uniform(0.1, 3, (pool_size, 1))
    pool = (rng.normal(size=(pool_size, width)) * lengths).astype(np.float32)
    truth = rng.normal(size=(people, width)) * 2
    zero = np.zeros(width, np.float32)
    arrays = {"factors": np.eye(width, dtype=np.float32), "mean": zero, "prior": zero}
    fitted = Fitted(arrays, {"beta": np.float32(0.25)}, pref.PReFSettings(rank=width))

    @jax.jit
    def learn(chosen, mask):
        context = Context(Responses(chosen), Responses(0 * chosen), mask)
        state = pref.adapt(fitted, context, jax.random.key(0))
        rule = pref.next_question(fitted, state, context, Responses(pool), Responses(0 * pool))
        return state["weights"], rule

    learn_all = jax.jit(jax.vmap(learn))

    def simulate(by_rule: bool) -> float:
        drawn = np.random.default_rng(1)
        answered = np.zeros((people, asked, width), np.float32)
        free = np.ones((people, pool_size), bool)
        for count in range(asked):
            _, rule = learn_all(answered, np.broadcast_to(np.arange(asked) < count, (people, asked)))
            # The rule is 0 for every question before the first answer tells a direction: then length decides.
            value = np.asarray(rule) if by_rule else drawn.random((people, pool_size))
            chosen = np.argmax(np.where(free, value, -np.inf), axis=1)
            free[np.arange(people), chosen] = False
            agrees = drawn.random(people) < sigmoid(np.sum(pool[chosen] * truth, axis=1))
            answered[:, count] = pool[chosen] * np.where(agrees, 1, -1)[:, None]
        weights = np.asarray(learn_all(answered, np.ones((people, asked), bool))[0])
        lengths = np.linalg.norm(weights, axis=1) * np.linalg.norm(truth, axis=1)
        return float(np.mean(np.sum(weights * truth, axis=1) / lengths))

    assert simulate(True) > simulate(False) + 0.05


def test_the_reference_of_lore_is_the_score_head():
    rng = np.random.default_rng(0)
    features, head = rng.normal(size=(40, 5)).astype(np.float32), rng.normal(size=5)
    choices = choices_of(features, [0], [1], base_scores=(features @ head + 3).astype(np.float32))
    np.testing.assert_allclose(head_direction(choices), head, atol=1e-5)
    with pytest.raises(DataError, match=r"linear in the features, found .* of their variance unexplained"):
        head_direction(replace(choices, base_scores=rng.normal(size=40).astype(np.float32)))
    with pytest.raises(DataError, match="needs the backbone's own scores"):
        head_direction(replace(choices, base_scores=None))


def test_sparse_features_can_be_read():
    features = np.array([[2, 0, 0], [0, 3, 0], [0, 0, 1], [0, 0, 0]], np.float32)
    choices = choices_of(features, [0, 3, 2, 1], [3, 1, 3, 2])
    arrays = {
        "center": np.zeros(3, np.float32),
        "encoder": np.eye(3, dtype=np.float32),
        "threshold": np.zeros(3, np.float32),
        "scale": np.ones(3, np.float32),
        "beta": np.array([1, 2, 0], np.float32),
        "direction": np.array([3, 0, 0], np.float32),
    }
    fitted = Fitted(arrays, {}, sparse.SparseSettings(features=3, active=2))
    places, activations = sparse.strongest(fitted, choices, count=2)
    assert places.tolist() == [[0, 1], [1, 3], [2, 3]]
    assert activations.tolist() == [[2, 0], [-3, 3], [1, -1]]
    state = {"deviation": np.array([0, -2, 5], np.float32)}
    assert sparse.coefficients(fitted, state).tolist() == [[0, 1], [-2, 2], [5, 0]]
    scores = np.asarray(sparse.score(fitted, state, Responses(features[[0, 3]])))
    # (beta + b_u) of the first feature times the difference, and the dense direction's part of it
    assert scores[0] - scores[1] == 2 + 6
