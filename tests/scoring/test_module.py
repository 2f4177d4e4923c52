"""A loaded reward model as a flax module: its numbers, what flax does with it, and trainers that call it."""

from __future__ import annotations

import subprocess
import sys
from pathlib import Path
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
import optax
import pytest
import transformers
from flax import nnx

import prb_jax as prb
from prb_jax.scoring.reward_model import RewardModel
from tests.plain_process import plain_environment
from tests.scoring.records import ragged, record, write_model
from tests.sweeps import sweep
from tests.tiny_encoders import write_encoder

TOLERANCE = 1e-5

score_tokens = nnx.jit(lambda module, tokens, lengths: module.score_tokens(tokens, lengths))


def check_ids_below_0(module: Any, tokens: np.ndarray, lengths: np.ndarray) -> None:
    """An id below 0 is no token, but behind the end of a sequence it changes nothing."""
    places = np.arange(tokens.shape[1])[None]
    rewards = np.asarray(score_tokens(module, tokens, lengths))
    padded = np.where(places < lengths[:, None], tokens, -1)
    np.testing.assert_array_equal(score_tokens(module, padded, lengths), rewards)
    padded[1, lengths[1] - 1] = -1
    assert np.flatnonzero(np.isnan(score_tokens(module, padded, lengths))).tolist() == [1]


def test_a_batch_has_the_rewards_of_the_scorer(model: RewardModel, mixed: list[prb.Comparison]) -> None:
    batch = model.batch(model.encode(mixed[:5]))
    expected = model.score_fn(model.params, batch)
    np.testing.assert_array_equal(nnx.jit(lambda module: module(batch))(model.module), expected)
    assert model.module is model.module


@pytest.mark.parametrize("family", sweep(["llama-yarn", "qwen3", "gemma2"], few=(0, 2)))
def test_plain_sequences_have_the_scores_of_transformers(family: str, tmp_path: Path) -> None:
    """Windows, soft caps and rope tables too; what stands in the padding makes no difference."""
    folder = write_model(tmp_path, family)
    model = prb.load(folder, dtype="float32")
    tokens, lengths = ragged(5, 150, vocabulary=model.config.vocab_size)
    rewards = np.asarray(score_tokens(model.module, tokens, lengths))
    assert (rewards.shape, rewards.dtype) == ((5,), np.float32)
    assert np.std(rewards) > 0.1
    torch = pytest.importorskip("torch")
    theirs = transformers.AutoModelForSequenceClassification.from_pretrained(
        folder, attn_implementation="eager", dtype=torch.float32
    ).eval()
    for row, length in enumerate(lengths):
        with torch.inference_mode():
            ids = torch.tensor(tokens[row : row + 1, :length].astype(np.int64))
            body = theirs.base_model(input_ids=ids, use_cache=False).last_hidden_state[0, -1]
            np.testing.assert_allclose(rewards[row], float(theirs.score(body)[0]), atol=TOLERANCE, rtol=0)

    lengths[2:4] = 0, 151
    wrong = np.asarray(score_tokens(model.module, tokens, lengths))
    assert np.isnan(wrong[2:4]).all()
    np.testing.assert_array_equal(wrong[:2], rewards[:2])
    check_ids_below_0(model.module, *ragged(5, 150, vocabulary=model.config.vocab_size))
    with pytest.raises(ValueError, match=r"tokens: expected at most \d+ a row, found 5000"):
        model.module.score_tokens(np.zeros((1, 5000), np.int32), np.ones(1, np.int32))


def test_a_quantised_model_too(folder: Path) -> None:
    model = prb.load(folder, quantize="int8", dtype="float32")
    comparison = record(3, 2)
    (tree,) = model.encode([comparison])
    ids = [tree.sequence(0), tree.sequence(1)]
    lengths = np.asarray([len(one) for one in ids], np.int32)
    tokens = np.zeros((2, lengths.max()), np.int32)
    for row, one in enumerate(ids):
        tokens[row, : len(one)] = one
    np.testing.assert_allclose(
        score_tokens(model.module, tokens, lengths), model.score(comparison), atol=1e-5
    )


def test_flax_shows_splits_and_optimises_it(
    folder: Path, mixed: list[prb.Comparison], capsys: pytest.CaptureFixture[str]
) -> None:
    model = prb.load(folder, dtype="float32")
    nnx.display(model.module)
    assert "down_proj.weight" in capsys.readouterr().out
    paths = {"/".join(map(str, path)) for path, _ in nnx.to_flat_state(nnx.state(model.module, nnx.Param))}
    assert {"embed", "layers/q", "layers/input_norm", "final_norm", "score"} <= paths
    assert jax.tree.structure(nnx.to_pure_dict(nnx.state(model.module))) == jax.tree.structure(model.params)

    batch, before = model.batch(model.encode(mixed[:4])), model.score(mixed[:4])
    module = model.module
    optimizer = nnx.Optimizer(module, optax.adam(1e-2), wrt=nnx.Param)

    @nnx.jit
    def step(module, optimizer):
        def loss(module):
            rewards = module(batch)
            return jax.nn.softplus(rewards[:, 1] - rewards[:, 0]).mean()

        value, gradient = nnx.value_and_grad(loss)(module)
        optimizer.update(module, gradient)
        return value

    losses = [float(step(module, optimizer)) for _ in range(5)]
    assert losses[-1] < losses[0] - 0.1
    # The model itself stays as it was loaded.
    for old, new in zip(before, model.score(mixed[:4]), strict=True):
        np.testing.assert_array_equal(old, new)


def test_rewards_of_every_token_as_a_trainer_asks_for_them(model: RewardModel) -> None:
    """Prompts padded on the left and responses on the right, with the mask that tunix makes."""
    tokens = np.random.default_rng(0).integers(5, 200, (3, 14)).astype(np.int32)
    real = np.asarray([[0] * 3 + [1] * 9 + [0] * 2, [1] * 14, [0] * 5 + [1] * 6 + [0] * 3], bool)
    mask = real[:, None, :] & np.tri(14, dtype=bool)[None]
    positions = np.maximum(real.cumsum(1) - 1, 0)
    asked = {"positions": positions, "attention_mask": jnp.asarray(mask), "segment_ids": real}
    rewards = nnx.jit(lambda module, ids, asked: module(ids, cache=None, **asked))(
        model.module, jnp.asarray(tokens), asked
    )
    assert rewards.shape == (3, 14, 1)
    for row in range(3):
        ids = tokens[row][real[row]]
        prefixes = np.zeros((14, 14), np.int32)
        for end in range(len(ids)):
            prefixes[end, : end + 1] = ids[: end + 1]
        expected = score_tokens(model.module, prefixes, np.minimum(np.arange(1, 15), len(ids)))
        np.testing.assert_allclose(rewards[row, real[row], 0], expected[: len(ids)], atol=TOLERANCE)
    with pytest.raises(ValueError, match="expected no cache, no segments"):
        model.module(jnp.asarray(tokens), segment_ids=real)


def test_an_encoder_scores_plain_sequences(tmp_path: Path) -> None:
    write_encoder(tmp_path, "DebertaV2ForSequenceClassification", num_labels=1)
    model = prb.load(tmp_path, dtype="float32")
    tokens, lengths = ragged(5, 30, vocabulary=96)
    rewards = score_tokens(model.module, tokens, lengths)
    check_ids_below_0(model.module, tokens, lengths)
    torch = pytest.importorskip("torch")
    theirs = transformers.AutoModelForSequenceClassification.from_pretrained(tmp_path).eval()
    mask = torch.tensor(np.arange(30)[None] < lengths[:, None])
    with torch.inference_mode():
        expected = theirs(torch.tensor(tokens.astype(np.int64)), attention_mask=mask).logits[:, 0]
    np.testing.assert_allclose(rewards, expected, atol=TOLERANCE)


@pytest.mark.parametrize("part", ["mesh", "tunix"])
def test_in_a_process_of_its_own(part: str, folder: Path, model: RewardModel) -> None:
    """Sharded over four devices, and as the reward model of tunix on that mesh."""
    if part == "tunix":
        pytest.importorskip("tunix")
    run = subprocess.run(
        [sys.executable, "-m", "tests.scoring.module_on_mesh_of_four", part, str(folder)],
        env=plain_environment(), capture_output=True, text=True, timeout=600,
    )  # fmt: skip
    assert run.returncode == 0, run.stderr
    tokens, lengths = ragged(5, 40, vocabulary=200)
    expected = score_tokens(model.module, tokens, lengths)
    np.testing.assert_allclose(np.asarray(run.stdout.split(), np.float32), expected, atol=TOLERANCE)
