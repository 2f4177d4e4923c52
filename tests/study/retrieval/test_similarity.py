"""Rankings by embeddings against the paper's way: one question at a time, its posts in batches of 16, torch."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import numpy as np
import pytest

from prb_jax import cli
from prb_jax.errors import CheckpointError
from prb_jax.models.readouts.text_encoder import load_text_encoder
from prb_jax.study.retrieval.rank_profiles import Query, rank_by_similarity, rank_profiles
from tests.models.readouts.test_text_encoder import contriever, texts
from tests.study.retrieval.test_rank_profiles import read, row, write
from tests.tiny_encoders import write_encoder

USERS, POSTS = 5, 21


@pytest.fixture(scope="module")
def encoder(tmp_path_factory: pytest.TempPathFactory) -> tuple[Path, Any]:
    folder = tmp_path_factory.mktemp("encoder")
    return folder, write_encoder(folder)


@pytest.fixture(scope="module")
def folder(encoder: tuple[Path, Any]) -> Path:
    return encoder[0]


@pytest.fixture(scope="module")
def queries() -> list[Query]:
    texts_of_posts = iter(texts(USERS * POSTS, longest=40, seed=2))
    profiles = [
        [{"id": f"{user}-{n}", "text": next(texts_of_posts)} for n in range(POSTS)] for user in range(USERS)
    ]
    questions = texts(USERS, longest=12, seed=1)
    return [Query("x", f"what {text}", profile) for text, profile in zip(questions, profiles)]


def test_the_papers_order(encoder: tuple[Path, Any], queries: list[Query]) -> None:
    folder, model = encoder
    ranking = rank_by_similarity([*queries, Query("x", "soup", [])], load_text_encoder(folder))
    for query, order in zip(queries, ranking.orders):
        assert sorted(order) == list(range(POSTS))
        vectors = contriever(folder, model, [post["text"] for post in query.posts], batch=16)
        scores = vectors @ contriever(folder, model, [query.question])[0]
        assert (np.diff(scores[order]) <= 1e-5).all()
    assert ranking.orders[-1] == []
    assert ranking.texts == len({t for q in queries for t in (q.question, *(p["text"] for p in q.posts))})
    assert ranking.truncated == 0


def test_equal_posts_keep_their_order(folder: Path) -> None:
    posts = [{"text": text} for text in ("tea", "soup", "tea", "", "soup", "tea", "")]
    (order,) = rank_by_similarity([Query("x", "rain", posts)], load_text_encoder(folder)).orders
    for text in ("tea", "soup", ""):
        same = [place for place in order if posts[place]["text"] == text]
        assert same == sorted(same)
        assert order.index(same[-1]) - order.index(same[0]) == len(same) - 1


def test_the_command(
    folder: Path, queries: list[Query], tmp_path: Path, capsys: pytest.CaptureFixture
) -> None:
    long = {"id": "long", "text": "soup " * 100}
    rows = [row(str(n), query.question, [*query.posts, long]) for n, query in enumerate(queries)]
    data, out = write(tmp_path / "x.jsonl", rows), tmp_path / "out.jsonl"
    command = ["rank-profiles", "--encoder", str(folder), "--data", str(data), "--out", str(out)]
    assert cli.main([*command, "--mesh", "data=1", "--dtype", "float32"]) == 0
    said, progress = capsys.readouterr()
    assert f"embedding with {folder}: 0 of " in progress
    assert " texts (100%), " in progress
    assert f"{out}: 5 comparisons, 5 with a ranked profile\n" in said
    assert ", 1 of them cut to the encoder's length\n" in said
    ranked = read(out)
    asked = [Query("x", given["question"], given["profile"]) for given in rows]
    expected = rank_by_similarity(asked, load_text_encoder(folder)).orders
    for query, order, new in zip(asked, expected, ranked):
        assert new["profile"] == [query.posts[place] for place in order]

    out.unlink()
    rank_profiles(data, encoder=str(folder), out=out, protocol="paper")
    for query, new, best in zip(asked, read(out), ranked):
        assert [post["text"] for post in new["profile"]] == [post["text"] for post in best["profile"]]
        assert [post["id"] for post in new["profile"]] == [post["id"] for post in query.posts]

    out.unlink()
    assert cli.main([*command, "--max-length", "5"]) == 0
    assert ", 1 of them" not in capsys.readouterr().out
    assert read(out) != ranked
    out.unlink()
    assert cli.main([*command, "--max-length", "100"]) == 2
    assert "more than the 64 tokens" in capsys.readouterr().err
    with pytest.raises(CheckpointError, match="no such folder"):
        rank_profiles(data, encoder="./nowhere", out=out)
