"""Which attention a program gets, by machine, dtype and wish; how streams are laid out for it; a kernel's first use."""

from __future__ import annotations

import dataclasses
import functools
import json
from pathlib import Path
from typing import Any

import jax
import jax.numpy as jnp
import pytest

from prb_jax.errors import CheckpointError, PrbWarning
from prb_jax.models.attention import choice, cudnn, first_use, stream_kernel
from prb_jax.models.attention.choice import StreamAttention, choose_attention
from prb_jax.models.attention.cudnn import cudnn_refusal, cudnn_stream_attention
from prb_jax.models.attention.first_use import compare, kernel_fault
from prb_jax.models.attention.stream_kernel import kernel_attention
from prb_jax.models.attention.streams import stream_attention
from prb_jax.platform.meshes import make_mesh
from prb_jax.trees import kernel_tables
from prb_jax.trees.packing import pack_streams
from prb_jax.trees.step_areas import step_areas
from prb_jax.trees.streams import StreamOptions, StreamShape, make_stream_batch
from tests.models.attention.kernel_on_mesh import devices
from tests.models.attention.test_stream_kernel import areas_of
from tests.models.compiled import with_cudnn
from tests.training.small_batches import small_config

CONFIG, GPU, BFLOAT16 = small_config(), devices("gpu"), jnp.dtype("bfloat16")
KERNEL, CUDNN = "kernel (Pallas) over packed streams", "cuDNN over packed streams"
IN_TURN = "block-wise XLA over packed streams"
AT_ONCE = f"{IN_TURN}, many blocks at a time"


@pytest.fixture(autouse=True)
def _warnings_come_again() -> None:
    choice._warn_once.cache_clear()


@pytest.fixture
def cudnn_takes_it(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(cudnn, "_refusal", lambda *sizes: None)


def choose(platform: str, dtype: str, wanted: str = "auto", *, sequence: int = 1, **options: Any) -> Any:
    mesh = devices(platform, sequence=sequence)
    return choose_attention(mesh, jnp.dtype(dtype), wanted, config=CONFIG, **options)


@pytest.mark.usefixtures("cudnn_takes_it")
@pytest.mark.parametrize("trained", [False, True])
def test_it_depends_on_machine_and_dtype(trained: bool) -> None:
    """To score and to train alike, also where the tokens of a stream are split."""
    for place, name, table in (
        ("tpu bfloat16", KERNEL, "steps"), ("gpu bfloat16", CUDNN, "keys"),
        ("tpu bfloat16 xla", AT_ONCE, "blocks"), ("gpu bfloat16 xla", AT_ONCE, "blocks"),
        ("tpu float32", AT_ONCE, "blocks"), ("gpu float32", AT_ONCE, "blocks"),
        ("cpu float32", IN_TURN, "blocks"), ("cpu bfloat16", IN_TURN, "blocks"), ("cpu float32 xla", IN_TURN, "blocks"),
    ):  # fmt: skip
        for sequence in (1, 4):
            chosen = choose(*place.split(), sequence=sequence, trained=trained)
            assert (chosen.name, chosen.table, chosen.parts) == (name, table, sequence), place
            assert chosen.refused is None
    here = choose_attention(None, BFLOAT16, config=CONFIG)
    assert here.name == IN_TURN or jax.default_backend() != "cpu"


@pytest.mark.usefixtures("cudnn_takes_it")
def test_streams_are_shaped_for_it() -> None:
    """Whole blocks; twice as many as there are parts of the queries. On CPUs some streams may be shorter than
    others."""
    usual = StreamOptions(tokens=33_000, program_cost=7)
    shaped = {
        (place, parts): choose(*place.split(), sequence=parts).shaped(usual)
        for place in ("cpu float32", "gpu float32", "gpu bfloat16", "tpu bfloat16")
        for parts in (1, 4)
    }
    found = {where: (one.tokens, one.block, one.program_cost) for where, one in shaped.items()}
    assert found == {
        ("cpu float32", 1): (33_024, 128, 7), ("cpu float32", 4): (33_792, 128, 7),
        ("gpu float32", 1): (33_024, 128, None), ("gpu float32", 4): (33_792, 128, None),
        ("gpu bfloat16", 1): (33_792, 1024, None), ("gpu bfloat16", 4): (40_960, 1024, None),
        ("tpu bfloat16", 1): (33_280, 512, None), ("tpu bfloat16", 4): (36_864, 512, None),
    }  # fmt: skip


def test_only_two_names_are_known() -> None:
    for old in ("blockwise", "kernel", "streams", "flash"):
        with pytest.raises(CheckpointError, match=f"attention: expected auto or xla, found '{old}'"):
            choose("gpu", "bfloat16", old)


def test_a_refusal_is_one_line_and_said_once(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(cudnn, "_refusal", lambda *sizes: "too many numbers")
    reason = "cuDNN does not take this model (too many numbers)"
    with pytest.warns(PrbWarning) as seen:
        both = [choose("gpu", "bfloat16") for _ in range(2)]
    assert {(refused.name, refused.refused) for refused in both} == {(AT_ONCE, reason)}
    assert [str(one.message) for one in seen] == [
        f"attention: {reason}: it is computed by {AT_ONCE}, which is slower"
    ]


@with_cudnn()
def test_the_machine_is_asked_with_a_small_program_of_streams(monkeypatch: pytest.MonkeyPatch) -> None:
    """With and without a window; what is refused is one line."""
    asked: list[int | None] = []

    def attend(*arrays: Any, window: int | None, **options: Any) -> jax.Array:
        asked.append(window)
        return cudnn_stream_attention(*arrays, window=window, **options)

    cudnn._refusal.cache_clear()
    for config, reason in (
        (small_config(head_dim=36), "multiple of 8, but got 36"),
        (small_config(head_dim=264), "but got 264"),
        (dataclasses.replace(CONFIG, attn_logit_softcapping=50.0), "does not support softcap, found 50"),
    ):
        assert reason in (cudnn_refusal(config, mesh=GPU, dtype=BFLOAT16) or "")
    cudnn._refusal.cache_clear()
    monkeypatch.setattr(cudnn, "cudnn_stream_attention", attend)
    assert "multiple of 8, but got 36" in (cudnn._refusal.__wrapped__(4, 2, 36, None, True, "bfloat16") or "")
    assert asked == [None]
    monkeypatch.setattr(
        cudnn, "cudnn_stream_attention", lambda q, *arrays, window, **options: asked.append(window) or q
    )
    assert cudnn._refusal.__wrapped__(4, 2, 36, None, True, "bfloat16") is None
    assert asked == [None, None, 48]


def interpreted(wrong: Any = None) -> Any:
    """The kernel, its steps run by XLA; and with a fault."""
    calls: list[int | None] = []

    def attend(q: Any, k: Any, v: Any, *, batch: Any, window: int | None = None, **options: Any) -> jax.Array:
        calls.append(window)
        q, k, window = (q, k, window) if wrong is None else wrong(q, k, window)
        return kernel_attention(q, k, v, batch=batch, window=window, interpret=True, **options)

    attend.calls = calls  # pyright: ignore[reportFunctionMemberAccess]
    return attend


FAULTS = {
    "the window is left out": lambda q, k, window: (q, k, None),
    "keys are scaled a little": lambda q, k, window: (q, k * 1.05, window),
    "a tenth of the keys is lost": lambda q, k, window: (q, k.at[:, ::10].set(0), window),
    "numbers are missing": lambda q, k, window: (q.at[:, 300:310].set(float("nan")), k, window),
}


@pytest.fixture
def small_kernel(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> Path:
    """A stream that is interpreted in little time; the folder of compiled programs."""
    monkeypatch.setattr(first_use, "_TOKENS", 1024)
    monkeypatch.setattr(first_use, "_LONGEST", 300)
    monkeypatch.setattr(first_use, "_WINDOW", 100)
    monkeypatch.setattr(first_use, "_OTHERS", ())
    monkeypatch.setattr(kernel_tables, "STEP_BLOCK", kernel_tables.TILE)
    first_use._agreed.cache_clear()
    before = jax.config.jax_compilation_cache_dir  # pyright: ignore[reportAttributeAccessIssue]
    monkeypatch.setattr(first_use, "_file", lambda: tmp_path / first_use.FILE)
    assert before is None or "://" not in before
    return tmp_path


def fault_of(attend: Any) -> str | None:
    mesh = make_mesh(devices=jax.devices()[:1])
    return kernel_fault(StreamAttention("kernel", "steps"), attend, small_config(head_dim=32), mesh=mesh)


def test_the_stream_of_the_first_use_needs_all_areas_of_the_kernel() -> None:
    options = stream_kernel.KERNEL.shaped(StreamOptions(first_use._TOKENS, window=first_use._WINDOW))
    trees = first_use._trees()
    (packed,) = pack_streams(trees, StreamShape(options.tokens, 32), options)
    batch = make_stream_batch(trees, packed, options)
    found = areas_of(batch, None) | areas_of(batch, first_use._WINDOW)
    assert found == set(range(len(step_areas(options.block // kernel_tables.TILE))))


def test_a_kernel_is_compared_once_and_remembered(small_kernel: Path) -> None:
    """With a window, a softcap and gradients; a later process reads the answer, and computes nothing."""
    attend = interpreted()
    assert fault_of(attend) is None
    assert attend.calls == [None, 100]
    ((key, (found, allowed)),) = json.loads((small_kernel / first_use.FILE).read_text()).items()
    assert key.startswith("kernel, ")
    assert "jax " in key
    assert key.endswith("2 heads of 32")
    assert 1e-3 < float(found) <= float(allowed) < 0.02
    first_use._agreed.cache_clear()
    again = interpreted(FAULTS["numbers are missing"])
    assert fault_of(again) is None
    assert again.calls == []
    (small_kernel / first_use.FILE).write_text("{")  # damaged
    first_use._agreed.cache_clear()
    assert "gives wrong numbers on this machine" in (fault_of(again) or "")


@pytest.mark.parametrize("fault", FAULTS)
def test_a_wrong_kernel_is_found(small_kernel: Path, fault: str) -> None:
    attend = interpreted(FAULTS[fault])
    message = fault_of(attend)
    assert message is not None
    assert "the kernel gives wrong numbers on this machine: outputs or gradients differ by" in message
    first_use._agreed.cache_clear()  # remembered, NaN too
    assert fault_of(interpreted()) == message


def test_a_wrong_kernel_is_not_chosen(monkeypatch: pytest.MonkeyPatch) -> None:
    """It is said once; devices that are elsewhere compute nothing, and programs for them have the kernel."""
    tpu = devices("tpu")
    assert choose_attention(tpu, BFLOAT16, config=CONFIG).name == KERNEL
    asked: list[Any] = []

    def fault(*arguments: Any, **options: Any) -> str:
        asked.append(arguments)
        return "the kernel gives wrong numbers"

    monkeypatch.setattr(stream_kernel, "kernel_fault", fault)
    with pytest.warns(
        PrbWarning, match="attention: the kernel gives wrong numbers: it is computed by"
    ) as seen:
        both = [choose_attention(tpu, BFLOAT16, config=CONFIG) for _ in range(2)]
    assert [refused.name for refused in both] == [AT_ONCE] * 2
    assert len(seen) == 1
    assert asked[0] == (stream_kernel.KERNEL, kernel_attention, CONFIG)
    assert choose_attention(tpu, BFLOAT16, "xla", config=CONFIG).refused is None
    assert len(asked) == 2
    assert kernel_fault(cudnn.CUDNN, stream_attention, CONFIG, mesh=GPU) is None  # not here


def test_cudnns_masks_agree_too(small_kernel: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """XLA computes what cuDNN would; cuDNN takes no softcap."""
    by_xla = functools.partial(cudnn_stream_attention, implementation="xla")
    monkeypatch.setattr(cudnn, "cudnn_stream_attention", by_xla)
    options = StreamAttention(CUDNN, "keys").shaped(StreamOptions(1024, window=100))
    found, allowed = compare(stream_attention, options, group=2, head_dim=32, softcap=None)
    assert 0 < found <= allowed
