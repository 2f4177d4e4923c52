"""The families of decoders: properties that ``config.json`` does not contain.

One row per family: the class name in reward-model checkpoints, the defaults of transformers for absent
fields, and the structural facts that are fixed in the family's code.
"""

from collections.abc import Iterator, Mapping
from dataclasses import replace
from types import MappingProxyType
from typing import Any

from prb_jax.models.config.experts import GPT_OSS_EXPERTS, MIXTRAL_EXPERTS, QWEN_EXPERTS
from prb_jax.models.config.family import Family, Norms
from prb_jax.models.config.fields import FieldReader
from prb_jax.plugins import usable_plugins
from prb_jax.seams import get, names

_OUTPUT_NORMS: Norms = (
    ("post_attention_norm", "post_attention_layernorm"), ("post_mlp_norm", "post_feedforward_layernorm"),
)  # fmt: skip
_GEMMA_NORMS: Norms = (
    ("input_norm", "input_layernorm"), ("post_attention_norm", "post_attention_layernorm"),
    ("mlp_norm", "pre_feedforward_layernorm"), ("post_mlp_norm", "post_feedforward_layernorm"),
)  # fmt: skip
_GLM_NORMS: Norms = (
    ("input_norm", "input_layernorm"), ("post_attention_norm", "post_self_attn_layernorm"),
    ("mlp_norm", "post_attention_layernorm"), ("post_mlp_norm", "post_mlp_layernorm"),
)  # fmt: skip
_BIAS = {"qkv_bias": "attention_bias", "output_bias": "attention_bias"}
_SHARED = {
    "head_dim": None, "pad_token_id": None, "tie_word_embeddings": False, "rms_norm_eps": 1e-6, "rope_theta": 10_000.0,
}  # fmt: skip
_QWEN = {
    "max_position_embeddings": 32768, "num_key_value_heads": 32, "sliding_window": 4096, "max_window_layers": 28,
}  # fmt: skip
_GEMMA = {"max_position_embeddings": 8192, "head_dim": 256, "pad_token_id": 0, "tie_word_embeddings": True}
_LATER_GEMMA = _GEMMA | {
    "num_key_value_heads": 4, "query_pre_attn_scalar": 256, "sliding_window": 4096,
    "hidden_activation": "gelu_pytorch_tanh",
}  # fmt: skip
_QWEN_MOE = {
    "num_experts": 128,
    "num_experts_per_tok": 8,
    "moe_intermediate_size": 768,
    "num_key_value_heads": 4,
}
_RECURRENT = {
    "max_position_embeddings": 32768, "num_key_value_heads": 4, "head_dim": 256, "partial_rotary_factor": 0.25,
    "full_attention_interval": 4, "linear_conv_kernel_dim": 4, "linear_key_head_dim": 128,
    "linear_value_head_dim": 128, "linear_num_key_heads": 16, "linear_num_value_heads": 32,
}  # fmt: skip
_RECURRENT_FACTS: Mapping[str, Any] = {
    "windows": "none", "qk_norm": "head", "centred_norms": True, "recurrent": True, "attention_gate": True,
}  # fmt: skip
_OLMO = {
    "max_position_embeddings": 2048,
    "num_key_value_heads": None,
    "pad_token_id": 1,
    "rms_norm_eps": 1e-5,
}
_OLMO_FACTS: Mapping[str, Any] = {**_BIAS, "qk_norm": "width", "norms": _OUTPUT_NORMS, "wide_norms": True}


def family(name: str, *defaults: Mapping[str, Any], **facts: Any) -> Family:
    """Describe a family.

    Args:
      name: Prefix of the family's class names in transformers, e.g. ``Llama``.
      defaults: Values of fields absent from ``config.json``; later ones take precedence. Defaults shared by most
        families may be omitted.
      facts: Other fields of :class:`Family`.
    """
    merged = dict(_SHARED)
    for values in defaults:
        merged |= values
    return Family(architecture=f"{name}ForSequenceClassification", defaults=MappingProxyType(merged), **facts)


_BUILTIN: Mapping[str, Family] = MappingProxyType(
    {
        "llama": family(
            "Llama", {"max_position_embeddings": 2048, "num_key_value_heads": None},
            **_BIAS, mlp_bias="mlp_bias", windows="none",
        ),
        "mistral": family(
            "Mistral", {"max_position_embeddings": 4096 * 32, "num_key_value_heads": 8, "sliding_window": 4096},
            windows="every",
        ),
        "qwen2": family("Qwen2", _QWEN, qkv_bias=True, windows="upper"),
        "qwen3": family("Qwen3", _QWEN, {"head_dim": 128}, **_BIAS, windows="upper", qk_norm="head"),
        "qwen2_moe": family(
            "Qwen2Moe", _QWEN,
            {
                "num_key_value_heads": 16, "num_experts": 60, "num_experts_per_tok": 4, "moe_intermediate_size": 1408,
                "shared_expert_intermediate_size": 5632, "qkv_bias": True,
            },
            qkv_bias="qkv_bias", windows="refused", experts=replace(QWEN_EXPERTS, shared=True),
        ),
        "qwen3_moe": family(
            "Qwen3Moe", _QWEN, _QWEN_MOE, **_BIAS, windows="used", qk_norm="head", experts=QWEN_EXPERTS
        ),
        "mixtral": family(
            "Mixtral",
            {
                "max_position_embeddings": 4096 * 32, "num_key_value_heads": 8, "rms_norm_eps": 1e-5,
                "rope_theta": 1_000_000.0, "sliding_window": None, "num_experts": 8, "num_experts_per_tok": 2,
            },
            windows="every", experts=MIXTRAL_EXPERTS,
        ),
        "gpt_oss": family(
            "GptOss",
            {
                "max_position_embeddings": 131_072, "num_key_value_heads": 8, "head_dim": 64, "rms_norm_eps": 1e-5,
                "rope_theta": 150_000.0, "sliding_window": 128, "attention_bias": True, "num_experts": 128,
                "num_experts_per_tok": 4,
            },
            **_BIAS, windows="pattern", window_period=2, wide_norms=True, sinks=True, rope_types=("yarn",),
            experts=GPT_OSS_EXPERTS,
        ),
        "gemma": family("Gemma", _GEMMA, {"num_key_value_heads": 16}, **_BIAS, windows="none", gemma=True),
        "gemma2": family(
            "Gemma2", _LATER_GEMMA, {"attn_logit_softcapping": 50.0, "final_logit_softcapping": 30.0},
            **_BIAS, windows="pattern", window_period=2, gemma=True, norms=_GEMMA_NORMS,
            softcaps_attention=True, softcaps_vocabulary=True,
        ),
        "gemma3_text": family(
            "Gemma3Text", _LATER_GEMMA,
            {
                "max_position_embeddings": 131_072, "rope_theta": 1_000_000.0, "rope_local_base_freq": 10_000.0,
                "final_logit_softcapping": None, "sliding_window_pattern": 6,
            },
            **_BIAS, windows="pattern", qk_norm="head", gemma=True, norms=_GEMMA_NORMS,
            local_theta="rope_local_base_freq", softcaps_vocabulary=True,
        ),
        "olmo2": family("Olmo2", _OLMO, **_OLMO_FACTS, windows="none"),
        "olmo3": family(
            "Olmo3", _OLMO, {"rope_theta": 500_000.0, "sliding_window": 4096},
            **_OLMO_FACTS, windows="pattern", window_period=4, local_theta="rope_theta",
        ),
        "phi3": family(
            "Phi3",
            {
                "max_position_embeddings": 4096, "original_max_position_embeddings": 4096, "num_key_value_heads": None,
                "pad_token_id": 32000, "rms_norm_eps": 1e-5, "sliding_window": None, "partial_rotary_factor": 1.0,
            },
            windows="every", fused=("qkv_proj", "gate_up_proj"), rope_types=("default", "longrope"),
        ),
        "smollm3": family(
            "SmolLM3",
            {
                "max_position_embeddings": 32768, "num_key_value_heads": 4, "pad_token_id": 128_004,
                "rope_theta": 2_000_000.0, "sliding_window": None, "no_rope_layer_interval": 4,
                "tie_word_embeddings": True,
            },
            **_BIAS, mlp_bias="mlp_bias", windows="unrotated", unrotated="listed",
        ),
        "ministral3": family(
            "Ministral3",
            {
                "max_position_embeddings": 262_144, "num_key_value_heads": 8, "head_dim": 128, "pad_token_id": 11,
                "rms_norm_eps": 1e-5, "sliding_window": None,
            },
            windows="every", rope_types=("llama3", "yarn"), query_growth=True,
        ),
        "glm4": family(
            "Glm4",
            {
                "max_position_embeddings": 131_072, "num_key_value_heads": 2, "head_dim": 128, "pad_token_id": 151_329,
                "rms_norm_eps": 1.5625e-7, "partial_rotary_factor": 0.5, "attention_bias": True,
            },
            qkv_bias="attention_bias", windows="none", norms=_GLM_NORMS, fused=("gate_up_proj",),
            interleaved_rope=True,
        ),
        "seed_oss": family(
            "SeedOss",
            {
                "max_position_embeddings": 524_288, "num_key_value_heads": 8, "head_dim": 128, "pad_token_id": 1,
                "attention_bias": True,
            },
            qkv_bias="attention_bias", output_bias="attention_out_bias", mlp_bias="mlp_bias", windows="none",
        ),
        "exaone4": family(
            "Exaone4",
            {
                "max_position_embeddings": 2048, "num_key_value_heads": 32, "rms_norm_eps": 1e-5,
                "sliding_window": 4096, "sliding_window_pattern": 4,
            },
            windows="pattern", unrotated="full", qk_norm="head", norms=_OUTPUT_NORMS,
        ),
        "qwen3_5_text": family(
            "Qwen3_5Text", _RECURRENT, **_BIAS, **_RECURRENT_FACTS,
            unused_rope_fields=("mrope_section", "mrope_interleaved"),
        ),
        "qwen3_5_moe_text": family(
            "Qwen3_5Moe", _RECURRENT,
            {
                "num_key_value_heads": 2, "num_experts": 256, "num_experts_per_tok": 8, "moe_intermediate_size": 512,
                "shared_expert_intermediate_size": 512, "intermediate_size": 512,  # the last one is unused
            },
            **_BIAS, **_RECURRENT_FACTS, unused_rope_fields=("mrope_section", "mrope_interleaved"),
            experts=replace(QWEN_EXPERTS, shared=True, normalised=True, some_layers=False),
        ),
        "qwen3_next": family(
            "Qwen3Next", _RECURRENT,
            {
                "num_key_value_heads": 2, "num_experts": 512, "num_experts_per_tok": 10, "moe_intermediate_size": 512,
                "shared_expert_intermediate_size": 512, "norm_topk_prob": True,
            },
            **_BIAS, **_RECURRENT_FACTS, grouped_recurrence=True, experts=replace(QWEN_EXPERTS, shared=True),
        ),
    }
)  # fmt: skip


class _Families(Mapping[str, Family]):
    """Families by ``model_type``: families of this package, then of plug-ins of the kind "backbones"."""

    def __getitem__(self, model_type: str) -> Family:
        if model_type in _BUILTIN:
            return _BUILTIN[model_type]
        if model_type in names("backbones"):
            return get("backbones", model_type).value
        raise KeyError(model_type)

    def __iter__(self) -> Iterator[str]:
        yield from _BUILTIN
        yield from (plugin.name for plugin in usable_plugins("backbones") if plugin.name not in _BUILTIN)

    def __len__(self) -> int:
        return sum(1 for _ in self)


FAMILIES: Mapping[str, Family] = _Families()


def origin_of(model_type: str) -> str:
    """Return the package and version of the plug-in that offers a family; "" for a family of this package."""
    if model_type in _BUILTIN or model_type not in names("backbones"):
        return ""
    return get("backbones", model_type).origin


_OF_BOTH = ("id2label", "label2id", "num_labels", "dtype", "torch_dtype", "tie_word_embeddings")
# transformers' defaults for fields of "text_config" that Google's files omit.
_GEMMA3_SIZES = {
    "vocab_size": 262_208, "hidden_size": 2304, "intermediate_size": 9216, "num_hidden_layers": 26,
    "num_attention_heads": 8,
}  # fmt: skip
_CLASSES_OF_TEXT = {
    "Gemma3ForConditionalGeneration": "Gemma3ForCausalLM",
    "Gemma3ForSequenceClassification": "Gemma3TextForSequenceClassification",
    "Qwen3_5ForConditionalGeneration": "Qwen3_5ForCausalLM",
    "Qwen3_5ForSequenceClassification": "Qwen3_5TextForSequenceClassification",
    "Qwen3_5MoeForConditionalGeneration": "Qwen3_5MoeForCausalLM",
}
_QWEN3_5_SIZES: Mapping[str, dict[str, Any]] = {
    "qwen3_5": {
        "vocab_size": 248_320, "hidden_size": 4096, "intermediate_size": 12_288, "num_hidden_layers": 32,
        "num_attention_heads": 16,
    },
    "qwen3_5_moe": {
        "vocab_size": 248_320, "hidden_size": 2048, "num_hidden_layers": 40, "num_attention_heads": 16,
    },
}  # fmt: skip


def text_model(raw: dict[str, Any], *, where: str) -> dict[str, Any]:
    """Return the text model's part of the raw ``config.json`` of Gemma 3 or Qwen 3.5 with a vision tower.

    Raises:
      CheckpointError: The text model is not described.
    """
    text = raw.get("text_config")
    if not isinstance(text, Mapping):
        raise FieldReader(raw, where).error("text_config", "an object")
    outer = {name: raw[name] for name in _OF_BOTH if name in raw}
    names = [_CLASSES_OF_TEXT.get(name, name) for name in raw.get("architectures") or ()]
    if raw["model_type"] in _QWEN3_5_SIZES:
        marks = {
            name: raw.get(name, default)
            for name, default in {"image_token_id": 248_056, "video_token_id": 248_057}.items()
        }
        own = {"model_type": f"{raw['model_type']}_text", "architectures": names or None, **marks}
        return {**_QWEN3_5_SIZES[raw["model_type"]], **text, **outer, **own}
    image = raw.get("image_token_id", raw.get("image_token_index", 262_144))
    own = {"model_type": "gemma3_text", "architectures": names or None, "image_token_id": image}
    return {**_GEMMA3_SIZES, "pad_token_id": raw.get("pad_token_id", 0), **text, **outer, **own}
