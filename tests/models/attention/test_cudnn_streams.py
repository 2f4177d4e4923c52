"""Attention over packed streams by cuDNN: its masks, computed by XLA, against the mask written out and against single
trees; its lowering; one program for a data set; when it is chosen."""

from __future__ import annotations

import functools
import re
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
import pytest

from prb_jax.errors import CheckpointError, MeshError
from prb_jax.models.attention import cudnn
from prb_jax.models.attention.choice import (
    choose_attention,
    stream_attention_name,
    trained_stream_attention,
    wanted_attention,
)
from prb_jax.models.attention.cudnn import cudnn_attention, cudnn_stream_attention
from prb_jax.models.attention.streams import stream_attention
from prb_jax.models.random_params import init_params
from prb_jax.readouts.score_tree import score_stream, score_tree
from prb_jax.scoring.batching import choose_batcher
from prb_jax.trees.batches import Bucket, make_batch
from prb_jax.trees.key_tables import KeyLayout
from prb_jax.trees.packing import StreamOptions, StreamShape, for_keys, pack_streams, with_key_layout
from prb_jax.trees.streams import StreamBatch, make_stream_batch
from prb_jax.trees.tree import Tree, build_tree
from tests.models.attention.compiled_shapes import largest_square
from tests.models.attention.kernel_on_mesh import devices, on_mesh
from tests.models.attention.test_cudnn import _as_in_hlo, _with_cudnn
from tests.models.attention.test_streams import dense, jit
from tests.models.test_decoder import family_config
from tests.sweeps import sweep
from tests.training.small_batches import small_config
from tests.trees.test_streams import people

by_xla = functools.partial(cudnn_stream_attention, implementation="xla")

ODD = [
    build_tree([[5]]), build_tree([[6], [7], [8, 9]]),  # no prefix, responses of a token
    build_tree([[*range(10, 60), k] for k in range(9)]),  # many responses
    build_tree([[*range(10, 60), 61, 62, 63], [*range(10, 60), 61, 62, 63], [*range(10, 60), 61]]),  # equal ones
]  # fmt: skip


def batches_of(
    trees: list[Tree], tokens: int, window: int | None = None
) -> tuple[StreamBatch, StreamBatch, Any]:
    """Two streams twice, with tables of keys and with tables of blocks; and what stands in them, if in both."""
    options = StreamOptions(tokens=tokens, streams=2, window=window)
    keyed = with_key_layout(options, KeyLayout(longest=300, response=60, queries=128))
    (packed,) = pack_streams(trees, StreamShape(tokens, 64), options)
    return make_stream_batch(trees, packed, keyed), make_stream_batch(trees, packed, options), packed


def real_tokens(packed: Any, tokens: int) -> np.ndarray:
    used = [stream.tokens for stream in packed]
    return np.arange(tokens)[None] < np.asarray([*used, 0][:2])[:, None]


def inputs(
    tokens: int, *, heads: int, kv_heads: int, size: int = 8, dtype: Any = jnp.float32
) -> list[jax.Array]:
    rng = np.random.default_rng(0)
    shapes = [(2, tokens, count, size) for count in (heads, kv_heads, kv_heads)]
    return [jnp.asarray(rng.normal(size=shape), dtype) for shape in shapes]


CASES = sweep(
    [(None, 8, 2, 0), (40, 8, 2, 1), (300, 4, 4, 2), (None, 8, 1, 3), (1, 2, 2, 0), (5000, 8, 2, 5)], few=(0, 1, 2)
)  # fmt: skip


@pytest.mark.parametrize(("window", "heads", "kv_heads", "seed"), CASES)
def test_equals_the_mask_written_out(window: int | None, heads: int, kv_heads: int, seed: int) -> None:
    """Beginnings shared two levels deep, a conversation for which the table is widened, padding; all blocks at once,
    one at a time, and some at a time with a rest."""
    tokens = 1536
    trees = [*people(2, 2, seed=seed), *people(1, 1, profile=1400, seed=seed + 3), *ODD]
    batch, blocks, packed = batches_of(trees, tokens, window)
    q, k, v = inputs(tokens, heads=heads, kv_heads=kv_heads)
    options: dict[str, Any] = {"window": window}
    expected = np.asarray(dense(q, k, v, batch, window, None))
    real = real_tokens(packed, tokens)
    program = jit(functools.partial(stream_attention, batch=blocks, **options))
    theirs = np.asarray(program(q, k, v))
    for copied_tokens in (65_536, 1, 5 * (128 + batch.table(window).keys.shape[2])):  # pyright: ignore
        attend = functools.partial(by_xla, batch=batch, copied_tokens=copied_tokens, **options)
        found = np.asarray(jit(attend)(q, k, v))
        assert np.isfinite(found).all()
        np.testing.assert_allclose(found[real], expected[real], atol=1e-5, rtol=0)
        np.testing.assert_allclose(found[real], theirs[real], atol=1e-5, rtol=0)


@pytest.mark.parametrize(("window", "copied_tokens"), [(None, 65_536), (None, 1), (300, 1200)])
def test_gradients_are_those_of_the_mask_written_out(window: int | None, copied_tokens: int) -> None:
    """Of q, k and v; all blocks at once, one at a time, and some at a time with a rest. What stands at padding of a
    stream or of a table gives nothing."""
    tokens = 1536
    trees = [*people(2, 2, seed=1), *people(1, 1, profile=1400, seed=4), *ODD]
    batch, _, packed = batches_of(trees, tokens, window)
    arrays = inputs(tokens, heads=8, kv_heads=2)
    towards = (
        np.random.default_rng(1).normal(size=arrays[0].shape) * real_tokens(packed, tokens)[..., None, None]
    )

    def gradients(attend: Any) -> list[np.ndarray]:
        def total(*arrays: jax.Array) -> jax.Array:
            return jnp.sum(attend(*arrays) * jnp.asarray(towards, jnp.float32))

        return [np.asarray(x) for x in jit(jax.grad(total, (0, 1, 2)))(*arrays)]

    options: dict[str, Any] = {"batch": batch, "window": window}
    ours = gradients(functools.partial(by_xla, copied_tokens=copied_tokens, **options))
    theirs = gradients(functools.partial(dense, softcap=None, **options))
    for found, expected in zip(ours, theirs, strict=True):
        assert np.isfinite(found).all()
        assert np.abs(found - expected).max() <= 1e-5 * np.abs(expected).max()


def test_bfloat16_is_within_its_roundings() -> None:
    """The bound of padded trees: one softmax, its weights and the output rounded once each."""
    tokens = 1024
    batch, _, packed = batches_of([*people(2, 3), *ODD], tokens)
    q, k, v = inputs(tokens, heads=8, kv_heads=2, dtype=jnp.bfloat16)
    wide = [x.astype(jnp.float32) for x in (q / 4, k, v)]
    truth = np.asarray(dense(*wide, batch=batch, window=None, softcap=None))
    ours = jit(functools.partial(by_xla, batch=batch))(q / 4, k, v)
    assert ours.dtype == jnp.bfloat16
    bound = 2 * 2.0**-9 * float(jnp.abs(wide[2]).max()) + 1e-5
    assert np.abs(np.asarray(ours, np.float32) - truth)[real_tokens(packed, tokens)].max() <= bound


def test_other_streams_and_softcaps_are_refused() -> None:
    batch, blocks, _ = batches_of(people(2, 2), 1024)
    q, k, v = inputs(1024, heads=2, kv_heads=2)
    with pytest.raises(ValueError, match="no table of keys for a window of None"):
        by_xla(q, k, v, batch=blocks)
    with pytest.raises(ValueError, match="no table of keys for a window of 3"):
        by_xla(q, k, v, batch=batch, window=3)
    with pytest.raises(NotImplementedError, match="knows no softcap, found 30"):
        by_xla(q, k, v, batch=batch, softcap=30.0)


@pytest.mark.parametrize("family", sweep(["qwen3", "gemma3", "mistral"], few=(1,)))
def test_a_model_scores_streams_as_single_trees(
    family: str, tmp_path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(cudnn, "cudnn_stream_attention", by_xla)
    config = family_config(family, tmp_path)
    params = init_params(config, seed=1)
    trees = people(2, 2, profile=150)
    batch, _, packed = batches_of(trees, 768, config.sliding_window)
    found = np.asarray(jit(functools.partial(score_stream, config=config, dtype=jnp.float32))(params, batch))
    alone = jit(functools.partial(score_tree, config=config, dtype=jnp.float32))
    expected = alone(params, make_batch(trees, Bucket(320, 4, 48), batch=len(trees)))
    for row, stream in zip(found, packed, strict=False):
        wanted = np.concatenate(
            [expected[member, : len(trees[member].responses)] for member in stream.members]
        )
        np.testing.assert_allclose(row[: len(wanted)], wanted, atol=1e-5)


@pytest.mark.parametrize("window", [None, 600])
def test_lowered_for_cuda(window: int | None, monkeypatch: pytest.MonkeyPatch) -> None:
    """One call of cuDNN in a loop over some blocks, and one for the rest; masks of a block, nothing of N x N."""
    _with_cudnn(monkeypatch)
    rng = np.random.default_rng(0)
    trees = [build_tree([rng.integers(3, 60, 4400)]) for _ in range(3)]
    options = for_keys(StreamOptions(tokens=14_848, window=window), trees, whole=True)
    (packed,) = pack_streams(trees, StreamShape(14_848, 16), options)
    batch = make_stream_batch(trees, packed, options)
    q, k = (jax.ShapeDtypeStruct((1, 14_848, heads, 128), jnp.bfloat16) for heads in (8, 2))
    name = "__cudnn$fmhaScaleBiasSoftmax"
    export = jax.export.export(
        jax.jit(functools.partial(cudnn_stream_attention, batch=batch, window=window)),
        platforms=("cuda",),
        disabled_checks=[jax.export.DisabledSafetyCheck.custom_call(name)],
    )
    text = export(q, k, k).mlir_module()
    calls = re.findall(r"custom_call @__cudnn.*", text)
    # 29 blocks of 512 queries; before them 4,416 keys, or 600 (a window and a response of one token) in whole columns:
    # two rounds of ten and nine more, or all at once.
    columns, rows = (4928, [10, 9]) if window is None else (1152, [29])
    assert len(calls) == len(rows)
    calls.sort(key=lambda call: f"{rows[0]}x512" not in call)
    for call, count in zip(calls, rows, strict=True):
        assert name in call
        assert "PADDING" in call
        assert "CAUSAL" not in call
        assert f"{count}x512x8x128xbf16>, tensor<{count}x{columns}x2x128xbf16>" in call
        assert f"tensor<{count}x1x512x{columns}xbf16>" in call
    assert largest_square(re.sub(r"tensor<([\dx]+)x(\w+)>", _as_in_hlo, text)) < 513


def test_on_meshes_streams_and_heads_are_split() -> None:
    found = on_mesh("cudnn-streams")
    assert max(found["differences"]) < 2e-5
    assert found["shard"] == [1, 512, 2, 16]
    assert found["calls"] == 1


@pytest.mark.slow
def test_one_program_for_a_data_set(monkeypatch: pytest.MonkeyPatch) -> None:
    """Of the first comparisons the shapes are chosen; others follow, longer ones too, and all have their own scores."""
    monkeypatch.setattr(cudnn, "cudnn_stream_attention", by_xla)
    config = small_config(sliding_window=24, use_sliding_window=True, max_window_layers=1)
    params = init_params(config, seed=1)
    first, later = people(6, 3, profile=90), [*people(20, 3, seed=7, profile=90), *ODD]
    shaped = StreamOptions(tokens=512, streams=2, window=24)
    options = with_key_layout(shaped, KeyLayout.of(512, 512))
    batches = choose_batcher(first, options, count=len(first) + len(later), whole=False)
    program: Any = jax.jit(functools.partial(score_stream, config=config, dtype=jnp.float32))
    alone = jit(functools.partial(score_tree, config=config, dtype=jnp.float32))
    made = 0
    for trees in (first, later):
        expected = alone(params, make_batch(trees, Bucket(256, 9, 48), batch=128))
        scored: list[int] = []
        for planned in batches(trees, range(len(trees))):
            made += 1
            rows = planned.take(np.asarray(program(params, planned.make()))[..., 0])
            scored += planned.members
            for member, row in zip(planned.members, rows, strict=True):
                np.testing.assert_allclose(row, expected[member, : len(row), 0], atol=1e-5)
        assert sorted(scored) == list(range(len(trees)))
    assert made > 5
    assert program._cache_size() == 1


def test_the_machine_is_asked_with_a_small_program_of_streams(monkeypatch: pytest.MonkeyPatch) -> None:
    """Where they are wanted, with and without a window; what is refused is one line."""
    _with_cudnn(monkeypatch)
    asked: list[int | None] = []

    def attend(*arrays: Any, window: int | None, **options: Any) -> jax.Array:
        asked.append(window)
        return cudnn_stream_attention(*arrays, window=window, **options)

    monkeypatch.setattr(cudnn, "cudnn_stream_attention", attend)
    refusal = functools.partial(cudnn._refusal.__wrapped__, 4, 2)
    assert "multiple of 8, but got 36" in (refusal(36, None, True, "bfloat16", True) or "")
    assert asked == []  # of padded trees already
    monkeypatch.setattr(cudnn, "cudnn_attention", lambda q, *arrays, **options: q)
    assert "multiple of 8, but got 36" in (refusal(36, None, True, "bfloat16", True) or "")
    assert refusal(64, None, True, "bfloat16", False) is None
    assert asked == [None]


GPU, BFLOAT16 = devices("gpu"), jnp.dtype("bfloat16")


def test_chosen_in_bfloat16_where_cudnn_takes_the_model(monkeypatch: pytest.MonkeyPatch) -> None:
    """To score and to train; a mesh that splits tokens, float32 and other wishes get padded trees."""
    monkeypatch.setattr(cudnn, "_refusal", lambda *sizes: None)
    config = small_config()
    for choose in (stream_attention_name, trained_stream_attention):
        assert choose(GPU, BFLOAT16, config=config) == "cuDNN over packed streams"
        for padded in ("kernel", "blockwise"):
            assert choose(GPU, BFLOAT16, padded, config=config) is None
        assert choose(GPU, jnp.dtype("float32"), config=config) is None
        assert choose(devices("gpu", sequence=2), BFLOAT16, config=config) is None
    assert stream_attention_name(GPU, BFLOAT16, "streams", config=config) == "cuDNN over packed streams"
    beside = wanted_attention(GPU, BFLOAT16, "streams", config=small_config())
    assert isinstance(beside, functools.partial)
    assert beside.func is cudnn_attention


def test_refused_where_it_cannot_be(monkeypatch: pytest.MonkeyPatch) -> None:
    for platform, dtype in (("cpu", "bfloat16"), ("tpu", "float32"), ("gpu", "float32")):
        with pytest.raises(
            CheckpointError,
            match=f"'streams' is for TPUs and GPUs in bfloat16, found {platform} in {dtype}",
        ):
            choose_attention(devices(platform), jnp.dtype(dtype), "streams", config=small_config())
    with pytest.raises(CheckpointError, match="'streams' says how a model is scored"):
        choose_attention(GPU, BFLOAT16, "streams", trained=True)
    with pytest.raises(MeshError, match="takes whole streams, found sequence=2"):
        choose_attention(devices("gpu", sequence=2), BFLOAT16, "streams", config=small_config())
    monkeypatch.setattr(cudnn, "_refusal", lambda *sizes: "too many numbers")
    assert stream_attention_name(GPU, BFLOAT16, config=small_config()) is None
    assert trained_stream_attention(GPU, BFLOAT16, config=small_config()) is None
    with pytest.raises(CheckpointError, match=r"cuDNN does not take this model \(too many numbers\): use"):
        choose_attention(GPU, BFLOAT16, "streams", config=small_config())
