"""Comparisons that begin alike are computed together: the same scores, fewer tokens."""

from __future__ import annotations

import os
from functools import partial
from pathlib import Path
from typing import Any, cast

import numpy as np
import pytest

import prb_jax as prb
from prb_jax.scoring.reward_model import RewardModel
from prb_jax.trees.streams import StreamOptions
from tests.packed import batch_alone
from tests.scoring.cudnn_model import over_cudnn_streams
from tests.scoring.large_process import read_by_windows
from tests.scoring.records import TOLERANCE, assert_close, score_rows, text, write_comparisons


def of_people(people: int, questions: int, *, alike: bool = False) -> list[prb.Comparison]:
    """Each person's comparisons have one profile; the people come in turn. ``alike``: profiles differ by a letter."""
    rng = np.random.default_rng(0)
    common = [{"text": text(rng, 40, 60)} for _ in range(3)]
    comparisons = []
    for person in range(people):
        posts = common if alike else [{"text": text(rng, 40, 60)} for _ in range(3)]
        profile = [*posts[:2], {"text": f"{posts[2]['text']} {'abcd'[person]}"}]
        comparisons += [
            prb.Comparison(
                id=f"{person}-{question}", user_id=str(person), profile=profile, question=text(rng, 3, 9),
                responses=[f"{k} {text(rng, 1, 9)}" for k in range(2 + question % 2)],
                labels=[1.0, *[0.0] * (1 + question % 2)],
            )
            for question in range(questions)
        ]  # fmt: skip
    return [comparisons[index] for index in rng.permutation(len(comparisons))]


def alone(model: RewardModel, comparisons: list[prb.Comparison]) -> list[np.ndarray]:
    """Scores of every comparison, each conversation in a stream of its own."""
    trees = model.encode(comparisons)
    scores = []
    for start in range(0, len(trees), 4):
        some = trees[start : start + 4]
        rewards = np.asarray(model.score_fn(model.params, model.place(batch_alone(some))))
        scores += [row[: len(tree.responses)] for row, tree in zip(rewards, some, strict=True)]
    return scores


@pytest.mark.parametrize("alike", [pytest.param(False, marks=pytest.mark.slow), True])
def test_scores_are_those_of_single_trees(model: RewardModel, alike: bool) -> None:
    """Streams hold two people, or split one."""
    comparisons = of_people(3, 6, alike=alike)
    expected = alone(model, comparisons)
    for batch_tokens in (None, 1024):
        assert_close(model.score(comparisons, batch_tokens=batch_tokens), expected)


@pytest.mark.slow
def test_cudnn_over_streams_scores_as_single_trees(
    model: RewardModel, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Scores, and the tokens that are computed for them, in two programs: that of all data, and of half the length."""
    comparisons = of_people(3, 6, alike=True)
    expected, streams = alone(model, comparisons), over_cudnn_streams(model, monkeypatch)
    options = streams.batch_options(1024)
    assert isinstance(options, StreamOptions)
    assert options.keys is not None
    assert options.tokens % options.block == options.block % options.keys.queries == 0
    for batch_tokens in (None, 1024, 1024):
        assert_close(streams.score(comparisons, batch_tokens=batch_tokens), expected)
    computed = sum(batch.computed or 0 for batch in streams.stream(comparisons, batch_tokens=1024))
    assert computed < 0.5 * sum(tree.tokens for tree in streams.encode(comparisons))
    assert cast(Any, streams.score_fn)._cache_size() == 2


@pytest.mark.slow
@pytest.mark.timeout(1200)
def test_a_user_with_many_comparisons_is_split_over_streams(
    model: RewardModel, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """In memory and larger than it: equal bytes, scores of single trees, tokens that grow no faster than data."""
    comparisons = of_people(1, 700)
    data = write_comparisons(tmp_path / "data.jsonl", comparisons)
    options = {"controls": "none", "batch_tokens": 2048, "progress": False}
    tokens = prb.evaluate(model, data, out=tmp_path / "held", **options).summary["tokens"]
    few = prb.evaluate(model, data, limit=175, **options).summary["tokens"]
    assert tokens["computed"] < 4.1 * few["computed"] < 0.5 * tokens["alone"]
    seen = read_by_windows(partial(monkeypatch.setattr, raising=False))
    prb.evaluate(model, data, out=tmp_path / "windows", **options)
    assert seen.held <= 600 < len(comparisons)
    bytes_of = [(tmp_path / name / "scores.jsonl").read_bytes() for name in ("held", "windows")]
    assert bytes_of[0] == bytes_of[1]
    some = comparisons[::50]
    scores = {row["id"]: row["scores"] for row in score_rows(tmp_path / "held")}
    assert len(scores) == len(comparisons)
    for one, expected in zip(some, alone(model, some), strict=True):
        np.testing.assert_allclose(scores[one.id], expected, atol=TOLERANCE, rtol=0)


def test_the_summary_has_the_tokens_that_were_saved(model: RewardModel, tmp_path: Path) -> None:
    """The paper's prompt begins with the question and saves nothing."""
    data = write_comparisons(tmp_path / "data.jsonl", of_people(3, 6, alike=True))
    options = {"controls": "none", "progress": False, "batch_tokens": 1024}
    whole = prb.evaluate(model, data, out=tmp_path / "whole", **options).summary
    assert sorted(os.listdir(tmp_path / "whole")) == ["run.json", "scores.jsonl", "summary.json", "users.csv"]
    rows = score_rows(tmp_path / "whole")
    tokens = whole["tokens"]
    assert tokens["alone"] == sum(row["tokens"] for row in rows)
    assert tokens["saved"] == tokens["alone"] - tokens["computed"]
    assert tokens["computed"] < 0.5 * tokens["alone"]
    assert "tokens" in whole["definitions"]
    paper = prb.evaluate(model, data, protocol="paper", profile_posts=3, **options)
    assert paper.summary["tokens"]["saved"] == 0
