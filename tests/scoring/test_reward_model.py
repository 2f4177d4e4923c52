"""A reward model through its public door: what transformers gives for each conversation alone, whatever
is scored beside it."""

from __future__ import annotations

import json
from dataclasses import replace
from pathlib import Path

import jax
import jax.numpy as jnp
import numpy as np
import pytest

import prb_jax as prb
from prb_jax.trees.streams import StreamOptions
from tests import tiny_tokenizer as tiny
from tests.packed import batch_alone, packed_batch
from tests.parity.oracle import transformers_scores
from tests.scoring.records import assert_close, record, write_model
from tests.tiny_models import write_tiny_model


def alone(folder: Path, comparison: prb.Comparison, *, posts: int) -> np.ndarray:
    """Each conversation written out, tokenised by transformers and scored by transformers, by itself."""
    from transformers import AutoTokenizer

    tokenizer = AutoTokenizer.from_pretrained(folder)
    shown = "\n".join(
        f"Post {i} (Category: {post.category}):\n{post.text}" if post.category else f"Post {i}:\n{post.text}"
        for i, post in enumerate(comparison.profile[:posts], start=1)
    )
    question = comparison.question
    if shown:
        heading = "What this user wrote before:"
        question = f"{heading}\n\n{shown}\n\nWhat the user asks now:\n\n{question}"
    conversations = [
        [{"role": "user", "content": question}, {"role": "assistant", "content": response}]
        for response in comparison.responses
    ]
    sequences = tokenizer.apply_chat_template(conversations, tokenize=True, return_dict=False)
    return transformers_scores(folder, sequences)[:, 0]


@pytest.mark.parametrize(
    ("family", "template", "bos"),
    [
        ("qwen3", tiny.THINKING, False),  # a thought in the last turn only
        ("llama-llama3", tiny.CHAT_WITH_BOS, True),  # template and tokenizer both write BOS
        ("qwen3", tiny.SEAMLESS, False),  # tokens merge at the edges of responses
        pytest.param("gemma2", tiny.SEAMLESS, False, marks=pytest.mark.slow),
    ],
)
def test_scores_are_those_of_each_conversation_alone(
    family: str, template: str, bos: bool, tmp_path: Path
) -> None:
    """The whole way from text to reward, with and without a profile, for 2, 4 and 16 responses."""
    place = write_model(tmp_path / "model", family, template=template, bos=bos)
    model = prb.load(place)
    comparisons = [record(1, 2), record(2, 4), record(7, 16)]
    for posts in (0, 10):
        scores = model.score(comparisons, profile_posts=posts)
        assert [row.dtype for row in scores] == [np.float32] * 3
        assert_close(scores, [alone(place, comparison, posts=posts) for comparison in comparisons])


class TestInvariance:
    """A score is a function of its conversation, of nothing that is scored beside it."""

    @pytest.mark.parametrize("batch_tokens", [1, 700, 100_000])
    def test_batch(self, model, mixed, scores, batch_tokens: int) -> None:
        assert np.std(np.concatenate(scores)) > 0.1
        assert_close(model.score(mixed, batch_tokens=batch_tokens), scores)

    @pytest.mark.parametrize("members", [slice(None, None, -1), slice(5, 6), slice(2, 9, 3)])
    def test_order_and_company(self, model, mixed, scores, members: slice) -> None:
        assert_close(model.score(mixed[members]), scores[members])

    def test_number_and_order_of_responses(self, model, mixed, scores) -> None:
        four = mixed[2]
        assert len(four.responses) == 4
        orders = (slice(1, 3), slice(None, None, -1))
        others = [replace(four, responses=four.responses[order]) for order in orders]
        assert_close(model.score(others), [scores[2][order] for order in orders])

    def test_layout(self, model, mixed, scores) -> None:
        """Alone, and packed into streams of other numbers and lengths, whether or not what begins alike is shared."""
        trees = model.encode(mixed)
        shards = model.batch_options().streams
        options = [StreamOptions(tokens=128, streams=n * shards, share=n > 1) for n in (1, 3)]
        for batch in (batch_alone(trees), *(packed_batch(trees, options=one) for one in options)):
            rewards = model.score_fn(model.params, model.place(batch))
            assert rewards.shape == (12, 4)
            assert_close([np.asarray(row[: len(s)]) for row, s in zip(rewards, scores)], scores)

    def test_posts_matter_and_private_fields_do_not(self, model, mixed, scores) -> None:
        fewer = model.score(mixed, profile_posts=1)
        for comparison, row, full in zip(mixed, fewer, scores, strict=True):
            changed = bool(np.abs(row - full).max() > 1e-3)
            assert changed == (len(comparison.profile) > 1)
        told = [
            replace(c, narrative="other", labels=range(len(c.responses)), user_id="u", category="c")
            for c in mixed
        ]
        assert_close(model.score(told), scores)

    def test_equal_responses_tie_exactly_and_nothing_scores_as_nothing(self, model) -> None:
        row = model.score(prb.Comparison(id="t", question="Tea?", responses=["Yes.", "No.", "Yes."]))
        assert row[0] == row[2] != row[1]
        assert model.score([]) == []


class TestLimits:
    def test_the_models_own_limit_holds_unless_told(self, tmp_path: Path) -> None:
        """A prompt that alone exceeds it is cut, posts first, and that is counted; scores stay finite."""
        model = prb.load(write_model(tmp_path / "model", "llama", max_position_embeddings=128))
        long = prb.Comparison(
            id="long", question="Which tea? " * 100, responses=["Green.", "Black."], labels=None,
            profile=[{"text": "I drink tea."}] * 3,
        )  # fmt: skip
        (batch,) = model.stream([long])
        (cut,) = batch.truncation
        assert cut.posts_dropped == 3
        assert cut.prompt_tokens_dropped > 200
        assert cut.response_tokens_dropped == 0
        (tree,) = model.encode([long])
        assert 120 <= max(len(tree.sequence(k)) for k in range(2)) <= 128
        assert np.isfinite(batch.scores[0]).all()
        assert batch.tokens == [tree.tokens]

    @pytest.mark.parametrize(
        ("option", "message"),
        [
            ({"max_length": 5000}, r"max_length 5000 is more than the 4096 tokens .*max_position_embed"),
            ({"profile_posts": -1}, "profile_posts: expected 0 or more, found -1"),
            ({"max_length": 0}, "max_length: expected at least 1, found 0"),
            (
                {"protocol": "rewardbench"},
                "protocol: expected one of 'default', 'paper', found 'rewardbench'",
            ),
        ],
    )
    def test_bad_options(self, model, mixed, option, message: str) -> None:
        with pytest.raises(prb.DataError, match=message):
            model.score(mixed, **option)


class TestLoading:
    def test_the_tokenizer_of_another_model(self, tmp_path: Path) -> None:
        message = r"ids up to 399, but .* has only 130 embeddings: .* not the tok"
        with pytest.raises(prb.CheckpointError, match=message):
            prb.load(write_model(tmp_path / "model", "llama", vocab_size=130))

    def test_dtype(self, folder: Path, mixed, scores) -> None:
        with pytest.raises(prb.CheckpointError, match="dtype: expected float32 or bfloat16, found 'float16'"):
            prb.load(folder, dtype="float16")
        assert prb.load(folder).dtype == "float32"
        narrow = prb.load(folder, dtype="bfloat16")
        assert {leaf.dtype.name for leaf in jax.tree.leaves(narrow.params["layers"])} == {"bfloat16"}
        rewards = narrow.score(mixed[:4])
        assert {row.dtype for row in rewards} == {np.dtype(np.float32)}
        difference = max(np.abs(a - b).max() for a, b in zip(rewards, scores))
        assert 1e-4 < difference < 0.3

    @pytest.mark.parametrize("stored", ["float16", "bfloat16"])
    def test_half_precision_checkpoints_run_in_bfloat16(self, tmp_path: Path, stored: str) -> None:
        model = prb.load(write_model(tmp_path / "model", "llama", dtype=stored))
        assert model.dtype == "bfloat16"
        assert model.params["score"].dtype == jnp.float32

    def test_a_tokenizer_kept_elsewhere(self, folder: Path, tmp_path: Path, mixed, scores) -> None:
        bare = write_tiny_model(tmp_path / "bare", "qwen3", vocab_size=400)
        with pytest.raises(prb.CheckpointError, match="bare: "):
            prb.load(bare)
        assert_close(prb.load(bare, tokenizer=folder).score(mixed), scores)

    def test_identity_names_what_decides_the_scores(self, folder: Path, model) -> None:
        identity = json.loads(json.dumps(model.identity()))
        assert identity["architecture"] == "Qwen3ForSequenceClassification"
        assert (identity["dtype"], identity["readout"]) == ("float32", "logit")
        assert identity["template"].startswith("sha256:")
        assert {"config.json", "model.safetensors"} <= set(identity["files"])
        assert prb.load(folder, dtype="bfloat16").identity() != model.identity()
        assert prb.load(folder, chat_template="plain").identity() != model.identity()
