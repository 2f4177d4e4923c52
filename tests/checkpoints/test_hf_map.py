"""The map from tensor names to leaves, against the modules that transformers builds."""

from pathlib import Path

import pytest

from prb_jax.checkpoints.hf_map import flatten, ignored_reason, leaf_maps, nest
from prb_jax.models.config.decoder import load_config
from tests.tiny_models import FAMILIES, write_tiny_model


@pytest.mark.parametrize("family", FAMILIES)
def test_every_parameter_of_transformers_has_one_leaf(family: str, tmp_path: Path) -> None:
    from transformers import AutoModelForSequenceClassification

    folder = write_tiny_model(tmp_path, family, num_labels=2)
    model = AutoModelForSequenceClassification.from_pretrained(folder)
    leaves = leaf_maps(load_config(folder))
    mapped = {key: leaf.file_shape for leaf in leaves for key in leaf.file_keys}
    assert mapped == {name: tuple(value.shape) for name, value in model.state_dict().items()}
    assert len({leaf.path for leaf in leaves}) == len(leaves)


def test_leaves_are_named_by_function(tmp_path: Path) -> None:
    llama = {
        leaf.path: leaf for leaf in leaf_maps(load_config(write_tiny_model(tmp_path / "a", "llama-llama3")))
    }
    assert llama[("layers", "q")].shape == (3, 64, 64)
    assert llama[("layers", "k")].shape == (3, 64, 32)
    assert llama[("layers", "down")].shape == (3, 96, 64)
    assert llama[("layers", "o_bias")].shape == (3, 64)
    assert llama[("score",)].shape == (64, 1)
    # the norm before the mlp has another name in the file
    assert llama[("layers", "mlp_norm")].key == "model.layers.{layer}.post_attention_layernorm.weight"
    assert ("layers", "post_attention_norm") not in llama

    gemma = {leaf.path: leaf for leaf in leaf_maps(load_config(write_tiny_model(tmp_path / "b", "gemma3")))}
    assert (
        gemma[("layers", "post_attention_norm")].key == "model.layers.{layer}.post_attention_layernorm.weight"
    )
    assert gemma[("layers", "mlp_norm")].key == "model.layers.{layer}.pre_feedforward_layernorm.weight"
    assert gemma[("layers", "post_mlp_norm")].key == "model.layers.{layer}.post_feedforward_layernorm.weight"
    assert gemma[("layers", "q_norm")].shape == (4, 24)


def test_only_declared_tensors_may_be_ignored() -> None:
    assert ignored_reason("model.layers.11.self_attn.rotary_emb.inv_freq")
    assert ignored_reason("model.rotary_emb.inv_freq")
    assert ignored_reason("lm_head.weight")
    for name in (
        "model.layers.1.self_attn.q_proj.lora_A.weight",
        "lm_head.bias",
        "v_head.weight",
        "inv_freq",
    ):
        assert ignored_reason(name) is None, name


def test_nest_and_flatten_are_inverse() -> None:
    flat = {("embed",): 1, ("layers", "q"): 2, ("layers", "k"): 3}
    assert nest(flat) == {"embed": 1, "layers": {"q": 2, "k": 3}}
    assert flatten(nest(flat)) == flat
