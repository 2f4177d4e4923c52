"""The leak guard: what a model sees, and what it must never see."""

from __future__ import annotations

from pathlib import Path

import pytest

from prb_jax.errors import DataError
from prb_jax.records.comparison import Comparison, Message
from prb_jax.scoring.reader import encode_comparisons
from prb_jax.text.open_tokenizer import load_tokenizer
from prb_jax.text.view import OrderClaim, TextProtocol, View, parse_protocol, render_profile, visible
from tests import tiny_tokenizer as tiny

PRIVATE = {
    "id": "SENTINEL-id",
    "user_id": "SENTINEL-user",
    "category": "SENTINEL-category",
    "subset": "SENTINEL-subset",
    "margin": 8642.25,
    "labels": [7531.5, 1357.5],
    "rubric_aspects": [
        {"aspect": "SENTINEL-aspect", "evidence": "SENTINEL-evidence", "reason": "SENTINEL-why"}
    ],
    "narrative": "SENTINEL-narrative",
}


def comparison(**changes: object) -> Comparison:
    posts = [{"id": f"SENTINEL-post-{i}", "category": f"topic{i}", "text": f"text{i}"} for i in range(1, 5)]
    shown = {"question": "Which way?", "responses": ["Left.", "Right."], "profile": posts}
    return Comparison(**(PRIVATE | shown | changes))  # type: ignore[arg-type]


@pytest.mark.parametrize("protocol", list(TextProtocol))
@pytest.mark.parametrize("posts", [0, 2, 10])
def test_nothing_private_is_ever_rendered(tmp_path: Path, protocol: TextProtocol, posts: int) -> None:
    chat = load_tokenizer(tiny.write_tokenizer(tmp_path))
    for max_length in (None, 90):  # the second one takes the truncating paths
        (tree,) = encode_comparisons([comparison()], chat, view=View(posts, protocol, max_length))
        for k in range(2):
            text = chat.tokenizer.decode(tree.sequence(k))
            assert "Which way?" in text or protocol is TextProtocol.PAPER
            assert "SENTINEL" not in text
            assert not any(number in text for number in ("8642", "7531", "1357"))
            assert "text3" not in text or posts > 2


def test_default_puts_the_posts_before_the_question_in_the_papers_format() -> None:
    seen = visible(comparison(), profile_posts=2, protocol=TextProtocol.DEFAULT)
    profile = "Post 1 (Category: topic1):\ntext1\nPost 2 (Category: topic2):\ntext2"
    told = f"What this user wrote before:\n\n{profile}\n\nWhat the user asks now:\n\nWhich way?"
    assert seen.prefix_messages == (Message("user", told),)
    assert seen.responses == ("Left.", "Right.")


def test_default_puts_them_into_the_first_user_turn_after_the_system_message() -> None:
    contents = {"system": "S", "user": "first", "assistant": "reply"}
    turns = [{"role": role, "content": content} for role, content in contents.items()]
    turns.append({"role": "user", "content": "last"})
    seen = visible(comparison(question=None, prompt=turns), profile_posts=1, protocol=TextProtocol.DEFAULT)
    system, first, *later = seen.prefix_messages
    assert system == Message("system", "S")
    assert later == [Message("assistant", "reply"), Message("user", "last")]
    assert "text1" in first.content
    assert first.content.endswith("\n\nfirst")


@pytest.mark.parametrize(
    ("order", "claim", "heading"),
    [
        (None, OrderClaim.RECORDED, ""),
        ("bm25", OrderClaim.RECORDED, ", most relevant first"),
        ("facebook/contriever", OrderClaim.RECORDED, ", most relevant first"),
        ("recency", OrderClaim.RECORDED, ", newest first"),
        (None, OrderClaim.ALWAYS, ", most relevant first"),
        ("recency", OrderClaim.ALWAYS, ", most relevant first"),
    ],
)
def test_the_heading_claims_an_order_only_where_the_record_names_one(order, claim, heading) -> None:
    record = comparison(profile_order=order)
    assert Comparison.from_row(record.to_row(), where="x") == record
    seen = visible(record, profile_posts=2, protocol=TextProtocol.DEFAULT, order_claim=claim)
    assert seen.prefix_messages[0].content.startswith(f"What this user wrote before{heading}:\n\nPost 1 ")
    paper = visible(record, profile_posts=2, protocol=TextProtocol.PAPER, order_claim=claim)
    assert paper.prefix_messages[0].content.startswith("Which way?Post 1 ")


def test_no_posts_means_the_question_alone() -> None:
    for protocol in TextProtocol:
        for record, posts in ((comparison(), 0), (comparison(profile=[]), 10)):
            seen = visible(record, profile_posts=posts, protocol=protocol)
            assert seen.prefix_messages == (Message("user", "Which way?"),)


def test_paper_puts_the_posts_after_the_question_without_a_separator() -> None:
    seen = visible(comparison(), profile_posts=1, protocol=TextProtocol.PAPER)
    assert seen.prefix_messages == (Message("user", "Which way?Post 1 (Category: topic1):\ntext1"),)


def test_post_without_category() -> None:
    posts = comparison(profile=[{"id": "1", "text": "a"}]).profile
    assert render_profile(posts, 10) == "Post 1:\na"
    assert render_profile(posts, 10, protocol=TextProtocol.PAPER) == "Post 1 (Category: ):\na"


def test_bad_options_are_named() -> None:
    with pytest.raises(DataError, match="profile_posts: expected 0 or more, found -1"):
        visible(comparison(), profile_posts=-1, protocol=TextProtocol.DEFAULT)
    with pytest.raises(DataError, match="expected one of 'default', 'paper', found 'ours'"):
        parse_protocol("ours")
    assert parse_protocol("paper") is TextProtocol.PAPER
