"""Every architecture and rope type against transformers: one tree against K separate forwards."""

from functools import partial
from pathlib import Path
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
import pytest
import torch

from prb_jax.models.checkpoints.hf_map import file_tensors, flatten
from prb_jax.models.checkpoints.load import inspect_checkpoint, load_params
from prb_jax.models.checkpoints.save import save_params
from prb_jax.models.config.decoder import load_config
from prb_jax.models.readouts.open_model import resolve_model
from prb_jax.trees.tree import Tree, build_tree
from tests.packed import batch_alone, packed_batch, read_trees
from tests.parity.oracle import transformers_gradients, transformers_scores
from tests.sweeps import sweep
from tests.tiny_models import (
    FAMILIES,
    write_model_beside_a_vision_tower,
    write_qwen_beside_a_vision_tower,
    write_qwen_moe,
    write_tiny_model,
)

FLOAT32_TOLERANCE = 1e-5
GRADIENT_TOLERANCE = 1e-5  # of the length of the difference, relative to the gradient's


def random_tree(prefix: int, lengths: list[int], *, seed: int = 0, vocab: int = 256) -> Tree:
    rng = np.random.default_rng(seed)
    shared = rng.integers(3, vocab, prefix).tolist()
    # The first token differs between responses, so that the split falls where it is meant to.
    return build_tree(
        [[*shared, 3 + k, *rng.integers(3, vocab, n - 1).tolist()] for k, n in enumerate(lengths)]
    )


def scores(folder: Path, trees: list[Tree], *, dtype: str = "float32", alone: bool = False) -> np.ndarray:
    """[B, K, n], of all trees in one stream, or of every conversation alone."""
    config = load_config(folder)
    params = load_params(folder, config, dtype=jnp.dtype(dtype), head_dtype=jnp.float32).params
    batch = (batch_alone if alone else packed_batch)(trees, window=config.sliding_window, taps=config.taps)
    return np.asarray(jax.jit(partial(read_trees, config=config, dtype=jnp.dtype(dtype)))(params, batch))


def oracle(folder, tree: Tree, **options) -> np.ndarray:
    return transformers_scores(folder, [tree.sequence(k) for k in range(len(tree.responses))], **options)


def families(*few: str) -> list[Any]:
    """Return all of them, of which `make test` tries these."""
    return sweep(FAMILIES, few=[place for place, name in enumerate(FAMILIES) if name in few])


@pytest.mark.parametrize(
    "family",
    families(
        "llama-llama3",
        "mistral",
        "qwen2",
        "qwen3",
        "gemma",
        "gemma2",
        "gemma3",
        "olmo2",
        "olmo3",
        "mixtral",
        "gpt_oss",
        "qwen3_5",
        "qwen3_next",
        "qwen3_moe-lead",
    ),
)
@pytest.mark.parametrize("responses", [pytest.param(2, marks=pytest.mark.slow), 4])
def test_float32_scores_equal_transformers(family, responses, tmp_path):
    folder = write_tiny_model(tmp_path / "model", family, num_labels=1 if responses == 2 else 3)
    lengths = [17, 30, 9, 24][:responses]
    trees = [random_tree(150, lengths, seed=1), random_tree(61, lengths[::-1], seed=2)]
    ours = scores(folder, trees)
    for row, tree in enumerate(trees):
        np.testing.assert_allclose(ours[row], oracle(folder, tree), atol=FLOAT32_TOLERANCE, rtol=0)


@pytest.mark.parametrize("family", families("gemma2", "qwen3_5-tail"))
def test_conversations_alone_have_the_scores_of_transformers(family, tmp_path):
    folder = write_tiny_model(tmp_path / "model", family, num_labels=3)
    trees = [random_tree(150, [17, 30, 9, 24], seed=1), random_tree(61, [24, 9, 30, 17], seed=2)]
    for row, tree in zip(scores(folder, trees, alone=True), trees, strict=True):
        np.testing.assert_allclose(row, oracle(folder, tree), atol=FLOAT32_TOLERANCE, rtol=0)


# One of each kind of layer: caps and windows; half of a head turned; experts in some layers; sinks; states.
@pytest.mark.parametrize("family", families("gemma2", "glm4", "gpt_oss", "qwen3_next-dense"))
def test_gradients_of_all_parameters_equal_transformers(family, tmp_path):
    folder = write_tiny_model(tmp_path / "model", family)
    config, tree = load_config(folder), random_tree(70, [17, 30], seed=1)
    params = load_params(folder, config).params
    batch = packed_batch([tree], window=config.sliding_window, taps=config.taps)
    factors = np.asarray([1.0, -0.5], np.float32)

    def total(params: Any) -> jax.Array:
        scores = read_trees(params, batch, config=config, dtype=jnp.dtype("float32"), differentiated=True)
        return (scores[0, :, 0] * factors).sum()

    gradients = flatten(jax.device_get(jax.jit(jax.grad(total))(params)))
    ours = dict(file_tensors(gradients, config))
    theirs = transformers_gradients(folder, [tree.sequence(k) for k in range(2)], factors)
    assert ours.keys() == theirs.keys()
    for name, gradient in theirs.items():
        difference, size = np.linalg.norm(ours[name] - gradient), np.linalg.norm(gradient)
        layer, bias_of_keys = name.removeprefix("model.layers.").partition(".self_attn.k_proj.bias")[:2]
        if bias_of_keys and not config.layer_rotates[int(layer)]:
            # It moves all scores of a query alike, and softmax ignores that: both are zero but for rounding.
            difference, size = max(difference, size), np.linalg.norm(theirs[name.replace("bias", "weight")])
        # Both are zero for an expert without tokens.
        assert difference < GRADIENT_TOLERANCE * size or difference == size == 0, (name, difference, size)


@pytest.mark.parametrize("names", ["transformers 4", "transformers 5", "qwen3_5"])
def test_the_text_model_beside_a_vision_tower_scores_as_in_transformers(names, tmp_path):
    if names == "qwen3_5":
        folder = write_qwen_beside_a_vision_tower(tmp_path / "model")
    else:
        folder = write_model_beside_a_vision_tower(
            tmp_path / "model", transformers_5=names == "transformers 5"
        )
    tree = random_tree(61, [17, 30], seed=2, vocab=250)
    np.testing.assert_allclose(
        scores(folder, [tree])[0], oracle(folder, tree), atol=FLOAT32_TOLERANCE, rtol=0
    )
    resolved = resolve_model(folder)
    assert resolved.config == load_config(folder)
    assert resolved.config.original["image_token_id"] == 255  # refused where conversations hold it
    report = inspect_checkpoint(folder, resolved.config)
    reasons = set(report.ignored_keys.values())
    assert {reason for reason in reasons if "tokens after" not in reason} == {
        "reads images, not used for text"
    }
    # Exported, it is the text model.
    params = load_params(folder, resolved.config).params
    alone = save_params(params, resolved.config, tmp_path / "alone")
    np.testing.assert_allclose(oracle(alone, tree), oracle(folder, tree), atol=FLOAT32_TOLERANCE, rtol=0)


@pytest.mark.parametrize("vision", [False, True], ids=["text", "beside a vision tower"])
def test_logits_of_a_family_that_transformers_has_no_scores_of(vision, tmp_path):
    from transformers import AutoModelForCausalLM, AutoModelForImageTextToText

    folder = write_qwen_moe(tmp_path / "model", vision=vision)
    kind = AutoModelForImageTextToText if vision else AutoModelForCausalLM
    model = kind.from_pretrained(folder, attn_implementation="eager").eval()
    trees = [random_tree(70, [17, 30, 9], seed=1, vocab=250), random_tree(21, [5, 11, 9], seed=2, vocab=250)]
    resolved = resolve_model(folder, readout="vocabulary:17")
    params = load_params(folder, resolved.config).params
    batch = packed_batch(trees, taps=resolved.config.taps)
    read = partial(read_trees, config=resolved.config, dtype=jnp.dtype("float32"))
    ours = np.asarray(jax.jit(read)(params, batch))[..., 0]
    for row, tree in enumerate(trees):
        for k in range(3):
            with torch.inference_mode():
                logits = model(input_ids=torch.tensor(tree.sequence(k)[None])).logits[0, -1]
            assert abs(ours[row, k] - float(logits[17])) < FLOAT32_TOLERANCE, (row, k)


@pytest.mark.parametrize("family", families("qwen3"))
def test_bfloat16_is_as_close_to_the_truth_as_transformers_bfloat16(family, tmp_path):
    folder = write_tiny_model(tmp_path / "model", family, dtype="bfloat16")
    trees = [random_tree(90 + 7 * i, [20, 30, 11, 5], seed=i) for i in range(6)]
    ours = scores(folder, trees, dtype="bfloat16")[..., 0]
    truth = np.stack([oracle(folder, tree, dtype="float32")[:, 0] for tree in trees])
    theirs = np.stack([oracle(folder, tree, dtype="bfloat16")[:, 0] for tree in trees])
    if load_config(folder).experts is None:
        size = lambda errors: np.sqrt(np.mean(errors**2))  # noqa: E731
    else:  # rounding can choose another expert for a token, so the largest errors of a few scores are chance
        size = lambda errors: np.quantile(np.abs(errors), 0.8)  # noqa: E731
    assert size(ours - truth) <= 1.5 * size(theirs - truth)


@pytest.mark.slow
@pytest.mark.parametrize("family", FAMILIES)
@pytest.mark.parametrize("responses", [2, 4, 16])
@pytest.mark.parametrize("prefix", [0, 2000, 3900])
def test_float32_scores_equal_transformers_at_length(family, responses, prefix, tmp_path):
    folder = write_tiny_model(tmp_path / "model", family)
    lengths = np.random.default_rng(responses).integers(20, 190, responses).tolist()
    tree = random_tree(prefix, lengths, seed=4)
    ours = scores(folder, [tree])
    np.testing.assert_allclose(ours[0], oracle(folder, tree), atol=FLOAT32_TOLERANCE, rtol=0)
