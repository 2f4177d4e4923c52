"""Attention by cuDNN: its masks, computed by XLA, against the mask written out; its lowering."""

from __future__ import annotations

import functools
import re

import jax
import jax.numpy as jnp
import numpy as np
import pytest

from prb_jax.models.attention.cudnn import cudnn_attention
from prb_jax.readouts.score_tree import score_tree
from prb_jax.trees.batches import Bucket
from tests.models.attention.test_blockwise import Case
from tests.models.compiled import jit, largest_square, text_for_cuda
from tests.training.small_batches import batch_of, initial_params, random_trees, small_config

# Ragged prefixes, one of them empty, one of a single token and one full; groups of one, two and eight; responses of one
# token, many responses and one; no place for a prefix; windows of one token, inside a response, across the edge of the
# prefix and beyond everything.
CASES = [
    Case(Bucket(96, 2, 32), (0, 1, 50, 96)),
    Case(Bucket(40, 16, 8), (40, 7), heads=8, kv_heads=1),
    Case(Bucket(33, 1, 20), (33, 0), heads=3, kv_heads=3, head_dim=24),
    Case(Bucket(32, 16, 1), (32, 0), head_dim=64),
    Case(Bucket(0, 3, 20), (0, 0)),
    Case(Bucket(24, 2, 10), (24, 9, 0), window=1),
    Case(Bucket(96, 3, 40), (96, 30, 0), window=33, heads=8, kv_heads=2),
    Case(Bucket(70, 2, 50), (33, 70, 0), window=60, head_dim=128),
    Case(Bucket(24, 2, 10), (24, 9), window=1000),
]


@functools.cache
def run(case: Case, copied_tokens: int = 10_000):
    options = {name: value for name, value in case.options.items() if name != "softcap"}
    return jit(
        functools.partial(cudnn_attention, **options, copied_tokens=copied_tokens, implementation="xla")
    )


@pytest.mark.parametrize("case", CASES, ids=str)
def test_equals_the_mask_written_out(case: Case) -> None:
    assert (case.check(run(case))[~case.real()] == 0).all()


@pytest.mark.parametrize("case", [CASES[1], CASES[6]], ids=str)
def test_responses_in_turn_are_the_same(case: Case) -> None:
    """Copies of one response a tree and turn; of a few of the 16; of all of them."""
    for copied_tokens in (1, 5 * len(case.lengths) * 48):
        case.check(run(case, copied_tokens))


@pytest.mark.parametrize("case", [CASES[1], CASES[7]], ids=str)
def test_bfloat16_is_within_its_roundings(case: Case) -> None:
    case.check(run(case), jnp.bfloat16)


@pytest.mark.parametrize("window", [None, 600])
def test_lowered_for_cuda(window: int | None) -> None:
    """Two calls of cuDNN, the second in a loop over responses; masks of one response, and nothing of T x T."""
    bucket, rows = Bucket(2000, 24, 100), 2
    q, k = (jax.ShapeDtypeStruct((rows, bucket.tokens, heads, 128), jnp.bfloat16) for heads in (8, 2))
    lengths = jax.ShapeDtypeStruct((rows,), jnp.int32)

    def program(q, k, v, lengths):
        return cudnn_attention(q, k, v, bucket=bucket, prefix_lengths=lengths, window=window)

    text = text_for_cuda(program, q, k, k, lengths)
    names = ("__cudnn$fmhaSoftmax", "__cudnn$fmhaScaleBiasSoftmax")
    causal, written = (re.findall(rf"custom_call @{re.escape(name)}\(.*", text) for name in names)
    assert len(causal) == len(written) == 1
    assert "PADDING_CAUSAL" in causal[0]
    assert f"sliding_window_length\\22: {window or 0}" in causal[0]
    assert "2x2000x8x128xbf16" in causal[0]
    # 12 or all responses of both trees at a time; keys: 100 own, 2000 or 599 of the prefix, filled to 64 columns.
    responses, keys, masks = (24, 2112, 1) if window is None else (48, 704, 48)
    assert f"{responses}x100x8x128xbf16>, tensor<{responses}x{keys}x2x128xbf16>" in written[0]
    assert f"tensor<{masks}x1x100x{keys}xbf16>" in written[0]
    assert largest_square(text) < 2112


def test_a_decoder_with_it_scores_as_with_blocks() -> None:
    config = small_config(
        model_type="mistral", architectures=["MistralForSequenceClassification"], sliding_window=24
    )
    params, batch = initial_params(config), batch_of(random_trees(2), rows=3)  # the last row only fills up

    def scores(attention):
        options = {"config": config, "dtype": jnp.dtype("float32"), "attention": attention}
        return np.asarray(jit(functools.partial(score_tree, **options))(params, batch))[:2]

    ours = scores(functools.partial(cudnn_attention, implementation="xla"))
    np.testing.assert_allclose(ours, scores(None), atol=2e-5, rtol=0)
