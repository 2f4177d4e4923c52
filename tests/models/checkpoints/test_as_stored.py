"""Checkpoints as other tools leave them hold the same values as plain ones, and say what was read otherwise."""

import json
import shutil

import jax
import ml_dtypes
import numpy as np
import pytest
from safetensors.numpy import load_file, save_file

import prb_jax as prb
from prb_jax.models.checkpoints.load import inspect_checkpoint, load_params
from prb_jax.models.config.decoder import load_config
from tests.tiny_models import write_model_without_torch


@pytest.fixture(scope="module")
def plain(tmp_path_factory):
    return write_model_without_torch(tmp_path_factory.mktemp("plain"), "llama", hidden_size=80)


@pytest.fixture
def stored(plain, tmp_path):
    """A copy of the folder, and its tensors."""
    folder = shutil.copytree(plain, tmp_path / "stored")
    return folder, load_file(folder / "model.safetensors")


def load(folder, message=""):
    if not message:
        return load_params(folder, load_config(folder)).params
    with pytest.warns(prb.PrbWarning, match=message):
        return load_params(folder, load_config(folder)).params


@pytest.mark.parametrize("prefix", ["_orig_mod.", "module.", "model.", "module._orig_mod."])
def test_a_wrapper_around_all_names_is_left_out(plain, stored, prefix):
    folder, tensors = stored
    save_file({f"{prefix}{name}": value for name, value in tensors.items()}, folder / "model.safetensors")
    jax.tree.map(np.testing.assert_array_equal, load(folder, "all names begin with"), load(plain))
    assert len(inspect_checkpoint(folder, load_config(folder)).told) == prefix.count(".")
    assert inspect_checkpoint(plain, load_config(plain)).told == ()


def test_a_module_that_peft_trained_whole_is_read_from_its_wrapper(plain, stored):
    folder, tensors = stored
    head = tensors.pop("score.weight")
    tensors |= {
        "score.modules_to_save.default.weight": head,
        "score.original_module.weight": np.zeros_like(head),
    }
    save_file(tensors, folder / "model.safetensors")
    jax.tree.map(np.testing.assert_array_equal, load(folder, "not from 'original_module'"), load(plain))
    save_file(tensors | {"score.weight": head}, folder / "model.safetensors")
    with pytest.raises(prb.CheckpointError, match="a tensor is there twice"):
        load(folder)


def write_fp8(folder, tensors, block=(32, 48)):
    """Write the matrices of the layers as FP8, and return what was written and all values as float32."""
    written, values = {}, {}
    for name, value in tensors.items():
        if not name.endswith("proj.weight"):
            written[name] = values[name] = value
            continue
        rows, columns = (-(-size // part) for size, part in zip(value.shape, block, strict=True))
        scale = np.random.default_rng(0).uniform(0.01, 0.1, (rows, columns)).astype(np.float32)
        spread = np.repeat(np.repeat(scale, block[0], 0), block[1], 1)[: value.shape[0], : value.shape[1]]
        written[name] = (value / spread).astype(ml_dtypes.float8_e4m3fn)
        written[f"{name}_scale_inv"] = scale
        values[name] = written[name].astype(np.float32) * spread
    save_file(written, folder / "model.safetensors")
    config = json.loads((folder / "config.json").read_text())
    config["quantization_config"] = {"quant_method": "fp8", "weight_block_size": list(block), "fmt": "e4m3"}
    (folder / "config.json").write_text(json.dumps(config))
    return written, values


def test_fp8_is_multiplied_by_the_scales_of_its_blocks(plain, stored, tmp_path):
    folder, tensors = stored
    _, values = write_fp8(folder, tensors)
    expected = shutil.copytree(plain, tmp_path / "expected")
    save_file(values, expected / "model.safetensors")
    read = load(folder, "21 matrices of FP8 are multiplied by their scales of blocks of 32 x 48")
    jax.tree.map(np.testing.assert_array_equal, read, load(expected))


def test_scales_that_do_not_fit_and_fp8_without_scales_are_refused(stored):
    folder, tensors = stored
    written, _ = write_fp8(folder, tensors)
    key = "model.layers.0.mlp.up_proj.weight"
    save_file(written | {f"{key}_scale_inv": np.ones((1, 1), np.float32)}, folder / "model.safetensors")
    with pytest.raises(
        prb.CheckpointError, match=rf"'{key}_scale_inv': expected shape \[3, 2\], found \[1, 1\]"
    ):
        load(folder)
    written.pop(f"{key}_scale_inv")
    save_file(written, folder / "model.safetensors")
    with pytest.raises(
        prb.CheckpointError, match=rf"'{key}': expected floating-point weights, found F8_E4M3"
    ):
        load(folder, "FP8")


@pytest.mark.parametrize("method", ["bitsandbytes", "gptq", "awq"])
def test_other_quantised_weights_are_refused_by_name(stored, method):
    folder, _ = stored
    config = json.loads((folder / "config.json").read_text()) | {
        "quantization_config": {"quant_method": method}
    }
    (folder / "config.json").write_text(json.dumps(config))
    with pytest.raises(prb.CheckpointError, match=rf"quantised weights \({method}\) are not supported"):
        load(folder)
