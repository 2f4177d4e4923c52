"""Loading: every value against transformers' own, dtypes, shardings, and refusals."""

import json
from collections.abc import Callable
from pathlib import Path
from typing import Any

import jax
import jax.numpy as jnp
import ml_dtypes
import numpy as np
import pytest
from safetensors.numpy import load_file, save_file

from prb_jax.errors import CheckpointError, MeshError
from prb_jax.models.checkpoints.hf_map import file_tensors, flatten, ignored_reason
from prb_jax.models.checkpoints.load import abstract_params, inspect_checkpoint, load_params
from prb_jax.models.config.decoder import load_config
from tests.parity.oracle import as_saved
from tests.tiny_models import FAMILIES, write_tiny_model

Tensors = dict[str, np.ndarray]


def assert_holds(params: dict[str, Any], folder: Path, tensors: Tensors) -> None:
    """The leaves are the tensors' values, bit for bit."""
    for name, value in file_tensors(flatten(params), load_config(folder)):
        np.testing.assert_array_equal(value, tensors[name].astype(value.dtype), err_msg=name)


@pytest.mark.parametrize("family", FAMILIES)
def test_parameters_are_those_of_transformers(family: str, tmp_path: Path) -> None:
    from transformers import AutoModelForSequenceClassification

    folder = write_tiny_model(tmp_path, family, num_labels=2)
    config = load_config(folder)
    params, report = load_params(folder, config)
    model = AutoModelForSequenceClassification.from_pretrained(folder)
    state = {
        key: part
        for name, value in model.state_dict().items()
        for key, part in as_saved(name, value.numpy(), config.model_type)
    }
    assert_holds(params, folder, state)
    read = set(state)
    for name in [name for name in read if name.endswith((".experts.gate_up_proj", ".experts.down_proj"))]:
        read.remove(name)  # gpt_oss: one tensor of all experts is read as one for each
        read |= {name.replace(".experts.", f".experts.{n}.") for n in range(len(state[name]))}
    assert set(report.used_keys) == read
    assert report.ignored_keys == {}
    assert report.parameters == sum(value.size for value in state.values())
    assert report.bytes_read == sum(value.nbytes for value in state.values())
    assert report.dtypes == {"F32": len(read)}
    assert report.head == "score.weight [2, 64] F32"

    def shape_and_dtype(x: Any) -> tuple[Any, Any]:
        return x.shape, x.dtype

    assert jax.tree.map(shape_and_dtype, params) == jax.tree.map(shape_and_dtype, abstract_params(config))


@pytest.mark.parametrize("stored", ["float32", "bfloat16", "float16"])
@pytest.mark.parametrize("loaded", ["float32", "bfloat16"])
def test_dtypes_are_converted_as_torch_does(stored: str, loaded: str, tmp_path: Path) -> None:
    import torch
    from transformers import AutoModelForSequenceClassification

    folder = write_tiny_model(tmp_path, "qwen3", dtype=stored)
    params, report = load_params(folder, load_config(folder), dtype=loaded)
    model = AutoModelForSequenceClassification.from_pretrained(folder, dtype=getattr(torch, loaded))
    state = {name: value.float().numpy() for name, value in model.state_dict().items()}
    assert {str(leaf.dtype) for leaf in jax.tree.leaves(params)} == {loaded}
    assert_holds(params, folder, state)
    assert list(report.dtypes) == [{"float32": "F32", "bfloat16": "BF16", "float16": "F16"}[stored]]


def test_head_dtype(tmp_path: Path) -> None:
    folder = write_tiny_model(tmp_path, "llama")
    config = load_config(folder)
    params, _ = load_params(folder, config, dtype=jnp.bfloat16, head_dtype=jnp.float32)
    abstract = abstract_params(config, dtype=jnp.bfloat16, head_dtype=jnp.float32)
    assert params["score"].dtype == abstract["score"].dtype == jnp.float32
    assert params["embed"].dtype == abstract["embed"].dtype == jnp.bfloat16
    with pytest.raises(CheckpointError, match="int8"):
        load_params(folder, config, dtype=jnp.int8)


def test_several_files_hold_the_same_model(tmp_path: Path) -> None:
    one = write_tiny_model(tmp_path / "one", "gemma2", dtype="bfloat16")
    many = write_tiny_model(tmp_path / "many", "gemma2", dtype="bfloat16", max_shard_size="60KB")
    first, _ = load_params(one, load_config(one), dtype=jnp.bfloat16)
    second, report = load_params(many, load_config(many), dtype=jnp.bfloat16)
    assert len(report.files) > 3
    jax.tree.map(np.testing.assert_array_equal, first, second)


def test_mixed_dtypes_in_one_file(tmp_path: Path) -> None:
    folder = write_tiny_model(tmp_path, "llama", dtype="bfloat16")
    tensors = load_file(folder / "model.safetensors")
    # as some trainers save a model: body in bfloat16, norms and head in float32
    for name in tensors:
        if "norm" in name or name == "score.weight":
            tensors[name] = tensors[name].astype(np.float32) + np.float32(1e-4)
    save_file(tensors, folder / "model.safetensors", metadata={"format": "pt"})
    params, report = load_params(folder, load_config(folder))
    assert_holds(params, folder, tensors)
    assert report.dtypes == {"BF16": 22, "F32": 8}


def test_shardings_on_this_process(tmp_path: Path) -> None:
    folder = write_tiny_model(tmp_path, "llama")
    config = load_config(folder)
    mesh = jax.make_mesh((1,), ("fsdp",), axis_types=(jax.sharding.AxisType.Auto,))
    sharding = jax.NamedSharding(mesh, jax.P())
    tree = jax.tree.map(lambda _: sharding, abstract_params(config))
    params, _ = load_params(folder, config, shardings=tree)
    assert all(leaf.sharding == sharding for leaf in jax.tree.leaves(params))
    del tree["score"]
    with pytest.raises(MeshError, match="differ in score"):
        load_params(folder, config, shardings=tree)


def changed(folder: Path, change: Callable[[Tensors], Any]) -> Path:
    """Rewrite the folder's tensors after a change."""
    tensors = load_file(folder / "model.safetensors")
    change(tensors)
    save_file(tensors, folder / "model.safetensors", metadata={"format": "pt"})
    return folder


def configured(folder: Path, **changes: Any) -> Path:
    raw = json.loads((folder / "config.json").read_text()) | changes
    (folder / "config.json").write_text(json.dumps(raw))
    return folder


def put(name: str, value: np.ndarray, *, without: str = "") -> Callable[[Tensors], Any]:
    return lambda tensors: (tensors.pop(without, None), tensors.update({name: value}))


SCORE = "score.weight"
Q1 = "model.layers.1.self_attn.q_proj.weight"


def rename(t: Tensors, old: str, new: str, *, keep: bool = False) -> None:
    for name in [name for name in t if old in name]:
        t[name.replace(old, new)] = t[name] if keep else t.pop(name)


V_HEAD = np.ones((1, 64), np.float32)
REFUSED: list[tuple[Callable[[Tensors], Any], str]] = [
    (lambda t: t.pop(Q1), rf"1 missing: '{Q1}'"),
    (lambda t: [t.pop(n) for n in list(t) if "layers.2" in n], r"9 missing: .* and 6 more"),
    (put("model.layers.0.self_attn.q_norm.weight", np.ones(16, np.float32)), "1 that llama has no"),
    (
        lambda t: rename(t, "layers.2", "layers.3", keep=True),
        r"9 that llama has no place .* 'model\.layers\.3",
    ),
    (put("score.bias", np.ones(1, np.float32)), "'score.bias'"),
    (lambda t: rename(t, "model.", ""), "29 missing.*29 that"),
    (
        lambda t: t.update({Q1: np.ascontiguousarray(t[Q1][:32])}),
        r"'model\.layers\.1\.self_attn\.q_proj\.weight': expected shape \[64, 64\], found \[32, 64\]",
    ),
    (
        put("model.embed_tokens.weight", np.zeros((250, 64), np.float32)),
        r"'model\.embed_tokens\.weight': expected shape \[256, 64\], found \[250, 64\]",
    ),
    (lambda t: t.update({Q1: t[Q1].astype(np.int8)}), "floating-point weights, found I8"),
    (lambda t: t.pop(SCORE), "score head 'score.weight' is missing, so it would have to be random"),
    (
        put("lm_head.weight", np.ones((256, 64), np.float32), without=SCORE),
        "score head.*causal language model, not of a reward model",
    ),
    (
        put("v_head.summary.weight", V_HEAD, without=SCORE),
        "score head.*another kind.*'v_head.summary.weight'",
    ),
    (
        put(SCORE, np.ones((3, 64), np.float32)),
        r"expected shape \[1, 64\], found \[3, 64\]: config.json says 1 labels; .* \"num_labels\": 3",
    ),
]


@pytest.mark.parametrize(("change", "message"), REFUSED)
def test_what_does_not_fit_is_refused(change: Callable[[Tensors], Any], message: str, tmp_path: Path) -> None:
    folder = changed(write_tiny_model(tmp_path, "llama"), change)
    config = load_config(folder)
    for check in (load_params, inspect_checkpoint):
        with pytest.raises(CheckpointError, match=message) as caught:
            check(folder, config)
        assert str(folder) in str(caught.value)


def test_a_config_that_never_says_how_many_labels(tmp_path: Path) -> None:
    folder = configured(write_tiny_model(tmp_path, "llama"), id2label=None, label2id=None)
    with pytest.raises(CheckpointError, match=r"gives no num_labels, which means 2 .*\"num_labels\": 1"):
        load_params(folder, load_config(folder))
    folder = configured(folder, num_labels=1)
    assert load_params(folder, load_config(folder)).params["score"].shape == (64, 1)


def test_a_head_in_a_side_file(tmp_path: Path) -> None:
    folder = changed(write_tiny_model(tmp_path, "llama"), lambda tensors: tensors.pop(SCORE))
    save_file({"v_head.summary.weight": V_HEAD}, folder / "value_head.safetensors")
    with pytest.raises(CheckpointError, match=r"side file.*value_head\.safetensors"):
        load_params(folder, load_config(folder))


def test_leftovers_are_ignored_and_listed(tmp_path: Path) -> None:
    leftovers = {
        "lm_head.weight": np.ones((256, 64), np.float32),
        "model.layers.0.self_attn.rotary_emb.inv_freq": np.ones(8, np.float32),
    }
    folder = changed(write_tiny_model(tmp_path, "llama"), lambda tensors: tensors.update(leftovers))
    report = load_params(folder, load_config(folder)).report
    assert report.ignored_keys.keys() == leftovers.keys()
    assert "not used by a reward model" in report.ignored_keys["lm_head.weight"]
    assert not set(report.ignored_keys) & set(report.used_keys)
    for name in (
        "model.layers.1.self_attn.q_proj.lora_A.weight",
        "lm_head.bias",
        "v_head.weight",
        "inv_freq",
    ):
        assert ignored_reason(name, load_config(folder)) is None, name


def test_stored_tied_embeddings_must_be_equal(tmp_path: Path) -> None:
    folder = write_tiny_model(tmp_path, "qwen3-yarn", dtype="bfloat16")  # tie_word_embeddings
    embedding = load_file(folder / "model.safetensors")["model.embed_tokens.weight"]
    changed(folder, put("lm_head.weight", embedding))
    config = load_config(folder)
    assert "lm_head.weight" in load_params(folder, config).report.ignored_keys
    other = embedding.copy()
    other[-1, -1] += ml_dtypes.bfloat16(1.0)
    for wrong in (other, embedding[:-1]):
        changed(folder, put("lm_head.weight", wrong))
        with pytest.raises(CheckpointError, match=r"tied.*differ"):
            load_params(folder, config)
