"""Rotary frequencies and angles against transformers."""

from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
import pytest

from prb_jax.models.config.decoder import parse_config
from prb_jax.models.layers import RopeConfig, inverse_frequencies, rotary_angles

LLAMA3 = {
    "rope_type": "llama3", "rope_theta": 500_000.0, "low_freq_factor": 1.0, "high_freq_factor": 4.0,
    "original_max_position_embeddings": 8192,
}  # fmt: skip


def yarn(theta: float, factor: float | None, original: int, **more: Any) -> dict[str, Any]:
    lengths = {"factor": factor, "original_max_position_embeddings": original}
    return {"rope_type": "yarn", "rope_theta": theta, **lengths, **more}


ROPES: dict[str, dict[str, Any]] = {
    "default": {"rope_type": "default", "rope_theta": 10_000.0},
    "default-theta": {"rope_type": "default", "rope_theta": 1_000_000.0},
    "linear": {"rope_type": "linear", "rope_theta": 1_000_000.0, "factor": 8.0},
    "llama-3.1": LLAMA3 | {"factor": 8.0},
    "llama-3.2": LLAMA3 | {"factor": 32.0},
    "yarn": yarn(1_000_000.0, 4.0, 32_768),
    "yarn-ratio": yarn(10_000.0, None, 4096),  # factor from the two context lengths
    "yarn-every-field": yarn(
        10_000.0, 40.0, 4096, mscale=1.0, mscale_all_dim=0.707, beta_fast=16.0, beta_slow=2.0, truncate=False
    ),
    "yarn-attention-factor": yarn(10_000.0, 2.0, 2048, attention_factor=1.25),
    "yarn-one-mscale": yarn(10_000.0, 2.0, 2048, mscale=2.0),  # has no effect without the other
    "yarn-step": yarn(10_000.0, 2.0, 4),  # context so short that the ramp has no width
}
MAX_POSITIONS = 131_072


def parsed(rope: dict[str, Any], head_dim: int) -> RopeConfig:
    raw = {
        "model_type": "llama", "vocab_size": 8, "hidden_size": 64, "intermediate_size": 8, "num_hidden_layers": 1,
        "num_attention_heads": 4, "head_dim": head_dim, "max_position_embeddings": MAX_POSITIONS,
        "rope_parameters": dict(rope),
    }  # fmt: skip
    return parse_config(raw, where="config.json").rope[0]


def transformers_rope(rope: dict[str, Any], head_dim: int) -> Any:
    from transformers import LlamaConfig
    from transformers.models.llama.modeling_llama import LlamaRotaryEmbedding

    sizes = {"hidden_size": 64, "num_attention_heads": 4, "max_position_embeddings": MAX_POSITIONS}
    return LlamaRotaryEmbedding(LlamaConfig(**sizes, head_dim=head_dim, rope_parameters=dict(rope)))


@pytest.mark.parametrize("head_dim", [16, 64, 128, 256])
@pytest.mark.parametrize("name", ROPES)
def test_frequencies_are_those_of_transformers(name: str, head_dim: int) -> None:
    rope, reference = parsed(ROPES[name], head_dim), transformers_rope(ROPES[name], head_dim)
    ours, theirs = inverse_frequencies(rope), reference.inv_freq.numpy()
    assert (ours.dtype, ours.shape) == (np.float32, (head_dim // 2,))
    np.testing.assert_allclose(ours, theirs, rtol=1e-6, atol=0)
    # All but a few agree to the last bit, which is what keeps long prompts together.
    assert np.mean(ours == theirs) >= 0.97
    assert rope.attention_factor == pytest.approx(reference.attention_scaling, rel=1e-12)


@pytest.mark.parametrize("name", ROPES)
def test_angles_are_those_of_transformers_at_long_positions(name: str) -> None:
    import torch

    ends = np.arange(4200), np.arange(MAX_POSITIONS - 50, MAX_POSITIONS)
    positions = np.concatenate(ends).astype(np.int32)
    theirs = transformers_rope(ROPES[name], 64)(torch.zeros(1), torch.tensor(positions)[None])
    ours = rotary_angles(jnp.asarray(positions)[None], parsed(ROPES[name], 64))
    for mine, other in zip(ours, theirs, strict=True):
        assert (mine.dtype, mine.shape) == (jnp.float32, (1, len(positions), 32))
        np.testing.assert_allclose(mine, other[..., :32].numpy(), rtol=0, atol=5e-6)


def test_positions_stay_apart_under_a_bfloat16_model() -> None:
    # In bfloat16, 257 would be rounded to 256.
    angles = jax.jit(lambda p: rotary_angles(p, parsed(ROPES["default"], 64)))
    cos, _ = angles(jnp.array([256, 257], jnp.int32))
    np.testing.assert_allclose(cos[:, 0], np.cos([256.0, 257.0]), atol=1e-6)
