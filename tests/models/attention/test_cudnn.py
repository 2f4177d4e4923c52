"""Attention by cuDNN: its masks, computed by XLA, against the mask written out; its lowering; when it is chosen."""

from __future__ import annotations

import dataclasses
import functools
import re

import jax
import jax.numpy as jnp
import numpy as np
import pytest

from prb_jax.errors import CheckpointError, PrbWarning
from prb_jax.models.attention import cudnn
from prb_jax.models.attention.choice import choose_attention, wanted_attention
from prb_jax.models.attention.cudnn import cudnn_attention, cudnn_refusal
from prb_jax.readouts.score_tree import score_tree
from prb_jax.trees.batches import Bucket
from tests.models.attention.compiled_shapes import largest_square
from tests.models.attention.kernel_on_mesh import devices, on_mesh
from tests.models.attention.test_blockwise import FLOAT32_TOLERANCE, Case, jit
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
    inputs, real = case.inputs(), case.real()
    ours, theirs = np.asarray(run(case)(*inputs)), case.reference(*inputs)
    np.testing.assert_allclose(ours[real], theirs[real], atol=FLOAT32_TOLERANCE, rtol=0)
    assert (ours[~real] == 0).all()


@pytest.mark.parametrize("case", [CASES[1], CASES[6]], ids=str)
def test_responses_in_turn_are_the_same(case: Case) -> None:
    """Copies of one response a tree and turn; of a few of the 16; of all of them."""
    inputs, real = case.inputs(), case.real()
    whole = np.asarray(run(case)(*inputs))
    for copied_tokens in (1, 5 * len(case.lengths) * 48):
        few = np.asarray(run(case, copied_tokens)(*inputs))
        np.testing.assert_allclose(few[real], whole[real], atol=FLOAT32_TOLERANCE, rtol=0)


@pytest.mark.parametrize("case", [CASES[1], CASES[7]], ids=str)
def test_bfloat16_is_within_its_roundings(case: Case) -> None:
    """The bound of the block-wise program: one softmax, its weights and the output rounded once each."""
    inputs = case.inputs(jnp.bfloat16)
    wide = [x.astype(jnp.float32) for x in inputs]
    truth, real = case.reference(*wide), case.real()
    ours = run(case)(*inputs)
    assert ours.dtype == jnp.bfloat16
    bound = 2 * 2.0**-9 * float(jnp.abs(wide[2]).max()) + FLOAT32_TOLERANCE
    assert np.abs(np.asarray(ours, np.float32) - truth)[real].max() <= bound


@pytest.mark.parametrize("window", [None, 600])
def test_lowered_for_cuda(window: int | None, monkeypatch: pytest.MonkeyPatch) -> None:
    """Two calls of cuDNN, the second in a loop over responses; masks of one response, and nothing of T x T."""
    _with_cudnn(monkeypatch)
    bucket, rows = Bucket(2000, 24, 100), 2
    q, k = (jax.ShapeDtypeStruct((rows, bucket.tokens, heads, 128), jnp.bfloat16) for heads in (8, 2))
    lengths = jax.ShapeDtypeStruct((rows,), jnp.int32)

    def program(q, k, v, lengths):
        return cudnn_attention(q, k, v, bucket=bucket, prefix_lengths=lengths, window=window)

    names = ("__cudnn$fmhaSoftmax", "__cudnn$fmhaScaleBiasSoftmax")
    export = jax.export.export(
        jax.jit(program),
        platforms=("cuda",),
        disabled_checks=[jax.export.DisabledSafetyCheck.custom_call(name) for name in names],
    )
    text = export(q, k, k, lengths).mlir_module()
    causal, written = (re.findall(rf"custom_call @{re.escape(name)}\(.*", text) for name in names)
    assert len(causal) == len(written) == 1
    assert "PADDING_CAUSAL" in causal[0]
    assert f"sliding_window_length\\22: {window or 0}" in causal[0]
    assert "2x2000x8x128xbf16" in causal[0]
    # 12 or all responses of both trees at a time; keys: 100 own, 2000 or 599 of the prefix, filled to 64 columns.
    responses, keys, masks = (24, 2112, 1) if window is None else (48, 704, 48)
    assert f"{responses}x100x8x128xbf16>, tensor<{responses}x{keys}x2x128xbf16>" in written[0]
    assert f"tensor<{masks}x1x100x{keys}xbf16>" in written[0]
    assert largest_square(re.sub(r"tensor<([\dx]+)x(\w+)>", _as_in_hlo, text)) < 2112


def _as_in_hlo(match: re.Match) -> str:
    kind = {"i32": "s32", "i1": "pred"}.get(match[2], match[2])
    return f"{kind}[{match[1].replace('x', ',')}]"


def test_on_meshes_trees_and_heads_are_split() -> None:
    found = on_mesh("cudnn")
    assert max(found["differences"]) < 2e-5
    assert found["shard"] == [1, 112, 2, 16]
    assert found["calls"] == 2


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


GPU, BFLOAT16 = devices("gpu"), jnp.dtype("bfloat16")


def test_chosen_in_bfloat16_on_gpus(monkeypatch: pytest.MonkeyPatch) -> None:
    config = small_config()
    monkeypatch.setattr(cudnn, "_refusal", lambda *sizes: None)
    choose = functools.partial(choose_attention, config=config)
    assert choose(GPU, BFLOAT16).name == "cuDNN"
    function = wanted_attention(GPU, BFLOAT16, "auto", config=config)
    assert isinstance(function, functools.partial)
    assert function.func is cudnn_attention
    blocks = "block-wise XLA, all heads at once"
    assert choose(GPU, BFLOAT16, trained=True).name == "cuDNN"
    assert choose_attention(GPU, BFLOAT16).name == choose(GPU, jnp.dtype("float32")).name == blocks
    assert choose(GPU, BFLOAT16, "blockwise").name == blocks
    assert choose(devices("tpu"), BFLOAT16).name == "splash kernel (Pallas)"
    split = choose(devices("gpu", sequence=2), BFLOAT16)
    assert (split.name, split.refused) == (
        blocks, "it has all tokens of a tree on one device, found sequence=2"
    )  # fmt: skip


def test_a_refusal_is_one_line(monkeypatch: pytest.MonkeyPatch) -> None:
    cudnn._refusal.cache_clear()
    if jax.default_backend() == "cpu":
        with pytest.warns(
            PrbWarning, match=r"cuDNN does not take this model \(cuDNN is not detected\.\): .*XLA"
        ) as seen:
            assert wanted_attention(GPU, BFLOAT16, "auto", config=small_config()) is None
        assert len(seen) == 1
    _with_cudnn(monkeypatch)
    cudnn._refusal.cache_clear()
    for config, reason in (
        (small_config(head_dim=36), "multiple of 8, but got 36"),
        (small_config(head_dim=264), "but got 264"),
        (dataclasses.replace(small_config(), attn_logit_softcapping=50.0), "knows no softcap, found 50"),
    ):
        assert reason in (cudnn_refusal(config, mesh=GPU, dtype=BFLOAT16) or "")
    cudnn._refusal.cache_clear()


def _with_cudnn(monkeypatch: pytest.MonkeyPatch) -> None:
    """JAX asks for cuDNN's version before it writes a call down, also where the program is for another machine."""
    monkeypatch.setattr("jax._src.cudnn.fused_attention_stablehlo.check_cudnn_version", lambda: 91_000)


def chosen(platform: str, dtype: str, wanted: str, **shape: int) -> str:
    return choose_attention(devices(platform, **shape), jnp.dtype(dtype), wanted).name


def test_chosen_by_the_user(monkeypatch: pytest.MonkeyPatch) -> None:
    at_once, by_head = "block-wise XLA, all heads at once", "block-wise XLA, head by head"
    for dtype in ("float32", "bfloat16"):
        assert chosen("gpu", dtype, "auto") == chosen("gpu", dtype, "blockwise") == at_once
        assert chosen("tpu", dtype, "blockwise") == at_once
        assert chosen("cpu", dtype, "auto") == chosen("cpu", dtype, "blockwise") == by_head
    assert (
        chosen("tpu", "bfloat16", "kernel") == chosen("tpu", "bfloat16", "auto") == "splash kernel (Pallas)"
    )
    assert chosen("tpu", "float32", "auto") == at_once
    assert choose_attention(None, BFLOAT16).name == (by_head if jax.default_backend() == "cpu" else at_once)
    monkeypatch.setattr(cudnn, "_refusal", lambda *sizes: None)
    assert choose_attention(GPU, BFLOAT16, "kernel", config=small_config()).name == "cuDNN"


def test_what_no_kernel_can_do_is_an_error(monkeypatch: pytest.MonkeyPatch) -> None:
    places = "tpu float32, cpu bfloat16, cpu float32, gpu float32, gpu bfloat16"
    for platform, dtype in (place.split() for place in places.split(", ")):
        with pytest.raises(CheckpointError, match=f"attention: .* found {platform} in {dtype}"):
            chosen(platform, dtype, "kernel")
    with pytest.raises(
        CheckpointError, match="attention: expected auto, blockwise, kernel, streams, found 'flash'"
    ):
        chosen("gpu", "bfloat16", "flash")
    monkeypatch.setattr(cudnn, "_refusal", lambda *sizes: "too many numbers")
    with pytest.raises(CheckpointError, match=r"cuDNN does not take this model \(too many numbers\): use"):
        choose_attention(GPU, BFLOAT16, "kernel", config=small_config())
