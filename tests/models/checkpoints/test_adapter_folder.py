"""PEFT adapters as models: the scores of PEFT itself, and what is refused by name."""

import json
import shutil
import warnings
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import numpy as np
import pytest

import prb_jax as prb
from prb_jax.cli import main
from prb_jax.models.checkpoints import adapter_folder
from prb_jax.models.checkpoints.adapter_config import AdapterConfig
from prb_jax.models.checkpoints.weight_file import read_tensors
from tests.sweeps import sweep
from tests.tiny_models import write_tiny_model
from tests.tiny_policies import VOCABULARY, write_policy
from tests.tiny_tokenizer import write_tokenizer

CASES: dict[str, dict[str, Any]] = {
    "plain": {"target_modules": ["q_proj", "v_proj"]},
    "dora": {
        "target_modules": ["q_proj", "down_proj", "k_proj"],
        "use_dora": True,
        "use_rslora": True,
        "rank_pattern": {"down_proj": 3, r"layers\.0\.self_attn\.q_proj": 2},
        "alpha_pattern": {"layers.1.mlp.down_proj": 5.0},
    },
    "all-linear": {"target_modules": "all-linear", "bias": "all"},
    "regular": {"target_modules": r".*\.[01]\.self_attn\.(q|o)_proj", "bias": "lora_only", "use_dora": True},
    "fused": {
        "target_modules": ["gate_up_proj", "o_proj"],
        "rank_pattern": {"gate_up_proj": 3},
        "use_dora": True,
    },
    "experts": {
        "target_modules": ["q_proj"],
        "target_parameters": ["mlp.experts.gate_up_proj", "experts.down_proj"],
        "rank_pattern": {"mlp.experts.down_proj": 2},
    },
    "all experts": {"target_modules": "all-linear", "target_parameters": ["mlp.experts.down_proj"]},
    "up alone": {"target_modules": [], "target_parameters": ["mlp.experts.gate_up_proj"], "use_rslora": True},
    "layers": {"target_modules": ["gate_proj"], "layers_to_transform": [1], "modules_to_save": ["norm"]},
}
COMPARISONS = [
    prb.Comparison(
        id="1", question="Where is the tea?", responses=["here", "not there, or is it"], labels=[1.0, 0.0]
    ),
    prb.Comparison(id="2", question="And the bread that I like?", responses=["b", "a c"], labels=[0.0, 1.0]),
]


@dataclass
class Adapted:
    """An adapter on disk, and PEFT's model in memory."""

    base: Path
    folder: Path
    model: Any = field(repr=False)

    def scores(self, rm: Any) -> np.ndarray:
        """PEFT's scores of the conversations that a model of ours is shown."""
        import torch

        ids = [tree.sequence(k) for tree in rm.encode(COMPARISONS) for k in range(2)]
        with torch.inference_mode():
            return np.array([self.model(torch.tensor(one[None])).logits[0, 0].item() for one in ids])


def write_adapter(
    folder: Path, family: str, *, causal: bool = False, seed: int = 0, **options: Any
) -> Adapted:
    """Write a random adapter with a head on a random base model, both by PEFT and transformers."""
    peft = pytest.importorskip("peft")
    import torch
    import transformers

    base = folder / "base"
    if causal:
        write_policy(base, family, seed=seed)
    else:
        write_tiny_model(base, family, vocab_size=VOCABULARY, seed=seed)
        write_tokenizer(base)
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")
        model = transformers.AutoModelForSequenceClassification.from_pretrained(
            base, num_labels=1, attn_implementation="eager"
        )
        model.config.pad_token_id = None
        adapted = peft.get_peft_model(
            model, peft.LoraConfig(task_type="SEQ_CLS", **{"r": 4, "lora_alpha": 6} | options)
        )
        generator = torch.Generator().manual_seed(seed)
        with torch.no_grad():
            for name, weight in adapted.named_parameters():
                noise = torch.randn(weight.shape, generator=generator)
                if "lora_magnitude" in name:
                    weight *= 1 + 0.2 * noise
                elif weight.requires_grad:
                    weight += 0.3 * noise / weight.shape[-1] ** 0.5
        adapted.save_pretrained(folder / "adapter")
    return Adapted(base, folder / "adapter", adapted.eval())


@pytest.fixture(scope="module")
def adapted(tmp_path_factory):
    return write_adapter(tmp_path_factory.mktemp("adapted"), "llama", causal=True, **CASES["dora"])


@pytest.fixture
def copy(adapted, tmp_path):
    """A copy of the adapter, for changes."""
    return shutil.copytree(adapted.folder, tmp_path / "copy")


def change(folder: Path, **fields: Any) -> Path:
    path = folder / "adapter_config.json"
    path.write_text(json.dumps(json.loads(path.read_text()) | fields))
    return folder


SWEEP = [
    (family, case)
    for case in CASES
    for family in ("llama", "mistral", "qwen2", "qwen3", "gemma", "gemma2", "gemma3", "phi3", "glm4")
    # these have one tensor for gate and up, the others one for each
    if case == "all-linear" or (case == "fused") == (family in ("phi3", "glm4"))
    if case not in ("experts", "all experts", "up alone")
]
SWEEP += [
    ("qwen3_moe-lead", "all experts"),
    ("mixtral", "experts"),
    ("qwen3_moe-lead", "experts"),
    ("gpt_oss", "experts"),
    ("qwen2_moe", "up alone"),
]


@pytest.mark.parametrize(
    ("family", "case"),
    sweep(
        SWEEP,
        few=[
            SWEEP.index(("qwen2", "all-linear")),
            SWEEP.index(("gemma2", "regular")),
            SWEEP.index(("phi3", "fused")),
            SWEEP.index(("qwen3_moe-lead", "experts")),
        ],
    ),
)
def test_scores_are_those_of_peft(family, case, tmp_path):
    adapted = write_adapter(tmp_path, family, **CASES[case])
    rm = prb.load(adapted.folder)
    np.testing.assert_allclose(np.concatenate(rm.score(COMPARISONS)), adapted.scores(rm), atol=1e-5)


def test_the_header_of_an_adapter_is_read_once(adapted, monkeypatch, capsys):
    read = []

    def counted(path):
        read.append(path)
        return read_tensors(path)

    monkeypatch.setattr(adapter_folder, "read_tensors", counted)
    prb.load(adapted.folder)
    assert main(["inspect", str(adapted.folder)]) == 0
    assert "DoRA of rank" in capsys.readouterr().out
    assert read == [adapted.folder / "adapter_model.safetensors"] * 2  # once a model that is opened


def test_a_head_on_a_language_model_is_the_model_s_and_both_are_recorded(adapted, capsys):
    rm = prb.load(adapted.folder)
    np.testing.assert_allclose(np.concatenate(rm.score(COMPARISONS)), adapted.scores(rm), atol=1e-5)
    files = rm.identity()["files"]
    assert {"peft_adapter/adapter_model.safetensors", "peft_base/model.safetensors"} <= files.keys()
    assert main(["inspect", str(adapted.folder)]) == 0
    assert "DoRA of rank 2, 3, 4 on 9 matrices" in " ".join(capsys.readouterr().out.split())


def test_an_adapter_is_converted_to_a_whole_model_and_scored_from_the_command_line(adapted, tmp_path):
    expected = np.concatenate(prb.load(adapted.folder).score(COMPARISONS))
    assert main(["convert", str(adapted.folder), str(tmp_path / "whole")]) == 0
    np.testing.assert_allclose(
        np.concatenate(prb.load(tmp_path / "whole").score(COMPARISONS)), expected, atol=1e-6
    )
    data, out = tmp_path / "pairs.jsonl", tmp_path / "run"
    rows = [
        {"id": one.id, "question": one.question, "responses": list(one.responses), "labels": list(one.labels)}
        for one in COMPARISONS
    ]
    data.write_text("".join(json.dumps(row) + "\n" for row in rows))
    moved = shutil.copytree(adapted.base, tmp_path / "moved")
    words = ["--base", str(moved), "--data", str(data), "--out", str(out), "--no-progress"]
    assert main(["evaluate", str(adapted.folder), *words]) == 0
    written = [json.loads(line)["scores"] for line in (out / "scores.jsonl").read_text().splitlines()]
    np.testing.assert_allclose(np.concatenate(written), expected, atol=1e-6)


@pytest.mark.parametrize(
    ("fields", "message"),
    [
        ({"peft_type": "LOHA"}, "field 'peft_type': expected LORA"),
        ({"lora_bias": True}, "field 'lora_bias': expected none"),
        ({"new_thing": 3}, "field 'new_thing': expected none"),
        ({"layer_replication": [[0, 1]]}, "field 'layer_replication'"),
        ({"init_lora_weights": "pissa"}, "field 'init_lora_weights'"),
        ({"fan_in_fan_out": True}, "field 'fan_in_fan_out'"),
        ({"r": 8}, "say rank 8, but the factors"),
        ({"r": "x"}, "field 'r': expected a number above 0"),
        ({"rank_pattern": {"(": 2}}, "field 'rank_pattern': expected regular expressions"),
        ({"use_dora": False}, "found lora_A.weight, lora_B.weight, lora_magnitude_vector"),
        (
            {"target_modules": ["q_proj", "k_proj"]},
            "'model.layers.0.mlp.down_proj': is not among target_modules",
        ),
        ({"target_modules": ["q_proj", "k_proj", "down_proj", "up_proj"]}, "the adapter has no factors"),
        ({"task_type": "CAUSAL_LM", "modules_to_save": None}, "tensor 'base_model.model.score.weight'"),
        (
            {"modules_to_save": ["score", "norm"]},
            "says that 'model.layers.0.input_layernorm.weight', .* was trained",
        ),
        ({"use_rslora": "false"}, "field 'use_rslora': expected true or false"),
        ({"rank_pattern": {"down_proj": 3.5}}, "field 'rank_pattern': expected a whole number"),
        ({"layers_to_transform": "1"}, "field 'layers_to_transform': expected a number of a layer"),
        ({"layers_to_transform": [0, 1]}, "module 'model.layers.2.* is not among target_modules"),
        ({"exclude_modules": ["down_proj"]}, "module '.*down_proj': is not among target_modules"),
        ({"auto_mapping": {"base_model_class": "Qwen2ForCausalLM"}}, "was trained on a Qwen2ForCausalLM"),
        ({"target_parameters": ["mlp.gate.bias"]}, "'target_parameters': expected tensors of experts"),
        ({"target_parameters": ["experts.down_proj"]}, "field 'use_dora': expected false"),
        ({"base_model_name_or_path": None}, "name the base model with --base"),
        ({"base_model_name_or_path": "/nowhere"}, "the base model of this adapter cannot be opened"),
    ],
)
def test_what_is_not_followed_is_refused_by_name(copy, fields, message):
    with pytest.raises(prb.CheckpointError, match=message):
        prb.load(change(copy, **fields))


@pytest.mark.parametrize("shape", [(1, 64), (65,), (63,)])
def test_lengths_of_another_shape_are_refused(copy, shape):
    from safetensors.numpy import load_file, save_file

    path = copy / "adapter_model.safetensors"
    tensors = load_file(path)
    name = next(one for one in tensors if one.endswith("layers.0.self_attn.q_proj.lora_magnitude_vector"))
    save_file(tensors | {name: np.ones(shape, np.float32)}, path)
    message = (
        rf"'.*q_proj.lora_magnitude_vector': expected shape \[64\], found \[{', '.join(map(str, shape))}\]"
    )
    with pytest.raises(prb.CheckpointError, match=message):
        prb.load(copy)


@pytest.mark.parametrize("case", ["head", "whole", "layer", "twice", "excluded"])
def test_a_tensor_that_is_lost_or_there_twice_is_refused(case, tmp_path):
    from safetensors.numpy import load_file, save_file

    lost, options, message = {
        "head": ("score", CASES["plain"], "says that 'score.weight' was trained"),
        "whole": ("model.norm", CASES["layers"] | {"modules_to_save": ["norm"]}, "'model.norm.weight' was trained"),
        "layer": ("layers.1.", CASES["layers"] | {"layers_to_transform": [1, 2], "modules_to_save": None},
                  "target_modules names 'model.layers.1.mlp.gate_proj' of"),
        "excluded": ("layers.1.self_attn.v", CASES["plain"] | {"exclude_modules": ["k_proj"]},
                     "target_modules names 'model.layers.1.self_attn.v_proj' of"),
        "twice": ("", CASES["plain"], "occurs twice, with and without 'default'"),
    }[case]  # fmt: skip
    adapter = write_adapter(tmp_path, "llama", **options).folder
    path = adapter / "adapter_model.safetensors"
    tensors = load_file(path)
    if case == "twice":
        name = next(one for one in tensors if one.endswith("lora_B.weight"))
        tensors[name.replace(".weight", ".default.weight")] = tensors[name] * 2
    else:
        tensors = {name: value for name, value in tensors.items() if lost not in name}
    save_file(tensors, path)
    with pytest.raises(prb.CheckpointError, match=message):
        prb.load(adapter)


def test_a_matrix_of_fp8_without_scales_is_refused_under_an_adapter(adapted, copy, tmp_path):
    import torch
    from safetensors.torch import load_file, save_file

    base = shutil.copytree(adapted.base, tmp_path / "fp8")
    tensors = load_file(base / "model.safetensors")
    name = "model.layers.1.self_attn.q_proj.weight"
    tensors[name] = tensors[name].to(torch.float8_e4m3fn)
    save_file(tensors, base / "model.safetensors", metadata={"format": "pt"})
    with pytest.raises(
        prb.CheckpointError, match=f"'{name}': expected floating-point weights, found F8_E4M3"
    ):
        prb.load(copy, base=base)


def test_a_base_that_may_be_another_is_told(tmp_path):
    from safetensors.numpy import load_file, save_file

    adapter = write_adapter(tmp_path, "llama", **CASES["plain"])
    other = shutil.copytree(adapter.base, tmp_path / "other")
    with pytest.warns(prb.PrbWarning, match=r"was trained on .*base, and is read on .*other"):
        prb.load(adapter.folder, base=other)
    change(adapter.folder, task_type="CAUSAL_LM", modules_to_save=["score"])
    with warnings.catch_warnings():
        warnings.simplefilter("error")
        prb.load(adapter.folder)

    path = adapter.folder / "adapter_model.safetensors"
    save_file({name: one for name, one in load_file(path).items() if "score" not in name}, path)
    change(adapter.folder, modules_to_save=None)
    with pytest.warns(prb.PrbWarning, match="as a language model .* is read by the reward head of .*base"):
        prb.load(adapter.folder)


def test_another_base_is_refused(adapted, copy, tmp_path):
    other = write_tiny_model(tmp_path / "other", "llama", vocab_size=VOCABULARY, hidden_size=32)
    write_tokenizer(other)
    with pytest.raises(prb.CheckpointError, match=r"expected shape .*found shape .* with --base"):
        prb.load(copy, base=other)
    with pytest.raises(prb.CheckpointError, match="base is for a PEFT adapter, which this is not"):
        prb.load(adapted.base, base=other)
    with pytest.raises(prb.CheckpointError, match="adapters name each other as their base"):
        prb.load(copy, base=copy)
    (copy / "adapter_model.safetensors").unlink()
    with pytest.raises(prb.CheckpointError, match=r"expected adapter_model\.safetensors"):
        prb.load(copy)


def test_the_base_may_be_an_adapter_too(adapted, copy):
    below = prb.load(adapted.folder).score(COMPARISONS[0])
    twice = prb.load(change(copy, base_model_name_or_path=str(adapted.folder))).score(COMPARISONS[0])
    assert np.isfinite(twice).all()
    assert np.abs(twice - below).min() > 1e-3


def test_scales_and_targets_are_named_as_in_peft():
    config = AdapterConfig(
        where="x", r=8, lora_alpha=16, use_rslora=True, rank_pattern={"v_proj": 4}, alpha_pattern={"0.v_proj": 3.0},
        target_modules=("v_proj", "mlp.up_proj"), modules_to_save=("norm",),
    )  # fmt: skip
    assert (config.rank("layers.0.v_proj"), config.rank("layers.0.my_v_proj")) == (4, 8)
    assert (config.scale("layers.0.v_proj"), config.scale("layers.1.v_proj")) == (1.5, 8.0)
    names = ("layers.0.v_proj", "layers.0.mlp.up_proj", "layers.0.up_proj", "layers.0.xv_proj")
    assert [config.targets(name) for name in names] == [True, True, False, False]
    assert [config.saves(name) for name in ("model.norm.weight", "model.normal.weight", "a.bias")] == [
        True,
        False,
        False,
    ]
