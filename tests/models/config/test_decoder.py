"""The configuration parser against what transformers itself resolves, in both spellings."""

import copy
import json
from dataclasses import replace
from pathlib import Path
from typing import Any

import numpy as np
import pytest

from prb_jax.errors import CheckpointError
from prb_jax.models.config.decoder import DecoderConfig, load_config, parse_config
from prb_jax.models.layers import RopeConfig, inverse_frequencies
from tests.tiny_models import FAMILIES, write_tiny_model

SMALL: dict[str, Any] = {
    "vocab_size": 128, "hidden_size": 64, "intermediate_size": 96, "num_hidden_layers": 4, "num_attention_heads": 4,
    "num_key_value_heads": 2,
}  # fmt: skip
LLAMA3_SCALING = {
    "factor": 8.0, "high_freq_factor": 4.0, "low_freq_factor": 1.0, "original_max_position_embeddings": 8192,
    "rope_type": "llama3",
}  # fmt: skip
LINEAR = {"type": "linear", "factor": 2.0}

# As transformers 4 writes them, and as older files on the hub look (fields absent, nulls, type for rope_type).
OLD_FILES: dict[str, dict[str, Any]] = {
    "llama-2": {"model_type": "llama", "rms_norm_eps": 1e-5, "torch_dtype": "float16", "pretraining_tp": 1},
    "llama-3.1": {
        "model_type": "llama", "attention_bias": False, "rope_theta": 500000.0, "rope_scaling": LLAMA3_SCALING,
        "max_position_embeddings": 131072, "num_labels": 1, "torch_dtype": "bfloat16",
    },
    "llama-3.2": {
        "model_type": "llama", "head_dim": 16, "rope_theta": 500000.0, "max_position_embeddings": 131072,
        "rope_scaling": LLAMA3_SCALING | {"factor": 32.0}, "id2label": {"0": "LABEL_0"}, "tie_word_embeddings": True,
    },
    "llama-linear": {"model_type": "llama", "rope_scaling": LINEAR, "num_key_value_heads": None},
    "llama-yarn": {
        "model_type": "llama", "max_position_embeddings": 65536, "mlp_bias": True, "attention_bias": True,
        "rope_scaling": {"type": "yarn", "factor": 16.0, "original_max_position_embeddings": 4096},
    },
    "llama-null-scaling": {"model_type": "llama", "rope_scaling": None, "rope_theta": 1000000},
    "mistral-v0.1": {"model_type": "mistral", "sliding_window": 4096, "rope_theta": 10000.0},
    "mistral-v0.2": {"model_type": "mistral", "sliding_window": None, "rope_theta": 1000000.0, "head_dim": None},
    "mistral-absent": {"model_type": "mistral"},
    "qwen2": {
        "model_type": "qwen2", "rope_theta": 1000000.0, "sliding_window": 131072, "max_window_layers": 2,
        "use_sliding_window": False,
    },
    "qwen2-window": {
        "model_type": "qwen2", "sliding_window": 512, "max_window_layers": 3, "use_sliding_window": True,
        "rope_scaling": {"factor": 4.0, "original_max_position_embeddings": 32768, "type": "yarn"},
    },
    "qwen2-layer-types": {
        "model_type": "qwen2", "sliding_window": 512, "use_sliding_window": True,
        "layer_types": ["sliding_attention", "full_attention", "full_attention", "sliding_attention"],
    },
    "qwen3": {"model_type": "qwen3", "rope_theta": 1000000, "attention_bias": True, "id2label": {"0": "a"}},
    "qwen3-head-dim": {"model_type": "qwen3", "head_dim": 32, "use_sliding_window": True},
    "gemma": {"model_type": "gemma", "hidden_act": "gelu", "head_dim": 16, "rope_theta": 10000.0},
    "gemma-absent": {"model_type": "gemma"},
    "gemma-2": {
        "model_type": "gemma2", "hidden_act": "gelu_pytorch_tanh", "hidden_activation": "gelu_pytorch_tanh",
        "head_dim": 32, "query_pre_attn_scalar": 144, "attn_logit_softcapping": 50.0, "final_logit_softcapping": 30.0,
        "sliding_window": 4096, "cache_implementation": "hybrid", "rope_theta": 10000.0,
    },
    "gemma-2-absent": {"model_type": "gemma2", "attn_logit_softcapping": None},
    "gemma-3": {
        "model_type": "gemma3_text", "head_dim": 32, "rope_theta": 1000000, "rope_local_base_freq": 20000,
        "rope_scaling": {"factor": 8.0, "rope_type": "linear"}, "sliding_window": 512, "sliding_window_pattern": 2,
        "query_pre_attn_scalar": 168,
    },
    "gemma-3-absent": {"model_type": "gemma3_text"},
    "olmo-2": {"model_type": "olmo2", "rope_theta": 500000, "attention_bias": True},
    "olmo-2-absent": {"model_type": "olmo2", "num_key_value_heads": None},
    "olmo-3": {
        "model_type": "olmo3", "rope_theta": 500000, "sliding_window": 512, "max_position_embeddings": 65536,
        "rope_scaling": {
            "rope_type": "yarn", "factor": 8.0, "attention_factor": 1.2079441541679836, "beta_fast": 32, "beta_slow": 1,
            "original_max_position_embeddings": 8192,
        },
    },
    "olmo-3-absent": {"model_type": "olmo3"},
    "phi-4": {"model_type": "phi3", "original_max_position_embeddings": 16384, "max_position_embeddings": 16384,
        "rope_theta": 250000, "embd_pdrop": 0.0, "resid_pdrop": 0.0, "sliding_window": None, "rope_scaling": None},
    "phi-4-mini": {
        "model_type": "phi3", "partial_rotary_factor": 0.75, "original_max_position_embeddings": 4096,
        "max_position_embeddings": 131072, "sliding_window": 262144, "rope_theta": 10000.0, "rope_scaling": {
            "type": "longrope", "short_factor": [1, 1.1, 1.2, 1.3, 1.4, 1.5], "long_factor": [1, 2, 4, 8, 16, 32],
        },
    },
    "phi-3-absent": {"model_type": "phi3", "num_key_value_heads": None},
    "smollm3": {"model_type": "smollm3", "no_rope_layers": [1, 1, 0, 1], "use_sliding_window": False},
    "smollm3-absent": {"model_type": "smollm3"},
    "glm-4": {"model_type": "glm4", "partial_rotary_factor": 0.5, "attention_bias": False, "head_dim": 32},
    "glm-4-absent": {"model_type": "glm4"},
    "seed-oss": {
        "model_type": "seed_oss", "attention_bias": True, "attention_out_bias": True, "residual_dropout": 0.1,
        "rope_scaling": {"rope_type": "default"}, "rope_theta": 10000000.0,
    },
    "exaone-4": {
        "model_type": "exaone4", "num_key_value_heads": 2, "sliding_window": 512, "sliding_window_pattern": "LLLG",
        "layer_types": [*["sliding_attention"] * 3, "full_attention"], "rope_theta": 1000000,
        "rope_scaling": LLAMA3_SCALING,
    },
    "exaone-4-small": {
        "model_type": "exaone4", "sliding_window": None, "sliding_window_pattern": None,
        "layer_types": ["full_attention"] * 4,
    },
    "qwen3-30b-a3b": {
        "model_type": "qwen3_moe", "head_dim": 32, "num_experts": 128, "num_experts_per_tok": 8, "norm_topk_prob": True,
        "moe_intermediate_size": 768, "mlp_only_layers": [], "decoder_sparse_step": 1, "router_aux_loss_coef": 0.001,
        "max_window_layers": 48, "sliding_window": None, "use_sliding_window": False, "rope_theta": 1000000.0,
        "output_router_logits": False,
    },
    "qwen3-moe-absent": {"model_type": "qwen3_moe"},
    "qwen1.5-moe": {
        "model_type": "qwen2_moe", "num_experts": 60, "num_experts_per_tok": 4, "moe_intermediate_size": 1408,
        "shared_expert_intermediate_size": 5632, "norm_topk_prob": False, "max_window_layers": 21,
        "sliding_window": 32768, "use_sliding_window": False, "rope_theta": 1000000.0,
    },
    "qwen2-moe-absent": {"model_type": "qwen2_moe"},
    "mixtral": {
        "model_type": "mixtral", "num_local_experts": 8, "num_experts_per_tok": 2, "sliding_window": None,
        "rope_theta": 1000000.0, "rms_norm_eps": 1e-5,
    },
    "gpt-oss-20b": {
        "model_type": "gpt_oss", "num_local_experts": 32, "num_experts_per_tok": 4, "head_dim": 64, "swiglu_limit": 7.0,
        "attention_bias": True, "sliding_window": 128, "rope_theta": 150000, "rms_norm_eps": 1e-5, "rope_scaling": {
            "rope_type": "yarn", "factor": 32.0, "beta_fast": 32.0, "beta_slow": 1.0, "truncate": False,
            "original_max_position_embeddings": 4096,
        }, "layer_types": ["sliding_attention", "full_attention"] * 2,
    },
    "mixtral-absent": {"model_type": "mixtral"},
    "exaone-4-absent": {"model_type": "exaone4"},
    "ministral-3": {
        "model_type": "ministral3", "head_dim": 32, "rope_parameters": {
            "type": "yarn", "rope_type": "yarn", "rope_theta": 1000000.0, "factor": 16.0, "beta_fast": 32.0,
            "beta_slow": 1.0, "mscale": 1.0, "mscale_all_dim": 1.0, "llama_4_scaling_beta": 0.1,
            "original_max_position_embeddings": 16384, "max_position_embeddings": 262144,
        },
    },
}  # fmt: skip
SAME_AS_IN_TRANSFORMERS = """
model_type vocab_size hidden_size intermediate_size num_hidden_layers num_attention_heads num_key_value_heads
rms_norm_eps num_labels pad_token_id tie_word_embeddings
"""


def hf_config(raw: dict[str, Any]) -> Any:
    from transformers import CONFIG_MAPPING

    return CONFIG_MAPPING[raw["model_type"]].from_dict(copy.deepcopy(raw))


def assert_rope_is(rope: RopeConfig, hf: Any, layer_type: str | None) -> None:
    from transformers.modeling_rope_utils import ROPE_INIT_FUNCTIONS

    parameters = hf.rope_parameters if layer_type is None else hf.rope_parameters[layer_type]
    assert rope.rope_type == parameters["rope_type"]
    assert rope.query_growth == parameters.get("llama_4_scaling_beta", 0.0)
    assert rope.theta == parameters["rope_theta"]
    if rope.rope_type == "default":
        return
    frequencies, scaling = ROPE_INIT_FUNCTIONS[rope.rope_type](hf, layer_type=layer_type)
    np.testing.assert_allclose(inverse_frequencies(rope), frequencies.numpy(), rtol=1e-6)
    if rope.long_factor:
        length = parameters["original_max_position_embeddings"] + 1
        frequencies, _ = ROPE_INIT_FUNCTIONS[rope.rope_type](hf, seq_len=length, layer_type=layer_type)
        np.testing.assert_allclose(inverse_frequencies(rope, long=True), frequencies.numpy(), rtol=1e-6)
    assert rope.attention_factor == pytest.approx(scaling, rel=1e-12)


def assert_is_what_transformers_resolves(config: DecoderConfig, hf: Any) -> None:
    for name in SAME_AS_IN_TRANSFORMERS.split():
        assert getattr(config, name) == getattr(hf, name), name
    assert config.head_dim == (getattr(hf, "head_dim", None) or hf.hidden_size // hf.num_attention_heads)
    gemma = config.model_type.startswith("gemma")
    later = gemma and config.model_type != "gemma"
    assert config.hidden_activation == (hf.hidden_activation if later else hf.hidden_act)
    assert config.torch_dtype == (None if hf.dtype is None else str(hf.dtype).removeprefix("torch."))
    scalar = hf.query_pre_attn_scalar if later else config.head_dim
    assert config.attention_scale == scalar**-0.5
    assert config.embedding_scale == (hf.hidden_size**0.5 if gemma else None)
    assert config.attn_logit_softcapping == getattr(hf, "attn_logit_softcapping", None)
    assert config.final_logit_softcapping == getattr(hf, "final_logit_softcapping", None)
    assert config.mlp_bias == getattr(hf, "mlp_bias", False)

    if config.experts is None:
        assert not hasattr(hf, "num_experts_per_tok")
    else:
        experts = config.experts
        assert (experts.count, experts.chosen) == (hf.num_experts, hf.num_experts_per_tok)
        assert experts.size == getattr(hf, "moe_intermediate_size", hf.intermediate_size)
        assert experts.normalised == getattr(hf, "norm_topk_prob", True)
        assert experts.shared == getattr(hf, "shared_expert_intermediate_size", 0)
        assert experts.limit == getattr(hf, "swiglu_limit", None)
        assert experts.alpha == getattr(hf, "swiglu_alpha", 1.0)
    if config.recurrence is not None:
        assert config.layer_mixers == tuple(hf.layer_types)
        sizes = {name: getattr(hf, f"linear_{name}") for name in ("num_key_heads", "num_value_heads")}
        assert sizes == {
            "num_key_heads": config.recurrence.key_heads,
            "num_value_heads": config.recurrence.value_heads,
        }
        assert config.recurrence.key_dim == hf.linear_key_head_dim
        assert config.recurrence.value_dim == hf.linear_value_head_dim
        assert config.recurrence.taps == hf.linear_conv_kernel_dim

    assert config.max_position_embeddings == hf.max_position_embeddings
    # The angles of LongRoPE are other ones for longer conversations.
    parameters = getattr(hf, "rope_parameters", None) or {}
    longer = parameters.get("rope_type") == "longrope"
    assert config.rope_switch == (parameters["original_max_position_embeddings"] if longer else None)
    if hasattr(hf, "no_rope_layers"):
        assert config.layer_rotates == tuple(map(bool, hf.no_rope_layers))
    elif config.model_type == "exaone4" and hf.sliding_window is not None:
        assert config.layer_rotates == config.layer_windows
    else:
        assert all(config.layer_rotates)
    if not hasattr(hf, "sliding_window"):
        assert config.sliding_window is None
        assert not any(config.layer_windows)
    else:
        assert config.sliding_window == (
            hf.sliding_window if getattr(hf, "use_sliding_window", True) else None
        )
        uniform = ["full_attention" if hf.sliding_window is None else "sliding_attention"]
        types = uniform * hf.num_hidden_layers if not getattr(hf, "layer_types", None) else hf.layer_types
        assert config.layer_windows == tuple(kind == "sliding_attention" for kind in types)
    if config.model_type in ("gemma3_text", "olmo3"):
        assert config.rope[1] is not None
        assert_rope_is(config.rope[0], hf, "full_attention")
        assert_rope_is(config.rope[1], hf, "sliding_attention")
    else:
        assert config.rope[1] is None
        assert_rope_is(config.rope[0], hf, None)


@pytest.mark.parametrize("name", OLD_FILES)
def test_both_spellings_resolve_as_in_transformers(name: str) -> None:
    old = SMALL | OLD_FILES[name]
    before, hf = copy.deepcopy(old), hf_config(old)
    first = parse_config(old, where="old")
    assert old == before
    assert_is_what_transformers_resolves(first, hf)
    new = json.loads(hf.to_json_string(use_diff=False))
    assert "rope_theta" not in new
    assert "rope_parameters" in new
    assert replace(first, ignored_keys=()) == replace(parse_config(new, where="new"), ignored_keys=())
    assert hash(first) == hash(parse_config(old, where="again"))


@pytest.mark.parametrize("family", FAMILIES)
def test_tiny_models_resolve_as_in_transformers(family: str, tmp_path: Path) -> None:
    import torch
    from transformers import AutoConfig, AutoModelForSequenceClassification

    folder = write_tiny_model(tmp_path, family, num_labels=3)
    config, hf = load_config(folder), AutoConfig.from_pretrained(folder)
    assert_is_what_transformers_resolves(config, hf)
    assert config.ignored_keys == ()
    assert config.original == json.loads((folder / "config.json").read_text())

    # Structural flags are not in the file: they are compared with the modules that transformers builds.
    model = AutoModelForSequenceClassification.from_config(hf).model
    layers = [layer for layer in model.layers if hasattr(layer, "self_attn")]
    names = {name for layer in layers for name, _ in layer.named_parameters()}
    assert config.attention_bias == ("self_attn.q_proj.bias" in names)
    assert config.attention_output_bias == ("self_attn.o_proj.bias" in names)
    assert config.sinks == ("self_attn.sinks" in names)
    assert config.mlp_bias == ("mlp.down_proj.bias" in names)
    merged = {"gate_up_proj"} if config.experts is not None else set()  # in memory, not in the file
    assert set(config.fused) | merged == {"qkv_proj", "gate_up_proj"} & {
        part for name in names for part in name.split(".")
    }
    q_norm = getattr(layers[0].self_attn, "q_norm", None)
    size = {"head": config.head_dim, "width": config.num_attention_heads * config.head_dim, None: 0}
    assert size[config.qk_norm] == (0 if q_norm is None else q_norm.weight.numel())
    assert {hf for _, hf in config.norms} == {name.split(".")[0] for name in names if "layernorm" in name}
    assert config.attention_scale == layers[0].self_attn.scaling
    assert config.norm_plus_one == (float(model.norm.weight.detach().abs().max()) == 0.0)

    # Norms round before they multiply, or after.
    norm = model.norm.bfloat16()
    weight = torch.nn.init.normal_(norm.weight, generator=torch.Generator().manual_seed(0)).detach()
    x = torch.randn(50, 64, generator=torch.Generator().manual_seed(1)).bfloat16()
    wide = x.float() * torch.rsqrt(x.float().pow(2).mean(-1, keepdim=True) + config.rms_norm_eps)
    if config.norm_plus_one:
        weight = 1 + weight.float()
    rounded_first = weight * wide.bfloat16()
    rounded_last = (wide * weight.float()).bfloat16()
    assert torch.equal(norm(x), rounded_first if config.norm_scale_after_cast else rounded_last)


def test_num_labels_default_is_two_as_in_transformers() -> None:
    assert parse_config(SMALL | {"model_type": "llama"}, where="c").num_labels == 2


def test_unknown_fields_are_listed() -> None:
    unknown = {"architectures": None, "use_cache": False, "mean": 0.3, "auto_map": {}}
    config = parse_config(SMALL | {"model_type": "llama"} | unknown, where="c")
    assert config.ignored_keys == ("auto_map", "mean")


ROPE, OF_LAYERS = "rope_scaling", "rope_parameters"
BAD_FIELDS: list[tuple[dict[str, Any], str]] = [
    ({"model_type": "mamba"}, "unknown architecture.*'mamba'.*LlamaForSequenceClassification"),
    (
        {
            "model_type": "qwen3_moe_plus",
            "architectures": ["Qwen3MoePlusForCausalLM"],
            "num_expert_groups": 8,
            "norm_topk_prob": True,
        },
        r"'qwen3_moe_plus' \(Qwen3MoePlusForCausalLM\)\. The nearest known family is 'qwen3_moe', which does not read "
        r"num_expert_groups\. Supported",
    ),
    (
        {"model_type": "phi", "architectures": None, "hidden_size": None},
        "'phi'. The nearest known family is 'phi3', which cannot read it: field 'hidden_size': expected an",
    ),
    ({"model_type": None}, "'model_type'"),
    ({"architectures": ["INFORMForSequenceClassification"]}, "unknown architecture 'INFORM"),
    ({"architectures": ["Qwen2ForSequenceClassification"]}, "expected 'Llama"),
    ({"architectures": "LlamaForSequenceClassification"}, "'architectures'.*list"),
    (
        {"model_type": "gemma3", "architectures": ["Gemma3ForConditionalGeneration"]},
        "'text_config' is missing",
    ),
    ({ROPE: {"type": "dynamic", "factor": 2.0}}, "'rope_scaling.type'.*'dynamic'"),
    ({OF_LAYERS: {"rope_type": "longrope"}}, "'rope_parameters.rope_type'.*longrope"),
    ({ROPE: LINEAR | {"rope_type": "llama3"}}, "'rope_scaling.type'"),
    ({ROPE: LINEAR | {"beta": 1}}, "'rope_scaling.beta'.*'linear'"),
    ({OF_LAYERS: {"factor": 2.0}}, "'rope_parameters.factor'.*'default'"),
    ({ROPE: {"type": "linear"}}, "'rope_scaling.factor' is missing"),
    ({ROPE: {"type": "linear", "factor": "2"}}, "'rope_scaling.factor'.*'2'"),
    ({ROPE: LLAMA3_SCALING | {"high_freq_factor": 1.0}}, "high_freq_factor"),
    ({ROPE: LINEAR, OF_LAYERS: {"rope_theta": 5.0}}, "both 'rope_scaling' and 'rope_parameters'"),
    ({"rope_theta": 1e4, OF_LAYERS: {"rope_theta": 1e6}}, "rope_theta.*1000000"),
    ({ROPE: LLAMA3_SCALING, "original_max_position_embeddings": 4096}, "original_max_position_embeddings"),
    ({OF_LAYERS: {"full_attention": {}}}, "one object for all layers"),
    ({ROPE: "linear"}, "'rope_scaling'.*object"),
    ({"partial_rotary_factor": 0.5}, "'partial_rotary_factor'"),
    ({OF_LAYERS: {"partial_rotary_factor": 0.5}}, "partial_rotary_factor"),
    ({"quantization_config": {"quant_method": "gptq"}}, "'quantization_config'.*quantised"),
    ({"per_layer_config": {"0": {}}}, "per_layer_config"),
    ({"hidden_size": None}, "'hidden_size'"),
    ({"hidden_size": "64"}, "'hidden_size': expected an integer.*'64'"),
    ({"num_hidden_layers": True}, "'num_hidden_layers'"),
    ({"vocab_size": 0}, "'vocab_size'.*at least 1"),
    ({"num_key_value_heads": 3}, "'num_key_value_heads': expected a divisor"),
    ({"hidden_size": 66}, "'hidden_size'.*multiple"),
    ({"head_dim": 15}, "even head_dim.*15"),
    ({"hidden_act": "relu"}, "'hidden_act'.*'relu'"),
    ({"torch_dtype": "int8"}, "'torch_dtype'.*'int8'"),
    ({"num_labels": 2, "id2label": {"0": "a"}}, "'num_labels': expected 1"),
    ({"id2label": {}}, "'id2label'"),
    ({"rms_norm_eps": float("nan")}, "'rms_norm_eps'"),
    ({"rms_norm_eps": 1e300}, "'rms_norm_eps': expected a number above 0 and at most 1, found 1e\\+300"),
    ({"rope_theta": 1e300}, "'rope_theta': expected a number above 0 and at most 3.40282e\\+38"),
    ({"model_type": "mistral", "layer_types": ["full_attention"] * 4}, "'layer_types'.*sliding_attention"),
    ({"model_type": "qwen2", "layer_types": ["sliding_attention"] * 4}, "'sliding_window'"),
    ({"model_type": "qwen3", "layer_types": ["linear_attention"] * 4}, "'layer_types'"),
    ({"model_type": "qwen3", "layer_types": ["full_attention"]}, "4 entries.*1 entries"),
    ({"model_type": "gemma2", "sliding_window": None}, "'sliding_window'"),
    ({"model_type": "gemma3_text", "use_bidirectional_attention": True}, "use_bidirectional"),
    ({"model_type": "gemma3_text", "attn_logit_softcapping": 50.0}, "attn_logit_softcapping"),
    ({"model_type": "gemma3_text", OF_LAYERS: {"rope_theta": 1e6}}, "full_attention"),
    ({"model_type": "gemma3_text", ROPE: LINEAR}, "'rope_scaling.rope_type' is missing"),
    ({"model_type": "phi3", ROPE: LINEAR}, "'rope_scaling.type'.*default, longrope"),
    (
        {"model_type": "phi3", ROPE: {"type": "longrope", "short_factor": [1.0]}},
        "'rope_scaling.short_factor'.*8 numb",
    ),
    (
        {"model_type": "phi3", "partial_rotary_factor": 1.5},
        "even head_dim, found 16 times partial_rotary_factor 1.5",
    ),
    ({"model_type": "smollm3", "no_rope_layers": [1, 0]}, "'no_rope_layers'.*4 entries"),
    ({"model_type": "ministral3", ROPE: LINEAR}, "'rope_scaling.type'.*llama3, yarn"),
    ({"model_type": "ministral3"}, "'rope_parameters.rope_type' is missing"),
    ({"model_type": "ministral3", ROPE: LLAMA3_SCALING}, "'rope_scaling.llama_4_scaling_beta' is missing"),
    ({"model_type": "olmo3", "rope_theta": 10000.0}, "'rope_theta': expected 500000, or a theta for each"),
    (
        {"model_type": "gemma3_text", OF_LAYERS: {"sliding_attention": {"rope_type": "dynamic"}}},
        "'rope_parameters.sliding_attention.rope_type'",
    ),
]


@pytest.mark.parametrize(("changes", "message"), BAD_FIELDS)
def test_what_cannot_be_honoured_is_an_error_that_names_it(changes: dict[str, Any], message: str) -> None:
    with pytest.raises(CheckpointError, match=message) as caught:
        parse_config(SMALL | {"model_type": "llama"} | changes, where="folder/config.json")
    assert str(caught.value).startswith("folder/config.json: ")
    assert "\n" not in str(caught.value)


def test_config_file_errors_name_the_file(tmp_path: Path) -> None:
    with pytest.raises(CheckpointError, match=r"expected a model folder, found no config\.json in it$"):
        load_config(tmp_path)
    path = tmp_path / "config.json"
    for content, message in ((b"{", "not valid JSON"), (b"\xff{}", "not valid JSON"), (b"[]", "found list")):
        path.write_bytes(content)
        with pytest.raises(CheckpointError, match=message) as caught:
            load_config(tmp_path)
        assert str(path) in str(caught.value)


def test_a_language_model_is_parsed_and_not_taken_for_a_reward_model(tmp_path: Path) -> None:
    causal = SMALL | {"model_type": "llama", "architectures": ["LlamaForCausalLM"]}
    reward = causal | {"architectures": ["LlamaForSequenceClassification"]}
    first, second = (parse_config(raw, where="c") for raw in (causal, reward))
    assert replace(first, architectures=second.architectures) == second
    (tmp_path / "config.json").write_text(json.dumps(causal))
    with pytest.raises(CheckpointError, match="'LlamaForCausalLM' is a causal language model, not a reward"):
        load_config(tmp_path)
