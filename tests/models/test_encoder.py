"""The encoder's numbers against transformers, its parameters, and what is refused."""

from __future__ import annotations

import functools
import json
from pathlib import Path

import jax
import jax.numpy as jnp
import numpy as np
import pytest
import torch
from safetensors.torch import load_file, save_file

from prb_jax.errors import CheckpointError
from prb_jax.models import layers
from prb_jax.models.checkpoints.encoder_folder import load_encoder_params, open_encoder
from prb_jax.models.checkpoints.hf_map import flatten
from prb_jax.models.checkpoints.load import abstract_params
from prb_jax.models.config.encoder import RelativePositions, parse_encoder_config
from prb_jax.models.encoder import bind_encoder, distance_rows, encode_tokens
from prb_jax.models.model import parameter_shardings
from prb_jax.platform.meshes import make_mesh
from tests.models.compiled import jit, no_stack_is_converted
from tests.tiny_encoders import BERT, DEBERTA, MODERN, configure, random_model, write_encoder

TOLERANCE = 1e-5


@functools.partial(jit, static_argnames="config")
def encode(params, tokens, *, config, **inputs):
    return encode_tokens(bind_encoder(config, params), tokens, dtype=jnp.float32, **inputs)


@pytest.mark.parametrize("instructions", [True, False])
@pytest.mark.parametrize("class_name", ["BertModel", "DebertaV2Model", "ModernBertModel"])
def test_in_bfloat16_the_program_does_not_convert_all_layers(
    class_name: str, instructions: bool, monkeypatch: pytest.MonkeyPatch
) -> None:
    """As in a decoder: tests/models/test_decoder.py."""
    monkeypatch.setattr(layers, "multiplies_bfloat16", lambda: instructions)
    sizes = {"hidden_size": 256, "intermediate_size": 512, "num_hidden_layers": 8, "num_attention_heads": 4}
    config = parse_encoder_config(random_model(class_name, **sizes).config.to_dict(), where="test")

    def run(params, dtype):
        tokens, lengths = jnp.ones((1, 64), jnp.int32), jnp.full((1,), 64)
        return encode_tokens(bind_encoder(config, params), tokens, lengths=lengths, dtype=dtype)

    no_stack_is_converted(config, run)


OWN = {"share_att_key": False}
CASES = {
    "bert": ("BertModel", {}),
    "bert-with-prefix-and-head": ("BertForMaskedLM", {}),
    "bert-no-types-relu": ("BertModel", {"type_vocab_size": 1, "hidden_act": "relu"}),
    "bert-gelu-new": ("BertModel", {"hidden_act": "gelu_new", "layer_norm_eps": 1e-5}),
    "deberta-v3": ("DebertaV2Model", {}),
    "deberta-own-projections": ("DebertaV2Model", {**OWN, "norm_rel_ebd": "none"}),
    "deberta-c2p": ("DebertaV2Model", {**OWN, "pos_att_type": "c2p", "position_buckets": 6}),
    "deberta-p2c-no-buckets": (
        "DebertaV2Model", {"pos_att_type": "p2c", "position_buckets": -1, "max_relative_positions": 7},
    ),
    "deberta-positions-and-types": ("DebertaV2Model", {"position_biased_input": True, "type_vocab_size": 3}),
    "deberta-without-distances": (
        "DebertaV2Model",
        {"relative_attention": False, "pos_att_type": None, "position_biased_input": True, "norm_rel_ebd": "none"},
    ),
    "modernbert": ("ModernBertModel", {}),
    "modernbert-with-biases-and-head": (
        "ModernBertForMaskedLM",
        {
            "norm_bias": True, "attention_bias": True, "mlp_bias": True, "hidden_activation": "gelu_pytorch_tanh",
            "layer_types": ["sliding_attention", "full_attention", "sliding_attention"],
            "rope_parameters": {
                "full_attention": {"rope_type": "default", "rope_theta": 5000.0},
                "sliding_attention": {"rope_type": "default", "rope_theta": 300.0},
            },
        },
    ),
}  # fmt: skip


def ragged(rows: int, length: int, *, seed: int = 0) -> tuple[np.ndarray, np.ndarray]:
    rng = np.random.default_rng(seed)
    tokens = rng.integers(5, 96, (rows, length)).astype(np.int32)
    lengths = rng.integers(1, length + 1, rows).astype(np.int32)
    lengths[:2] = length, 1
    return tokens, lengths


def reference(model, tokens: np.ndarray, lengths: np.ndarray, types: np.ndarray) -> np.ndarray:
    mask = np.arange(tokens.shape[1])[None] < lengths[:, None]
    inputs = {"input_ids": tokens, "attention_mask": mask}
    if "ModernBert" not in type(model).__name__:
        inputs["token_type_ids"] = types
    with torch.inference_mode():
        body = getattr(model, model.base_model_prefix, model)
        states = body(**{name: torch.tensor(value.astype(np.int64)) for name, value in inputs.items()})
    return states.last_hidden_state.numpy()


@pytest.mark.parametrize("case", CASES)
def test_states_equal_those_of_transformers(case: str, tmp_path: Path) -> None:
    class_name, changes = CASES[case]
    model = write_encoder(tmp_path, class_name, **changes)
    opened = open_encoder(tmp_path)
    params = load_encoder_params(opened, mesh=make_mesh("data=1")).params
    tokens, lengths = ragged(6, 50)  # far beyond the buckets of distances
    kinds = max(opened.config.type_vocab_size, 1)
    types = np.random.default_rng(1).integers(0, kinds, tokens.shape).astype(np.int32)
    expected = reference(model, tokens, lengths, types)
    inside = np.arange(tokens.shape[1])[None] < lengths[:, None]
    run = functools.partial(encode, params, lengths=lengths, config=opened.config)
    states = run(tokens, token_types=types)
    np.testing.assert_allclose(np.asarray(states)[inside], expected[inside], atol=TOLERANCE, rtol=0)

    # An empty row is finite and changes nothing.
    empty = lengths * (np.arange(6) < 5)
    fewer = np.asarray(run(tokens, token_types=types, lengths=empty))
    assert np.isfinite(fewer).all()
    np.testing.assert_array_equal(fewer[:5], states[:5])


@pytest.mark.parametrize(("buckets", "distance"), [(256, 512), (8, 64), (6, 64), (0, 7), (0, 64), (32, 40)])
def test_rows_of_distances_are_those_of_transformers(buckets: int, distance: int) -> None:
    from transformers.models.deberta_v2.modeling_deberta_v2 import build_relative_position

    length = 600
    terms = dict.fromkeys(("content_to_position", "position_to_content", "shared", "normed"), True)
    relative = RelativePositions(buckets=buckets, max_distance=distance, **terms)
    tokens = torch.zeros(1, length, 4)
    table = build_relative_position(tokens, tokens, bucket_size=buckets or -1, max_position=distance)[0]
    expected = torch.clamp(table + relative.span, 0, 2 * relative.span - 1).numpy()
    rows = distance_rows(length, relative)
    query, key = np.indices((length, length))
    np.testing.assert_array_equal(rows[length - 1 - (query - key)], expected)


@pytest.mark.parametrize(
    "case", ["bert", "deberta-v3", "deberta-own-projections", "deberta-positions-and-types", "modernbert"]
)
def test_every_parameter_has_its_axes(case: str) -> None:
    class_name, changes = CASES[case]
    config = parse_encoder_config(random_model(class_name, **changes).config.to_dict(), where="test")
    abstract = flatten(abstract_params(config))
    shardings = flatten(parameter_shardings(abstract_params(config), make_mesh("data=1"), config=config))
    assert {path: len(leaf.shape) for path, leaf in abstract.items()} == {
        path: len(sharding.spec) for path, sharding in shardings.items()
    }


def test_tensors_of_older_files(tmp_path: Path) -> None:
    """Files of torch.save, TensorFlow's names of norms, a stored buffer, and a pooler."""
    model = write_encoder(tmp_path)
    expected = load_encoder_params(open_encoder(tmp_path), mesh=make_mesh("data=1")).params
    tensors = {
        key.replace("LayerNorm.weight", "LayerNorm.gamma").replace("LayerNorm.bias", "LayerNorm.beta"): value
        for key, value in model.state_dict().items()
    } | {"embeddings.position_ids": torch.arange(64)[None]}
    (tmp_path / "model.safetensors").unlink()
    torch.save(tensors, tmp_path / "pytorch_model.bin")
    opened = open_encoder(tmp_path)
    assert set(opened.report.ignored_keys) == {
        "embeddings.position_ids", "pooler.dense.weight", "pooler.dense.bias"
    }  # fmt: skip
    params = load_encoder_params(opened, mesh=make_mesh("data=1")).params
    jax.tree.map(np.testing.assert_array_equal, params, expected)


@pytest.mark.parametrize(
    ("class_name", "changes", "message"),
    [
        ("BertModel", {"model_type": "roberta"}, r"'model_type': expected an encoder, .*found 'roberta'"),
        ("BertModel", {"position_embedding_type": "relative_key"}, r"'position_embedding_type': expected 'absolute'"),
        ("BertModel", {"is_decoder": True}, r"field 'is_decoder': expected False"),
        ("BertModel", {"hidden_act": "silu"}, r"field 'hidden_act': expected one of gelu, .*found 'silu'"),
        ("BertModel", {"num_attention_heads": 5}, r"'hidden_size': expected a multiple of .*\(5\)"),
        ("BertModel", {"architectures": "BertModel"}, r"field 'architectures': expected a list"),
        ("DebertaV2Model", {"conv_kernel_size": 3}, r"field 'conv_kernel_size': expected 0 or no such field"),
        ("DebertaV2Model", {"pos_att_type": "p2p"}, r"field 'pos_att_type': expected c2p, p2c"),
        ("DebertaV2Model", {"pos_att_type": [["p2c"]]}, r"field 'pos_att_type': expected c2p, p2c"),
        ("DebertaV2Model", {"norm_rel_ebd": "batch"}, r"field 'norm_rel_ebd': expected none or layer_norm"),
        ("DebertaV2Model", {"relative_attention": False}, r"field 'pos_att_type': expected none"),
        ("ModernBertModel", {"layer_types": ["full_attention"]}, r"'layer_types': expected 3 entries"),
        ("ModernBertModel", {"classifier_pooling": "max"}, r"'classifier_pooling': expected cls or mean"),
        ("ModernBertModel", {"rope_scaling": {"rope_type": "linear"}}, r"'rope_scaling': expected None"),
        ("ModernBertModel", {"rope_parameters": {"rope_theta": 1.0}}, r"'rope_parameters': expected objects full_"),
        (
            "ModernBertModel", {"rope_parameters": {"full_attention": {"rope_type": "yarn"}}},
            r"'rope_parameters\.full_attention\.rope_type': expected 'default'",
        ),
        (
            "ModernBertModel",
            {"global_rope_theta": 1.0, "rope_parameters": {"full_attention": {"rope_theta": 2.0}}},
            r"'rope_parameters\.full_attention\.rope_theta': expected the same value as 'global_rope_theta'",
        ),
        ("DebertaV2Model", {"quantization_config": {"bits": 4}}, r"quantised weights"),
    ],
)  # fmt: skip
def test_configurations_that_are_refused(class_name: str, changes: dict, message: str) -> None:
    kinds = {"BertModel": ("bert", BERT), "ModernBertModel": ("modernbert", MODERN)}
    model_type, sizes = kinds.get(class_name, ("deberta-v2", DEBERTA))
    raw = {"model_type": model_type, **sizes, **changes}
    with pytest.raises(CheckpointError, match="config.json: .*" + message):
        parse_encoder_config(raw, where="config.json")


def test_tensors_that_are_not_those_of_the_configuration(tmp_path: Path) -> None:
    write_encoder(tmp_path)
    path = tmp_path / "model.safetensors"
    whole = load_file(path)
    key = "encoder.layer.1.attention.self.query.bias"
    save_file({k: v for k, v in whole.items() if k != key}, path)
    with pytest.raises(CheckpointError, match=rf"1 missing: '{key}'"):
        open_encoder(tmp_path)
    save_file(whole | {"adapter.weight": torch.zeros(2)}, path)
    with pytest.raises(CheckpointError, match=r"1 that bert has no place for: 'adapter\.weight'"):
        open_encoder(tmp_path)
    save_file(whole | {key: torch.zeros(5)}, path)
    with pytest.raises(CheckpointError, match=rf"tensor '{key}': expected shape \[32\], found \[5\]"):
        open_encoder(tmp_path)
    save_file(whole, path)
    configure(tmp_path, odd_field=1)
    assert open_encoder(tmp_path).config.ignored_keys == ("odd_field",)
    assert json.loads((tmp_path / "config.json").read_text())["odd_field"] == 1
