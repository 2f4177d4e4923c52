"""The pieces of a layer: how they round. Their formulas are those of transformers, see tests/parity."""

from __future__ import annotations

import functools
import math
import re
import subprocess
import sys
from pathlib import Path

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from jax.typing import DTypeLike

from prb_jax.models import layers
from prb_jax.models.layers import (
    float32_einsum,
    from_bits,
    gated,
    in_bits,
    matmul_precision,
    product,
    project,
    rms_norm,
    rotate,
    rounded,
    row_of,
    sum_over_tokens,
)
from tests.plain_process import plain_environment


def random(*shape: int, seed: int = 0, scale: float = 1.0) -> np.ndarray:
    return (scale * np.random.default_rng(seed).normal(size=shape)).astype(np.float32)


def bfloat16(x: np.ndarray) -> np.ndarray:
    """Rounded to bfloat16, kept as float32."""
    return np.asarray(jnp.asarray(x, jnp.float32).astype(jnp.bfloat16).astype(jnp.float32))


def narrow(*arrays: np.ndarray) -> list[jax.Array]:
    return [jnp.asarray(x, jnp.bfloat16) for x in arrays]


def share_apart(out: jax.Array, expected: np.ndarray) -> float:
    """The share of bfloat16 numbers that are not exactly those expected."""
    assert out.dtype == jnp.bfloat16
    return float((np.asarray(out.astype(jnp.float32)) != expected).mean())


def test_the_two_orders_of_casting_differ_in_bfloat16() -> None:
    """Llama rounds before it scales, Gemma after: each is reproduced to the bit."""
    x, weight = bfloat16(random(40, 64)), bfloat16(random(64, seed=1))
    normed = x / np.sqrt(np.mean(x**2, axis=-1, keepdims=True, dtype=np.float32) + np.float32(1e-6))
    rounded_first = bfloat16(bfloat16(normed) * weight)
    rounded_last = bfloat16(normed * weight)
    assert (rounded_first != rounded_last).mean() > 0.1

    norm = functools.partial(rms_norm, *narrow(x, weight), eps=1e-6, plus_one=False)
    # The last bit of a mean in another order moves one value in thousands across a rounding edge.
    assert share_apart(norm(scale_after_cast=True), rounded_first) < 0.002
    assert share_apart(norm(scale_after_cast=False), rounded_last) < 0.002


def test_numbers_are_rounded_like_a_conversion() -> None:
    """Any bits of float32, which include infinities and subnormal numbers; a NaN of arithmetic stays one."""
    bits = np.random.default_rng(0).integers(0, 2**32, 200_000, dtype=np.uint32)
    edges = [0.0, -0.0, np.inf, -np.inf, np.nan, -np.nan, np.finfo(np.float32).max, 1e-40, -1e-45]
    x = np.concatenate([bits.view(np.float32), np.asarray(edges, np.float32)])
    ours = np.asarray(jax.jit(rounded, static_argnums=1)(x, jnp.bfloat16))
    assert ours.dtype == jnp.bfloat16
    numbers = ~np.isnan(x)
    assert numbers.mean() > 0.9
    theirs = x[numbers].astype(jnp.bfloat16)
    np.testing.assert_array_equal(ours.view(np.uint16)[numbers], theirs.view(np.uint16))
    assert np.isnan(ours[-len(edges) :][np.isnan(edges)].astype(np.float32)).all()
    assert rounded(jnp.asarray(x), jnp.float32).dtype == jnp.float32


@pytest.mark.parametrize("dtype", [jnp.bfloat16, jnp.float32])
def test_a_row_of_a_stack_and_its_gradient(dtype: DTypeLike) -> None:
    stack = jnp.asarray(random(4, 3, 5), dtype)
    factor = jnp.asarray(random(3, 5, seed=1), dtype)

    def loss(stack: jax.Array, number: jax.Array) -> jax.Array:
        return (row_of(stack, number) * factor).sum().astype(jnp.float32)

    for number in range(4):
        np.testing.assert_array_equal(jax.jit(row_of)(stack, number), stack[number])
        gradient = jax.jit(jax.grad(loss))(stack, number)
        np.testing.assert_array_equal(gradient, jnp.zeros_like(stack).at[number].set(factor))
    assert from_bits(in_bits(stack), dtype).dtype == dtype
    np.testing.assert_array_equal(from_bits(in_bits(stack), dtype), stack)


def test_statistics_of_a_norm_are_float32() -> None:
    """A thousand squares of size 10,000: their bfloat16 sum would stop growing."""
    x = jnp.full((1, 1024), 100.0, jnp.bfloat16)
    out = rms_norm(x, jnp.ones(1024, jnp.bfloat16), eps=1e-6, plus_one=False, scale_after_cast=True)
    np.testing.assert_array_equal(out.astype(jnp.float32), np.ones((1, 1024)))


def test_a_row_of_zeros_stays_zero() -> None:
    out = rms_norm(jnp.zeros((2, 8)), jnp.ones(8), eps=1e-6, plus_one=True, scale_after_cast=False)
    np.testing.assert_array_equal(out, np.zeros((2, 8)))


def test_rotation_is_rounded_once() -> None:
    """bfloat16 in, bfloat16 out, float32 between."""
    x, angles = bfloat16(random(1, 50, 2, 8)), random(1, 50, 4, scale=3.0)
    cos, sin = np.cos(angles)[:, :, None], np.sin(angles)[:, :, None]
    first, second = x[..., :4], x[..., 4:]
    expected = bfloat16(np.concatenate([first * cos - second * sin, second * cos + first * sin], axis=-1))
    assert share_apart(rotate(*narrow(x), jnp.cos(angles), jnp.sin(angles)), expected) < 0.01


def test_products_of_bfloat16_accumulate_in_float32() -> None:
    """One, then 4,095 times 2**-9: added up in bfloat16 the small ones would all be lost."""
    x = jnp.concatenate([jnp.ones((1, 1)), jnp.full((1, 4095), 2.0**-9)], axis=1).astype(jnp.bfloat16)
    out = project(x, jnp.ones((4096, 1), jnp.bfloat16), jnp.full((1,), 0.5, jnp.bfloat16))
    assert out.dtype == jnp.bfloat16
    assert float(out[0, 0]) == float(jnp.asarray(1 + 4095 * 2.0**-9 + 0.5, jnp.bfloat16))


@pytest.mark.parametrize(
    ("instructions", "platform", "rows", "multiplied"),
    [
        (False, "cpu", 64, "f32"),
        (False, "cpu", 63, "bf16"),
        (True, "cpu", 64, "bf16"),
        (False, "tpu", 64, "bf16"),
    ],
)
def test_bfloat16_is_multiplied_as_float32_where_the_processor_lacks_instructions(
    instructions: bool, platform: str, rows: int, multiplied: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    """On CPUs, from so many rows on that the conversion costs less than it saves; einsum at any size."""
    monkeypatch.setattr(layers, "multiplies_bfloat16", lambda: instructions)
    x, weight = narrow(random(2, rows, 96), random(2, 96, 80, seed=1))
    forms = {
        "product": lambda *factors: product(*factors, (2, 1), batch=1),
        "einsum": lambda *factors: float32_einsum("bti,bio->bto", *factors),
    }
    for name, form in forms.items():
        program = jax.jit(form).trace(x, weight).lower(lowering_platforms=(platform,))
        kinds = re.findall(r"dot_general.*tensor<[\dx]+x(\w+)>, tensor<[\dx]+x(\w+)>", program.as_text())
        wide = name == "einsum" and platform == "cpu" and not instructions
        assert kinds == [("f32",) * 2 if wide else (multiplied,) * 2], name
        if platform == "cpu":
            expected = np.asarray(x, np.float64) @ np.asarray(weight, np.float64)
            np.testing.assert_allclose(jax.jit(form)(x, weight), expected, rtol=1e-5, atol=1e-4)


@pytest.mark.parametrize(
    ("content", "has"),
    [
        ("processor\t: 0\nflags\t\t: fpu avx512f avx512_bf16 amx_bf16\n", True),
        ("processor\t: 0\nFeatures\t: fp asimd bf16\n", True),
        ("processor\t: 0\nmodel name\t: bf16\nflags\t\t: fpu avx512f avx512_vnni\n", False),
        (None, False),
    ],
)
def test_what_linux_says_of_the_processor(
    content: str | None, has: bool, monkeypatch: pytest.MonkeyPatch, tmp_path: Path
) -> None:
    file = tmp_path / "cpuinfo"
    if content is not None:
        file.write_text(content)
    monkeypatch.setattr(layers, "_PROCESSOR", file)
    assert layers.multiplies_bfloat16.__wrapped__() is has


def test_float32_means_float32() -> None:
    assert matmul_precision(jnp.dtype(jnp.float32)) == jax.lax.Precision.HIGHEST
    assert matmul_precision(jnp.dtype(jnp.bfloat16)) is None
    x, weight = random(4, 9, 33), random(33, 5, seed=1)
    np.testing.assert_allclose(
        project(jnp.asarray(x), jnp.asarray(weight)), x.astype(np.float64) @ weight, rtol=2e-5, atol=5e-6
    )


def test_weights_are_cast_to_the_activations() -> None:
    """float32 master weights, bfloat16 activations."""
    x, weight = random(3, 16), random(16, 4, seed=1)
    mixed = project(*narrow(x), jnp.asarray(weight))
    assert mixed.dtype == jnp.bfloat16
    np.testing.assert_array_equal(mixed, project(*narrow(x, weight)))


def test_a_gate_is_applied_in_float32_and_rounded_once() -> None:
    gate, up = bfloat16(random(6, 40)), bfloat16(random(6, 40, seed=1))
    expected = bfloat16(gate / (1 + np.exp(-gate)) * up)
    assert share_apart(gated(*narrow(gate, up), "silu"), expected) < 0.01


@pytest.mark.parametrize("devices", [1, 4])
@pytest.mark.parametrize("dtype", [jnp.float32, jnp.bfloat16])
@pytest.mark.parametrize(
    ("tokens", "inputs", "outputs"),
    [((128,), 48, 24), ((2, 96), 24, 48), ((7,), 3, 5), ((40,), 2048, 16), ((1, 2400), 33, 33)],
)
def test_gradients_of_matrices_are_sums_over_all_tokens(
    tokens: tuple[int, ...],
    inputs: int,
    outputs: int,
    dtype: DTypeLike,
    devices: int,
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    """Also where tokens cannot be divided into parts of the usual size, and for wide and narrow factors."""
    monkeypatch.setattr(jax, "device_count", lambda: devices)
    x, gradient = bfloat16(random(*tokens, inputs)), bfloat16(random(*tokens, outputs, seed=1))
    expected = x.reshape(-1, inputs).astype(np.float64).T @ gradient.reshape(-1, outputs)
    found = jax.jit(lambda *factors: sum_over_tokens(*factors))(
        jnp.asarray(x, dtype), jnp.asarray(gradient, dtype)
    )
    assert found.dtype == jnp.float32
    np.testing.assert_allclose(found, expected, rtol=1e-5, atol=1e-4)


def test_wide_factors_are_not_transposed_at_once(monkeypatch: pytest.MonkeyPatch) -> None:
    """Counted in the program: the largest transposed array is a part of the narrower factor."""
    monkeypatch.setattr(jax, "device_count", lambda: 1)
    shapes = [jax.ShapeDtypeStruct((4096, size), jnp.float32) for size in (1024, 512)]
    program = (
        jax.jit(lambda *factors: sum_over_tokens(*factors))
        .trace(*shapes)
        .lower(lowering_platforms=("cpu",))
        .as_text()
    )
    shapes_found = re.findall(r"stablehlo.transpose .*-> tensor<([\dx]+)xf32>", program)
    sizes = [math.prod(map(int, shape.split("x"))) for shape in shapes_found]
    assert len(sizes) == 2
    assert max(sizes) == 1024 * 512  # of the result
    assert min(sizes) <= 1 << 14


def test_the_gradient_of_a_matrix_gathers_no_tokens() -> None:
    """Tokens that are split over a mesh stay where they are: only the sums are exchanged, once."""
    command = [sys.executable, "-m", "tests.models.gradients_on_mesh"]
    environment = plain_environment(devices=4) | {"JAX_PLATFORMS": "cpu"}
    found = subprocess.run(command, env=environment, check=True, timeout=300, capture_output=True, text=True)
    assert found.stdout.split() == ["1", "0"]
