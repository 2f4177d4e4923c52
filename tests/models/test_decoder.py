"""The decoder's parameters, positions and read-out; its numbers are compared in tests/parity."""

from __future__ import annotations

import dataclasses
import functools
import itertools

import jax
import jax.numpy as jnp
import numpy as np
import pytest

from prb_jax.models import layers, rematerialised
from prb_jax.models.checkpoints.load import abstract_params
from prb_jax.models.config.decoder import DecoderConfig, load_config
from prb_jax.models.decoder import decode_stream, decode_stream_keeping
from prb_jax.models.lora import init_lora
from prb_jax.models.lora_config import LoraConfig
from prb_jax.models.model import abstract_model, bind, init_params, narrow_matrices
from prb_jax.models.parameter import parameters
from prb_jax.models.readouts.score_tree import score_stream
from prb_jax.models.vocabulary_heads import LanguageHead
from prb_jax.training.microbatches import named_tree
from prb_jax.trees.streams import StreamOptions
from prb_jax.trees.tree import build_tree
from tests.models.compiled import jit, largest_square, no_stack_is_converted
from tests.packed import packed_batch, read_trees
from tests.sweeps import sweep
from tests.tiny_models import FAMILIES, TINY_FAMILIES
from tests.training.small_batches import initial_params, random_trees, small_config

REMAT = ["none", "dots", "full"]

scored = jit(read_trees, static_argnames=("config", "dtype"))


def family_config(family: str, folder, **changes: int) -> DecoderConfig:
    """Read from the config.json that transformers writes, without writing weights."""
    import transformers

    tiny = TINY_FAMILIES[family]
    sizes = {
        "vocab_size": 96, "hidden_size": 48, "intermediate_size": 40, "num_hidden_layers": 3,
        "num_attention_heads": 4, "num_key_value_heads": 2, "pad_token_id": 0, "num_labels": 1,
    }  # fmt: skip
    arguments = {**sizes, **tiny.arguments, "architectures": [tiny.model_class], **changes}
    getattr(transformers, tiny.config_class)(**arguments).save_pretrained(folder)
    return load_config(folder)


@pytest.mark.parametrize("family", sweep(["gpt_oss", "qwen3_5", "qwen3_next"], few=(1,)))
def test_matrices_in_bfloat16_give_the_scores_of_the_float32_ones_that_they_were(family, tmp_path) -> None:
    """The reference of a policy is kept so: before the first update, its distance from the policy is zero."""
    config, rng = family_config(family, tmp_path, num_hidden_layers=2), np.random.default_rng(0)
    params = jax.tree.map(
        lambda x: x + 0.1 * rng.normal(size=x.shape).astype(np.float32), init_params(config)
    )
    narrow = narrow_matrices(params["layers"], config, jnp.bfloat16)
    assert {narrow[name].dtype for name in ("q", "down")} == {jnp.dtype(jnp.bfloat16)}
    batch = packed_batch(random_trees(2), window=config.sliding_window, taps=config.taps)
    of_each = [
        scored({**params, "layers": each}, batch, config=config, dtype=jnp.dtype(jnp.bfloat16))
        for each in (narrow, params["layers"])
    ]
    np.testing.assert_array_equal(*of_each)


@pytest.mark.parametrize("instructions", [True, False])
@pytest.mark.parametrize("family", ["qwen3", "gemma2", "qwen3_moe", "qwen3_next"])
@pytest.mark.parametrize("program", [score_stream, decode_stream_keeping])
def test_in_bfloat16_no_program_converts_all_layers(
    program, family, instructions, tmp_path, monkeypatch
) -> None:
    """XLA for CPUs moves bfloat16 as float32: a slice of a stack would convert the whole stack first."""
    monkeypatch.setattr(layers, "multiplies_bfloat16", lambda: instructions)
    config = family_config(family, tmp_path, hidden_size=256, intermediate_size=512, num_hidden_layers=8)
    batch = packed_batch(TREES, window=config.sliding_window, taps=config.taps)

    def run(params, dtype):
        if program is score_stream:
            return score_stream(params, batch, config=config, dtype=dtype)
        return decode_stream_keeping(bind(config, params), batch, dtype=dtype)

    no_stack_is_converted(config, run)


def gradient_of(config, batch, dtype, **options):
    """Function of (trained, frozen) -> gradients of what the head reads by the trained arrays of layers."""

    def total(trained, frozen):
        params = {**frozen, "layers": {**frozen["layers"], **trained}}
        return (score_stream(params, batch, config=config, dtype=jnp.dtype(dtype), **options) ** 2).sum()

    return jax.grad(total)


def adapters_of(config, frozen):
    layers = bind(config, frozen).layers
    names = tuple(name for name in ("q", "o", "delta_o", "down") if hasattr(layers, name))
    drawn = init_lora(layers, LoraConfig(rank=2, targets=names))["layers"]
    keys = jax.random.split(jax.random.key(1), len(drawn))
    return {
        name: 0.1 * jax.random.normal(key, drawn[name].shape) for name, key in zip(drawn, keys, strict=True)
    }


@pytest.mark.parametrize(
    ("family", "dtype", "remat"),
    sweep(
        list(
            itertools.product(["qwen3", "gemma2", "qwen3_moe", "qwen3_next"], ["float32", "bfloat16"], REMAT)
        ),
        few=(1, 4, 11, 15, 19),
    ),
)
def test_layers_that_read_their_frozen_weights_have_the_same_gradients(
    family, dtype, remat, tmp_path
) -> None:
    """Against a backward pass that reads all weights through indices and keeps everything."""
    config = family_config(family, tmp_path, num_hidden_layers=4)
    batch = packed_batch(TREES, window=config.sliding_window, taps=config.taps)
    frozen = jit(functools.partial(init_params, config, dtype=jnp.dtype(dtype)))()
    trained = adapters_of(config, frozen)
    found = jit(gradient_of(config, batch, dtype, differentiated=True, remat=remat))(trained, frozen)
    expected = jit(gradient_of(config, batch, dtype))(trained, frozen)
    wide = jax.tree.map(lambda leaf: leaf.astype(jnp.float32), frozen)
    true = expected if dtype == "float32" else jit(gradient_of(config, batch, "float32"))(trained, wide)

    def apart(name, one, other):
        return float(jnp.linalg.norm(one[name] - other[name]) / jnp.linalg.norm(true[name]))

    # What is computed again is rounded elsewhere, so bfloat16 is held to its distance from float32.
    most = 1e-5 if dtype == "float32" else 2 * max(apart(name, expected, true) for name in found)
    for name, leaf in found.items():
        assert float(jnp.abs(leaf).max()) > 0, name
        assert apart(name, found, true) < most, (name, apart(name, found, true), most)


@pytest.mark.parametrize("adapted", [True, False])
def test_weights_of_bfloat16_that_are_not_frozen_have_their_gradients(adapted, tmp_path) -> None:
    """Training keeps float32, but whoever differentiates the scores of a model may ask for these."""
    config = family_config("qwen3", tmp_path)
    params, batch = jit(functools.partial(init_params, config, dtype=jnp.bfloat16))(), packed_batch(TREES)
    frozen = {**params, "layers": {**params["layers"], **(adapters_of(config, params) if adapted else {})}}
    trained = {name: params["layers"][name] for name in ("q", "down", "input_norm")}
    found, expected = (
        jit(gradient_of(config, batch, "bfloat16", **options))(trained, frozen)
        for options in ({"differentiated": True, "remat": "dots"}, {})
    )
    for name, leaf in found.items():
        assert leaf.dtype == jnp.bfloat16
        apart, size = (
            jnp.linalg.norm(x.astype(jnp.float32)) for x in (leaf - expected[name], expected[name])
        )
        assert size > 0
        assert apart < 2e-2 * size, name


@pytest.mark.parametrize(
    ("family", "dtype"),
    sweep(
        [("qwen3", "float32"), ("qwen3", "bfloat16"), ("qwen3_next", "float32"), ("qwen3_next", "bfloat16")],
        few=(0, 1, 2),
    ),
)
def test_training_adapters_copies_no_frozen_stack(family, dtype, tmp_path, monkeypatch) -> None:
    config = family_config(family, tmp_path, hidden_size=256, intermediate_size=512, num_hidden_layers=8)
    batch = packed_batch(TREES, window=config.sliding_window, taps=config.taps)
    frozen = abstract_params(config, dtype=jnp.dtype(dtype))
    trained = jax.eval_shape(functools.partial(adapters_of, config), frozen)
    gradient = gradient_of(config, batch, dtype, differentiated=True, remat="full")

    def taken() -> int:
        program = jit(lambda *given: gradient(*given)).lower(trained, frozen).compile()
        return program.memory_analysis().temp_size_in_bytes

    read = taken()
    monkeypatch.setattr(rematerialised, "frozen", lambda layers, dtype: False)
    sliced = taken()
    stacks = sum(leaf.size * leaf.dtype.itemsize for leaf in jax.tree.leaves(frozen["layers"]))
    assert read < sliced - stacks / 2


SMALL = small_config(num_labels=2)
LANGUAGE = dataclasses.replace(SMALL, head=LanguageHead(tied=True))
TREES = [build_tree([[5, 6, 7, 8, 9], [5, 6, 7, 10, 11, 12]]), build_tree([[3], [4, 5]])]
BATCH = packed_batch(TREES)


@pytest.mark.parametrize("family", FAMILIES)
def test_the_module_and_the_checkpoint_have_one_tree(family: str, tmp_path) -> None:
    """Same names, shapes and dtypes; every leaf has a place on the mesh."""
    config = family_config(family, tmp_path, num_labels=3)
    ours = jax.eval_shape(lambda: init_params(config, dtype=jnp.bfloat16))
    file = abstract_params(config, dtype=jnp.bfloat16)
    assert jax.tree.structure(ours) == jax.tree.structure(file)
    declared = dict(parameters(abstract_model(config)))
    for (path, leaf), other in zip(jax.tree.leaves_with_path(ours), jax.tree.leaves(file), strict=True):
        assert (leaf.shape, leaf.dtype) == (other.shape, other.dtype), path
        place = tuple(key.key for key in path)
        assert len(declared[place].get_metadata("axes")) + (place[0] == "layers") == len(leaf.shape)


@pytest.mark.parametrize("family", ["llama-yarn", "qwen2", "gemma3"])
def test_random_parameters_have_useful_sizes(family: str, tmp_path) -> None:
    config = family_config(family, tmp_path)
    params = jit(lambda: init_params(config, seed=3))()
    # Variance 1 / inputs; norms are the identity in the family's own parametrisation; biases are zero.
    assert float(params["layers"]["down"].std()) == pytest.approx(40**-0.5, rel=0.1)
    assert float(params["score"].std()) == pytest.approx(48**-0.5, rel=0.4)
    identity = 0.0 if family == "gemma3" else 1.0
    for norm in (params["final_norm"], params["layers"]["input_norm"]):
        np.testing.assert_array_equal(norm, np.full_like(norm, identity))
    for name in ("q_bias", "gate_bias"):
        if name in params["layers"]:
            assert not params["layers"][name].any()
    # The residual stream starts at size one, scaled embedding or not.
    scale = config.embedding_scale or 1.0
    assert float(scale * params["embed"].std()) == pytest.approx(1.0, rel=0.05)
    same, other = (jit(lambda seed=seed: init_params(config, seed=seed))() for seed in (3, 4))
    np.testing.assert_array_equal(params["layers"]["q"], same["layers"]["q"])
    assert (params["layers"]["q"] != other["layers"]["q"]).all()
    # No two layers and no two matrices are drawn alike.
    assert (params["layers"]["q"][0] != params["layers"]["q"][1]).all()
    assert (params["layers"]["gate"] != params["layers"]["up"]).all()


def test_scores_are_float32_logits_at_the_read_position() -> None:
    """The last norm and a head, linear or of a language, by hand, at the token that `read` names."""
    params = init_params(SMALL)
    decode = functools.partial(decode_stream, dtype=jnp.float32, reads_only=False)
    hidden = jit(lambda params, batch: decode(bind(SMALL, params), batch))(params, BATCH)
    assert hidden.shape == (1, 128, 32)
    assert np.isfinite(hidden).all()  # of padding too
    for reads in (BATCH.reads, np.maximum(BATCH.reads - 1, 0)):
        moved = dataclasses.replace(BATCH, reads=reads)
        scores = scored(params, moved, config=SMALL, dtype=jnp.float32)
        logits = scored(params, moved, config=LANGUAGE, dtype=jnp.float32)
        assert (scores.shape, scores.dtype) == ((2, 2, 2), jnp.float32)
        for row, response in ((0, 0), (0, 1), (1, 0), (1, 1)):
            state = np.asarray(hidden[0, reads[0, BATCH.places[row, response]]], np.float64)
            normed = state / np.sqrt(np.mean(state**2) + 1e-6) * np.asarray(params["final_norm"])
            np.testing.assert_allclose(scores[row, response], normed @ np.asarray(params["score"]), atol=2e-6)
            np.testing.assert_allclose(logits[row, response], np.asarray(params["embed"]) @ normed, atol=2e-5)


def test_bfloat16_activations_give_float32_scores() -> None:
    """Close responses must not tie by rounding: the scores are no multiples of a bfloat16 step."""
    narrow, wide = (
        scored(init_params(SMALL), BATCH, config=SMALL, dtype=x) for x in (jnp.bfloat16, jnp.float32)
    )
    assert narrow.dtype == jnp.float32
    rounded = narrow.astype(jnp.bfloat16).astype(jnp.float32)
    assert float((narrow != rounded).mean()) > 0.9
    assert 0 < float(jnp.abs(narrow - wide).max()) < 0.1


@pytest.mark.parametrize("family", sweep(["qwen3", "gemma2", "qwen3_5"], few=(1,)))
def test_gradients_are_finite_and_reach_every_parameter(family: str, tmp_path) -> None:
    """With a stream of padding only, windows, soft-caps and mixed layers."""
    config = family_config(family, tmp_path)
    params = init_params(config, seed=1)
    trees = [build_tree([[*range(5, 40), 7, 8, 9], [*range(5, 40), 10, 11]])]
    options = StreamOptions(tokens=128, streams=2, window=config.sliding_window, taps=config.taps)
    batch = packed_batch(trees, options=options)

    def loss(params):
        scores = read_trees(params, batch, config=config, dtype=jnp.float32)[..., 0]
        return scores[0, 0] - scores[0, 1]

    gradients = jit(jax.grad(loss))(params)
    for path, leaf in jax.tree.leaves_with_path(gradients):
        assert np.isfinite(leaf).all(), path
        assert np.abs(leaf).max() > 0, path


def test_the_number_of_layers_does_not_change_the_program() -> None:
    """Layers are scanned: the text of the program is as long for eight as for two."""

    def length(layers: int) -> int:
        kinds: dict[str, tuple[object, ...]] = {
            "layer_windows": (False,) * layers,
            "layer_rotates": (True,) * layers,
        }
        kinds["layer_mixers"] = SMALL.layer_mixers[:1] * layers
        config = dataclasses.replace(SMALL, num_hidden_layers=layers, **kinds)
        params = abstract_params(config)
        lowered = jax.jit(lambda p: read_trees(p, BATCH, config=config, dtype=jnp.float32)).lower(params)
        return len(lowered.as_text().splitlines())

    assert length(8) == length(2)


def test_no_square_of_the_prefix_in_the_whole_program(tmp_path) -> None:
    """Masks and positions neither, in a model that mixes windows and full attention."""
    config = family_config("gemma2", tmp_path)
    trees = [build_tree([[*range(9)] * 220 + [1], [*range(9)] * 220 + [2]])]
    batch = packed_batch(trees, window=config.sliding_window)
    params = abstract_params(config)
    program = jit(lambda p, b: read_trees(p, b, config=config, dtype=jnp.float32))
    text = program.lower(params, batch).compile().as_text()
    assert largest_square(text) < 1024


def test_a_soft_prompt_takes_the_place_of_the_first_tokens() -> None:
    """Rows of the embedding given as soft prompts change nothing; their gradients are those of rows that are used."""
    config, trees = small_config(), random_trees(3)
    params = initial_params(config)
    run = jax.jit(functools.partial(read_trees, config=config, dtype=jnp.dtype("float32")))
    plain = np.asarray(run(params, packed_batch(trees)))
    first = np.stack([tree.prefix[:3] for tree in trees] + [np.zeros(3, np.int32)])
    prompts = jnp.take(params["embed"], jnp.asarray(first), axis=0)
    named = packed_batch([named_tree(tree, row, 3) for row, tree in enumerate(trees)])
    np.testing.assert_allclose(run(params, named, soft_prompts=prompts), plain, atol=1e-6, rtol=0)
    assert np.abs(np.asarray(run(params, named)) - plain).max() > 1e-3
    gradient = jax.grad(lambda prompts: run(params, named, soft_prompts=prompts).sum())(prompts)
    size = np.abs(np.asarray(gradient)).max(axis=(1, 2))
    assert (size[:3] > 1e-3).all()
    assert size[3] == 0
