"""Which attention a program gets, by machine, dtype and wish; which wishes are errors."""

from __future__ import annotations

import dataclasses
import functools
from typing import Any

import jax
import jax.numpy as jnp
import pytest

from prb_jax.errors import CheckpointError, MeshError, PrbWarning
from prb_jax.models.attention import cudnn
from prb_jax.models.attention.choice import (
    choose_attention,
    stream_attention_name,
    trained_stream_attention,
    wanted_attention,
)
from prb_jax.models.attention.cudnn import cudnn_attention, cudnn_refusal, cudnn_stream_attention
from tests.models.attention.kernel_on_mesh import devices
from tests.models.compiled import with_cudnn
from tests.training.small_batches import small_config

CONFIG, GPU, BFLOAT16 = small_config(), devices("gpu"), jnp.dtype("bfloat16")
AT_ONCE, BY_HEAD = "block-wise XLA, all heads at once", "block-wise XLA, head by head"
CUDNN_STREAMS = "cuDNN over packed streams"
FOR_TREES = {
    "cuDNN": "gpu bfloat16 auto, gpu bfloat16 kernel, gpu bfloat16 streams",
    "splash kernel (Pallas)": "tpu bfloat16 auto, tpu bfloat16 kernel, tpu bfloat16 streams",
    AT_ONCE: "gpu float32 auto, gpu float32 blockwise, gpu bfloat16 blockwise, tpu float32 auto, tpu float32 blockwise,"
    " tpu bfloat16 blockwise",
    BY_HEAD: "cpu float32 auto, cpu float32 blockwise, cpu bfloat16 auto, cpu bfloat16 blockwise",
}
"""The implementation for padded trees, and what asks for it where cuDNN takes the model."""


@pytest.fixture
def cudnn_takes_it(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(cudnn, "_refusal", lambda *sizes: None)


@pytest.fixture
def cudnn_refuses_it(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(cudnn, "_refusal", lambda *sizes: "too many numbers")


def choose(platform: str, dtype: str, wanted: str, *, sequence: int = 1, trained: bool = False) -> Any:
    mesh = devices(platform, sequence=sequence)
    return choose_attention(mesh, jnp.dtype(dtype), wanted, config=CONFIG, trained=trained)


@pytest.mark.usefixtures("cudnn_takes_it")
def test_for_padded_trees() -> None:
    for name, places in FOR_TREES.items():
        for place in places.split(", "):
            assert choose(*place.split()).name == name, place
    assert choose("gpu", "bfloat16", "auto", trained=True).name == "cuDNN"
    # Before the model is known, nothing is chosen that may refuse it.
    assert choose_attention(GPU, BFLOAT16).name == AT_ONCE
    assert choose_attention(None, BFLOAT16).name == (BY_HEAD if jax.default_backend() == "cpu" else AT_ONCE)
    split = choose("gpu", "bfloat16", "auto", sequence=2)
    reason = "it has all tokens of a tree on one device, found sequence=2"
    assert (split.name, split.refused) == (AT_ONCE, reason)
    for wanted in ("auto", "streams"):
        function = wanted_attention(GPU, BFLOAT16, wanted, config=CONFIG)
        assert isinstance(function, functools.partial)
        assert function.func is cudnn_attention


@pytest.mark.usefixtures("cudnn_takes_it")
def test_for_packed_streams() -> None:
    """On GPUs in bfloat16, to score and to train; on TPUs to score where it is asked for; on CPUs always."""
    for for_streams in (stream_attention_name, trained_stream_attention):
        assert for_streams(GPU, BFLOAT16, config=CONFIG) == CUDNN_STREAMS
        for padded in ("kernel", "blockwise"):
            assert for_streams(GPU, BFLOAT16, padded, config=CONFIG) is None
        assert for_streams(GPU, jnp.dtype("float32"), config=CONFIG) is None
        assert for_streams(devices("gpu", sequence=2), BFLOAT16, config=CONFIG) is None
        assert for_streams(devices("cpu"), BFLOAT16, config=CONFIG) == "block-wise XLA over packed streams"
    assert stream_attention_name(GPU, BFLOAT16, "streams", config=CONFIG) == CUDNN_STREAMS
    tpu, kernel = devices("tpu"), "kernel (Pallas) over packed streams"
    assert stream_attention_name(tpu, BFLOAT16, "streams", config=CONFIG) == kernel
    assert stream_attention_name(tpu, BFLOAT16, config=CONFIG) is None
    assert trained_stream_attention(tpu, BFLOAT16, config=CONFIG) == kernel
    assert trained_stream_attention(tpu, jnp.dtype("float32"), config=CONFIG) is None
    assert trained_stream_attention(devices("tpu", sequence=2), BFLOAT16, config=CONFIG) is None


@pytest.mark.usefixtures("cudnn_refuses_it")
def test_wishes_that_cannot_be_are_errors() -> None:
    for place in ("tpu float32", "cpu bfloat16", "cpu float32", "gpu float32"):
        named = place.replace(" ", " in ")
        with pytest.raises(CheckpointError, match=f"attention: .* found {named}"):
            choose(*place.split(), "kernel")
        with pytest.raises(
            CheckpointError, match=f"'streams' is for TPUs and GPUs in bfloat16, found {named}"
        ):
            choose(*place.split(), "streams")
    for platform in ("tpu", "gpu"):
        with pytest.raises(
            CheckpointError, match="'streams' says how a model is scored; what is trained takes"
        ):
            choose(platform, "bfloat16", "streams", trained=True)
        with pytest.raises(MeshError, match="takes whole streams, found sequence=2"):
            choose(platform, "bfloat16", "streams", sequence=2)
    with pytest.raises(CheckpointError, match="expected auto, blockwise, kernel, streams, found 'flash'"):
        choose("gpu", "bfloat16", "flash")
    with pytest.raises(CheckpointError, match=r"attention: .* found gpu in bfloat16"):
        choose_attention(GPU, BFLOAT16, "kernel")
    for wanted in ("kernel", "streams"):
        with pytest.raises(
            CheckpointError, match=r"cuDNN does not take this model \(too many numbers\): use"
        ):
            choose("gpu", "bfloat16", wanted)
    for for_streams in (stream_attention_name, trained_stream_attention):
        assert for_streams(GPU, BFLOAT16, config=CONFIG) is None


def test_a_refusal_is_one_line() -> None:
    cudnn._refusal.cache_clear()
    if jax.default_backend() == "cpu":
        refused = r"cuDNN does not take this model \(cuDNN is not detected\.\): .*XLA"
        with pytest.warns(PrbWarning, match=refused) as seen:
            assert wanted_attention(GPU, BFLOAT16, "auto", config=CONFIG) is None
        assert len(seen) == 1
    cudnn._refusal.cache_clear()
    with with_cudnn():
        for config, reason in (
            (small_config(head_dim=36), "multiple of 8, but got 36"),
            (small_config(head_dim=264), "but got 264"),
            (dataclasses.replace(CONFIG, attn_logit_softcapping=50.0), "knows no softcap, found 50"),
        ):
            assert reason in (cudnn_refusal(config, mesh=GPU, dtype=BFLOAT16) or "")
    cudnn._refusal.cache_clear()


@with_cudnn()
def test_the_machine_is_asked_with_a_small_program_of_streams(monkeypatch: pytest.MonkeyPatch) -> None:
    """Where they are wanted, with and without a window; what is refused is one line."""
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
