"""Reward models of other layouts from load to score: text rules, refusals, reports, conversion."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from safetensors.numpy import load_file, save_file

import prb_jax as prb
from prb_jax.cli import main
from prb_jax.records.comparison import Message
from prb_jax.reports.inspection.inspect import inspect
from prb_jax.text.open_tokenizer import load_tokenizer
from prb_jax.text.template import TextRules
from prb_jax.text.tokenizer import ChatTokenizer
from prb_jax.training.convert import convert
from tests import tiny_tokenizer as tiny
from tests.models.readouts.checkpoints import Reference, case_of, write_row
from tests.parity.oracle import transformers_scores
from tests.parity.reward_models import SIZES
from tests.scoring.records import record

TOLERANCE = 1e-5
CHAT = [Message("user", "Is it raining?"), Message("assistant", "It is.")]
THREE = record(1, 3)


def sequences(model: prb.RewardModel) -> list[list[int]]:
    """The ids of each response of one comparison, after its prompt."""
    (tree,) = model.encode([THREE])
    return [tree.sequence(k).tolist() for k in range(3)]


def assert_scores(model: prb.RewardModel, reference: Reference) -> None:
    expected = [reference(ids) for ids in sequences(model)]
    np.testing.assert_allclose(model.score([THREE])[0], expected, atol=TOLERANCE, rtol=0)


def assert_transformers_scores(model: prb.RewardModel, folder: Path) -> None:
    expected = transformers_scores(folder, sequences(model))[:, 0]
    np.testing.assert_allclose(model.score([THREE])[0], expected, atol=TOLERANCE, rtol=0)


def rendered(model: prb.RewardModel, conversation: list[Message]) -> str:
    assert isinstance(model.tokenizer, ChatTokenizer)
    return model.tokenizer.render([conversation])[0]


class TestText:
    def test_a_last_token_is_put_behind_every_conversation(self, tmp_path: Path) -> None:
        folder, reference = write_row("internlm2", tmp_path, config={"reward_token_id": 5})
        model, plain = prb.load(folder), load_tokenizer(folder)
        assert [ids[-1] for ids in sequences(model)] == [5, 5, 5]
        assert model.tokenizer.encode(CHAT) == [*plain.encode(CHAT), 5]
        assert model.tokenizer.template_hash != plain.template_hash
        assert_scores(model, reference)

    def test_not_where_it_stands_already(self, tmp_path: Path) -> None:
        folder = tiny.write_tokenizer(tmp_path, template=tiny.CHAT.replace("<|end|>\\n", "<|end|>"))
        end = load_tokenizer(folder).eos_token_id
        rules = TextRules(append="given", append_id=end)
        assert load_tokenizer(folder, rules=rules).encode(CHAT) == load_tokenizer(folder).encode(CHAT)

    @pytest.mark.parametrize(
        ("row", "message"),
        [
            ("athene", r"id 128003\) that the tokenizer does not have"),
            ("qwen2-prm", r"reads its reward at '<extra_0>' \(id 151651\)"),
        ],
    )
    def test_a_token_that_the_tokenizer_does_not_know(self, row: str, message: str, tmp_path: Path) -> None:
        folder, _ = write_row(row, tmp_path)
        with pytest.raises(prb.CheckpointError, match=message):
            prb.load(folder)

    def test_the_tokenizers_own_cls_token(self, tmp_path: Path) -> None:
        folder, reference = write_row("athene", tmp_path)
        path = folder / "tokenizer_config.json"
        path.write_text(json.dumps(json.loads(path.read_text()) | {"cls_token": tiny.START}))
        model = prb.load(folder)
        assert model.tokenizer.encode(CHAT)[-1] == model.tokenizer.tokenizer.cls_token_id
        assert_scores(model, reference)

    def test_one_bos_where_template_and_tokenizer_both_write_one(self, tmp_path: Path) -> None:
        folder, _ = write_row("tulu", tmp_path)
        tiny.write_tokenizer(folder, template=tiny.CHAT_WITH_BOS, bos=True)
        ids = load_tokenizer(folder).encode(CHAT)
        assert ids.count(1) == 1
        assert ids[0] == 1
        assert "BOS" not in inspect(str(folder))["warnings"]

    def test_an_empty_thought_in_the_last_turn(self, tmp_path: Path) -> None:
        from transformers import AutoTokenizer

        folder, _ = write_row("nemotron-classifier", tmp_path, template=tiny.THINKING)
        spoken = [{"role": message.role, "content": message.content} for message in CHAT]
        theirs = AutoTokenizer.from_pretrained(folder).apply_chat_template(spoken, return_dict=False)
        assert load_tokenizer(folder).encode(CHAT) == theirs
        assert "thought" in inspect(str(folder))["example"]

    def test_a_mark_behind_every_response(self, tmp_path: Path) -> None:
        folder = tiny.write_tokenizer(tmp_path)
        start = load_tokenizer(folder).tokenizer.convert_tokens_to_ids(tiny.START)
        marked = load_tokenizer(folder, rules=TextRules(suffix=tiny.START, suffix_id=start))
        again = [CHAT[0], Message("assistant", CHAT[1].content + tiny.START)]
        assert marked.encode(CHAT) == marked.encode(again) == load_tokenizer(folder).encode(again)

    def test_a_template_for_a_tokenizer_without_one(self, tmp_path: Path) -> None:
        folder, reference = write_row("ultra-rm", tmp_path, template=None)
        model = prb.load(folder)
        assert rendered(model, CHAT) == f"{tiny.BOS}Human: Is it raining?\n\nAssistant: It is."
        assert_scores(model, reference)
        model = prb.load(folder, chat_template="rewardbench")
        assert rendered(model, CHAT) == f"{tiny.BOS}User: Is it raining?\n\nAssistant: It is.\n\n{tiny.END}"
        assert_scores(model, reference)

    def test_a_template_that_is_borrowed_with_its_tokenizer(self, tmp_path: Path) -> None:
        borrowed = "{% for message in messages %}[INST] {{ message['content'] }}{% endfor %}"
        folder, reference = write_row("starling", tmp_path, template=borrowed)
        model = prb.load(folder)
        turns = [*CHAT, Message("user", "Still?"), Message("assistant", "Yes.")]
        first = f"{tiny.BOS}[INST] Is it raining? {tiny.END} [/INST] It is.{tiny.END}"
        assert rendered(model, CHAT) == first
        assert rendered(model, turns) == f"{first}{tiny.BOS}[INST] Still? {tiny.END} [/INST] Yes.{tiny.END}"
        told = f"{tiny.BOS}[INST] <<SYS>>\nBe brief.\n<</SYS>>\n\nIs it raining? {tiny.END} [/INST]"
        assert rendered(model, [Message("system", "Be brief."), *CHAT]).startswith(told)
        assert_scores(model, reference)
        assert rendered(prb.load(convert(folder, tmp_path / "standard")), CHAT) == first
        again = prb.load(folder, chat_template=borrowed)
        assert rendered(again, CHAT) == "[INST] Is it raining?[INST] It is."

    def test_the_end_of_the_prompt_must_occur(self, tmp_path: Path) -> None:
        folder, _ = write_row("armorm", tmp_path)
        with pytest.raises(prb.DataError, match=r"'c1': response 0: the ids \[128009, .*do not occur"):
            prb.load(folder).score([record(1)])


def test_logits_of_a_vocabulary_are_capped_where_the_model_caps_them(tmp_path: Path) -> None:
    from transformers import Gemma2Config, Gemma2ForCausalLM

    torch.manual_seed(0)
    config = Gemma2Config(**SIZES, vocab_size=416, initializer_range=0.5, final_logit_softcapping=0.7)
    theirs = Gemma2ForCausalLM._from_config(config, attn_implementation="eager").eval()
    theirs.save_pretrained(tmp_path)
    tiny.write_tokenizer(tmp_path)
    one = prb.load(tmp_path, readout="vocabulary:17")
    with torch.inference_mode():
        logits = [theirs(torch.tensor([ids])).logits[0, -1, [17, 4]] for ids in sequences(one)]
    expected = torch.stack(logits).double()
    assert 0.1 < expected.abs().max() < 0.7
    np.testing.assert_allclose(one.score([THREE])[0], expected[:, 0], atol=TOLERANCE, rtol=0)
    (shares,) = prb.load(tmp_path, readout="vocabulary:17,4").score([THREE])
    np.testing.assert_allclose(shares, torch.softmax(expected, -1)[:, 0], atol=TOLERANCE, rtol=0)
    facts = inspect(str(tmp_path), readout="vocabulary:17")
    assert facts["readout"].endswith("logit of token 17 at the last token, logits capped at 0.7")
    with pytest.raises(prb.CheckpointError, match="is not a linear head"):
        convert(tmp_path, tmp_path / "standard", readout="vocabulary:17")


@pytest.mark.parametrize("together", [None, "min"])
def test_two_labels_behind_every_step_equal_transformers(together: str | None, tmp_path: Path) -> None:
    """A ``*ForTokenClassification``, as TRL trains process models; the last step may come without its mark."""
    from transformers import Qwen3Config, Qwen3ForTokenClassification

    torch.manual_seed(0)
    config = Qwen3Config(vocab_size=416, num_labels=2, initializer_range=0.2, **SIZES)
    theirs = Qwen3ForTokenClassification(config).eval()
    with torch.no_grad():
        theirs.score.bias.normal_()
    theirs.save_pretrained(tmp_path)
    tiny.write_tokenizer(tmp_path)
    step = load_tokenizer(tmp_path).bos_token_id
    marked = [f"Walk.{tiny.BOS} Rest.{tiny.BOS} Eat.{tiny.BOS}", f"Rest.{tiny.BOS}", f"Walk.{tiny.BOS} Eat"]
    trio = prb.Comparison(id="c", question="And then?", responses=marked, labels=None)
    readout = f"steps:{step}" + (f":{together}" if together else "")
    model = prb.load(tmp_path, readout=readout)
    (tree,) = model.encode([trio])
    expected, counts = [], []
    for k in range(3):
        ids = torch.tensor(tree.sequence(k).astype(np.int64))
        with torch.inference_mode():
            good = theirs(ids[None]).logits[0].softmax(-1)[ids == step, 1]
        counts.append(len(good))
        expected.append(float(good.min() if together else good.prod()))
    assert counts == [3, 1, 2]
    assert np.ptp(expected) > 1e-3
    np.testing.assert_allclose(model.score([trio])[0], expected, atol=TOLERANCE, rtol=0)
    shown = inspect(str(tmp_path), readout=readout)["readout"]
    assert f"probability of a good step at every token {step}, the {together or 'product'} of them" in shown

    with pytest.raises(
        prb.CheckpointError, match=r"'Qwen3ForTokenClassification'.*steps:ID for a model with two"
    ):
        prb.load(tmp_path)
    with pytest.raises(prb.CheckpointError, match=r"token 300 ends .* expected an added token .* found"):
        prb.load(tmp_path, readout="steps:300")
    with pytest.raises(prb.CheckpointError, match=r"unknown readout .*steps:1:median.*: expected one of"):
        prb.load(tmp_path, readout="steps:1:median")


class TestBesideAVisionTower:
    def test_the_tower_is_left_unread_and_not_converted(self, tmp_path: Path) -> None:
        folder, reference = write_row("skywork-vl", tmp_path)
        facts = inspect(str(folder))
        assert facts["readout"] == "skywork-vl: linear, at the last token, logit"
        assert facts["tensors ignored"].splitlines() == [
            f"visual.{name}: vision tower, not used for text"
            for name in ("blocks.0.norm1.weight", "merger.mlp.2.weight")
        ]
        assert "text alone is scored" in facts["warnings"]
        assert_scores(prb.load(folder), reference)
        target = convert(folder, tmp_path / "standard", drop_bias=True)
        written = json.loads((target / "config.json").read_text())
        assert written["architectures"] == ["Qwen2ForSequenceClassification"]
        assert_transformers_scores(prb.load(target), target)

    def test_images_are_refused(self, tmp_path: Path) -> None:
        folder, _ = write_row("skywork-vl", tmp_path, config={"image_token_id": 1})
        model = prb.load(folder)
        marked = prb.Comparison(id="1", question=f"{tiny.BOS} What is this?", responses=["A.", "B."])
        refusal = r"'1': its text holds the token 1 \(image_token_id of .*only text"
        with pytest.raises(prb.DataError, match=refusal):
            model.score([marked])
        parts = [{"type": "image", "image": "x.jpg"}, {"type": "text", "text": "What is this?"}]
        prompt: Any = [{"role": "user", "content": parts}]
        with pytest.raises(
            prb.DataError, match=r"content\[0\].type': expected 'text', found 'image'.*: only text"
        ):
            prb.Comparison(id="1", prompt=prompt, responses=["A.", "B."])


def test_heads_are_float32_in_a_bfloat16_model(tmp_path: Path) -> None:
    folder, reference = write_row("urm", tmp_path)
    model = prb.load(folder, dtype="bfloat16")
    assert {str(leaf.dtype) for leaf in model.params["head"].values()} == {"float32"}
    assert str(model.params["embed"].dtype) == "bfloat16"
    rewards = model.score_fn(model.params, model.batch(model.encode([THREE])))
    assert (str(rewards.dtype), rewards.shape[1]) == ("float32", 3)
    np.testing.assert_allclose(rewards[0], [reference(ids) for ids in sequences(model)], atol=0.3)
    assert model.identity()["readout"] == "urm"


class TestReport:
    def test_a_value_head_in_a_side_file(self, tmp_path: Path) -> None:
        folder, _ = write_row("value-head", tmp_path)
        facts = inspect(str(folder))
        assert facts["readout"] == "value-head: linear, at the last token, logit"
        assert facts["score head"].splitlines() == [
            "v_head.summary.weight [1, 32] F32 in value_head.safetensors",
            "v_head.summary.bias [1] F32 in value_head.safetensors",
        ]
        assert "v_head.summary.bias is added to every reward" in facts["warnings"]
        assert "ids:" in facts["example"]

    @pytest.mark.parametrize(
        ("row", "reading"),
        [
            ("armorm", "19 objectives, at the last token, mixed by a gate read at the last ids [128009, "),
            ("qrm", "19 objectives, each the mean of 5 quantiles, at the last token, mixed by a gate"),
            ("ldl", "22 objectives, each the expectation over 10 bins, at the last token, mixed by a gate"),
            ("urm", "5 objectives, each the mean of a normal distribution, at the last token"),
            ("urm-llama-3", "5 objectives, each the mean of a normal distribution, at the last token, mixed by fixed"),
            ("starling", "linear, at the last token"),
            ("grm-sftreg", "2 linear layers, relu between, at the last token"),
            ("nemotron-vocabulary", "logit of token 0 at the last token"),
        ],
    )  # fmt: skip
    def test_what_a_head_does(self, row: str, reading: str, tmp_path: Path) -> None:
        folder, _ = write_row(row, tmp_path)
        facts = inspect(str(folder))
        assert facts["readout"].startswith(f"{row}: {reading}")
        assert facts["architecture"] == case_of(row).config["architectures"][0]
        assert "quantiles" not in facts["config ignored"]
        assert facts["score head"] != "none read"

    def test_warnings(self, tmp_path: Path) -> None:
        folder, _ = write_row("openrlhf-prefix", tmp_path, template=tiny.DATED, config={"pad_token_id": 3})
        said = inspect(str(folder))["warnings"]
        assert "pad equals eos (id 3)" in said
        assert "prints today's date: it is fixed to 26 Jul 2024" in said
        assert "writes a system turn of its own" in said
        assert "normaliser of rewards: it is not applied" in said
        assert "0 BOS" in said


class TestConvert:
    @pytest.mark.parametrize("row", ["starling", "eurus", "openrlhf", "nemotron-vocabulary", "internlm2"])
    def test_scores_stay_and_transformers_has_the_same(self, row: str, tmp_path: Path) -> None:
        config = {"reward_token_id": 3} if row == "internlm2" else None
        folder, _ = write_row(row, tmp_path, config=config)
        target = convert(folder, tmp_path / "standard")
        before, after = prb.load(folder), prb.load(target)
        assert after.config.architectures[0].endswith("ForSequenceClassification")
        assert "auto_map" not in json.loads((target / "config.json").read_text())
        np.testing.assert_array_equal(before.score([THREE])[0], after.score([THREE])[0])
        assert sequences(before) == sequences(after)
        assert_transformers_scores(after, target)

    def test_a_bias_has_no_place(self, tmp_path: Path) -> None:
        folder, _ = write_row("value-head", tmp_path)
        with pytest.raises(prb.CheckpointError, match=r"a bias of \[.*\], which no .*--drop-bias"):
            convert(folder, tmp_path / "standard")
        assert not (tmp_path / "standard").exists()
        assert main(["convert", str(folder), str(tmp_path / "standard"), "--drop-bias"]) == 0
        path = folder / "value_head.safetensors"
        head = load_file(path)
        (old,), (new,) = (prb.load(place).score([THREE]) for place in (folder, tmp_path / "standard"))
        np.testing.assert_allclose(old, new + head["v_head.summary.bias"], atol=1e-6)
        # a bias of zero is none
        save_file({**head, "v_head.summary.bias": np.zeros(1, np.float32)}, path)
        same = prb.load(convert(folder, tmp_path / "unbiased"))
        np.testing.assert_array_equal(prb.load(folder).score([THREE])[0], same.score([THREE])[0])

    @pytest.mark.parametrize("row", ["linear", "eurus"])
    def test_to_a_value_head_and_back(self, row: str, tmp_path: Path) -> None:
        from transformers import AutoModelForCausalLM

        folder, reference = write_row(row, tmp_path)
        value = tmp_path / "value"
        assert main(["convert", str(folder), str(value), "--layout", "value-head"]) == 0
        back = convert(value, tmp_path / "back")
        models = [prb.load(place) for place in (folder, value, back)]
        (first,), (second,), (third,) = (model.score([THREE]) for model in models)
        np.testing.assert_array_equal(first, second)
        np.testing.assert_array_equal(first, third)
        # The language model's class reads the body, and the head is where TRL looks for it.
        tensors = load_file(value / "model.safetensors")
        body = AutoModelForCausalLM.from_pretrained(value).eval()
        ids = sequences(models[0])[0]
        with torch.inference_mode():
            state = body.model(torch.tensor([ids])).last_hidden_state[0, -1].numpy()
        reward = tensors["v_head.summary.weight"] @ state + tensors["v_head.summary.bias"]
        np.testing.assert_allclose(reward, reference(ids), atol=TOLERANCE)
