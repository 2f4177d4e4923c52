"""The table of backbones in the docs is the registry, and each backbone supports what its row says."""

from __future__ import annotations

import re
from functools import partial
from pathlib import Path
from typing import Any

import jax
import jax.numpy as jnp
import pytest

from prb_jax.models.cache import empty_prefix, empty_suffix, extend, layers_of
from prb_jax.models.checkpoints.load import abstract_params
from prb_jax.models.config.decoder import DecoderConfig, parse_config
from prb_jax.models.config.families import _BUILTIN
from prb_jax.models.config.family import ENCODERS, is_encoder
from prb_jax.models.lora import init_lora
from prb_jax.models.lora_config import LoraConfig
from prb_jax.models.model import bind, matrix_flops_per_token
from prb_jax.models.quantization import quantization_form, quantize_params
from tests.packed import packed_batch, read_trees
from tests.sweeps import sweep
from tests.training.small_batches import random_trees

PAGE = Path(__file__).resolve().parents[2] / "docs" / "open_reward_models.md"
COMPOSITE = ("gemma3", "qwen3_5", "qwen3_5_moe")  # a text model beside a vision tower
COLUMNS = ("score", "train, LoRA", "int8, fp8", "sample", "`prb plan`")
RAW: dict[str, Any] = {
    "vocab_size": 64, "hidden_size": 32, "intermediate_size": 48, "num_hidden_layers": 4, "num_attention_heads": 4,
    "num_key_value_heads": 2, "head_dim": 16, "num_labels": 1, "num_experts": 4, "num_experts_per_tok": 2,
    "moe_intermediate_size": 24, "shared_expert_intermediate_size": 24, "linear_num_key_heads": 2,
    "linear_num_value_heads": 4, "linear_key_head_dim": 8, "linear_value_head_dim": 8,
}  # fmt: skip


def table() -> dict[str, dict[str, str]]:
    """What each `model_type` supports, by column."""
    rows = [
        line.split("|")[1:-1] for line in PAGE.read_text(encoding="utf-8").splitlines() if line[:1] == "|"
    ]
    start = next(number for number, row in enumerate(rows) if row[0].strip() == "`model_type`")
    head = [cell.strip() for cell in rows[start][1:6]]
    assert tuple(head) == COLUMNS
    found: dict[str, dict[str, str]] = {}
    for row in rows[start + 2 :]:
        cells = [cell.strip() for cell in row[1:6]]
        found |= {name: dict(zip(head, cells, strict=True)) for name in re.findall(r"`(\w[\w-]*)`", row[0])}
    return found


def config_of(name: str) -> DecoderConfig:
    yarn = {"rope_type": "yarn", "rope_theta": 1e4, "factor": 4.0, "original_max_position_embeddings": 64}
    raw = {**RAW, "model_type": name, "architectures": None}
    ropes = {"gpt_oss": yarn, "ministral3": {**yarn, "llama_4_scaling_beta": 0.1}}  # these have no default
    return parse_config(raw | ({"rope_parameters": ropes[name]} if name in ropes else {}), where=name)


def test_the_table_has_every_backbone() -> None:
    found = table()
    assert sorted(found) == sorted([*_BUILTIN, *COMPOSITE, *ENCODERS])
    for name, row in found.items():
        texts = {"text", "yes"} if name in COMPOSITE else {"yes"}
        assert row["score"] in texts
        others = {row[column] for column in COLUMNS[1:]}
        assert others == {"no"} if is_encoder({"model_type": name}) else others <= texts


@pytest.mark.parametrize("name", sweep(list(_BUILTIN), few=[list(_BUILTIN).index("qwen3_5_moe_text")]))
def test_a_backbone_supports_what_its_row_says(name: str) -> None:
    """Programs are traced, not run: parity is tested elsewhere."""
    config = config_of(name)
    params = abstract_params(config)
    float32 = jnp.dtype("float32")
    factors = jax.eval_shape(lambda: init_lora(bind(config, params).layers, LoraConfig(rank=2)))["layers"]
    adapted = {**params, "layers": {**params["layers"], **factors}}
    batch = packed_batch(random_trees(2), window=config.sliding_window, taps=config.taps)
    score = partial(read_trees, batch=batch, config=config, dtype=float32)
    scores = jax.eval_shape(score, adapted)
    gradient = jax.eval_shape(jax.grad(lambda p: score(p, differentiated=True).sum()), adapted)
    assert jax.tree.map(jnp.shape, gradient) == jax.tree.map(jnp.shape, adapted)
    narrow = jax.eval_shape(lambda p: quantize_params(config, p, quantization_form("int8")), params)
    assert any(leaf.dtype == jnp.int8 for leaf in jax.tree.leaves(narrow))
    assert jax.eval_shape(score, narrow).shape == scores.shape
    assert matrix_flops_per_token(config) > 0

    def step(params: Any) -> jax.Array:
        prefix = empty_prefix(config, trees=1, columns=8, dtype=float32)
        suffix = empty_suffix(config, trees=1, samples=2, columns=4, dtype=float32)
        tokens, layers = jnp.zeros((1, 2), jnp.int32), layers_of(bind(config, params))
        return extend(params, layers, tokens, prefix, suffix, config=config, dtype=float32)[0]

    assert jax.eval_shape(step, params).shape == (1, 2, 32)
