"""Checkpoints as other tools leave them hold the same values as plain ones, and say what was read otherwise."""

import json
import shutil

import jax
import ml_dtypes
import numpy as np
import pytest
from safetensors.numpy import load_file, save_file

import prb_jax as prb
from prb_jax.models.checkpoints.adapter_folder import adapted_folder
from prb_jax.models.checkpoints.load import inspect_checkpoint, load_params
from prb_jax.models.checkpoints.weight_index import SliceReader, index_folder
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
    with pytest.raises(prb.CheckpointError, match="a tensor occurs twice"):
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
    scales = np.full((3, 2), 127, np.uint8)  # exponents of 2, as bytes
    save_file(written | {f"{key}_scale_inv": scales}, folder / "model.safetensors")
    with pytest.raises(
        prb.CheckpointError, match=rf"'{key}_scale_inv': expected floating-point scales, found U8"
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


# The 16 values of a number of four bits, by their places: quantiles of a normal distribution between -1 and 1 (QLoRA,
# appendix E), and floats of one sign, two exponent bits and one bit of mantissa, divided by the largest.
NF4 = [
    -1.0, -0.6961928009986877, -0.5250730514526367, -0.39491748809814453, -0.28444138169288635, -0.18477343022823334,
    -0.09105003625154495, 0.0, 0.07958029955625534, 0.16093020141124725, 0.24611230194568634, 0.33791524171829224,
    0.44070982933044434, 0.5626170039176941, 0.7229568362236023, 1.0,
]  # fmt: skip
_POSITIVE = [0.0, 0.0625, 8.0, 12.0, 4.0, 6.0, 2.0, 3.0]
FP4 = [value / 12 for value in [*_POSITIVE, *(-value for value in _POSITIVE)]]


def write_four_bits(folder, tensors, kind, *, double, dtype="float32", block=64):
    """Write the matrices of the layers as bitsandbytes does, one number at a time; returns all values as float32."""
    written, values = {}, {}
    for name, value in tensors.items():
        if not name.endswith("proj.weight"):
            written[name] = values[name] = value
            continue
        places = np.array(NF4 if kind == "nf4" else FP4, np.float32)
        flat, state = value.reshape(-1), {"quant_type": kind, "blocksize": block, "dtype": dtype}
        scales = np.array(
            [np.abs(flat[at : at + block]).max() for at in range(0, len(flat), block)], np.float32
        )
        if double:
            outer, offset = 256, float(scales.mean())
            of_scales = np.linspace(-1, 1, 256).astype(np.float32)
            largest = [
                np.abs(scales[at : at + outer] - np.float32(offset)).max()
                for at in range(0, len(scales), outer)
            ]
            numbers, again = [], []
            for at, scale in enumerate(scales):
                numbers.append(int(np.abs(of_scales - (scale - offset) / largest[at // outer]).argmin()))
                again.append(of_scales[numbers[-1]] * largest[at // outer] + np.float32(offset))
            written[f"{name}.absmax"] = np.array(numbers, np.uint8)
            written[f"{name}.nested_absmax"] = np.array(largest, np.float32)
            written[f"{name}.nested_quant_map"] = of_scales
            state |= {"nested_blocksize": outer, "nested_dtype": "float32", "nested_offset": offset}
            scales = np.array(again, np.float32)
        else:
            written[f"{name}.absmax"] = scales
        each = np.repeat(scales, block)[: len(flat)]
        chosen = np.abs(flat[:, None] / each[:, None] - places).argmin(axis=1)
        written[name] = np.array([16 * a + b for a, b in zip(chosen[::2], chosen[1::2])], np.uint8)[:, None]
        written[f"{name}.quant_map"] = places
        text = json.dumps(state | {"shape": list(value.shape)}).encode()
        written[f"{name}.quant_state.bitsandbytes__{kind}"] = np.frombuffer(text, np.uint8)
        rounded = (places[chosen] * each).astype(ml_dtypes.bfloat16 if dtype == "bfloat16" else dtype)
        values[name] = rounded.astype(np.float32).reshape(value.shape)
    save_file(written, folder / "model.safetensors")
    config = json.loads((folder / "config.json").read_text())
    config["quantization_config"] = {"quant_method": "bitsandbytes", "load_in_4bit": True}
    (folder / "config.json").write_text(json.dumps(config))
    return written, values


@pytest.mark.parametrize(
    ("kind", "double", "dtype"),
    [("nf4", False, "bfloat16"), ("nf4", True, "float32"), ("fp4", True, "float16")],
)
def test_four_bits_are_dequantised(plain, stored, tmp_path, kind, double, dtype):
    """Also of a matrix whose rows are no whole number of blocks, and of a half of the columns or rows alone."""
    folder, tensors = stored
    _, values = write_four_bits(folder, tensors, kind, double=double, dtype=dtype)
    expected = shutil.copytree(plain, tmp_path / "expected")
    save_file(values, expected / "model.safetensors")
    said = rf"21 matrices of bitsandbytes are dequantised \({kind} to {dtype}\)"
    jax.tree.map(np.testing.assert_array_equal, load(folder, said), load(expected))
    for name in ("model.layers.1.mlp.down_proj.weight", "model.layers.1.self_attn.k_proj.weight"):
        index = index_folder(folder)
        for region in (np.s_[1:7, 3:30], np.s_[5:6, 0:64]):
            part = np.empty(values[name][region].shape, np.float32)
            with SliceReader(index) as reader:
                reader.read_into(part, name, region)
            np.testing.assert_array_equal(part, values[name][region])


def test_four_bits_without_a_part_or_with_another_state_are_refused(stored):
    folder, tensors = stored
    written, _ = write_four_bits(folder, tensors, "nf4", double=True)
    key = "model.layers.0.mlp.up_proj.weight"
    state = f"{key}.quant_state.bitsandbytes__nf4"
    said = json.loads(written[state].tobytes())

    def changed(**fields):
        return {state: np.frombuffer(json.dumps(said | fields).encode(), np.uint8)}

    cases = [
        ({f"{key}.quant_map": None}, rf"'{key}.quant_map': expected F32 \[16\] by its state, found none"),
        (
            {f"{key}.absmax": np.ones(3, np.uint8)},
            r"absmax': expected U8 \[\d+\] by its state, found U8 \[3\]",
        ),
        ({f"{key}.nested_absmax": None}, r"absmax': expected F32 .*, found U8"),
        ({key: written[key][:-1]}, rf"'{key}': expected U8 \[\d+, 1\] by its state, found U8"),
        (changed(quant_type="fp4"), "field 'quant_type': expected one of nf4, fp4, as in the name"),
        (
            changed(dtype="float8"),
            "field 'dtype': expected one of float32, float16, bfloat16, found 'float8'",
        ),
        (changed(blocksize=0), "field 'blocksize': expected a whole number above 0"),
        (changed(nested_offset="x"), "field 'nested_offset': expected a finite number"),
        (changed(shape=[-1, 2]), "field 'shape': expected two sizes"),
        ({state: None}, rf"'{key}': expected floating-point weights, found U8|has no place for"),
    ]
    for change, message in cases:
        tensors = {name: value for name, value in (written | change).items() if value is not None}
        save_file(tensors, folder / "model.safetensors")
        with pytest.raises(prb.CheckpointError, match=message):
            inspect_checkpoint(folder, load_config(folder))


def test_an_adapter_of_a_base_in_four_bits_is_added_to_what_is_dequantised(plain, stored, tmp_path):
    folder, tensors = stored
    _, values = write_four_bits(folder, tensors, "nf4", double=True)
    whole, adapter = shutil.copytree(plain, tmp_path / "whole"), tmp_path / "adapter"
    save_file(values, whole / "model.safetensors")
    module, rng = "model.layers.1.mlp.down_proj", np.random.default_rng(0)
    rows, columns = values[f"{module}.weight"].shape
    factors = {"lora_A": rng.normal(size=(2, columns)), "lora_B": rng.normal(size=(rows, 2))}
    adapter.mkdir()
    save_file(
        {
            f"base_model.model.{module}.{name}.weight": value.astype(np.float32)
            for name, value in factors.items()
        },
        adapter / "adapter_model.safetensors",
    )
    described = {"peft_type": "LORA", "r": 2, "lora_alpha": 4, "target_modules": module.replace(".", r"\.")}
    (adapter / "adapter_config.json").write_text(json.dumps(described))
    read = []
    for base in (folder, whole):
        view = adapted_folder(adapter, base)
        with pytest.warns(prb.PrbWarning):
            read.append(load_params(view, load_config(view)).params)
    jax.tree.map(np.testing.assert_array_equal, *read)
    added = np.asarray(read[0]["layers"]["down"][1]).T - values[f"{module}.weight"]
    np.testing.assert_allclose(added, 2 * factors["lora_B"] @ factors["lora_A"], atol=1e-5)
