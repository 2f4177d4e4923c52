"""Heads with several labels, and the scoring protocol of the paper, against transformers."""

from __future__ import annotations

from pathlib import Path

import numpy as np
import pytest

import prb_jax as prb
from tests import tiny_tokenizer as tiny
from tests.parity.oracle import transformers_scores
from tests.scoring.records import TOLERANCE, assert_close, record, write_model


class TestSeveralLabels:
    def test_the_rule_must_be_named_and_is_followed(self, tmp_path: Path) -> None:
        place = write_model(tmp_path / "model", "qwen2", num_labels=2)
        with pytest.raises(prb.CheckpointError, match=r"2 labels, and nothing says which .* first-log"):
            prb.load(place)
        comparison = record(1, 3)
        model = prb.load(place, readout="first-logit")
        (tree,) = model.encode([comparison])
        logits = transformers_scores(place, [tree.sequence(k).tolist() for k in range(3)])
        (first,) = model.score([comparison])
        np.testing.assert_allclose(first, logits[:, 0], atol=TOLERANCE)
        (last,) = prb.load(place, readout="last-softmax").score([comparison])
        np.testing.assert_allclose(last, 1 / (1 + np.exp(logits[:, 0] - logits[:, 1])), atol=TOLERANCE)
        assert (np.diff(first) != np.diff(last)).all()

    def test_unknown_and_useless_rules(self, folder: Path) -> None:
        with pytest.raises(
            prb.CheckpointError, match="unknown readout 'mean': expected one of logit, first-logit"
        ):
            prb.load(folder, readout="mean")
        with pytest.raises(
            prb.CheckpointError, match="'last-softmax' needs several labels, the score head has one"
        ):
            prb.load(folder, readout="last-softmax")


class TestPaperProtocol:
    """Against the protocol carried out with transformers: batches padded on the right, read where it reads."""

    @staticmethod
    def carried_out(folder: Path, comparison: prb.Comparison, content: str, *, max_length: int) -> np.ndarray:
        import torch
        from transformers import AutoModelForSequenceClassification, AutoTokenizer

        tokenizer = AutoTokenizer.from_pretrained(folder)
        model = AutoModelForSequenceClassification.from_pretrained(folder, attn_implementation="eager").eval()
        texts = [
            tokenizer.apply_chat_template(
                [{"role": "user", "content": content}, {"role": "assistant", "content": response}],
                tokenize=False,
            )
            for response in comparison.responses
        ]
        inputs = tokenizer(texts, return_tensors="pt", padding=True, truncation=True, max_length=max_length)
        assert inputs["input_ids"][0, :2].tolist() == [tokenizer.bos_token_id] * 2
        with torch.inference_mode():
            logits = model(**inputs).logits.double()
        return (logits[:, 0] if logits.shape[1] == 1 else torch.softmax(logits, dim=-1)[:, -1]).numpy()

    @pytest.mark.parametrize("num_labels", [1, 2])
    @pytest.mark.parametrize("pad", [tiny.PAD, tiny.END])
    def test_scores(self, tmp_path: Path, num_labels: int, pad: str) -> None:
        """Two BOS, the end of long answers cut off, no profile; the padding token may be END itself, and
        the score is then read before it."""
        place = write_model(
            tmp_path / "model", "llama", template=tiny.CHAT_WITH_BOS, bos=True, pad=pad, num_labels=num_labels,
            pad_token_id=0 if pad == tiny.PAD else 3,
        )  # fmt: skip
        model = prb.load(place, readout="last-softmax" if num_labels == 2 else None)
        comparisons = [record(n, 3, longest=60) for n in (1, 2, 3)]
        for limit in (80, None):
            found = model.score(comparisons, profile_posts=0, protocol="paper", max_length=limit)
            expected = [self.carried_out(place, c, c.question, max_length=limit or 8192) for c in comparisons]
            assert_close(found, expected)
        lost = [tree.truncation.response_tokens_dropped for tree in model.encode(
            comparisons, profile_posts=0, protocol="paper", max_length=80
        )]  # fmt: skip
        assert max(lost) > 20

    def test_with_a_profile_it_follows_the_question_without_a_separator(self, tmp_path: Path) -> None:
        place = write_model(tmp_path / "model", "llama", template=tiny.CHAT_WITH_BOS, bos=True)
        comparison = record(2)
        posts = "\n".join(
            f"Post {i} (Category: {post.category}):\n{post.text}"
            for i, post in enumerate(comparison.profile, 1)
        )
        (found,) = prb.load(place).score([comparison], protocol="paper")
        expected = self.carried_out(place, comparison, comparison.question + posts, max_length=8192)
        np.testing.assert_allclose(found, expected, atol=TOLERANCE)
