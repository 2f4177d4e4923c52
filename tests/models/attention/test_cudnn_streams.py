"""Attention over packed streams by cuDNN: its masks, computed by XLA, against the mask written out and against single
trees; its lowering; one program for a data set."""

from __future__ import annotations

import functools
import re
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
import pytest

from prb_jax.models.attention import cudnn
from prb_jax.models.attention.cudnn import cudnn_stream_attention
from prb_jax.models.model import init_params
from prb_jax.models.readouts.score_tree import score_stream
from prb_jax.scoring.batching import choose_batcher
from prb_jax.trees.kernel_tables import KeyLayout, for_keys, with_key_layout
from prb_jax.trees.packing import pack_streams
from prb_jax.trees.streams import StreamBatch, StreamOptions, StreamShape, make_stream_batch
from prb_jax.trees.tree import Tree, build_tree
from tests.models.attention.test_streams import (
    assert_scores_are_those_of_trees,
    batch_of,
    dense,
    gradients,
    inputs,
)
from tests.models.compiled import jit, largest_square, text_for_cuda
from tests.models.test_decoder import family_config
from tests.packed import batch_alone, read_trees
from tests.sweeps import sweep
from tests.training.small_batches import small_config
from tests.trees.test_streams import people

by_xla = functools.partial(cudnn_stream_attention, implementation="xla")

ODD = [
    build_tree([[5]]), build_tree([[6], [7], [8, 9]]),  # no prefix, responses of a token
    build_tree([[*range(10, 60), k] for k in range(9)]),  # many responses
    build_tree([[*range(10, 60), 61, 62, 63], [*range(10, 60), 61, 62, 63], [*range(10, 60), 61]]),  # equal ones
]  # fmt: skip


def keyed_batch(trees: list[Tree], tokens: int, window: int | None = None) -> tuple[StreamBatch, Any]:
    """Two streams with tables of keys, and what stands in them."""
    options = StreamOptions(tokens=tokens, streams=2, window=window)
    (packed,) = pack_streams(trees, StreamShape(tokens, 64), options)
    keyed = with_key_layout(options, KeyLayout(longest=300, response=60, queries=128))
    return make_stream_batch(trees, packed, keyed), packed


CASES = sweep(
    [(None, 8, 2, 0), (40, 8, 2, 1), (300, 4, 4, 2), (None, 8, 1, 3), (1, 2, 2, 0), (5000, 8, 2, 5)], few=(0, 1)
)  # fmt: skip


@pytest.mark.parametrize(("window", "heads", "kv_heads", "seed"), CASES)
def test_equals_the_mask_written_out(window: int | None, heads: int, kv_heads: int, seed: int) -> None:
    """Beginnings shared two levels deep, a conversation for which the table is widened, padding; all blocks at once,
    one at a time, and some at a time with a rest."""
    tokens = 1536
    trees = [*people(2, 2, seed=seed), *people(1, 1, profile=1400, seed=seed + 3), *ODD]
    batch, _ = keyed_batch(trees, tokens, window)
    q, k, v, _ = inputs(tokens, heads=heads, kv_heads=kv_heads)
    expected, real = np.asarray(dense(q, k, v, batch, window, None)), batch.tokens > 0
    for copied_tokens in (65_536, 1, 5 * (128 + batch.table(window).keys.shape[2])):  # pyright: ignore
        attend = functools.partial(by_xla, batch=batch, window=window, copied_tokens=copied_tokens)
        out = np.asarray(jit(attend)(q, k, v))
        assert np.isfinite(out).all()
        np.testing.assert_allclose(out[real], expected[real], atol=1e-5, rtol=0)


@pytest.mark.parametrize(
    ("window", "copied_tokens"), sweep([(None, 65_536), (None, 1), (300, 1200)], few=(2,))
)
def test_gradients_are_those_of_the_mask_written_out(window: int | None, copied_tokens: int) -> None:
    """Of q, k and v; all blocks at once, one at a time, and some at a time with a rest. What stands at padding of a
    stream or of a table gives nothing."""
    tokens = 1536
    trees = [*people(2, 2, seed=1), *people(1, 1, profile=1400, seed=4), *ODD]
    batch, _ = keyed_batch(trees, tokens, window)
    arrays, real = inputs(tokens), jnp.asarray(batch.tokens > 0)
    options: dict[str, Any] = {"batch": batch, "window": window}
    ours = gradients(functools.partial(by_xla, copied_tokens=copied_tokens, **options), *arrays, real)
    whole = gradients(functools.partial(dense, softcap=None, **options), *arrays, real)
    for one, other in zip(ours, whole, strict=True):
        assert np.isfinite(one).all()
        assert np.abs(one - other).max() <= 1e-5 * np.abs(other).max()


def test_bfloat16_is_within_its_roundings() -> None:
    """One softmax, its weights and the output are rounded once each."""
    tokens = 1024
    batch, _ = keyed_batch([*people(2, 3), *ODD], tokens)
    q, k, v, _ = inputs(tokens, jnp.bfloat16)
    wide = [x.astype(jnp.float32) for x in (q / 4, k, v)]
    truth = np.asarray(dense(*wide, batch=batch, window=None, softcap=None))
    ours = jit(functools.partial(by_xla, batch=batch))(q / 4, k, v)
    assert ours.dtype == jnp.bfloat16
    bound = 2 * 2.0**-9 * float(jnp.abs(wide[2]).max()) + 1e-5
    assert np.abs(np.asarray(ours, np.float32) - truth)[batch.tokens > 0].max() <= bound


def test_other_streams_and_softcaps_are_refused() -> None:
    batch, _ = keyed_batch(people(2, 2), 1024)
    blocks, _ = batch_of(people(2, 2), StreamShape(1024, 32))
    q, k, v, _ = inputs(1024, heads=2)
    with pytest.raises(ValueError, match="no table of keys for a window of None"):
        by_xla(q, k, v, batch=blocks)
    with pytest.raises(ValueError, match="no table of keys for a window of 3"):
        by_xla(q, k, v, batch=batch, window=3)
    with pytest.raises(NotImplementedError, match="does not support softcap, found 30"):
        by_xla(q, k, v, batch=batch, softcap=30.0)


@pytest.mark.parametrize("family", sweep(["qwen3", "gemma3", "mistral"], few=(1,)))
def test_a_model_scores_streams_as_single_trees(
    family: str, tmp_path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(cudnn, "cudnn_stream_attention", by_xla)
    config, trees = family_config(family, tmp_path), people(2, 2, profile=150)
    batch, packed = keyed_batch(trees, 768, config.sliding_window)
    assert_scores_are_those_of_trees(config, trees, batch, packed)


@pytest.mark.parametrize("window", [None, 600])
def test_lowered_for_cuda(window: int | None) -> None:
    """One call of cuDNN in a loop over some blocks, and one for the rest; masks of a block, nothing of N x N."""
    rng = np.random.default_rng(0)
    trees = [build_tree([rng.integers(3, 60, 4400)]) for _ in range(3)]
    options = for_keys(StreamOptions(tokens=14_848, window=window), trees, whole=True)
    (packed,) = pack_streams(trees, StreamShape(14_848, 16), options)
    batch = make_stream_batch(trees, packed, options)
    q, k = (jax.ShapeDtypeStruct((1, 14_848, heads, 128), jnp.bfloat16) for heads in (8, 2))
    text = text_for_cuda(functools.partial(cudnn_stream_attention, batch=batch, window=window), q, k, k)
    calls = re.findall(r"custom_call @__cudnn.*", text)
    # 29 blocks of 512 queries; before them 4,416 keys, or 600 (a window and a response of one token) in whole columns:
    # two rounds of ten and nine more, or all at once.
    columns, rows = (4928, [10, 9]) if window is None else (1152, [29])
    assert len(calls) == len(rows)
    calls.sort(key=lambda call: f"{rows[0]}x512" not in call)
    for call, count in zip(calls, rows, strict=True):
        assert "__cudnn$fmhaScaleBiasSoftmax" in call
        assert "PADDING" in call
        assert "CAUSAL" not in call
        assert f"{count}x512x8x128xbf16>, tensor<{count}x{columns}x2x128xbf16>" in call
        assert f"tensor<{count}x1x512x{columns}xbf16>" in call
    assert largest_square(text) < 513


@pytest.mark.slow
def test_one_program_for_a_data_set(monkeypatch: pytest.MonkeyPatch) -> None:
    """Of the first comparisons the shapes are chosen; others follow, longer ones too, and all have their own scores."""
    monkeypatch.setattr(cudnn, "cudnn_stream_attention", by_xla)
    config = small_config(sliding_window=24, use_sliding_window=True, max_window_layers=1)
    params = init_params(config, seed=1)
    first, later = people(6, 3, profile=90), [*people(20, 3, seed=7, profile=90), *ODD]
    shaped = StreamOptions(tokens=512, streams=2, window=24)
    options = with_key_layout(shaped, KeyLayout.of(512, 512))
    batches = choose_batcher(first, options, whole=False)
    program: Any = jax.jit(functools.partial(score_stream, config=config, dtype=jnp.float32))
    alone = jit(functools.partial(read_trees, config=config, dtype=jnp.float32))
    made = 0
    for trees in (first, later):
        expected = alone(params, batch_alone(trees, window=24))
        scored: list[int] = []
        for planned in batches(trees, range(len(trees))):
            made += 1
            rows = planned.take([np.asarray(program(params, batch))[..., 0] for batch in planned.make()])
            scored += planned.members
            for member, row in zip(planned.members, rows, strict=True):
                np.testing.assert_allclose(row, expected[member, : len(row), 0], atol=1e-5)
        assert sorted(scored) == list(range(len(trees)))
    assert made > 5
    assert program._cache_size() == 1
