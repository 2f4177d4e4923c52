"""A reward model on an encoder behind the server: its scores, its fixed shapes, and whatever comes together."""

from __future__ import annotations

from pathlib import Path
from typing import Any, cast

import numpy as np
import pytest

import prb_jax as prb
from prb_jax.errors import DataError
from prb_jax.serving.items import ChatItem, RenderedItem
from prb_jax.serving.options import ServeOptions
from prb_jax.serving.serve import make_served
from prb_jax.serving.tree_scorer import open_tree_scorer
from prb_jax.text.view import ViewOptions
from tests.scoring.test_pair_model import comparison
from tests.serving.test_limits import ask_together
from tests.tiny_encoders import write_encoder

VIEW = ViewOptions(profile_posts=2)
ROWS = [comparison(number, 2 + number % 4, longest=30) for number in range(12)]


@pytest.fixture(scope="module")
def model(tmp_path_factory: pytest.TempPathFactory) -> prb.RewardModel:
    path: Path = tmp_path_factory.mktemp("deberta")
    write_encoder(path, "DebertaV2ForSequenceClassification", num_labels=1)
    return prb.load(path)


def items_of(one: prb.Comparison) -> list[ChatItem]:
    return [ChatItem(one.prompt, text, profile=one.profile) for text in one.responses]


def test_requests_together_have_the_scores_of_the_model(model: prb.RewardModel) -> None:
    """Some lose a part of their prompt, which all responses of a request share; some are asked for twice."""
    expected = model.score(ROWS, profile_posts=2)
    assert any(tree.truncation.any for tree in model.encode(ROWS, profile_posts=2))
    compiled = cast(Any, model.score_fn)._cache_size
    engine = make_served(model, ServeOptions(batch_tokens=256, view=VIEW)).engine
    programs = compiled()
    ids = RenderedItem(tuple(model.encode(ROWS[:1], profile_posts=2)[0].sequence(0).tolist()))
    asked = [*map(items_of, ROWS), *map(items_of, ROWS[:3]), [ids], [RenderedItem("a text")]]
    *answers, rendered, refused = ask_together(engine, *asked)
    engine.close()
    for answer, wanted in zip(answers, [*expected, *expected[:3]], strict=True):
        np.testing.assert_allclose([score.value for score in answer], wanted, atol=1e-5)
    np.testing.assert_allclose(rendered[0].value, expected[0][0], atol=1e-5)
    assert "reads a prompt and a response as two texts" in str(refused)
    assert compiled() == programs


def test_the_shapes_are_compiled_before_the_first_request(model: prb.RewardModel) -> None:
    scorer = open_tree_scorer(model, VIEW, batch_tokens=512)
    before = cast(Any, model.score_fn)._cache_size()
    scorer.compile()
    after = cast(Any, model.score_fn)._cache_size()
    assert 0 < after - before <= 6
    for count in (1, 2, len(ROWS)):
        scores = scorer([item for one in ROWS[:count] for item in items_of(one)])
        values = [cast(Any, score).value for score in scores]
        expected = np.concatenate(model.score(ROWS[:count], profile_posts=2))
        np.testing.assert_allclose(values, expected, atol=1e-5)
    assert isinstance(scorer([RenderedItem("a text")])[0], DataError)
    assert scorer([]) == []
