"""A DeBERTa reward model from load to score: the pair as transformers makes it, its classifier, what is refused."""

from __future__ import annotations

import json
from collections.abc import Sequence
from pathlib import Path

import numpy as np
import pytest
import torch

import prb_jax as prb
from prb_jax import cli
from prb_jax.models.readouts.open_model import resolve_model
from prb_jax.models.readouts.registry import ROWS
from prb_jax.scoring import reward_model
from prb_jax.text.pair_tokenizer import load_pair_tokenizer
from prb_jax.text.view import View
from prb_jax.training.convert import convert
from prb_jax.trees import sequences
from tests.scoring.records import TOLERANCE, read_json, score_rows, write_comparisons
from tests.tiny_encoders import WORDS, configure, write_encoder, write_wordpiece


def write(folder: Path, **config) -> torch.nn.Module:
    """A random DebertaV2ForSequenceClassification in a file of torch.save, under the names of the real ones."""
    model = write_encoder(folder, "DebertaV2ForSequenceClassification", **({"num_labels": 1} | config))
    (folder / "model.safetensors").unlink()
    torch.save(model.state_dict(), folder / "pytorch_model.bin")
    return model


def comparison(number: int, responses: int = 2, *, longest: int = 18) -> prb.Comparison:
    rng = np.random.default_rng(number)

    def text(most: int) -> str:
        return " ".join(rng.choice(WORDS[:28], int(rng.integers(1, most))))

    return prb.Comparison(
        id=f"c{number}",
        question=text(12) + " ?",
        responses=[f"{WORDS[k % 20]} {text(longest)}" for k in range(responses)],
        labels=[float(k == 0) for k in range(responses)],
        user_id=f"u{number % 3}",
        profile=[{"id": str(i), "category": "", "text": text(9)} for i in range(number % 3)],
    )


def reference(folder: Path, model, question: str, responses: Sequence[str]) -> np.ndarray:
    """The logits of each response, by transformers in float64: on some CPUs its float32 is 8e-6 away from them."""
    from transformers import AutoTokenizer

    tokenizer, logits = AutoTokenizer.from_pretrained(folder), []
    for response in responses:
        inputs = tokenizer(question, response, return_tensors="pt")
        with torch.inference_mode():
            masked = {name: inputs[name] for name in ("input_ids", "attention_mask")}
            logits.append(model.double()(**masked).logits[0].tolist())
    model.float()
    return np.asarray(logits)


def assert_near(scores: Sequence[float] | np.ndarray, expected: np.ndarray) -> None:
    np.testing.assert_allclose(scores, expected, atol=TOLERANCE, rtol=0)


@pytest.fixture(scope="module")
def folder(tmp_path_factory: pytest.TempPathFactory) -> tuple[Path, torch.nn.Module]:
    path = tmp_path_factory.mktemp("deberta")
    return path, write(path)


def refused(message: str) -> pytest.RaisesExc[prb.CheckpointError]:
    return pytest.raises(prb.CheckpointError, match=message)


@pytest.fixture(scope="module")
def rm(folder: tuple[Path, torch.nn.Module]) -> prb.RewardModel:
    return prb.load(folder[0], mesh="data=1")


def test_scores_equal_those_of_transformers(folder, rm: prb.RewardModel) -> None:
    path, model = folder
    rows = [comparison(number, 2 + number % 3) for number in range(9)]
    for row, scores in zip(rows, rm.score(rows, profile_posts=0), strict=True):
        assert_near(scores, reference(path, model, row.question, row.responses)[:, 0])
    assert rm.readout == "deberta-pair"
    assert rm.report is not None
    assert rm.report.files == ("pytorch_model.bin",)
    assert "classifier.weight [1, 32] F32" in rm.report.head
    # The pure function on a batch of one's own.
    batch = rm.batch(rm.encode(rows[:3], profile_posts=0))
    again = np.asarray(rm.score_fn(rm.params, batch))
    assert_near(again[1, :3], rm.score(rows[:3], profile_posts=0)[1])
    assert_near(rm.reward(rows[1].question, rows[1].responses[2], profile_posts=0), again[1, 2])


@pytest.mark.parametrize(
    "changes",
    [
        {"classifier_pooling": "cls"},
        {
            "classifier_pooling": "mean",
            "norm_bias": True,
            "classifier_bias": True,
            "classifier_activation": "tanh",
        },
    ],
    ids=["cls", "mean"],
)
def test_scores_of_modernbert_equal_those_of_transformers(
    changes: dict, tmp_path: Path, capsys: pytest.CaptureFixture
) -> None:
    model = write_encoder(tmp_path, "ModernBertForSequenceClassification", num_labels=1, **changes)
    rows = [comparison(number, 2 + number % 3, longest=40) for number in range(5)]
    rm = prb.load(tmp_path, mesh="data=1")
    assert rm.readout == "modernbert-pair"
    for row, scores in zip(rows, rm.score(rows, profile_posts=0), strict=True):
        assert_near(scores, reference(tmp_path, model, row.question, row.responses)[:, 0])
    assert cli.main(["inspect", str(tmp_path)]) == 0
    said = " ".join(capsys.readouterr().out.split())
    mean = changes["classifier_pooling"] == "mean"
    assert ("the mean of all states" in said) == mean
    assert "6 tokens on each side" in said


def test_batches_side_by_side_give_the_same_bytes(
    rm: prb.RewardModel, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(sequences, "GROUP", 1)
    rows = [comparison(number, 2 + number % 3) for number in range(24)]

    def scored(lanes: int) -> list[tuple[Sequence[int], list[bytes]]]:
        monkeypatch.setattr(reward_model, "lanes", lambda mesh: lanes)
        batches = rm.stream(rows, view=View(0), batch_tokens=128)
        return [(batch.indices, [scores.tobytes() for scores in batch.scores]) for batch in batches]

    alone = scored(1)
    assert len(alone) > 4
    assert scored(3) == alone


def test_the_profile_stands_in_the_first_text(folder, rm: prb.RewardModel) -> None:
    path, model = folder
    row = comparison(5)
    heading, ask = "What this user wrote before:", "What the user asks now:"
    posts = "\n".join(f"Post {i}:\n{post.text}" for i, post in enumerate(row.profile, start=1))
    question = f"{heading}\n\n{posts}\n\n{ask}\n\n{row.question}"
    (scores,) = rm.score([row], profile_posts=10, max_length=64)
    (tree,) = rm.encode([row], profile_posts=10)
    assert not tree.truncation.any
    assert_near(scores, reference(path, model, question, row.responses)[:, 0])


def test_what_does_not_fit_is_taken_from_the_prompt(folder, rm: prb.RewardModel) -> None:
    path, model = folder
    row = prb.Comparison(id="x", question="soup " * 90 + "rain ?", responses=["tea", "bread " * 20])
    (tree,) = rm.encode([row])
    assert tree.truncation.prompt_tokens_dropped > 0
    assert max(len(tree.sequence(k)) for k in range(2)) == 64
    cut = "soup " * (64 - 20 - 3 - 2) + "rain ?"
    assert_near(rm.score([row])[0], reference(path, model, cut, row.responses)[:, 0])
    turns = [prb.Message(*turn) for turn in (("user", "tea"), ("assistant", "no"), ("user", "why"))]
    whole = load_pair_tokenizer(path).tokenizer("tea\n\nno", "why")["input_ids"]
    assert rm.tokenizer.encode(turns) == whole


def test_several_labels_need_a_rule(tmp_path: Path) -> None:
    model = write(tmp_path, num_labels=2, pooler_hidden_act="tanh")
    with refused(r"has 2 labels, .*choose --readout first-logit"):
        prb.load(tmp_path)
    row = comparison(1)
    logits = reference(tmp_path, model, row.question, row.responses)
    shares = np.exp(logits) / np.exp(logits).sum(1, keepdims=True)
    for readout, expected in (("first-logit", logits[:, 0]), ("last-softmax", shares[:, 1])):
        assert_near(prb.load(tmp_path, readout=readout).score(row, profile_posts=0), expected)


def test_the_commands(
    folder, tmp_path: Path, capsys: pytest.CaptureFixture, monkeypatch: pytest.MonkeyPatch
) -> None:
    path, model = folder
    monkeypatch.setenv("COLUMNS", "200")  # narrow terminals fold the report's lines
    assert cli.main(["inspect", str(path)]) == 0
    said = capsys.readouterr().out
    for part in (
        "DebertaV2ForSequenceClassification", "encoder, 3 layers, width 32", "64 tokens",
        "classifier.weight [1, 32] F32",
        "deberta-pair: pooler and classifier of the first token's state, logit",
        "1 file;", "distances up to 64 in 16 embeddings (content to position and position to content)",
    ):  # fmt: skip
        assert part in said
    rows = [comparison(number) for number in range(7)]
    data = write_comparisons(tmp_path / "x.jsonl", rows)
    command = ["evaluate", str(path), "--data", str(data), "--no-progress", "--out"]
    assert cli.main([*command, str(tmp_path / "run"), "--profile-posts", "0"]) == 0
    for row, written in zip(rows, score_rows(tmp_path / "run"), strict=True):
        assert_near(written["scores"], reference(path, model, row.question, row.responses)[:, 0])
    capsys.readouterr()
    assert cli.main([*command, str(tmp_path / "paper"), "--protocol", "paper"]) == 2
    assert "chat template" in capsys.readouterr().err


def test_an_encoder_of_texts_is_inspected_and_not_loaded(
    tmp_path: Path, capsys: pytest.CaptureFixture
) -> None:
    write_encoder(tmp_path)
    assert cli.main(["inspect", str(tmp_path)]) == 0
    said = capsys.readouterr().out
    assert "mean of the last states, not normalised" in said
    assert "pooler.dense.weight: pooler, not used for embeddings" in said
    with refused(r"'BertModel' is not a reward model on an encoder; .*deberta-pair"):
        prb.load(tmp_path)


def test_what_is_refused(folder, tmp_path: Path) -> None:
    path, _ = folder
    with refused("leave out chat_template"):
        prb.load(path, chat_template="plain")
    with refused("readout 'armorm' is not a reward model on an encoder"):
        prb.load(path, readout="armorm")
    with refused("'DebertaV2ForSequenceClassification' is an encoder"):
        resolve_model(path)
    with refused("is an encoder, which this command cannot use"):
        convert(path, tmp_path / "out")
    write(tmp_path, type_vocab_size=2)
    with refused("'type_vocab_size': expected 0, found 2"):
        prb.load(tmp_path)
    tensors, file = write(tmp_path).state_dict(), tmp_path / "pytorch_model.bin"
    torch.save({k: v for k, v in tensors.items() if k != "pooler.dense.weight"}, file)
    with refused(r"'pooler\.dense\.weight' of the read-out 'deberta-pair' is missing"):
        prb.load(tmp_path)
    torch.save(tensors | {"pooler.dense.bias": torch.zeros(3)}, file)
    with refused(r"'pooler\.dense\.bias': expected shape \[32\], found \[3\]"):
        prb.load(tmp_path)
    torch.save(tensors, file)
    configure(tmp_path, id2label={"0": "a", "1": "b"}, num_labels=None)
    with refused(r"'classifier\.weight' has 1 labels, but config\.json says 2"):
        prb.load(tmp_path)
    configure(tmp_path, id2label=None, num_labels=1, architectures=None)
    with refused("'deberta-v2' is not a reward model on an encoder"):
        prb.load(tmp_path)
    assert prb.load(tmp_path, readout="deberta-pair").readout == "deberta-pair"
    configure(tmp_path, pooler_hidden_act="silu")
    with refused(r"'pooler_hidden_act': expected one of .*, found 'silu'"):
        prb.load(tmp_path, readout="deberta-pair")
    assert ROWS["deberta-pair"].models[0] == "OpenAssistant/reward-model-deberta-v3-large"


def test_a_tokenizer_without_a_separator(tmp_path: Path) -> None:
    write_wordpiece(tmp_path)
    path = tmp_path / "tokenizer.json"
    path.write_text(json.dumps(read_json(path) | {"post_processor": None}))
    pairs = load_pair_tokenizer(tmp_path)
    assert (pairs.before, pairs.between, pairs.after) == ((), (), ())
