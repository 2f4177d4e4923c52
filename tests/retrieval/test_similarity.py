"""Rankings by embeddings against the paper's way: one question at a time, its posts in batches of 16, torch."""

from __future__ import annotations

import json
from pathlib import Path

import numpy as np
import pytest
import torch

from prb_jax import cli
from prb_jax.errors import CheckpointError
from prb_jax.readouts.text_encoder import load_text_encoder
from prb_jax.retrieval.rank_profiles import Query, rank_by_similarity, rank_profiles
from tests.readouts.test_text_encoder import texts
from tests.tiny_encoders import write_encoder

USERS, POSTS = 5, 21


@pytest.fixture(scope="module")
def folder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    path = tmp_path_factory.mktemp("encoder")
    write_encoder(path)
    return path


@pytest.fixture(scope="module")
def queries() -> list[Query]:
    questions = [f"what {text}" for text in texts(USERS, longest=12, seed=1)]
    posts = texts(USERS * POSTS, longest=40, seed=2)
    return [
        Query("x", question, [{"id": f"{user}-{n}", "text": posts[user * POSTS + n]} for n in range(POSTS)])
        for user, question in enumerate(questions)
    ]


def papers_scores(folder: Path, query: Query) -> np.ndarray:
    """What the paper's script computes: masked means, batches of 16, dot products."""
    from transformers import AutoModel, AutoTokenizer

    tokenizer, model = AutoTokenizer.from_pretrained(folder), AutoModel.from_pretrained(folder).eval()

    def embed(rows: list[str]) -> torch.Tensor:
        inputs = tokenizer(rows, padding=True, truncation=True, return_tensors="pt")
        inputs = {name: inputs[name] for name in ("input_ids", "attention_mask")}
        with torch.inference_mode():
            states, mask = model(**inputs).last_hidden_state, inputs["attention_mask"][:, :, None]
        return (states * mask).sum(1) / mask.sum(1)

    rows = [post["text"] for post in query.posts]
    vectors = torch.cat([embed(rows[start : start + 16]) for start in range(0, len(rows), 16)])
    return (vectors @ embed([query.question])[0]).numpy()


def test_the_papers_order(folder: Path, queries: list[Query]) -> None:
    found = rank_by_similarity([*queries, Query("x", "soup", [])], load_text_encoder(folder))
    for query, order in zip(queries, found.orders):
        scores = papers_scores(folder, query)
        assert sorted(order) == list(range(POSTS))
        ranked = scores[order]
        assert (ranked[:-1] >= ranked[1:] - 1e-5).all()
    assert found.orders[-1] == []
    assert found.texts == len({t for q in queries for t in (q.question, *(p["text"] for p in q.posts))})
    assert found.truncated == 0


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
    rows = [
        {"id": str(n), "question": q.question, "chosen": "a", "rejected": "b", "profile": [*q.posts, long]}
        for n, q in enumerate(queries)
    ]
    data, out = tmp_path / "x.jsonl", tmp_path / "out.jsonl"
    data.write_text("".join(json.dumps(each) + "\n" for each in rows))
    command = ["rank-profiles", "--encoder", str(folder), "--data", str(data), "--out", str(out)]
    assert cli.main([*command, "--mesh", "data=1", "--dtype", "float32"]) == 0
    said, progress = capsys.readouterr()
    assert f"embedding with {folder}: 0 of " in progress
    assert " texts (100%), " in progress
    assert f"{out}: 5 comparisons, 5 with a ranked profile\n" in said
    assert ", 1 of them cut to the encoder's length\n" in said
    ranked = [json.loads(line) for line in out.read_text().splitlines()]
    expected = rank_by_similarity(
        [Query("x", row["question"], row["profile"]) for row in rows], load_text_encoder(folder)
    ).orders
    for row, order, new in zip(rows, expected, ranked):
        assert new["profile"] == [row["profile"][place] for place in order]

    out.unlink()
    rank_profiles(data, encoder=str(folder), out=out, protocol="paper")
    papers = [json.loads(line) for line in out.read_text().splitlines()]
    for row, new, best in zip(rows, papers, ranked):
        assert [post["text"] for post in new["profile"]] == [post["text"] for post in best["profile"]]
        assert [post["id"] for post in new["profile"]] == [post["id"] for post in row["profile"]]

    out.unlink()
    assert cli.main([*command, "--max-length", "5"]) == 0
    assert ", 1 of them" not in capsys.readouterr().out
    assert [json.loads(line) for line in out.read_text().splitlines()] != ranked
    out.unlink()
    assert cli.main([*command, "--max-length", "100"]) == 2
    assert "more than the 64 tokens" in capsys.readouterr().err
    with pytest.raises(CheckpointError, match="no such folder"):
        rank_profiles(data, encoder="./nowhere", out=out)
