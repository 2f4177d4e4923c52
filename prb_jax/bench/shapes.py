"""Model shapes by name, so that a benchmark needs no download. Weights are random."""

from __future__ import annotations

from typing import Any

# (hidden_size, intermediate_size, layers, heads, kv heads, head_dim, vocabulary) of Qwen3's published
# sizes; the first is a model of 43 million parameters in the same proportions.
_QWEN3: dict[str, tuple[int, int, int, int, int, int, int]] = {
    "qwen3-40m": (512, 1536, 10, 8, 4, 128, 6_400),
    "qwen3-0.6b": (1024, 3072, 28, 16, 8, 128, 151_936),
    "qwen3-1.7b": (2048, 6144, 28, 16, 8, 128, 151_936),
    "qwen3-4b": (2560, 9728, 36, 32, 8, 128, 151_936),
    "qwen3-8b": (4096, 12288, 36, 32, 8, 128, 151_936),
}

SHAPES = tuple(_QWEN3)


def shape_config(name: str) -> dict[str, Any]:
    """The ``config.json`` of a named shape."""
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
