"""Meshes: what is asked for, where parameters lie, and the errors of meshes that cannot be."""

from __future__ import annotations

from dataclasses import replace

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from jax.sharding import AbstractMesh, PartitionSpec

from prb_jax.errors import MeshError
from prb_jax.models.checkpoints.hf_map import flatten
from prb_jax.models.checkpoints.load import abstract_params
from prb_jax.models.config.decoder import DecoderConfig
from prb_jax.models.config.encoder import parse_encoder_config
from prb_jax.models.model import parameter_shardings
from prb_jax.models.vocabulary_heads import LanguageHead
from prb_jax.platform.meshes import make_mesh, parse_mesh
from prb_jax.platform.sharding import (
    MESH_AXES,
    MeshShape,
    check_heads,
    constrainer,
    mesh_shape,
    partition_spec,
)
from tests.tiny_encoders import BERT, DEBERTA
from tests.training.small_batches import WINDOWED, small_config

GOLDEN = {
    "tensor, fsdp+sequence": "embed",
    "fsdp+sequence, tensor": "lm_head",
    "-, fsdp+sequence, tensor": "layers/q layers/k layers/v layers/gate layers/up layers/relative_k layers/relative_q",
    "-, tensor, fsdp+sequence": "layers/o layers/down",
    "-, tensor": "layers/q_bias layers/k_bias layers/v_bias layers/gate_bias layers/up_bias layers/relative_k_bias"
    " layers/relative_q_bias",
    "-, -": "layers/o_bias layers/down_bias layers/input_norm layers/post_attention_norm layers/mlp_norm"
    " layers/post_mlp_norm layers/q_norm layers/k_norm layers/post_attention_norm_bias layers/post_mlp_norm_bias score",
    "-": "final_norm embed_norm embed_norm_bias relative_norm relative_norm_bias",
    "-, fsdp+sequence": "words positions token_types embed_proj relative",
}
"""The mesh axis that splits each axis of a parameter, and the parameters, of every family."""


def config(**changes: object) -> DecoderConfig:
    """Llama with every bias."""
    llama = {"model_type": "llama", "architectures": ["LlamaForSequenceClassification"]}
    sizes = {"hidden_size": 48, "intermediate_size": 96, "head_dim": 8}
    return small_config(**llama | sizes | {"attention_bias": True, "mlp_bias": True} | changes)


def mesh_of(**sizes: int) -> AbstractMesh:
    """A mesh without devices: enough to decide who gets what."""
    shape = dict.fromkeys(MESH_AXES, 1) | sizes
    return AbstractMesh(tuple(shape.values()), tuple(shape))


def test_the_golden_table() -> None:
    own = {"share_att_key": False, "embedding_size": 16, "type_vocab_size": 2, "position_biased_input": True}
    encoders = [
        {**BERT, "model_type": "bert", "architectures": ["BertModel"]},
        {**DEBERTA, **own, "model_type": "deberta-v2", "architectures": ["DebertaV2Model"]},
    ]
    every = [
        replace(config(), head=LanguageHead()),
        config(model_type="qwen3", architectures=["Qwen3ForSequenceClassification"]),
        config(**WINDOWED),
        *(parse_encoder_config(raw, where="test") for raw in encoders),
    ]
    names_by_axes: dict[str, set[str]] = {}
    for one in every:
        for path, sharding in flatten(
            parameter_shardings(abstract_params(one), mesh_of(), config=one)
        ).items():
            shown = (axis if isinstance(axis, str) else "+".join(axis or "-") for axis in sharding.spec)
            names_by_axes.setdefault(", ".join(shown), set()).add("/".join(path))
    assert names_by_axes == {axes: set(names.split()) for axes, names in GOLDEN.items()}


@pytest.mark.parametrize(
    ("matrix", "inputs", "outputs"),
    [("q", "model", "heads"), ("down", "mlp", "model"), ("up", "model", "mlp")],
)
def test_adapters_and_scales_follow_their_matrix(matrix: str, inputs: str, outputs: str) -> None:
    """The rank of an adapter is small; scales are those of outputs."""
    shape, sizes = (2, 48, 48), {"": 3, "_lora_a": 3, "_lora_b": 3}
    for scales in ("_scale", "_weight_scale"):
        layers = {
            f"{matrix}{suffix}": jax.ShapeDtypeStruct(shape[:size], jnp.float32)
            for suffix, size in (sizes | {scales: 2}).items()
        }
        found = parameter_shardings({"layers": layers}, mesh_of(), config=config())["layers"]
        assert found[matrix].spec == partition_spec((None, inputs, outputs))
        assert found[f"{matrix}_lora_a"].spec == partition_spec((None, inputs, None))
        assert found[f"{matrix}_lora_b"].spec == partition_spec((None, None, outputs))
        assert found[f"{matrix}{scales}"].spec == partition_spec((None, outputs))


def test_trees_are_dealt_over_data_and_fsdp() -> None:
    assert partition_spec(("batch", None, "heads")) == PartitionSpec(("data", "fsdp"), None, ("tensor",))


def test_shardings_of_a_model_follow_the_table() -> None:
    abstract = abstract_params(config())
    shardings = flatten(parameter_shardings(abstract, mesh_of(fsdp=4, tensor=2), config=config()))
    leaves = flatten(abstract).items()
    shapes = {"/".join(path): shardings[path].shard_shape(leaf.shape) for path, leaf in leaves}
    expected = {
        "embed": (32, 12), "input_norm": (2, 48), "q": (2, 12, 16), "k": (2, 12, 8), "v": (2, 12, 8),
        "o": (2, 16, 12), "q_bias": (2, 16), "k_bias": (2, 8), "v_bias": (2, 8), "o_bias": (2, 48), "mlp_norm": (2, 48),
        "gate": (2, 12, 48), "up": (2, 12, 48), "down": (2, 48, 12), "gate_bias": (2, 48), "up_bias": (2, 48),
        "down_bias": (2, 48), "final_norm": (48,), "score": (48, 1),
    }  # fmt: skip
    assert {name.removeprefix("layers/"): shape for name, shape in shapes.items()} == expected


@pytest.mark.parametrize(
    ("text", "devices", "expected"),
    [
        (None, 8, MeshShape(fsdp=8)),
        ("", 1, MeshShape()),
        ("data=8", 8, MeshShape(data=8)),
        ("fsdp=4,tensor=2", 8, MeshShape(fsdp=4, tensor=2)),
        (" tensor = 2 , data = 2, fsdp=2", 8, MeshShape(data=2, fsdp=2, tensor=2)),
        ("fsdp=-1,tensor=2", 8, MeshShape(fsdp=4, tensor=2)),
        ("data=-1", 6, MeshShape(data=6)),
    ],
)
def test_sizes_are_read(text: str | None, devices: int, expected: MeshShape) -> None:
    shape = parse_mesh(text, devices=devices)
    assert shape == expected
    assert shape.devices == devices
    assert shape.batch_shards == expected.data * expected.fsdp


@pytest.mark.parametrize(
    ("text", "message"),
    [
        ("model=8", "mesh 'model=8': unknown axis 'model': expected data, fsdp, sequence, tensor, e.g. fsdp=4"),
        ("fsdp", "mesh 'fsdp': axis 'fsdp': expected a whole number or -1, found ''"),
        ("fsdp=two", "mesh 'fsdp=two': axis 'fsdp': expected a whole number or -1, found 'two'"),
        ("fsdp=2.0", "mesh 'fsdp=2.0': axis 'fsdp': expected a whole number or -1, found '2.0'"),
        ("fsdp=0", "mesh 'fsdp=0': axis 'fsdp': expected a size of at least 1, or -1 for what is left, found 0"),
        ("fsdp=-2", "axis 'fsdp': expected a size of at least 1, or -1 for what is left, found -2"),
        ("fsdp=2,fsdp=4", "mesh 'fsdp=2,fsdp=4': axis 'fsdp' is given twice"),
        ("fsdp=-1,data=-1", "only one axis may be -1, found fsdp and data"),
        ("fsdp=-1,tensor=3", "mesh 'fsdp=-1,tensor=3': 3 does not divide the 8 devices"),
        ("fsdp=2", "mesh 'fsdp=2' takes 2 devices, but 8 are present: write -1 for one axis to use all of them"),
        ("fsdp=16", "mesh 'fsdp=16' takes 16 devices, but 8 are present"),
        ("fsdp=2,", "mesh 'fsdp=2,': unknown axis ''"),
    ],
)  # fmt: skip
def test_meshes_that_cannot_be(text: str, message: str) -> None:
    with pytest.raises(MeshError) as error:
        parse_mesh(text, devices=8)
    assert message in str(error.value)


def test_a_mesh_always_has_all_axes() -> None:
    mesh = make_mesh("data=1", devices=jax.devices()[:1])
    assert mesh.axis_names == ("data", "fsdp", "sequence", "tensor")
    assert mesh_shape(mesh) == MeshShape()


@pytest.mark.parametrize(
    ("changes", "sizes", "message"),
    [
        ({}, {"fsdp": 5}, "mesh axis fsdp=5 does not divide 48 (model axis of 'embed', shape (64, 48))"),
        ({"vocab_size": 63}, {"tensor": 2}, "mesh axis tensor=2 does not divide 63 (vocab axis of 'embed'"),
        ({"intermediate_size": 97}, {"tensor": 2}, "mesh axis tensor=2 does not divide 97 (mlp axis of 'layers/"),
    ],
)  # fmt: skip
def test_a_mesh_that_does_not_divide_a_parameter(changes: dict, sizes: dict, message: str) -> None:
    one = config(**changes)
    with pytest.raises(MeshError) as error:
        parameter_shardings(abstract_params(one), mesh_of(**sizes), config=one)
    assert message in str(error.value)


def test_heads_are_never_split() -> None:
    """Four columns of a kv head of eight would divide, and be wrong."""
    heads = {"num_attention_heads": 4, "num_key_value_heads": 2}
    check_heads(mesh_of(tensor=2), heads=heads)
    with pytest.raises(MeshError, match="mesh axis tensor=4 does not divide num_key_value_heads=2"):
        check_heads(mesh_of(tensor=4), heads=heads)
    with pytest.raises(MeshError, match="mesh axis tensor=3 does not divide num_attention_heads=4"):
        check_heads(mesh_of(tensor=3), heads={"num_attention_heads": 4, "num_key_value_heads": 3})


def test_nothing_is_said_to_one_device() -> None:
    x = np.zeros((2, 3))
    assert constrainer(None)(x, ("batch", None)) is x
    assert constrainer(make_mesh("data=1", devices=jax.devices()[:1]))(x, ("batch", None)) is x
