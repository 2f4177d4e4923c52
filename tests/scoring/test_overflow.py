"""Weights that overflow, and heads that say nothing, are errors that name the tensor, and no plausible numbers."""

from __future__ import annotations

import warnings
from pathlib import Path

import jax.numpy as jnp
import numpy as np
import pytest
from safetensors.numpy import load_file, save_file

import prb_jax as prb
from prb_jax.errors import PrbWarning, RunError
from prb_jax.models.layers import inverse_root_mean_square, rms_norm
from tests.training.tiny import rows, write_model


def scaled(model: Path, tensor: str, factor: float) -> Path:
    path = model / "model.safetensors"
    tensors = load_file(path)
    tensors[tensor] = tensors[tensor] * np.float32(factor)
    save_file(tensors, path, metadata={"format": "pt"})
    return model


@pytest.mark.parametrize(
    "tensor",
    [
        "model.embed_tokens.weight",
        "model.layers.0.self_attn.q_proj.weight",  # its norm would make attention uniform: scores that differ
        "model.layers.1.mlp.down_proj.weight",
    ],
)
def test_weights_that_overflow_in_a_norm_are_named(tmp_path, tensor):
    folder = scaled(write_model(tmp_path / "m"), tensor, 1e30)
    data = rows(6)
    message = rf"expected finite numbers: the tensor '{tensor}' has weights of up to .*e\+29, and those above 1e\+18"
    with pytest.raises(RunError, match=message):
        prb.evaluate(str(folder), data, progress=False)


def test_several_large_tensors_name_the_largest_weight(tmp_path):
    folder = write_model(tmp_path / "m")
    for layer in (0, 1):
        scaled(folder, f"model.layers.{layer}.self_attn.v_proj.weight", 1e12)
        scaled(folder, f"model.layers.{layer}.self_attn.o_proj.weight", 1e14)
    data = rows(6)
    message = r"no tensor is out of range, the largest weight is .*e\+13 in 'model.layers.\d.self_attn.o_proj.weight'"
    with pytest.raises(RunError, match=message):
        prb.evaluate(str(folder), data, progress=False)


def test_equal_scores_over_different_texts_are_an_error_and_of_a_handful_a_warning(tmp_path):
    folder = scaled(write_model(tmp_path / "m"), "score.weight", 0.0)
    data = rows(10)
    message = "same score, 0.0, over different texts: all weights of the tensor 'score.weight' are 0"
    for _ in range(2):  # the same command does not go past it
        with pytest.raises(RunError, match=message):
            prb.evaluate(str(folder), data, out=tmp_path / "out", progress=False)
    with pytest.warns(PrbWarning, match=message):
        prb.evaluate(str(folder), data[:5], progress=False)
    same = [prb.Comparison(id=str(n), question="q", responses=["a", "a"], labels=[1, 0]) for n in range(20)]
    with warnings.catch_warnings():
        warnings.simplefilter("error")
        assert prb.evaluate(str(folder), same, progress=False).summary["ties"] == 20
        texts = [
            prb.Comparison(id=str(n), question=f"{n}", responses=["ab", "ba"], labels=[1, 0])
            for n in range(20)
        ]
        for ties in ("baseline:length", lambda comparison: [0.0, 0.0]):
            assert prb.evaluate(ties, texts, progress=False).summary["ties"] == 20


def test_a_norm_whose_squares_overflow_gives_no_number():
    x = jnp.asarray([[1e18, 1.0], [1e20, 1.0], [0.0, 0.0]], jnp.float32)
    assert np.isfinite(np.asarray(inverse_root_mean_square(x, eps=1e-6)))[:, 0].tolist() == [
        True,
        False,
        True,
    ]
    normed = rms_norm(x, jnp.ones(2), eps=1e-6, plus_one=False, scale_after_cast=True)
    assert np.isnan(np.asarray(normed)).all(axis=1).tolist() == [False, True, False]
