"""Heads with several labels, and the scoring protocol of the paper, against transformers."""

from __future__ import annotations

from pathlib import Path

import numpy as np
import pytest

import prb_jax as prb
from prb_jax.cli import main
from prb_jax.reports.inspection.inspect import inspect
from tests import tiny_tokenizer as tiny
from tests.json_lines import write_lines
from tests.parity.oracle import transformers_scores
from tests.scoring.records import TOLERANCE, assert_close, read_json, record, score_rows, write_model
from tests.sweeps import sweep


class TestSeveralLabels:
    def test_the_rule_must_be_named_and_is_followed(self, tmp_path: Path) -> None:
        place = write_model(tmp_path / "model", "qwen2", num_labels=2)
        comparison = record(1, 3)
        with pytest.raises(
            prb.CheckpointError, match=r"2 labels, and none is named as the reward.* first-log"
        ):
            prb.load(place).score([comparison])
        model = prb.load(place, readout="first-logit")
        (tree,) = model.encode([comparison])
        logits = transformers_scores(place, [tree.sequence(k).tolist() for k in range(3)])
        (first,) = model.score([comparison])
        np.testing.assert_allclose(first, logits[:, 0], atol=TOLERANCE)
        (last,) = prb.load(place, readout="last-softmax").score([comparison])
        np.testing.assert_allclose(last, 1 / (1 + np.exp(logits[:, 0] - logits[:, 1])), atol=TOLERANCE)
        assert (np.diff(first) != np.diff(last)).all()


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

    @pytest.mark.parametrize(
        ("num_labels", "pad"),
        sweep([(1, tiny.PAD), (2, tiny.END), (1, tiny.END), (2, tiny.PAD)], few=(1,)),
    )
    def test_scores(self, tmp_path: Path, num_labels: int, pad: str) -> None:
        """Two BOS, the end of long answers cut off, no profile; the padding token may be END itself, and
        the score is then read before it."""
        place = write_model(
            tmp_path / "model", "llama", template=tiny.CHAT_WITH_BOS, bos=True, pad=pad, num_labels=num_labels,
            pad_token_id=0 if pad == tiny.PAD else 3,
        )  # fmt: skip
        model = prb.load(place)
        assert model.readout == ("logit" if num_labels == 1 else "last-softmax")
        comparisons = [record(n, 3, longest=60) for n in (1, 2, 3)]
        for limit in (80, None):
            scores = model.score(comparisons, profile_posts=0, protocol="paper", max_length=limit)
            expected = [self.carried_out(place, c, c.question, max_length=limit or 8192) for c in comparisons]
            assert_close(scores, expected)
        trees = model.encode(comparisons, profile_posts=0, protocol="paper", max_length=80)
        assert max(tree.truncation.response_tokens_dropped for tree in trees) > 20

    def test_with_a_profile_it_follows_the_question_without_a_separator(self, tmp_path: Path) -> None:
        place = write_model(tmp_path / "model", "llama", template=tiny.CHAT_WITH_BOS, bos=True)
        comparison = record(2)
        posts = "\n".join(
            f"Post {i} (Category: {post.category}):\n{post.text}"
            for i, post in enumerate(comparison.profile, 1)
        )
        scores = prb.load(place).score(comparison, profile_posts=10, protocol="paper")
        expected = self.carried_out(place, comparison, comparison.question + posts, max_length=8192)
        np.testing.assert_allclose(scores, expected, atol=TOLERANCE)

    def test_a_head_with_two_labels_on_the_command_line(
        self, tmp_path: Path, capsys: pytest.CaptureFixture[str]
    ) -> None:
        """No rule is named: the paper protocol has one, and says so; a rule that is named is followed; the
        default protocol refuses. The model names no padding token, which is said too."""
        place = write_model(
            tmp_path / "model", "llama", template=tiny.CHAT_WITH_BOS, bos=True, num_labels=2, pad=None,
            pad_token_id=None,
        )  # fmt: skip
        comparisons = [record(n) for n in (1, 2)]
        rows = [
            {"id": c.id, "question": c.question, "responses": c.responses, "labels": [1, 0]}
            for c in comparisons
        ]
        data = write_lines(tmp_path / "pairs.jsonl", rows)

        def run(name: str, *options: str) -> int:
            return main(["evaluate", str(place), "--data", data, "--out", str(tmp_path / name), *options])

        assert run("refused") == 2
        assert "2 labels, and none is named as the reward" in capsys.readouterr().err
        assert not (tmp_path / "refused").exists()
        assert run("paper", "--protocol", "paper") == 0
        said = capsys.readouterr().err
        assert "the score head has 2 labels; the reward is the last of their softmax" in said
        assert "neither config.json nor the tokenizer names a padding token" in said
        told = read_json(tmp_path / "paper" / "run.json")
        assert [remark in said for remark in told["remarks"]] == [True, True]
        assert told["inputs"]["model"]["readout"] == "last-softmax"
        logits = [
            transformers_scores(place, [tree.sequence(k).tolist() for k in range(2)])
            for tree in prb.load(place).encode(comparisons, profile_posts=0, protocol="paper")
        ]
        expected = [1 / (1 + np.exp(pair[:, 0] - pair[:, 1])) for pair in logits]
        assert_close([np.asarray(row["scores"]) for row in score_rows(tmp_path / "paper")], expected)
        assert run("first", "--protocol", "paper", "--readout", "first-logit") == 0
        assert "labels;" not in capsys.readouterr().err
        first = [np.asarray(row["scores"]) for row in score_rows(tmp_path / "first")]
        assert_close(first, [pair[:, 0] for pair in logits])
        facts = inspect(str(place))
        assert facts["readout"].endswith("last-softmax (protocol paper; the default one needs --readout)")
        assert "names a padding token" in facts["warnings"]
