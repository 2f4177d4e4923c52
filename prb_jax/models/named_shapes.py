"""Model shapes by name, so that a benchmark needs no download. Weights are random."""

from __future__ import annotations

from pathlib import Path
from typing import Any

from prb_jax.data.reading import read_object
from prb_jax.errors import CheckpointError
from prb_jax.models.config.decoder import DecoderConfig, load_config, parse_config

QUESTION_TOKENS = 40
"""Of a made-up prefix, its question, where a person has several; what stands before it is the person's profile."""

# (hidden_size, intermediate_size, layers, heads, kv heads, head_dim, vocabulary) of Qwen3's published
# sizes; the first is a model of 43 million parameters in the same proportions.
_QWEN3: dict[str, tuple[int, int, int, int, int, int, int]] = {
    "qwen3-40m": (512, 1536, 10, 8, 4, 128, 6_400),
    "qwen3-0.6b": (1024, 3072, 28, 16, 8, 128, 151_936),
    "qwen3-1.7b": (2048, 6144, 28, 16, 8, 128, 151_936),
    "qwen3-4b": (2560, 9728, 36, 32, 8, 128, 151_936),
    "qwen3-8b": (4096, 12288, 36, 32, 8, 128, 151_936),
}

# Fields of the ``config.json`` of larger models of other families.
_OTHERS: dict[str, dict[str, Any]] = {
    "llama3.1-70b": {
        "architectures": ["LlamaForSequenceClassification"],
        "model_type": "llama",
        "vocab_size": 128_256,
        "hidden_size": 8192,
        "intermediate_size": 28_672,
        "num_hidden_layers": 80,
        "num_attention_heads": 64,
        "num_key_value_heads": 8,
        "head_dim": 128,
        "rms_norm_eps": 1e-5,
        "rope_theta": 500_000.0,
        "rope_scaling": {
            "rope_type": "llama3",
            "factor": 8.0,
            "low_freq_factor": 1.0,
            "high_freq_factor": 4.0,
            "original_max_position_embeddings": 8192,
        },
        "max_position_embeddings": 131_072,
    },
    "gemma2-27b": {
        "architectures": ["Gemma2ForSequenceClassification"],
        "model_type": "gemma2",
        "vocab_size": 256_000,
        "hidden_size": 4608,
        "intermediate_size": 36_864,
        "num_hidden_layers": 46,
        "num_attention_heads": 32,
        "num_key_value_heads": 16,
        "head_dim": 128,
        "query_pre_attn_scalar": 144,
        "attn_logit_softcapping": 50.0,
        "final_logit_softcapping": 30.0,
        "sliding_window": 4096,
        "hidden_activation": "gelu_pytorch_tanh",
        "rms_norm_eps": 1e-6,
        "rope_theta": 10_000.0,
        "max_position_embeddings": 8192,
    },
}

SHAPES = (*_QWEN3, *_OTHERS)


def shape_config(name: str) -> dict[str, Any]:
    """The ``config.json`` of a named shape."""
    if name in _OTHERS:
        return {**_OTHERS[name], "num_labels": 1, "pad_token_id": 0, "torch_dtype": "bfloat16"}
    width, mlp, layers, heads, kv_heads, head_dim, vocab = _QWEN3[name]
    return {
        "architectures": ["Qwen3ForSequenceClassification"],
        "model_type": "qwen3",
        "vocab_size": vocab,
        "hidden_size": width,
        "intermediate_size": mlp,
        "num_hidden_layers": layers,
        "num_attention_heads": heads,
        "num_key_value_heads": kv_heads,
        "head_dim": head_dim,
        "rms_norm_eps": 1e-6,
        "rope_theta": 1_000_000.0,
        "max_position_embeddings": 40_960,
        "hidden_act": "silu",
        "attention_bias": False,
        "tie_word_embeddings": False,
        "num_labels": 1,
        "pad_token_id": 0,
        "torch_dtype": "float32" if name == "qwen3-40m" else "bfloat16",
    }


def has_no_weights(name: str) -> bool:
    """Return whether this is a named shape or a ``config.json``, not a folder or hub id."""
    return name in SHAPES or name.endswith(".json")


def read_model(model: str | Path | DecoderConfig) -> DecoderConfig:
    """The configuration of a named shape, of a ``config.json``, or of a folder that holds one.

    Raises:
      CheckpointError: there is none, or it cannot be used.
    """
    if isinstance(model, DecoderConfig):
        return model
    if str(model) in SHAPES:
        return parse_config(shape_config(str(model)), where=str(model))
    path = Path(model)
    if path.is_file():
        return parse_config(read_object(path, error=CheckpointError), where=str(path))
    if path.is_dir():
        return load_config(path)
    raise CheckpointError(
        f"{model}: expected a config.json, a folder that holds one, or a shape of {', '.join(SHAPES)}"
    )
