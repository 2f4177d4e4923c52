"""Rotary frequencies and angles against transformers and against float64."""

from dataclasses import replace
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
import pytest

from prb_jax.models.config.decoder import RopeConfig, parse_config
from prb_jax.models.rope import inverse_frequencies, rotary_angles

ROPES: dict[str, dict[str, Any]] = {
    "default": {"rope_type": "default", "rope_theta": 10_000.0},
    "default-theta": {"rope_type": "default", "rope_theta": 1_000_000.0},
    "linear": {"rope_type": "linear", "rope_theta": 1_000_000.0, "factor": 8.0},
    "llama-3.1": {
        "rope_type": "llama3",
        "rope_theta": 500_000.0,
        "factor": 8.0,
        "low_freq_factor": 1.0,
        "high_freq_factor": 4.0,
        "original_max_position_embeddings": 8192,
    },
    "llama-3.2": {
        "rope_type": "llama3",
        "rope_theta": 500_000.0,
        "factor": 32.0,
        "low_freq_factor": 1.0,
        "high_freq_factor": 4.0,
        "original_max_position_embeddings": 8192,
    },
    "yarn": {
        "rope_type": "yarn",
        "rope_theta": 1_000_000.0,
        "factor": 4.0,
        "original_max_position_embeddings": 32_768,
    },
    "yarn-ratio": {  # factor from the two context lengths
        "rope_type": "yarn",
        "rope_theta": 10_000.0,
        "factor": None,
        "original_max_position_embeddings": 4096,
    },
    "yarn-every-field": {
        "rope_type": "yarn",
        "rope_theta": 10_000.0,
        "factor": 40.0,
        "original_max_position_embeddings": 4096,
        "mscale": 1.0,
        "mscale_all_dim": 0.707,
        "beta_fast": 16.0,
        "beta_slow": 2.0,
        "truncate": False,
    },
    "yarn-attention-factor": {
        "rope_type": "yarn",
        "rope_theta": 10_000.0,
        "factor": 2.0,
        "original_max_position_embeddings": 2048,
        "attention_factor": 1.25,
    },
    "yarn-one-mscale": {  # has no effect without the other
        "rope_type": "yarn",
        "rope_theta": 10_000.0,
        "factor": 2.0,
        "original_max_position_embeddings": 2048,
        "mscale": 2.0,
    },
    "yarn-step": {  # context so short that the ramp has no width
        "rope_type": "yarn",
        "rope_theta": 10_000.0,
        "factor": 2.0,
        "original_max_position_embeddings": 4,
    },
}
MAX_POSITIONS = 131_072


def parsed(rope: dict[str, Any], head_dim: int) -> RopeConfig:
    raw = {
        "model_type": "llama",
        "vocab_size": 8,
        "hidden_size": 64,
        "intermediate_size": 8,
        "num_hidden_layers": 1,
        "num_attention_heads": 4,
        "head_dim": head_dim,
        "max_position_embeddings": MAX_POSITIONS,
        "rope_parameters": dict(rope),
    }
    return parse_config(raw, where="config.json").rope[0]


def transformers_rope(rope: dict[str, Any], head_dim: int) -> Any:
    from transformers import LlamaConfig
    from transformers.models.llama.modeling_llama import LlamaRotaryEmbedding

    config = LlamaConfig(
        hidden_size=64,
        num_attention_heads=4,
        head_dim=head_dim,
        max_position_embeddings=MAX_POSITIONS,
        rope_parameters=dict(rope),
    )
    return LlamaRotaryEmbedding(config)


@pytest.mark.parametrize("head_dim", [16, 64, 128, 256])
@pytest.mark.parametrize("name", ROPES)
def test_frequencies_are_those_of_transformers(name: str, head_dim: int) -> None:
    rope, reference = parsed(ROPES[name], head_dim), transformers_rope(ROPES[name], head_dim)
    ours, theirs = inverse_frequencies(rope), reference.inv_freq.numpy()
    assert ours.dtype == np.float32
    assert ours.shape == (head_dim // 2,)
    np.testing.assert_allclose(ours, theirs, rtol=1e-6, atol=0)
    # All but a few agree to the last bit, which is what keeps long prompts together.
    assert np.mean(ours == theirs) >= 0.97
    assert rope.attention_factor == pytest.approx(reference.attention_scaling, rel=1e-12)


@pytest.mark.parametrize("name", ROPES)
def test_angles_are_those_of_transformers_at_long_positions(name: str) -> None:
    import torch

    positions = np.concatenate([np.arange(4200), np.arange(MAX_POSITIONS - 50, MAX_POSITIONS)]).astype(
        np.int32
    )
    reference = transformers_rope(ROPES[name], 64)
    theirs = reference(torch.zeros(1), torch.tensor(positions)[None])
    ours = rotary_angles(jnp.asarray(positions), parsed(ROPES[name], 64))
    for mine, other in zip(ours, theirs, strict=True):
        assert mine.dtype == jnp.float32
        assert mine.shape == (len(positions), 32)
        np.testing.assert_allclose(mine, other[0, :, :32].numpy(), rtol=0, atol=5e-6)


def test_default_frequencies_follow_the_formula_in_float64() -> None:
    rope = parsed(ROPES["default-theta"], 128)
    exact = 1_000_000.0 ** (-np.arange(0, 128, 2) / 128)
    np.testing.assert_allclose(inverse_frequencies(rope), exact, rtol=1e-6)


def test_llama3_keeps_short_wavelengths_and_slows_long_ones() -> None:
    rope = parsed(ROPES["llama-3.2"], 64)
    plain = inverse_frequencies(replace(rope, rope_type="default"))
    scaled = inverse_frequencies(rope)
    wavelengths = 2 * np.pi / plain
    short, long = wavelengths < 8192 / 4, wavelengths > 8192
    assert short.any()
    assert long.any()
    assert not (short | long).all()
    np.testing.assert_array_equal(scaled[short], plain[short])
    np.testing.assert_allclose(scaled[long], plain[long] / 32, rtol=1e-6)
    between = scaled[~short & ~long] / plain[~short & ~long]
    assert ((between > 1 / 32) & (between < 1)).all()


def test_positions_stay_apart_under_a_bfloat16_model() -> None:
    # In bfloat16, 257 would be rounded to 256.
    cos, _ = jax.jit(lambda p: rotary_angles(p, parsed(ROPES["default"], 64)))(
        jnp.array([256, 257], jnp.int32)
    )
    np.testing.assert_allclose(cos[:, 0], np.cos([256.0, 257.0]), atol=1e-6)


def test_angles_take_any_shape_and_scale_by_the_attention_factor() -> None:
    rope = parsed(ROPES["yarn-attention-factor"], 16)
    positions = np.arange(6, dtype=np.int32).reshape(2, 3)
    cos, sin = rotary_angles(positions, rope)
    assert cos.shape == sin.shape == (2, 3, 8)
    np.testing.assert_allclose(cos**2 + sin**2, 1.25**2, rtol=1e-6)
    np.testing.assert_array_equal(cos[0, 0], np.float32(1.25))
