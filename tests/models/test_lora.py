"""Low-rank adapters: what they start as, what they add, what merging leaves."""

from __future__ import annotations

import jax
import jax.numpy as jnp
import numpy as np
import pytest

from prb_jax.errors import PrbError
from prb_jax.models.checkpoints.load import abstract_params
from prb_jax.models.layers import project
from prb_jax.models.lora import adapted_project, init_lora, merge_lora
from prb_jax.models.lora_config import LoraConfig
from prb_jax.models.model import bind
from tests.models.one_layer import layer_of
from tests.packed import packed_batch, read_trees
from tests.training.small_batches import initial_params, random_trees, small_config

CONFIG = small_config()


def with_adapters(params: dict, config: LoraConfig, *, trained: bool, seed: int = 0) -> dict:
    """Adapters as they start, or with a B that is not zero."""
    factors, rng = (
        init_lora(bind(CONFIG, params).layers, config, seed=seed)["layers"],
        np.random.default_rng(seed),
    )
    for name in [name for name in factors if trained and name.endswith("_b")]:
        factors[name] = jnp.asarray(rng.normal(size=factors[name].shape, scale=0.2), jnp.float32)
    return {**params, "layers": {**params["layers"], **factors}}


def scores(params: dict, *, scale: float = 1.0, dtype: str = "float32") -> np.ndarray:
    run = jax.jit(read_trees, static_argnames=("config", "dtype", "lora_scale"))
    batch = packed_batch(random_trees(3))
    return np.asarray(run(params, batch, config=CONFIG, dtype=jnp.dtype(dtype), lora_scale=scale))


def test_factors_have_their_shapes_and_sizes() -> None:
    factors = init_lora(
        bind(CONFIG, abstract_params(CONFIG)).layers, LoraConfig(rank=5, targets=("q", "down"))
    )["layers"]
    assert {name: leaf.shape for name, leaf in factors.items()} == {
        "q_lora_a": (2, 32, 5), "q_lora_b": (2, 5, 64), "down_lora_a": (2, 48, 5), "down_lora_b": (2, 5, 32),
    }  # fmt: skip
    assert all(leaf.dtype == jnp.float32 for leaf in factors.values())
    assert (np.asarray(factors["q_lora_b"]) == 0).all()
    assert float(factors["down_lora_a"].std()) == pytest.approx(48**-0.5, rel=0.1)
    assert float(factors["q_lora_a"].std()) == pytest.approx(32**-0.5, rel=0.1)


def test_factors_depend_on_seed_and_name_alone() -> None:
    params = abstract_params(CONFIG)
    few = init_lora(bind(CONFIG, params).layers, LoraConfig(rank=5, targets=("k",)), seed=3)["layers"]
    all_of_them = init_lora(bind(CONFIG, params).layers, LoraConfig(rank=5), seed=3)["layers"]
    np.testing.assert_array_equal(few["k_lora_a"], all_of_them["k_lora_a"])
    assert (np.asarray(all_of_them["k_lora_a"]) != np.asarray(all_of_them["v_lora_a"])).all()
    other = init_lora(bind(CONFIG, params).layers, LoraConfig(rank=5), seed=4)["layers"]
    assert (np.asarray(all_of_them["k_lora_a"]) != np.asarray(other["k_lora_a"])).all()
    compiled = jax.jit(lambda: init_lora(bind(CONFIG, params).layers, LoraConfig(rank=5), seed=3))()["layers"]
    np.testing.assert_allclose(compiled["up_lora_a"], all_of_them["up_lora_a"], rtol=1e-6)


def test_an_adapted_model_starts_as_the_model_it_adapts() -> None:
    params = initial_params(CONFIG)
    adapted = with_adapters(params, LoraConfig(rank=4), trained=False)
    np.testing.assert_array_equal(scores(adapted, scale=2.0), scores(params))


def test_an_adapter_adds_a_scaled_product() -> None:
    rng = np.random.default_rng(0)
    sizes = {"q": (6, 4), "q_lora_a": (6, 2), "q_lora_b": (2, 4), "q_bias": (4,)}
    weights = {name: rng.normal(size=size) for name, size in sizes.items()}
    x = rng.normal(size=(3, 5, 6))
    expected = x @ weights["q"] + weights["q_bias"] + 0.5 * (x @ weights["q_lora_a"]) @ weights["q_lora_b"]
    arrays = {name: jnp.asarray(value, jnp.float32) for name, value in weights.items()}
    for dtype, tolerance in ((jnp.float32, 1e-5), (jnp.bfloat16, 0.15)):
        out = adapted_project(layer_of(arrays), "q", jnp.asarray(x, dtype), scale=0.5)
        assert out.dtype == dtype
        np.testing.assert_allclose(out.astype(jnp.float32), expected, atol=tolerance)


@pytest.mark.parametrize("targets", [LoraConfig.targets, ("q", "v"), ("down",)])
def test_a_merged_model_gives_the_same_scores(targets: tuple[str, ...]) -> None:
    params = initial_params(CONFIG)
    config = LoraConfig(rank=4, alpha=6.0, targets=targets)
    adapted = with_adapters(params, config, trained=True)
    merged = merge_lora(CONFIG, adapted, scale=config.scale)
    assert jax.tree.structure(merged) == jax.tree.structure(params)
    again = merge_lora(CONFIG, merged, scale=2.0)  # without adapters they stay as they are
    assert all(a is b for a, b in zip(jax.tree.leaves(again), jax.tree.leaves(merged), strict=True))
    before = scores(adapted, scale=config.scale)
    assert np.abs(before - scores(params)).max() > 0.05
    np.testing.assert_allclose(scores(merged), before, atol=1e-5)


def test_merging_runs_in_float32_and_keeps_the_dtype() -> None:
    config = LoraConfig(rank=4)
    wide = with_adapters(initial_params(CONFIG), config, trained=True)
    narrow = {**wide, "layers": {**wide["layers"], "q": wide["layers"]["q"].astype(jnp.bfloat16)}}
    layers = narrow["layers"]
    merged = merge_lora(CONFIG, narrow, scale=config.scale)["layers"]["q"]
    a, b = (np.asarray(layers[f"q_lora_{part}"], np.float64) for part in "ab")
    exact = np.asarray(layers["q"].astype(jnp.float32), np.float64) + config.scale * a @ b
    assert merged.dtype == jnp.bfloat16
    # One rounding to bfloat16, at most half of 2**-7 of the value.
    error = np.abs(np.asarray(merged.astype(jnp.float32)) - exact)
    assert (error <= 2.0**-8 * np.abs(exact) * 1.01 + 1e-6).all()


def test_a_frozen_factor_has_no_gradient_and_a_product_has_the_right_ones() -> None:
    """Of the hand-written derivative, against numpy; in bfloat16 the gradient of float32 weights is float32."""
    rng = np.random.default_rng(0)
    x, w, towards = rng.normal(size=(3, 5, 8)), rng.normal(size=(8, 6)), rng.normal(size=(3, 5, 6))

    def loss(x, w):
        return jnp.sum(project(x, w).astype(jnp.float32) * towards.astype(np.float32))

    for dtype, tolerance in ((jnp.float32, 1e-5), (jnp.bfloat16, 0.1)):
        to_x, to_w = jax.grad(loss, argnums=(0, 1))(jnp.asarray(x, dtype), jnp.asarray(w, jnp.float32))
        assert (to_x.dtype, to_w.dtype) == (dtype, jnp.float32)
        np.testing.assert_allclose(to_x.astype(jnp.float32), towards @ w.T, atol=tolerance)
        np.testing.assert_allclose(to_w, np.einsum("abi,abo->io", x, towards), atol=tolerance)
    text = str(jax.make_jaxpr(jax.grad(loss))(jnp.asarray(x, jnp.float32), jnp.asarray(w, jnp.float32)))
    assert text.count("dot_general") == 2  # forward, and the gradient by x: none by the weight


@pytest.mark.parametrize("tokens", [2, 40])
def test_gradients_of_an_adapted_product_and_how_many_products_they_take(tokens: int) -> None:
    """Few tokens go through the factors, many through W + s A B; W's gradient costs a product where it is asked for."""
    rng = np.random.default_rng(0)
    sizes = {"x": (1, tokens, 12), "q": (12, 10), "q_lora_a": (12, 2), "q_lora_b": (2, 10), "q_bias": (10,)}
    exact = {name: rng.normal(size=size) for name, size in sizes.items()}
    arrays = {name: jnp.asarray(value, jnp.float32) for name, value in exact.items()}
    towards = rng.normal(size=(1, tokens, 10))

    def loss(trained, frozen):
        everything = {**frozen, **trained}
        x = everything.pop("x")
        out = adapted_project(layer_of(everything), "q", x, scale=0.5)
        return jnp.sum(out * towards.astype(np.float32))

    x, w, a, b = (
        exact[name].reshape(-1, exact[name].shape[-1]) for name in ("x", "q", "q_lora_a", "q_lora_b")
    )
    upstream = towards.reshape(tokens, 10)
    expected = {
        "x": (upstream @ (w + 0.5 * a @ b).T)[None], "q": x.T @ upstream, "q_lora_a": 0.5 * x.T @ (upstream @ b.T),
        "q_lora_b": 0.5 * (x @ a).T @ upstream, "q_bias": upstream.sum(0),
    }  # fmt: skip
    for name, gradient in jax.grad(loss)(arrays, {}).items():
        np.testing.assert_allclose(gradient, expected[name], atol=2e-5, err_msg=name)

    trained = {name: arrays.pop(name) for name in ("x", "q_lora_a", "q_lora_b")}
    program = jax.make_jaxpr(jax.grad(loss))(trained, arrays).jaxpr
    products = [equation for equation in program.eqns if equation.primitive.name == "dot_general"]
    shapes = [equation.outvars[0].aval.shape for equation in products]
    assert shapes.count((12, 10)) == (1 if tokens == 40 else 0)  # A B alone: no gradient by W


@pytest.mark.parametrize(
    ("options", "message"),
    [
        ({"rank": 0}, r"lora\.rank: expected at least 1, found 0"),
        ({"alpha": 0.0}, r"lora\.alpha: expected more than 0, found 0\.0"),
        ({"targets": ("q", "query")}, r"targets: expected different names among q, k, v, o, gate, up, down"),
        ({"targets": ()}, "found none"),
        ({"targets": ("q", "q")}, "found q, q"),
    ],
)
def test_options_that_cannot_be(options: dict, message: str) -> None:
    with pytest.raises(PrbError, match=message):
        LoraConfig(**options)
