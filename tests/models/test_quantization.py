"""Matrices in eight bits: the formula in float64, bounds of the error, whole models, what is refused."""

from __future__ import annotations

import re
from types import SimpleNamespace
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
import pytest

from prb_jax.errors import CheckpointError
from prb_jax.models import layers
from prb_jax.models.checkpoints.load import load_params
from prb_jax.models.config.decoder import load_config
from prb_jax.models.lora import adapted_project, init_lora, merge_lora
from prb_jax.models.lora_config import LoraConfig
from prb_jax.models.model import bind
from prb_jax.models.quantization import (
    FORMS,
    quantization_form,
    quantize_array,
    quantize_params,
    quantized_project,
)
from prb_jax.models.readouts.score_tree import make_score_fn
from prb_jax.platform.meshes import make_mesh
from tests.models.one_layer import layer_of
from tests.packed import packed_batch, read_trees
from tests.sweeps import sweep
from tests.tiny_models import write_tiny_model
from tests.training.small_batches import initial_params, random_trees, small_config

INT8, FP8 = FORMS["int8"].dtype, FORMS["fp8"].dtype
LIMIT = {INT8: 127.0, FP8: 448.0}


def factors(seed: int = 0) -> tuple[np.ndarray, np.ndarray]:
    """x [3, 5, 96] and W [96, 40] of very different rows, among them rows and columns of zeros."""
    rng = np.random.default_rng(seed)
    x = rng.normal(size=(3, 5, 96)) * np.exp(rng.normal(size=(3, 5, 1), scale=3))
    w = rng.normal(size=(96, 40)) * np.exp(rng.normal(size=(1, 40), scale=2))
    x[1, 2] = 0
    w[:, 7] = 0
    w[11] = 0
    return x.astype(np.float32), w.astype(np.float32)


def rounded(values: np.ndarray, dtype: np.dtype, axis: int) -> np.ndarray:
    """The formula, in float64: the nearest multiples of each channel's scale, or the nearest float8."""
    top = np.abs(values).max(axis=axis, keepdims=True)
    scale = np.where(top == 0, np.float32(1), top * np.float32(1 / LIMIT[dtype]))
    quotient = values / scale  # float32: what is a tie is a matter of its last bit
    nearest = np.rint(quotient) if dtype == INT8 else quotient.astype(dtype)
    return nearest.astype(np.float64) * scale


@pytest.mark.parametrize("form", FORMS)
def test_a_product_is_the_formula_in_float64(form: str) -> None:
    chosen = FORMS[form]
    x, w = factors()
    narrow, scale = quantize_array(w, chosen.dtype, axis=0)
    assert (narrow.dtype, scale.shape, scale.dtype) == (chosen.dtype, (40,), np.float32)
    arrays = map(jnp.asarray, (x, narrow, scale))
    out = np.asarray(quantized_project(*arrays, activations=chosen.activations))
    seen = rounded(x, chosen.dtype, -1) if chosen.activations else x.astype(np.float64)
    expected = seen @ rounded(w, chosen.dtype, 0)
    # Against the sum of absolute values: float32's own rounding.
    size = np.abs(seen) @ np.abs(rounded(w, chosen.dtype, 0))
    assert (np.abs(out - expected) <= 2e-6 * size).all()
    assert (out[1, 2] == 0).all()
    assert (out[..., 7] == 0).all()


@pytest.mark.parametrize("dtype", [INT8, FP8], ids=str)
def test_host_and_device_quantise_alike(dtype: np.dtype) -> None:
    """Also what is tiny: a scale that would be denormal gives zeros, and no division by zero."""
    x, w = factors()
    w[:, 3] *= np.float32(1e-39) / np.abs(w[:, 3]).max()
    for values, axis in ((w, 0), (x, -1)):
        host, device = (quantize_array(x, dtype, axis=axis) for x in (values, jnp.asarray(values)))
        for one, other in zip(host, device, strict=True):
            np.testing.assert_array_equal(one.astype(np.float32), np.asarray(other).astype(np.float32))
    assert (quantize_array(w, dtype, axis=0)[0][:, 3].astype(np.float32) == 0).all()


@pytest.mark.parametrize("value", [np.nan, np.inf])
def test_what_is_not_finite_stays_visible(value: float) -> None:
    x, w = factors()
    x[0, 0, 5] = value
    narrow, scale = quantize_array(w, INT8, axis=0)
    out = quantized_project(jnp.asarray(x), jnp.asarray(narrow), jnp.asarray(scale), activations=True)
    finite = np.all(np.isfinite(np.asarray(out)), axis=-1)
    assert not finite[0, 0]
    assert finite.sum() == finite.size - 1


def test_biases_and_adapters_are_added_to_it() -> None:
    x, w = factors()
    x = np.clip(x, -3, 3)
    rng = np.random.default_rng(1)
    bias, a, b = rng.normal(size=40), rng.normal(size=(96, 2)) / 10, rng.normal(size=(2, 40))
    narrow, scale = quantize_array(w, INT8, axis=0)
    weights = {"q": narrow, "q_scale": scale, "q_bias": bias, "q_lora_a": a, "q_lora_b": b}
    arrays = {name: jnp.asarray(v, v.dtype if name == "q" else jnp.float32) for name, v in weights.items()}
    expected = rounded(x, INT8, -1) @ rounded(w, INT8, 0) + bias + 0.5 * (x @ a) @ b
    out = adapted_project(layer_of(arrays), "q", jnp.asarray(x), scale=0.5)
    np.testing.assert_allclose(out, expected, rtol=1e-4, atol=1e-4 * np.abs(expected).max(axis=-1).min())
    assert out.dtype == jnp.float32


def scores(params: dict[str, Any], config: Any) -> np.ndarray:
    run = jax.jit(read_trees, static_argnames=("config", "dtype"))
    batch = packed_batch(random_trees(3), window=config.sliding_window, taps=config.taps)
    return np.asarray(run(params, batch, config=config, dtype=jnp.dtype(jnp.float32)))


def dequantised(params: dict[str, Any]) -> dict[str, Any]:
    layers = dict(params["layers"])
    for name in [name.removesuffix("_weight_scale") for name in layers if name.endswith("_weight_scale")]:
        scale = layers.pop(f"{name}_weight_scale")
        layers[name] = np.asarray(layers[name], np.float32) * np.asarray(scale)[..., None, :]
    return {**params, "layers": layers}


# Biases of attention and of the mlp; norms of queries and keys; four norms, windows and soft caps.
@pytest.mark.parametrize(
    "family",
    sweep(
        [
            "llama-llama3",
            "llama-yarn",
            "qwen3",
            "gemma2",
            "gemma3",
            "qwen3_moe",
            "gpt_oss",
            "qwen3_5",
            "qwen3_next",
        ],
        few=(4, 6),
    ),
)
def test_a_family_scores_as_its_dequantised_weights_do(family: str, tmp_path) -> None:
    folder = write_tiny_model(tmp_path, family)
    config = load_config(folder)
    plain = scores(load_params(folder, config).params, config)
    by_form = {form: scores(load_params(folder, config, quantize=form).params, config) for form in FORMS}
    expected = scores(dequantised(load_params(folder, config, quantize="int8-weights").params), config)
    assert np.std(expected) > 0.1
    np.testing.assert_allclose(by_form["int8-weights"], expected, atol=2e-5)
    # The arithmetic of fp8 is emulated by this CPU's compiler: `load` refuses such devices.
    for form, least, most in (("int8-weights", 1e-4, 0.2), ("int8", 1e-4, 0.3), ("fp8", 1e-3, 0.8)):
        assert least < np.abs(by_form[form] - plain).max() < most


@pytest.mark.parametrize(("form", "kinds"), [("int8", "i8.i8.i32"), ("int8-weights", "bf16.bf16.f32")])
def test_the_program_multiplies_eight_bit_factors(
    form: str, kinds: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    """All seven products of a layer, the factors in the same dtype and the sums wide; of the layers that are scanned
    and of the last one, which is computed at the read places."""
    monkeypatch.setattr(layers, "multiplies_bfloat16", lambda: True)
    config = small_config()
    params = jax.eval_shape(lambda p: quantize_params(config, p, FORMS[form]), initial_params(config))
    run = make_score_fn(config, mesh=make_mesh(devices=jax.devices()[:1]), dtype=jnp.dtype(jnp.bfloat16),
                        shardings=jax.tree.map(lambda _: None, params))  # fmt: skip
    text = jax.jit(run).lower(params, packed_batch(random_trees(3))).as_text()
    products = re.findall(
        r"stablehlo.dot_general.*tensor<\d+x\d+x\d+x(\w+)>, tensor<\d+x\d+x(\w+)>\) -> tensor<\S*x(\w+)>",
        text,
    )
    assert [".".join(dtypes) for dtypes in products].count(kinds) == 14


def test_the_tree_is_quantised_in_place() -> None:
    config = small_config()
    params = initial_params(config)
    narrow = jax.jit(lambda p: quantize_params(config, p, FORMS["int8"]))(params)
    assert set(narrow["layers"]) - set(params["layers"]) == {f"{name}_scale" for name in LoraConfig.targets}
    for name in LoraConfig.targets:
        expected, scale = quantize_array(np.asarray(params["layers"][name]), INT8, axis=1)
        np.testing.assert_array_equal(narrow["layers"][name], expected)
        np.testing.assert_array_equal(narrow["layers"][f"{name}_scale"], scale)
    np.testing.assert_array_equal(narrow["embed"], params["embed"])
    with pytest.raises(CheckpointError, match="layers/q: is quantised already"):
        quantize_params(config, narrow, FORMS["fp8"])


def test_adapters_stay_as_they_are_and_cannot_be_merged() -> None:
    config = small_config()
    params = initial_params(config)
    lora = init_lora(bind(config, params).layers, LoraConfig(rank=2, targets=("q",)))["layers"]
    adapted = {**params, "layers": {**params["layers"], **lora}}
    narrow = quantize_params(config, adapted, FORMS["int8"])
    plain = scores(quantize_params(config, params, FORMS["int8"]), config)
    np.testing.assert_allclose(scores(narrow, config), plain, atol=1e-6, rtol=0)
    with pytest.raises(CheckpointError, match="layers/q: is quantised: merge its adapter before"):
        merge_lora(config, narrow, scale=1.0)


def test_forms_that_do_not_exist_or_do_not_run_here() -> None:
    with pytest.raises(CheckpointError, match="quantize: expected int8, int8-weights, fp8, found 'int4'"):
        quantization_form("int4")
    mesh = make_mesh(devices=jax.devices("cpu")[:1])
    assert quantization_form("int8", mesh=mesh) == FORMS["int8"]
    with pytest.raises(CheckpointError, match=r"fp8 needs matrix units.*found cpu \(cpu\)"):
        quantization_form("fp8", mesh=mesh)


@pytest.mark.parametrize(
    ("platform", "kind", "capability", "runs"),
    [
        ("gpu", "NVIDIA H200", "9.0", True),
        ("gpu", "NVIDIA B200", "10.0", True),
        ("gpu", "NVIDIA A100", "8.0", False),
        ("gpu", "AMD MI300", "gfx942", False),
        ("tpu", "TPU7x", "", True),
        ("tpu", "TPU v6 lite", "", False),
    ],
)
def test_which_devices_multiply_fp8(platform: str, kind: str, capability: str, runs: bool) -> None:
    device = SimpleNamespace(platform=platform, device_kind=kind, compute_capability=capability)
    mesh: Any = SimpleNamespace(devices=np.array([device], object))
    if runs:
        assert quantization_form("fp8", mesh=mesh).name == "fp8"
    else:
        with pytest.raises(CheckpointError, match=re.escape(kind)):
            quantization_form("fp8", mesh=mesh)
