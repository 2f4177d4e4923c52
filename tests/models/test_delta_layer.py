"""Recurrent layers over forests, and the programs that they make; parity with transformers is in `tests/parity`."""

from __future__ import annotations

import functools
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
import pytest

from prb_jax.errors import CheckpointError
from prb_jax.models.checkpoints.load import abstract_params
from prb_jax.models.config.decoder import DecoderConfig, parse_config
from prb_jax.models.delta_rule import unit_lower_inverse
from prb_jax.models.flops import stream_flops
from prb_jax.models.model import init_params, matrix_flops_per_token
from prb_jax.reports.inspection.words import attention
from prb_jax.trees.streams import StreamOptions
from prb_jax.trees.tree import Tree, build_tree
from tests.models.compiled import jit
from tests.packed import batch_alone, packed_batch, read_trees

RAW: dict[str, Any] = {
    "architectures": ["Qwen3_5TextForSequenceClassification"], "model_type": "qwen3_5_text", "vocab_size": 96,
    "hidden_size": 32, "intermediate_size": 48, "num_hidden_layers": 2, "num_attention_heads": 4,
    "num_key_value_heads": 2, "head_dim": 16, "full_attention_interval": 2, "linear_num_key_heads": 2,
    "linear_num_value_heads": 4, "linear_key_head_dim": 8, "linear_value_head_dim": 12, "num_labels": 1,
    "rope_parameters": {"rope_type": "default", "rope_theta": 10000.0, "partial_rotary_factor": 0.25},
}  # fmt: skip


def config(**changes: Any) -> DecoderConfig:
    return parse_config(RAW | changes, where="config.json")


def forest() -> list[Tree]:
    """Two persons with two questions each, responses from one token to three chunks, equal conversations, and one tree
    that shares nothing."""
    rng = np.random.default_rng(0)
    trees = []
    for person in range(2):
        profile = [2 + person, *rng.integers(9, 96, 99)]
        for question in range(2):
            asked = [*profile, 2 + question, *rng.integers(9, 96, 40 * question)]
            trees.append(
                build_tree([[*asked, 3 + k, *rng.integers(9, 96, n)] for k, n in enumerate((0, 5, 130))])
            )
    return [*trees, trees[0], build_tree([[4], [5, 6, 7]])]


@pytest.mark.parametrize("values", ["drawn", "equal keys"])
def test_the_inverse_is_exact_where_powers_would_lose_all_digits(values: str) -> None:
    size = 64
    a = np.random.default_rng(0).standard_normal((2, 3, size, size)) * 0.3
    a = np.tril(a if values == "drawn" else np.ones_like(a), -1)
    expected = np.linalg.inv(a + np.eye(size))
    ours = jit(unit_lower_inverse)(jnp.asarray(a, jnp.float32))
    np.testing.assert_allclose(ours, expected, atol=3e-6 * np.abs(expected).max())
    weights = np.random.default_rng(1).standard_normal(a.shape)
    gradient = jit(jax.grad(lambda a: (unit_lower_inverse(a) * weights).sum()))(jnp.asarray(a, jnp.float32))
    turned = expected.swapaxes(-1, -2)
    exact = np.tril(-turned @ weights @ turned, -1)
    np.testing.assert_allclose(gradient, exact, atol=3e-6 * np.abs(exact).max())


def test_a_forest_scores_as_its_conversations_alone_do_and_so_do_its_gradients() -> None:
    """Several levels of shared beginnings, padding, and two streams of one batch."""
    chosen, trees = config(), forest()
    params = init_params(chosen, seed=1)
    options = StreamOptions(tokens=1024, streams=2, taps=chosen.taps)
    read = functools.partial(read_trees, config=chosen, dtype=jnp.dtype(jnp.float32), differentiated=True)
    mask = np.zeros((len(trees), 3), np.float32)
    for row, tree in enumerate(trees):
        mask[row, : len(tree.responses)] = np.linspace(1, -1, len(tree.responses))

    @jit
    def scored(params: Any, batch: Any) -> Any:
        def total(params: Any) -> Any:
            scores = read(params, batch)[..., 0] * mask
            return scores.sum(), scores

        return jax.grad(total, has_aux=True)(params)

    (ours, shared), (expected, alone) = (
        scored(params, batch)
        for batch in (packed_batch(trees, options=options), batch_alone(trees, taps=chosen.taps))
    )
    assert np.std(alone) > 0.1
    np.testing.assert_allclose(shared, alone, atol=1e-5)
    for (path, leaf), other in zip(jax.tree.leaves_with_path(ours), jax.tree.leaves(expected), strict=True):
        assert np.abs(leaf - other).max() <= 1e-5 * max(np.abs(other).max(), 1.0), path
        assert np.abs(other).max() > 0, path


def test_the_program_is_as_long_for_two_periods_as_for_three() -> None:
    batch = packed_batch([build_tree([[5, 6, 7], [5, 8]])], taps=4)

    def length(layers: int) -> int:
        chosen = config(num_hidden_layers=layers, full_attention_interval=4)
        params = abstract_params(chosen)
        run = jax.jit(lambda p: read_trees(p, batch, config=chosen, dtype=jnp.float32))
        return len(run.lower(params).as_text().splitlines())

    assert length(12) == length(8)


def test_operations_are_those_counted_by_hand() -> None:
    chosen = config()
    keys, values, width, mlp = 16, 48, 32, 48
    recurrent = width * (2 * keys + 2 * values + 2 * 4) + values * width
    full = width * (2 * 64 + 2 * 32) + 64 * width
    assert matrix_flops_per_token(chosen) == 2 * (recurrent + full + 2 * 3 * width * mlp)
    tree = build_tree([[5, 6, 7], [5, 8]])  # 4 tokens, at positions 0, 1, 2 and 1
    batch = packed_batch([tree], taps=4)
    of_states = 4 * (6 * 4 * 8 * 12 + 2 * 4 * (2 * keys + values))
    of_pairs = 4 * (1 + 2 + 3 + 2) * 4 * 16
    assert stream_flops(batch, chosen) == 4 * matrix_flops_per_token(chosen) + of_states + of_pairs


def test_what_is_told_of_a_model() -> None:
    assert attention(config()) == (
        "full; q and k normalised; its output is gated; 1 of 2 layers recurrent (gated delta rule): 2 heads of "
        "queries and keys of 8, 4 of values of 12"
    )


@pytest.mark.parametrize(
    ("changes", "message"),
    [
        ({"layer_types": ["linear_attention"] * 2}, "'layer_types': expected 'full_attention' for one layer at least"),
        ({"layer_types": ["full_attention"]}, "'layer_types': expected 2 entries"),
        ({"layer_types": ["full_attention", "mamba"]}, "expected a list of 'full_attention' and 'linear_attention'"),
        ({"full_attention_interval": 3}, "'full_attention_interval': expected at most 2"),
        ({"hidden_act": "gelu_pytorch_tanh"}, "'hidden_act': expected 'silu', because no other one is supported"),
        ({"linear_num_value_heads": 3}, "'linear_num_value_heads': expected a multiple of linear_num_key_heads (2)"),
        ({"linear_conv_kernel_dim": 1}, "'linear_conv_kernel_dim': expected an integer of at least 2"),
        ({"attn_output_gate": False}, "'attn_output_gate': expected True"),
    ],
)  # fmt: skip
def test_a_field_that_cannot_be_followed_is_named(changes: dict[str, Any], message: str) -> None:
    with pytest.raises(CheckpointError) as error:
        config(**changes)
    assert message in str(error.value)
