"""Tiny random reward models, written by transformers itself: the oracle's side of parity tests; or, where it does
not matter who wrote them, without torch.

Nothing in them is trivial: norm weights are not one, biases and heads are not zero, windows are shorter
than the sequences tests use, soft-caps bite, and each rope type has pairs in every one of its bands.
"""

import json
from collections.abc import Mapping
from dataclasses import dataclass, field
from pathlib import Path
from types import MappingProxyType
from typing import Any

import pytest


@dataclass(frozen=True)
class TinyFamily:
    """One architecture with one rope: names of transformers' classes and arguments of its configuration."""

    config_class: str
    arguments: Mapping[str, Any] = field(default_factory=dict)

    @property
    def model_class(self) -> str:
        return self.config_class.removesuffix("Config") + "ForSequenceClassification"


_SIZES: Mapping[str, Any] = MappingProxyType(
    {
        "vocab_size": 256,
        "hidden_size": 64,
        "intermediate_size": 96,
        "num_hidden_layers": 3,
        "num_attention_heads": 4,
        "num_key_value_heads": 2,
        "max_position_embeddings": 4096,
        "rms_norm_eps": 1e-5,
        "num_labels": 1,
        "pad_token_id": 0,
        "bos_token_id": 1,
        "eos_token_id": 2,
    }
)


def _rope(rope_type: str, theta: float, **values: Any) -> dict[str, Any]:
    return {"rope_type": rope_type, "rope_theta": theta, **values}


_DEFAULT = _rope("default", 50_000.0)
_LINEAR = _rope("linear", 20_000.0, factor=4.0)
# Head dimension 16: two pairs are kept, one is blended, five are slowed.
_BANDS = {"low_freq_factor": 1.0, "high_freq_factor": 4.0}
_LLAMA3 = _rope("llama3", 500_000.0, factor=8.0, **_BANDS, original_max_position_embeddings=512)
_YARN = _rope("yarn", 1_000_000.0, factor=4.0, original_max_position_embeddings=1024)
_LONGROPE = _rope(
    "longrope", 10_000.0, short_factor=[1.0, 1.1, 1.3, 1.7, 2.0, 2.5], long_factor=[1.0, 2.0, 4.0, 8.0, 16.0, 32.0],
    partial_rotary_factor=0.75, original_max_position_embeddings=4096,
)  # fmt: skip
# layer_types are left out: transformers derives them from the pattern.
_GEMMA: Mapping[str, Any] = MappingProxyType(
    {"head_dim": 24, "query_pre_attn_scalar": 20, "sliding_window": 24, "num_hidden_layers": 4}
)
_MOE: Mapping[str, Any] = MappingProxyType(
    {"num_experts": 6, "num_experts_per_tok": 2, "moe_intermediate_size": 40}
)
# Fields of the sections of images change nothing for text.
_PARTIAL = _rope(
    "default", 50_000.0, partial_rotary_factor=0.25, mrope_section=[1, 1, 1], mrope_interleaved=True
)
_DELTA: Mapping[str, Any] = MappingProxyType(
    {
        "head_dim": 24, "linear_num_key_heads": 2, "linear_num_value_heads": 4, "linear_key_head_dim": 16,
        "linear_value_head_dim": 24,
    }
)  # fmt: skip
_LOCAL = _rope("default", 10_000.0)


def _tiny(name: str, rope: Mapping[str, Any], **arguments: Any) -> TinyFamily:
    return TinyFamily(f"{name}Config", {"rope_parameters": rope, **arguments})


def _ropes(full: Mapping[str, Any], sliding: Mapping[str, Any] = _LOCAL) -> dict[str, Any]:
    return {"full_attention": full, "sliding_attention": sliding}


TINY_FAMILIES: Mapping[str, TinyFamily] = MappingProxyType(
    {
        "llama": _tiny("Llama", _DEFAULT),
        "llama-linear": _tiny("Llama", _LINEAR),
        "llama-llama3": _tiny("Llama", _LLAMA3, attention_bias=True),
        "llama-yarn": _tiny("Llama", _YARN, mlp_bias=True),
        "mistral": _tiny("Mistral", _DEFAULT, sliding_window=24),
        "mistral-full": _tiny("Mistral", _YARN, sliding_window=None, head_dim=24),
        "qwen2": _tiny("Qwen2", _DEFAULT),
        "qwen2-window": _tiny(
            "Qwen2", _YARN, use_sliding_window=True, sliding_window=24, max_window_layers=1
        ),
        "qwen3": _tiny("Qwen3", _DEFAULT, head_dim=24),
        "qwen3-yarn": _tiny("Qwen3", _YARN, head_dim=24, tie_word_embeddings=True),
        "gemma": _tiny("Gemma", _DEFAULT, head_dim=24),
        "gemma2": _tiny("Gemma2", _DEFAULT, **_GEMMA, attn_logit_softcapping=5.0),
        "gemma3": _tiny("Gemma3Text", _ropes(_DEFAULT), **_GEMMA, sliding_window_pattern=3),
        "gemma3-linear": _tiny("Gemma3Text", _ropes(_LINEAR), **_GEMMA, sliding_window_pattern=2),
        "olmo2": _tiny("Olmo2", _LLAMA3, attention_bias=True),
        "olmo3": _tiny("Olmo3", _ropes(_YARN, _DEFAULT), sliding_window=24, num_hidden_layers=4),
        "phi3": _tiny("Phi3", _DEFAULT, sliding_window=24),
        "phi3-longrope": _tiny("Phi3", _LONGROPE, hidden_size=64, max_position_embeddings=8192),
        "smollm3": _tiny("SmolLM3", _DEFAULT, no_rope_layer_interval=2),
        "smollm3-window": _tiny(
            "SmolLM3",
            _YARN,
            use_sliding_window=True,
            sliding_window=24,
            no_rope_layers=[1, 0, 1],
            mlp_bias=True,
            attention_bias=True,
        ),
        "ministral3": _tiny(
            "Ministral3",
            _rope(
                "yarn", 1_000_000.0, factor=4.0, original_max_position_embeddings=40, llama_4_scaling_beta=0.3
            ),
            head_dim=24,
        ),
        "glm4": _tiny("Glm4", _DEFAULT, head_dim=24),
        "seed_oss": _tiny("SeedOss", _LLAMA3, head_dim=24, attention_out_bias=True),
        "qwen3_moe": _tiny("Qwen3Moe", _DEFAULT, head_dim=24, **_MOE, norm_topk_prob=True),
        "qwen3_moe-window": _tiny(
            "Qwen3Moe", _YARN, head_dim=24, **_MOE, use_sliding_window=True, sliding_window=24
        ),
        "qwen3_moe-lead": _tiny(
            "Qwen3Moe", _DEFAULT, head_dim=24, **_MOE, mlp_only_layers=[0], num_hidden_layers=4
        ),
        "qwen2_moe-step": _tiny(
            "Qwen2Moe",
            _DEFAULT,
            **_MOE,
            shared_expert_intermediate_size=40,
            decoder_sparse_step=2,
            num_hidden_layers=5,
        ),
        "qwen2_moe": _tiny("Qwen2Moe", _DEFAULT, **_MOE, shared_expert_intermediate_size=40),
        "mixtral": _tiny("Mixtral", _DEFAULT, sliding_window=24, num_local_experts=5, num_experts_per_tok=2),
        "gpt_oss": _tiny(
            "GptOss",
            _rope("yarn", 150_000.0, factor=4.0, original_max_position_embeddings=1024, truncate=False),
            head_dim=24,
            sliding_window=24,
            num_local_experts=6,
            num_experts_per_tok=2,
            swiglu_limit=1.5,
        ),
        "exaone4": _tiny("Exaone4", _DEFAULT, sliding_window=24, sliding_window_pattern=2),
        "qwen3_5": _tiny("Qwen3_5Text", _PARTIAL, **_DELTA, num_hidden_layers=4, full_attention_interval=2),
        "qwen3_5-tail": _tiny(
            "Qwen3_5Text",
            _PARTIAL,
            **_DELTA,
            num_hidden_layers=5,
            attention_bias=True,
            layer_types=["linear_attention", "linear_attention", "full_attention"] + ["linear_attention"] * 2,
        ),
        "qwen3_next": _tiny(
            "Qwen3Next",
            _rope("default", 50_000.0, partial_rotary_factor=0.25),
            **_DELTA,
            **_MOE,
            shared_expert_intermediate_size=40,
            num_hidden_layers=3,
            full_attention_interval=2,
        ),
        "qwen3_next-dense": _tiny(
            "Qwen3Next",
            _rope("default", 50_000.0, partial_rotary_factor=0.25),
            **_DELTA,
            **_MOE,
            shared_expert_intermediate_size=40,
            mlp_only_layers=[0, 1, 4],
            num_hidden_layers=5,
            full_attention_interval=2,
        ),
    }
)
#: One name for each architecture and rope type that the decoder must match.
FAMILIES: tuple[str, ...] = tuple(TINY_FAMILIES)


def write_tiny_model(
    folder: str | Path,
    family: str,
    *,
    dtype: str = "float32",
    num_labels: int = 1,
    seed: int = 0,
    rope: Mapping[str, Any] | None = None,
    max_shard_size: str | None = None,
    **config_overrides: Any,
) -> Path:
    """Write a random ``*ForSequenceClassification`` checkpoint with ``save_pretrained``.

    Args:
      folder: where to; created.
      family: one of :data:`FAMILIES`.
      dtype: of the saved weights, ``float32``, ``bfloat16`` or ``float16``.
      num_labels: rows of the score head.
      seed: of the weights.
      rope: replaces the family's ``rope_parameters``.
      max_shard_size: e.g. ``"100KB"`` for several files and an index.
      config_overrides: further arguments of the configuration class.

    Returns:
      The folder.
    """
    torch = pytest.importorskip("torch", reason="transformers writes no model without torch")
    import transformers

    tiny = TINY_FAMILIES[family]
    config = tiny_config(tiny, rope=rope, num_labels=num_labels, **config_overrides)
    model = getattr(transformers, tiny.model_class)(config).eval()

    # Variance one through the layer, so that attention is far from uniform; Gemma scales its embedding.
    randomise(model, seed=seed, unit_embedding="Gemma" not in tiny.config_class)
    sharded = {} if max_shard_size is None else {"max_shard_size": max_shard_size}
    model.to(getattr(torch, dtype)).save_pretrained(folder, **sharded)
    return Path(folder)


def write_model_beside_a_vision_tower(folder: Path, *, transformers_5: bool) -> Path:
    """Write a random Gemma 3 that reads images, with the names of tensors of transformers 4 or 5."""
    import transformers
    from safetensors.torch import load_file, save_file

    vision = {
        "hidden_size": 32, "intermediate_size": 32, "num_hidden_layers": 1, "num_attention_heads": 2,
        "image_size": 28, "patch_size": 14,
    }  # fmt: skip
    text = tiny_config(TINY_FAMILIES["gemma3"]).to_dict()
    config = transformers.Gemma3Config(
        text_config=text, vision_config=vision, mm_tokens_per_image=4, num_labels=1, image_token_id=255
    )
    model = transformers.Gemma3ForSequenceClassification(config).eval()
    randomise(model.model.language_model, seed=0)
    randomise(model.score, seed=1)
    model.save_pretrained(folder)
    if transformers_5:
        path = folder / "model.safetensors"
        tensors = {
            name
            if name == "score.weight"
            else f"model.{name.replace('language_model.model.', 'language_model.')}": value
            for name, value in load_file(path).items()
        }
        save_file(tensors, path, metadata={"format": "pt"})
    return folder


def write_qwen_beside_a_vision_tower(folder: Path) -> Path:
    """Write a random Qwen 3.5 that reads images, with the tensors of the prediction of later tokens."""
    import torch
    import transformers
    from safetensors.torch import load_file, save_file

    vision = {
        "hidden_size": 32, "intermediate_size": 32, "depth": 1, "num_heads": 2, "out_hidden_size": 64,
        "num_position_embeddings": 16,
    }  # fmt: skip
    text = tiny_config(TINY_FAMILIES["qwen3_5"]).to_dict()
    config = transformers.Qwen3_5Config(
        text_config=text, vision_config=vision, num_labels=1, image_token_id=255, video_token_id=254
    )
    model = transformers.Qwen3_5ForSequenceClassification(config).eval()
    randomise(model.model.language_model, seed=0)
    randomise(model.score, seed=1)
    model.save_pretrained(folder)
    path = folder / "model.safetensors"
    tensors = {**load_file(path), "mtp.fc.weight": torch.zeros(64, 128)}
    save_file(tensors, path, metadata={"format": "pt"})
    return folder


def write_qwen_moe(folder: Path, *, vision: bool) -> Path:
    """Write a random language model of Qwen 3.5 with experts, alone or beside a vision tower."""
    import transformers

    arguments = {**_SIZES, **_DELTA, **_MOE, "rope_parameters": dict(_PARTIAL), "num_hidden_layers": 3}
    text = transformers.Qwen3_5MoeTextConfig(
        **arguments, full_attention_interval=2, shared_expert_intermediate_size=40
    )
    if not vision:
        model = transformers.Qwen3_5MoeForCausalLM(text)
    else:
        tower = {
            "hidden_size": 32, "intermediate_size": 32, "depth": 1, "num_heads": 2, "out_hidden_size": 64,
            "num_position_embeddings": 16,
        }  # fmt: skip
        config = transformers.Qwen3_5MoeConfig(
            text_config=text.to_dict(), vision_config=tower, image_token_id=255
        )
        model = transformers.Qwen3_5MoeForConditionalGeneration(config)
    randomise(model.eval(), seed=0)
    model.save_pretrained(folder)
    return folder


def randomise(model: Any, *, seed: int, unit_embedding: bool = False) -> None:
    """Draw the parameters of a model of transformers: variance 1 / inputs in matrices, 1 in a unit embedding."""
    import torch

    generator = torch.Generator().manual_seed(seed)
    with torch.no_grad():
        for name, weight in model.named_parameters():
            noise = torch.randn(weight.shape, generator=generator)
            if "norm" in name:
                weight.copy_(0.3 * noise + float(not _is_centred(type(model).__name__, name)))
            elif name.endswith("A_log"):  # states that last about ten tokens
                weight.copy_(0.3 * noise - 2.0)
            elif name.endswith(("bias", "sinks")):
                weight.copy_(0.3 * noise)
            elif unit_embedding and "embed_tokens" in name:
                weight.copy_(noise)
            else:  # of each expert, where a tensor holds all of them
                weight.copy_(noise / weight.shape[-1] ** 0.5)


def write_model_without_torch(folder: Path, family: str, *, seed: int = 0, **config_overrides: Any) -> Path:
    """Write a random checkpoint of the same configuration with prb_jax's own writer."""
    import jax
    import numpy as np

    from prb_jax.models.checkpoints.load import abstract_params
    from prb_jax.models.checkpoints.save import save_params
    from prb_jax.models.config.decoder import parse_config

    tiny = TINY_FAMILIES[family]
    raw = json.loads(tiny_config(tiny, **config_overrides).to_json_string(use_diff=False))
    config = parse_config(raw | {"architectures": [tiny.model_class]}, where=family)
    rng = np.random.default_rng(seed)

    def weight(path: tuple[Any, ...], leaf: jax.ShapeDtypeStruct) -> np.ndarray:
        noise = rng.standard_normal(leaf.shape, np.float32)
        if "norm" in path[-1].key:
            return 0.3 * noise + float(not _is_centred(tiny.config_class, path[-1].key))
        return noise / leaf.shape[-2 if path[0].key != "embed" else -1] ** 0.5

    params = jax.tree_util.tree_map_with_path(weight, abstract_params(config))
    return save_params(params, config, folder)


def _is_centred(kind: str, norm: str) -> bool:
    """Whether this norm multiplies by 1 + w."""
    return (
        kind.startswith(("Gemma", "Qwen3_5", "Qwen3Next"))
        and "linear_attn" not in norm
        and "delta" not in norm
    )


def tiny_config(tiny: TinyFamily, *, rope: Mapping[str, Any] | None = None, **arguments: Any) -> Any:
    """The configuration as transformers has it."""
    import transformers

    arguments = {**_SIZES, **tiny.arguments, **arguments}
    arguments["rope_parameters"] = _copied(rope or arguments["rope_parameters"])
    return getattr(transformers, tiny.config_class)(**arguments)


def _copied(rope: Mapping[str, Any]) -> dict[str, Any]:
    """transformers fills in the object it is given, which must not change the table above."""
    return {key: dict(value) if isinstance(value, Mapping) else value for key, value in rope.items()}
