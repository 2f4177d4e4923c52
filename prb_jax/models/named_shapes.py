"""Model shapes by name with random weights, for benchmarks without a download."""

from __future__ import annotations

from pathlib import Path
from typing import Any

from prb_jax.errors import CheckpointError
from prb_jax.models.config.decoder import DecoderConfig, load_config, parse_config
from prb_jax.records.reading import read_object

QUESTION_TOKENS = 40
"""Tokens of the question in a synthetic prefix, for users with several questions; the tokens before it are the user's
profile."""

_EVERY = {"num_labels": 1, "pad_token_id": 0, "torch_dtype": "bfloat16"}
_QWEN3 = _EVERY | {
    "architectures": ["Qwen3ForSequenceClassification"], "model_type": "qwen3", "vocab_size": 151_936,
    "num_key_value_heads": 8, "head_dim": 128, "rms_norm_eps": 1e-6, "rope_theta": 1_000_000.0,
    "max_position_embeddings": 40_960, "hidden_act": "silu", "attention_bias": False, "tie_word_embeddings": False,
}  # fmt: skip


def _qwen3(width: int, mlp: int, layers: int, heads: int, **others: Any) -> dict[str, Any]:
    sizes = {"hidden_size": width, "intermediate_size": mlp, "num_hidden_layers": layers}
    return {**_QWEN3, **sizes, "num_attention_heads": heads, **others}


def _qwen3_moe(width: int, expert: int, layers: int, heads: int, **others: Any) -> dict[str, Any]:
    kind = {"architectures": ["Qwen3MoeForSequenceClassification"], "model_type": "qwen3_moe"}
    return _qwen3(
        width, 3 * width, layers, heads, **kind, moe_intermediate_size=expert, norm_topk_prob=True, **others
    )


def _qwen3_5(width: int, mlp: int, layers: int, heads: int, **others: Any) -> dict[str, Any]:
    """Return a shape in which three of four layers are recurrent."""
    sizes = {"hidden_size": width, "intermediate_size": mlp, "num_hidden_layers": layers}
    named = {"architectures": ["Qwen3_5TextForSequenceClassification"], "model_type": "qwen3_5_text"}
    rope = {"rope_type": "default", "rope_theta": 10_000_000.0, "partial_rotary_factor": 0.25}
    recurrent = {"full_attention_interval": 4, "linear_key_head_dim": 128, "linear_value_head_dim": 128}
    attention = {"num_attention_heads": heads, "head_dim": 256, "hidden_act": "silu", "attention_bias": False}
    context = {"max_position_embeddings": 262_144, "rms_norm_eps": 1e-6, "rope_parameters": rope}
    return {**_EVERY, "vocab_size": 248_320, **named, **sizes, **attention, **recurrent, **context, **others}


_CONFIGS: dict[str, dict[str, Any]] = {
    # 43 million parameters with the proportions of the published sizes below.
    "qwen3-40m": _qwen3(512, 1536, 10, 8, num_key_value_heads=4, vocab_size=6_400, torch_dtype="float32"),
    # Mixtures of experts. The first one has the same FLOPs per token as the shape above.
    "qwen3-110m-a40m": _qwen3_moe(
        512, 384, 10, 8, num_local_experts=16, num_experts_per_tok=4, num_key_value_heads=4, vocab_size=6_400,
        torch_dtype="float32",
    ),
    "qwen3-30b-a3b": _qwen3_moe(
        2048, 768, 48, 32, num_local_experts=128, num_experts_per_tok=8, num_key_value_heads=4
    ),
    "qwen3-0.6b": _qwen3(1024, 3072, 28, 16),
    "qwen3-1.7b": _qwen3(2048, 6144, 28, 16),
    "qwen3-4b": _qwen3(2560, 9728, 36, 32),
    "qwen3-8b": _qwen3(4096, 12288, 36, 32),
    "qwen3.5-40m": _qwen3_5(
        512, 1536, 8, 4, num_key_value_heads=2, linear_num_key_heads=8, linear_num_value_heads=8, vocab_size=6_400,
        torch_dtype="float32",
    ),
    "qwen3.5-9b": _qwen3_5(
        4096, 12_288, 32, 16, num_key_value_heads=4, linear_num_key_heads=16, linear_num_value_heads=32
    ),
    "qwen3-next-80b-a3b": _qwen3_5(
        2048, 5120, 48, 16, num_key_value_heads=2, linear_num_key_heads=16, linear_num_value_heads=32,
        architectures=["Qwen3NextForSequenceClassification"], model_type="qwen3_next", vocab_size=151_936,
        num_experts=512, num_experts_per_tok=10, moe_intermediate_size=512, shared_expert_intermediate_size=512,
        norm_topk_prob=True,
    ),
    "gpt-oss-20b": _EVERY | {
        "architectures": ["GptOssForSequenceClassification"], "model_type": "gpt_oss", "vocab_size": 201_088,
        "hidden_size": 2880, "intermediate_size": 2880, "num_hidden_layers": 24, "num_attention_heads": 64,
        "num_key_value_heads": 8, "head_dim": 64, "num_local_experts": 32, "num_experts_per_tok": 4,
        "sliding_window": 128, "layer_types": ["sliding_attention", "full_attention"] * 12, "rms_norm_eps": 1e-5,
        "rope_theta": 150_000.0, "hidden_act": "silu", "attention_bias": True, "max_position_embeddings": 131_072,
        "rope_scaling": {
            "rope_type": "yarn", "factor": 32.0, "beta_fast": 32.0, "beta_slow": 1.0, "truncate": False,
            "original_max_position_embeddings": 4096,
        },
    },
    "mixtral-47b-a13b": _EVERY | {
        "architectures": ["MixtralForSequenceClassification"], "model_type": "mixtral", "vocab_size": 32_000,
        "hidden_size": 4096, "intermediate_size": 14_336, "num_hidden_layers": 32, "num_attention_heads": 32,
        "num_key_value_heads": 8, "head_dim": 128, "num_local_experts": 8, "num_experts_per_tok": 2,
        "rms_norm_eps": 1e-5, "rope_theta": 1_000_000.0, "hidden_act": "silu", "max_position_embeddings": 32_768,
    },
    "llama3.1-70b": _EVERY | {
        "architectures": ["LlamaForSequenceClassification"], "model_type": "llama", "vocab_size": 128_256,
        "hidden_size": 8192, "intermediate_size": 28_672, "num_hidden_layers": 80, "num_attention_heads": 64,
        "num_key_value_heads": 8, "head_dim": 128, "rms_norm_eps": 1e-5, "rope_theta": 500_000.0,
        "rope_scaling": {
            "rope_type": "llama3", "factor": 8.0, "low_freq_factor": 1.0, "high_freq_factor": 4.0,
            "original_max_position_embeddings": 8192,
        },
        "max_position_embeddings": 131_072,
    },
    "gemma2-27b": _EVERY | {
        "architectures": ["Gemma2ForSequenceClassification"], "model_type": "gemma2", "vocab_size": 256_000,
        "hidden_size": 4608, "intermediate_size": 36_864, "num_hidden_layers": 46, "num_attention_heads": 32,
        "num_key_value_heads": 16, "head_dim": 128, "query_pre_attn_scalar": 144, "attn_logit_softcapping": 50.0,
        "final_logit_softcapping": 30.0, "sliding_window": 4096, "hidden_activation": "gelu_pytorch_tanh",
        "rms_norm_eps": 1e-6, "rope_theta": 10_000.0, "max_position_embeddings": 8192,
    },
}  # fmt: skip

SHAPES = tuple(_CONFIGS)


def shape_config(name: str) -> dict[str, Any]:
    """Return the ``config.json`` of a named shape."""
    return dict(_CONFIGS[name])


def has_no_weights(name: str) -> bool:
    """Return True for a named shape or a ``config.json``, False for a folder or hub id."""
    return name in SHAPES or name.endswith(".json")


def read_model(model: str | Path | DecoderConfig) -> DecoderConfig:
    """Read the configuration of a named shape, a ``config.json``, or a folder that contains one.

    Raises:
      CheckpointError: The configuration is missing or cannot be used.
    """
    if isinstance(model, DecoderConfig):
        return model
    if str(model) in SHAPES:
        return parse_config(shape_config(str(model)), where=str(model))
    path = Path(model)
    if path.is_file():
        return parse_config(read_object(path, error=CheckpointError, finite=False), where=str(path))
    if path.is_dir():
        return load_config(path)
    raise CheckpointError(
        f"{model}: expected a config.json, a folder with one, or a shape of {', '.join(SHAPES)}"
    )
