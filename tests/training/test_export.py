"""Trained models out: what transformers and PEFT make of them."""

import json
import shutil
import warnings

import numpy as np
import pytest

import prb_jax as prb
from prb_jax.training.convert import convert
from prb_jax.training.train import train
from tests.sweeps import sweep
from tests.tiny_tokenizer import DATED
from tests.training.tiny import comparisons, config, rows, write_model, write_rows


@pytest.fixture(scope="module")
def run(model, tmp_path_factory):
    """A LoRA run with a learning rate at which every adapter moves."""
    folder = tmp_path_factory.mktemp("runs")
    data = write_rows(folder / "pairs.jsonl", rows(24))
    changes = {"steps": 6, "lora__rank": 4, "optimizer__learning_rate": 0.03, "validation__every": 3}
    chosen = config(model, data, tuning="lora", method="profile_context", **changes)
    return train(chosen, out=folder / "run", progress=False)


@pytest.fixture(scope="module")
def scored(run):
    """Some conversations and the rewards that our own code gives them."""
    rm, pairs = prb.load(run.out), comparisons(6, seed=5)
    ids = [tree.sequence(k) for tree in rm.encode(pairs) for k in range(2)]
    return ids, np.concatenate(rm.score(pairs))


def transformers_scores(model, ids):
    """In one right-padded batch, as transformers reads scores by the padding token."""
    import torch

    width = max(len(row) for row in ids)
    pad = model.config.pad_token_id
    batch = torch.tensor([[*row.tolist(), *[pad] * (width - len(row))] for row in ids])
    with torch.no_grad():
        return model(input_ids=batch, attention_mask=(batch != pad).long()).logits[:, 0].numpy()


def test_transformers_gives_the_same_scores(run, scored):
    from transformers import AutoModelForSequenceClassification, AutoTokenizer

    ids, expected = scored
    theirs = AutoModelForSequenceClassification.from_pretrained(run.model).eval()
    np.testing.assert_allclose(transformers_scores(theirs, ids), expected, atol=1e-5)
    vocabulary = AutoTokenizer.from_pretrained(run.model).get_vocab()
    assert vocabulary == prb.load(run.out).tokenizer.tokenizer.get_vocab()


def test_peft_gives_the_same_scores_and_an_adapter_says_what_it_adapts(run, model, scored, tmp_path):
    peft = pytest.importorskip("peft")
    from safetensors.numpy import load_file
    from transformers import AutoModelForSequenceClassification

    ids, expected = scored
    folder = convert(run.out, tmp_path / "adapter", adapter=True)
    base = AutoModelForSequenceClassification.from_pretrained(model)
    with warnings.catch_warnings(record=True) as warned:
        warnings.simplefilter("always")
        adapted = peft.PeftModel.from_pretrained(base, folder).eval()
    assert not [item for item in warned if "missing adapter keys" in str(item.message)]
    np.testing.assert_allclose(transformers_scores(adapted, ids), expected, atol=1e-5)
    opened = prb.load(folder)
    np.testing.assert_allclose(np.concatenate(opened.score(comparisons(6, seed=5))), expected, atol=1e-5)
    assert opened.reader.trained == prb.load(run.out).reader.trained is not None

    described = json.loads((folder / "adapter_config.json").read_text())
    assert (described["r"], described["lora_alpha"], described["task_type"]) == (4, 32.0, "SEQ_CLS")
    assert described["base_model_name_or_path"] == str(model)
    tensors = load_file(folder / "adapter_model.safetensors")
    assert tensors["base_model.model.score.weight"].shape == (1, 32)
    assert tensors["base_model.model.model.layers.1.mlp.down_proj.lora_A.weight"].shape == (4, 48)
    assert tensors["base_model.model.model.layers.1.mlp.down_proj.lora_B.weight"].shape == (32, 4)
    assert len(tensors) == 1 + 2 * 7 * 2


@pytest.mark.parametrize(
    ("changes", "targets", "ranks"),
    sweep([
        (
            {"architectures": ["Phi3ForSequenceClassification"], "model_type": "phi3"},
            ("q", "v", "up", "down"),
            {"qkv_proj": 4, "gate_up_proj": 2},
        ),
        (
            {
                "architectures": ["Qwen3_5TextForSequenceClassification"], "model_type": "qwen3_5_text",
                "full_attention_interval": 2, "linear_num_key_heads": 2, "linear_num_value_heads": 4,
                "linear_key_head_dim": 8, "linear_value_head_dim": 8,
            },
            ("q", "q_gate", "down", "delta_q", "delta_k", "delta_v", "delta_b", "delta_o"),
            {"q_proj": 4, "in_proj_qkv": 6},
        ),
        (
            {
                "architectures": ["Qwen3NextForSequenceClassification"], "model_type": "qwen3_next",
                "full_attention_interval": 2, "linear_num_key_heads": 2, "linear_num_value_heads": 4,
                "linear_key_head_dim": 8, "linear_value_head_dim": 8, "num_experts": 4, "num_experts_per_tok": 2,
                "moe_intermediate_size": 24, "shared_expert_intermediate_size": 24,
            },
            ("k", "q_gate", "delta_q", "delta_z", "delta_v", "delta_a", "shared_gate", "shared_down"),
            {"linear_attn.in_proj_qkvz": 6, "linear_attn.in_proj_ba": 2, "self_attn.q_proj": 2},
        ),
        (
            {
                "architectures": ["Qwen3MoeForSequenceClassification"], "model_type": "qwen3_moe", "num_experts": 4,
                "num_experts_per_tok": 2, "moe_intermediate_size": 24, "mlp_only_layers": [0],
            },
            ("q", "gate", "up", "down", "dense_gate", "dense_up", "dense_down"),
            {"mlp.experts.gate_up_proj": 4},
        ),
        (
            {
                "architectures": ["Qwen2MoeForSequenceClassification"], "model_type": "qwen2_moe", "num_experts": 4,
                "num_experts_per_tok": 2, "moe_intermediate_size": 24, "shared_expert_intermediate_size": 40,
                "mlp_only_layers": [1],
            },
            ("q", "down", "dense_up", "shared_gate", "shared_up", "shared_down"),
            {},
        ),
    ], few=(3,)),
    ids=["phi3", "qwen3_5", "qwen3_next", "qwen3_moe", "qwen2_moe"],
)  # fmt: skip
def test_adapters_of_matrices_that_share_a_tensor_are_one_adapter_of_peft(changes, targets, ranks, tmp_path):
    peft = pytest.importorskip("peft")
    from transformers import AutoModelForSequenceClassification

    base = write_model(tmp_path / "base", **changes)
    chosen = {"steps": 2, "lora__rank": 2, "lora__targets": targets, "tuning": "lora"}
    data = write_rows(tmp_path / "pairs.jsonl", rows(16))
    run = train(
        config(base, data, **chosen, optimizer__learning_rate=0.03), out=tmp_path / "run", progress=False
    )
    rm, pairs = prb.load(run.out), comparisons(4, seed=5)
    ids = [tree.sequence(k) for tree in rm.encode(pairs) for k in range(2)]
    folder = convert(run.out, tmp_path / "adapter", adapter=True)
    described = json.loads((folder / "adapter_config.json").read_text())
    assert described.get("rank_pattern", {}) == ranks
    theirs = peft.PeftModel.from_pretrained(
        AutoModelForSequenceClassification.from_pretrained(base), folder
    ).eval()
    expected = np.concatenate(rm.score(pairs))
    np.testing.assert_allclose(transformers_scores(theirs, ids), expected, atol=1e-5)
    np.testing.assert_allclose(np.concatenate(prb.load(folder).score(pairs)), expected, atol=1e-5)
    whole = AutoModelForSequenceClassification.from_pretrained(run.model).eval()
    np.testing.assert_allclose(transformers_scores(whole, ids), expected, atol=1e-5)


def test_training_starts_from_an_adapter_on_the_base_that_is_named(run, model, scored, data, tmp_path):
    folder = convert(run.out, tmp_path / "adapter", adapter=True)
    base = shutil.copytree(model, tmp_path / "moved" / model.name)
    described = json.loads((folder / "adapter_config.json").read_text())
    described["base_model_name_or_path"] = str(tmp_path / "gone" / model.name)
    (folder / "adapter_config.json").write_text(json.dumps(described))
    chosen = {"tuning": "lora", "steps": 2, "lora__rank": 2, "method": "profile_context"}
    with pytest.raises(prb.CheckpointError, match="name another with --base"):
        train(config(folder, data, **chosen), out=tmp_path / "on", progress=False)
    chosen |= {"base": str(base), "optimizer__learning_rate": 1e-12}  # no weight moves
    on = train(config(folder, data, **chosen), out=tmp_path / "on", progress=False)
    pairs = comparisons(6, seed=5)
    np.testing.assert_allclose(np.concatenate(prb.load(on.out).score(pairs)), scored[1], atol=1e-5)
    chosen["optimizer__learning_rate"] = 0.03
    moved = train(config(folder, data, **chosen), out=tmp_path / "moved-on", progress=False)
    expected = np.concatenate(prb.load(moved.out).score(pairs))
    assert np.abs(expected - scored[1]).max() > 1e-3
    files = json.loads((moved.out / "train.json").read_text())["inputs"]["model"]["files"]
    assert {"peft_adapter/adapter_model.safetensors", "peft_base/model.safetensors"} <= files.keys()
    again = convert(moved.out, tmp_path / "again", adapter=True)  # an adapter of the adapter
    opened = prb.load(again, base=_based(folder, base))
    np.testing.assert_allclose(np.concatenate(opened.score(pairs)), expected, atol=1e-5)


def _based(adapter, base):
    """Write the base's place into an adapter."""
    described = json.loads((adapter / "adapter_config.json").read_text())
    described["base_model_name_or_path"] = str(base)
    (adapter / "adapter_config.json").write_text(json.dumps(described))
    return adapter


def test_a_run_is_converted_from_the_checkpoint_that_is_asked_for(run, tmp_path, capsys):
    exported = (run.model / "model.safetensors").read_bytes()
    best = run.summary["exported_step"]
    assert (convert(run.out, tmp_path / "a") / "model.safetensors").read_bytes() == exported
    assert (convert(run.out, tmp_path / "b", step=best) / "model.safetensors").read_bytes() == exported
    last = convert(run.out, tmp_path / "c", step="last", dtype="bfloat16")
    assert prb.load(last).dtype == "bfloat16"
    with pytest.raises(prb.RunError, match=r"no checkpoint of step 99; there are best, last, "):
        convert(run.out, tmp_path / "d", step=99)
    capsys.readouterr()
    convert(run.out, tmp_path / "a")
    assert capsys.readouterr().err.endswith(f"prb: {tmp_path / 'a'}: finished already by an earlier call\n")
    (tmp_path / "e").mkdir()
    for other, message in (("c", "exists already, with other files"), ("e", "exists already; choose")):
        with pytest.raises(prb.RunError, match=message):
            convert(run.out, tmp_path / other)
    assert not list(tmp_path.glob(".*"))


def test_a_run_whose_starting_model_changed_is_not_converted(model, tmp_path):
    start = shutil.copytree(model, tmp_path / "start")
    chosen = config(start, write_rows(tmp_path / "pairs.jsonl", rows(16)), steps=1, tuning="head")
    result = train(chosen, out=tmp_path / "run", progress=False)
    with pytest.raises(prb.CheckpointError, match="trains no adapter"):
        convert(result.out, tmp_path / "adapter", adapter=True)
    other = write_model(tmp_path / "other", rope_theta=5e4)
    shutil.copyfile(other / "config.json", start / "config.json")
    with pytest.raises(prb.RunError, match=r"model.files.config.json"):
        convert(result.out, tmp_path / "converted")
    assert not (tmp_path / "converted").exists()


def test_a_checkpoint_is_converted_bit_for_bit_or_to_another_dtype(model, tmp_path):
    same = convert(model, tmp_path / "same")
    for name in ("model.safetensors", "tokenizer.json", "tokenizer_config.json"):
        assert (same / name).read_bytes() == (model / name).read_bytes()
    half = convert(model, tmp_path / "half", dtype="bfloat16", chat_template="plain")
    rm = prb.load(half)
    assert rm.dtype == "bfloat16"
    assert rm.tokenizer.template_hash == prb.load(model, chat_template="plain").tokenizer.template_hash
    with pytest.raises(prb.RunError, match="for runs of `prb train`"):
        convert(model, tmp_path / "no", adapter=True)


def test_a_template_that_reads_the_clock_is_exported_as_it_was(model, tmp_path):
    template = tmp_path / "dated.jinja"
    template.write_text(DATED)
    dated = convert(model, tmp_path / "dated", chat_template=str(template))
    assert (dated / "chat_template.jinja").read_text() == DATED
    expected = prb.load(model, chat_template=str(template)).tokenizer.template_hash
    assert prb.load(dated).tokenizer.template_hash == expected
