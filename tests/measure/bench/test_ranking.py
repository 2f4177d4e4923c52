"""The benchmark of rankings: both ways rank alike, what is counted is what is in the file."""

from __future__ import annotations

import sys
from pathlib import Path

import numpy as np
import pytest

from prb_jax.errors import RunError
from prb_jax.measure.bench.ranking import largest_swap
from prb_jax.measure.bench.rivals.transformers import TransformersRanker
from prb_jax.models.readouts.text_encoder import Pooling
from tests.json_lines import read_lines, write_lines
from tests.models.readouts.test_text_encoder import sentence_transformers, texts
from tests.tiny_encoders import write_encoder
from tests.tiny_models import write_tiny_model

USERS, POSTS = 3, 19


@pytest.fixture(scope="module")
def folder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    path = tmp_path_factory.mktemp("encoder")
    write_encoder(path)
    return path


@pytest.fixture(scope="module")
def data(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """Posts of many lengths, all distinct, some too long; a second question of a user; one without a profile."""
    posts = [f"{text} p{n}" for n, text in enumerate(texts(USERS * POSTS, longest=70))]
    rows = []
    for user in range(USERS):
        profile = [{"id": str(n), "text": posts[user * POSTS + n]} for n in range(POSTS)]
        rows.append({"question": f"what soup {user}", "user_id": f"u{user}", "profile": profile})
    rows.append({"question": "what again", "user_id": "u0", "profile": rows[0]["profile"]})
    rows.append({"question": "who", "user_id": "nobody"})
    # Without a user_id: a user of its own, whose posts another one has too.
    rows.append({"question": "what soup 1", "profile": rows[1]["profile"][:4]})
    lines = ({"id": str(number), "chosen": "a", "rejected": "b"} | row for number, row in enumerate(rows))
    return Path(write_lines(tmp_path_factory.mktemp("data") / "x.jsonl", lines))


def test_both_ways_rank_alike_and_every_number_is_finite(folder: Path, data: Path, bench, capsys) -> None:
    from transformers import AutoTokenizer

    options = "--against transformers --rounds 2 --mesh data=1 --dtype float32"
    (row,) = bench("rank", folder, "--data", data, options)
    assert (row["users"], row["posts"]) == (USERS + 1, USERS * POSTS + 4)
    assert row["texts"] == USERS * (POSTS + 1)
    words = {name for name, value in row.items() if isinstance(value, str)}
    assert words == {"dtype", "peak_memory_of"}
    assert None not in row.values()
    # Two users in each of two rounds: everybody has had a turn.
    assert (row["against_users"], row["against_posts"]) == (USERS + 1, row["posts"])
    assert row["equal_orders"] == USERS + 1
    assert row["largest_swap"] == 0
    assert row["posts_per_second"] / row["users_per_second"] == pytest.approx(row["posts"] / row["users"])
    assert row["speedup"] > 0
    assert row["compiles"] >= 1

    # Their padding, counted by hand: a question alone, posts in batches of 16.
    tokenizer, lines = AutoTokenizer.from_pretrained(folder), read_lines(data)

    def sizes(texts: list[str]) -> list[int]:
        return [min(len(tokenizer(text)["input_ids"]), 64) for text in texts]

    tokens = padded = 0
    for line in (lines[0], lines[1], lines[2], lines[5]):
        posts = [post["text"] for post in line["profile"]]
        for batch in map(sizes, ([line["question"]], posts[:16], posts[16:])):
            tokens += sum(batch)
            padded += len(batch) * max(batch, default=0)
    assert row["against_padding_waste"] == pytest.approx(1 - tokens / padded)
    # Ours has the last record's texts from another user's.
    again = sum(sizes([lines[5]["question"], *(post["text"] for post in lines[5]["profile"])]))
    seconds = row["posts"] / row["posts_per_second"]
    assert row["tokens_per_second"] * seconds == pytest.approx(tokens - again)
    assert 0 <= row["padding_waste"] < 1
    shown = capsys.readouterr().out
    for word in ("posts/s", "tokens/s", "padding", "compile s", "speed-up", "equal orders", "4 of 4"):
        assert word in shown


def test_our_side_alone_in_two_dtypes(folder: Path, data: Path, bench, capsys) -> None:
    rows = bench("rank", folder, "--data", data, "--users 2 --rounds 1 --dtype float32 bfloat16")
    assert [row["dtype"] for row in rows] == ["float32", "bfloat16"]
    assert all((row["users"], row["posts"]) == (2, 2 * POSTS) for row in rows)
    assert all(row["speedup"] is None and row["posts_per_second"] > 0 for row in rows)
    assert "speed-up" not in capsys.readouterr().out


def test_both_ways_pool_as_the_files_say(data: Path, tmp_path: Path, bench) -> None:
    """First states of length one, of texts cut at 12 tokens."""
    write_encoder(tmp_path)
    sentence_transformers(
        tmp_path,
        pooling={"pooling_mode_cls_token": True, "pooling_mode_mean_tokens": False},
        sentence_bert_config={"max_seq_length": 12, "do_lower_case": True},
    )
    words = "--against transformers --against-users 3 --users 3 --rounds 1"
    (row,) = bench("rank", tmp_path, "--data", data, words)
    assert row["against_users"] == 3
    # Posts that are equal up to the cut have equal vectors, but for the last bit in batches of other shapes.
    assert row["largest_swap"] < 1e-6


def test_without_torch_it_is_said(folder: Path, monkeypatch) -> None:
    monkeypatch.setitem(sys.modules, "torch", None)
    with pytest.raises(RunError, match="needs torch, which is not installed: pip install"):
        TransformersRanker(folder, pooling=Pooling(), max_length=64)


def test_a_swap_is_how_much_worse_an_earlier_post_is() -> None:
    scores = np.array([0.5, 3.0, 2.0, 2.5], np.float32)
    assert largest_swap([1, 3, 2, 0], scores) == 0
    assert largest_swap([1, 2, 3, 0], scores) == 0.5
    assert largest_swap([0, 2, 3, 1], scores) == 2.5


def test_what_cannot_be_ranked_is_one_line(folder: Path, data: Path, tmp_path: Path, refused) -> None:
    bare = write_lines(
        tmp_path / "bare.jsonl", [{"id": "1", "question": "q", "chosen": "a", "rejected": "b"}]
    )
    decoder = write_tiny_model(tmp_path / "qwen3", "qwen3")
    for model, file, words, message in (
        (folder, bare, "", "bare.jsonl: no comparison has a profile to rank"),
        (folder, data, "--users 9", "4 users have a profile, expected 9 or more"),
        (
            folder, data, "--users 2 --against transformers --against-users 3",
            "against_users 3: expected at most 2, the users that are ranked",
        ),
        (decoder, data, "", "field 'model_type': expected an encoder"),
    ):  # fmt: skip
        assert message in refused("rank", model, "--data", file, words)
