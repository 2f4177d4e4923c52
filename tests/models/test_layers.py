"""The pieces of a layer against their formulas."""

from __future__ import annotations

import jax
import jax.numpy as jnp
import numpy as np
import pytest

from prb_jax.models.layers import gated, matmul_precision, project, rms_norm, rotate


def random(*shape: int, seed: int = 0, scale: float = 1.0) -> np.ndarray:
    return (scale * np.random.default_rng(seed).normal(size=shape)).astype(np.float32)


def bfloat16(x: np.ndarray) -> np.ndarray:
    """Rounded to bfloat16, kept as float32."""
    return np.asarray(jnp.asarray(x, jnp.float32).astype(jnp.bfloat16).astype(jnp.float32))


@pytest.mark.parametrize("plus_one", [True, False])
@pytest.mark.parametrize("scale_after_cast", [True, False])
def test_norm_follows_the_formula_in_float64(plus_one: bool, scale_after_cast: bool) -> None:
    x, weight = random(5, 7, 48, scale=3.0), random(48, seed=1)
    wide = x.astype(np.float64)
    expected = wide / np.sqrt(np.mean(wide**2, axis=-1, keepdims=True) + 1e-5) * (weight + plus_one)
    found = rms_norm(
        jnp.asarray(x), jnp.asarray(weight), eps=1e-5, plus_one=plus_one, scale_after_cast=scale_after_cast
    )
    np.testing.assert_allclose(found, expected, rtol=2e-6, atol=1e-6)


def test_the_two_orders_of_casting_differ_in_bfloat16() -> None:
    """Llama rounds before it scales, Gemma after: each is reproduced to the bit."""
    x, weight = bfloat16(random(40, 64)), bfloat16(random(64, seed=1))
    normed = x / np.sqrt(np.mean(x**2, axis=-1, keepdims=True, dtype=np.float32) + np.float32(1e-6))
    rounded_first = bfloat16(bfloat16(normed) * weight)
    rounded_last = bfloat16(normed * weight)
    assert (rounded_first != rounded_last).mean() > 0.1

    def found(scale_after_cast: bool) -> np.ndarray:
        out = rms_norm(
            jnp.asarray(x, jnp.bfloat16),
            jnp.asarray(weight, jnp.bfloat16),
            eps=1e-6,
            plus_one=False,
            scale_after_cast=scale_after_cast,
        )
        assert out.dtype == jnp.bfloat16
        return np.asarray(out.astype(jnp.float32))

    # The last bit of a mean in another order moves one value in thousands across a rounding edge.
    assert (found(True) != rounded_first).mean() < 0.002
    assert (found(False) != rounded_last).mean() < 0.002


def test_statistics_of_a_norm_are_float32() -> None:
    """A thousand squares of size 10,000: their bfloat16 sum would stop growing."""
    x = jnp.full((1, 1024), 100.0, jnp.bfloat16)
    out = rms_norm(x, jnp.ones(1024, jnp.bfloat16), eps=1e-6, plus_one=False, scale_after_cast=True)
    np.testing.assert_array_equal(out.astype(jnp.float32), np.ones((1, 1024)))


def test_a_row_of_zeros_stays_zero() -> None:
    out = rms_norm(jnp.zeros((2, 8)), jnp.ones(8), eps=1e-6, plus_one=True, scale_after_cast=False)
    np.testing.assert_array_equal(out, np.zeros((2, 8)))


@pytest.mark.parametrize("scale", [1.0, 0.25])
def test_rotation_follows_the_formula_in_float64(scale: float) -> None:
    """Pair i is (x[i], x[i + H/2]), turned by position times frequency i."""
    x = random(2, 6, 3, 10)
    positions = np.asarray([[0, 1, 2, 3, 4, 5], [0, 0, 0, 700, 701, 4095]])
    frequencies = 10_000.0 ** (-np.arange(5) / 5)
    angles = positions[..., None] * frequencies
    pairs = x[..., :5].astype(np.float64) + 1j * x[..., 5:]
    turned = scale * pairs * np.exp(1j * angles)[:, :, None]
    expected = np.concatenate([turned.real, turned.imag], axis=-1)
    cos, sin = (jnp.asarray(f(angles), jnp.float32) for f in (np.cos, np.sin))
    np.testing.assert_allclose(rotate(jnp.asarray(x), cos, sin, scale=scale), expected, atol=1e-6)


def test_rotated_products_depend_on_the_distance_alone() -> None:
    q, k = random(1, 1, 1, 16), random(1, 1, 1, 16, seed=1)
    frequencies = 10_000.0 ** (-np.arange(8) / 8)

    def product(query_place: int, key_place: int) -> float:
        def at(x: np.ndarray, place: int) -> jax.Array:
            angles = np.full((1, 1, 1), place) * frequencies
            cos, sin = (jnp.asarray(f(angles), jnp.float32) for f in (np.cos, np.sin))
            return rotate(jnp.asarray(x), cos, sin)

        return float(jnp.sum(at(q, query_place) * at(k, key_place)))

    assert product(105, 98) == pytest.approx(product(7, 0), abs=1e-5)
    assert product(105, 98) != pytest.approx(product(8, 0), abs=1e-2)


def test_rotation_is_rounded_once() -> None:
    """bfloat16 in, bfloat16 out, float32 between."""
    x, angles = bfloat16(random(1, 50, 2, 8)), random(1, 50, 4, scale=3.0)
    cos, sin = np.cos(angles)[:, :, None], np.sin(angles)[:, :, None]
    first, second = x[..., :4], x[..., 4:]
    expected = bfloat16(np.concatenate([first * cos - second * sin, second * cos + first * sin], axis=-1))
    found = rotate(jnp.asarray(x, jnp.bfloat16), jnp.cos(angles), jnp.sin(angles))
    assert found.dtype == jnp.bfloat16
    assert (np.asarray(found.astype(jnp.float32)) != expected).mean() < 0.01


def test_products_of_bfloat16_accumulate_in_float32() -> None:
    """One, then 4,095 times 2**-9: added up in bfloat16 the small ones would all be lost."""
    x = jnp.concatenate([jnp.ones((1, 1)), jnp.full((1, 4095), 2.0**-9)], axis=1).astype(jnp.bfloat16)
    out = project(x, jnp.ones((4096, 1), jnp.bfloat16), jnp.full((1,), 0.5, jnp.bfloat16))
    assert out.dtype == jnp.bfloat16
    assert float(out[0, 0]) == float(jnp.asarray(1 + 4095 * 2.0**-9 + 0.5, jnp.bfloat16))


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
    mixed = project(jnp.asarray(x, jnp.bfloat16), jnp.asarray(weight))
    assert mixed.dtype == jnp.bfloat16
    np.testing.assert_array_equal(
        mixed, project(jnp.asarray(x, jnp.bfloat16), jnp.asarray(weight, jnp.bfloat16))
    )


def test_activations_are_those_of_torch() -> None:
    torch = pytest.importorskip("torch")
    x = np.linspace(-12, 12, 1001, dtype=np.float32)
    silu = torch.nn.functional.silu(torch.from_numpy(x)).numpy()
    gelu = torch.nn.functional.gelu(torch.from_numpy(x), approximate="tanh").numpy()
    np.testing.assert_allclose(gated(jnp.asarray(x), jnp.ones(x.shape), "silu"), silu, atol=2e-6)
    np.testing.assert_allclose(gated(jnp.asarray(x), jnp.ones(x.shape), "gelu_pytorch_tanh"), gelu, atol=2e-6)


def test_a_gate_is_applied_in_float32_and_rounded_once() -> None:
    gate, up = bfloat16(random(6, 40)), bfloat16(random(6, 40, seed=1))
    expected = bfloat16(gate / (1 + np.exp(-gate)) * up)
    found = gated(jnp.asarray(gate, jnp.bfloat16), jnp.asarray(up, jnp.bfloat16), "silu")
    assert found.dtype == jnp.bfloat16
    assert (np.asarray(found.astype(jnp.float32)) != expected).mean() < 0.01
