"""Episodes: a query is of another question than the context, and shares no response with it."""

from functools import partial
from typing import Any

import jax
import numpy as np
import pytest

from prb_jax.personal.few_shot import gpo
from prb_jax.personal.few_shot.choices import Context, Responses
from prb_jax.personal.few_shot.episodes import draw, people_of
from prb_jax.personal.few_shot.networks import arrays_of
from prb_jax.personal.few_shot.protocol import Fitted
from tests.personal.few_shot.planted import choices_of


def rows_of(tree: Any) -> list[Any]:
    return [jax.tree.map(lambda leaf, row=row: leaf[row], tree) for row in range(64)]


@pytest.mark.parametrize("shared_texts", [False, True])
def test_queries_do_not_meet_the_context(shared_texts):
    rng = np.random.default_rng(0)
    count = 90
    users = np.sort(rng.integers(0, 6, count)).astype(np.int32)
    # User 0 has one question and the responses from 40 on; the others have four, with ten responses each.
    first = np.where(users == 0, rng.integers(40, 58, count), rng.integers(0, 40, count)).astype(np.int32)
    features = np.arange(60, dtype=np.float32)[:, None]  # a response is told by its feature
    questions = np.where(users == 0, 7, first // 10).astype(np.int32)
    items = np.arange(60, dtype=np.int32) // 4 if shared_texts else None
    pairs = first, first + 1 - 2 * (first % 2)
    choices = choices_of(features, *pairs, users=users, questions=questions, items=items)
    people = people_of(choices, most=12)
    assert people.mask.sum(axis=1).max() == 12
    drawn = jax.tree.map(np.asarray, jax.jit(partial(draw, batch=64, shots=5))(people, jax.random.key(0)))
    names = np.arange(60) // (4 if shared_texts else 1)
    sizes, one_question, queries = set(), 0, 0
    for context, pairs, weights in zip(*map(rows_of, (drawn.contexts, drawn.pairs, drawn.weights))):
        told = np.stack([side.features[context.mask, 0] for side in (context.chosen, context.rejected)])
        told, asked = told.astype(int), pairs.features[weights > 0, :, 0].astype(int)
        assert not set(names[told].ravel()) & set(names[asked].ravel())
        sizes.add(told.shape[1])
        queries += len(asked)
        if told.size and len(asked) and told[0, 0] >= 40:
            one_question += 1
        else:
            assert not set(told[0] // 10) & set(asked[:, 0] // 10)
    assert sizes == set(range(6))
    assert queries > 100
    assert one_question > 0  # who has one question is asked about others of its comparisons


def test_gpo_reads_every_comparison_from_both_sides_and_in_any_order():
    rng, width, count = np.random.default_rng(0), 8, 3
    settings = gpo.GPOSettings(width=width, layers=1, heads=2)
    arrays = arrays_of(gpo.Transformer(rng.normal(size=4).astype(np.float32), settings, rng))
    arrays["head"]["w"] = rng.normal(0, 1 / np.sqrt(width), (width, 4)).astype(np.float32)
    fitted = Fitted(arrays, {}, settings)
    chosen, rejected, asked = rng.normal(size=(3, count, 4)).astype(np.float32)

    def scores(first: np.ndarray, second: np.ndarray) -> np.ndarray:
        context = Context(Responses(first), Responses(second), np.ones(count, bool))
        state = gpo.adapt(fitted, context, jax.random.key(0))
        # the null token, and each comparison with either sign
        assert int(state["mask"].sum()) == 1 + 2 * count
        return np.asarray(gpo.score(fitted, state, Responses(asked)))

    in_order = scores(chosen, rejected)
    np.testing.assert_allclose(scores(chosen[::-1], rejected[::-1]), in_order, atol=1e-5)
    # another person: all choices turned round
    assert np.abs(scores(rejected, chosen) - in_order).max() > 1e-2
