"""The kernels for NVIDIA GPUs, their steps run by XLA, against the mask written out; and their lowering."""

from __future__ import annotations

import functools
import re

import jax
import jax.numpy as jnp
import numpy as np
import pytest

from prb_jax.errors import CheckpointError, MeshError
from prb_jax.models.attention.choice import choose_attention
from prb_jax.models.attention.triton import BLOCKS, triton_attention
from prb_jax.models.attention.triton_kernels import KernelBlocks
from prb_jax.readouts.score_tree import score_tree
from prb_jax.trees.mask import TreeLayout
from tests.models.attention.dense import reference_attention
from tests.models.attention.kernel_on_mesh import gpus, on_mesh
from tests.models.attention.test_blockwise import FLOAT32_TOLERANCE, Case, jit
from tests.models.attention.test_gradients import gradients
from tests.training.small_batches import batch_of, initial_params, random_trees, small_config

# Ragged prefixes, one empty and one full; several blocks; T a multiple of the block and not; groups of one, two and
# eight; windows within a block, across blocks and across the edge of the prefix; soft caps; a head dim of 24.
CASES = [
    Case(TreeLayout(96, 2, 32), (0, 1, 50, 96), head_dim=64),
    Case(TreeLayout(80, 3, 16), (80, 7), heads=8, kv_heads=1),
    Case(TreeLayout(70, 2, 50), (33, 70), head_dim=128, window=40, softcap=3.0),
    Case(TreeLayout(50, 16, 3), (50, 24), heads=3, kv_heads=3, window=9, head_dim=24),
    Case(TreeLayout(64, 1, 40), (64, 31), heads=2, kv_heads=1, head_dim=256, softcap=0.5),
    Case(TreeLayout(0, 3, 20), (0, 0)),
]
SMALL = (KernelBlocks(32, 16, warps=4, stages=1), KernelBlocks(16, 32, warps=4, stages=1))
kernel = functools.partial(triton_attention, blocks=SMALL, interpret=True)


@functools.cache
def run(case: Case, attend=kernel):
    return jit(functools.partial(attend, **case.options))


@pytest.mark.parametrize("case", CASES, ids=str)
def test_equals_the_mask_written_out(case: Case) -> None:
    inputs = case.inputs()
    ours, theirs = np.asarray(run(case)(*inputs)), case.reference(*inputs)
    np.testing.assert_allclose(ours[case.real()], theirs[case.real()], atol=FLOAT32_TOLERANCE, rtol=0)
    assert (ours[~case.real()] == 0).all()


@pytest.mark.parametrize("case", CASES[1:4], ids=str)
def test_gradients_equal_those_of_the_whole_mask(case: Case) -> None:
    inputs = case.inputs()
    theirs = gradients(reference_attention, case, inputs)
    for one, other in zip(gradients(kernel, case, inputs), theirs, strict=True):
        assert float(jnp.abs(other).max()) > 0.1
        np.testing.assert_allclose(one, other, atol=2e-5, rtol=1e-5)


def test_bfloat16_is_as_good_as_rounding_allows() -> None:
    """As in the block-wise program, outputs to 2**-8 of the largest value, and gradients to one in a hundred."""
    case = CASES[0]
    inputs = case.inputs(jnp.bfloat16)
    wide = [x.astype(jnp.float32) for x in inputs]
    ours = run(case)(*inputs)
    assert ours.dtype == jnp.bfloat16
    error = np.abs(np.asarray(ours, np.float32) - case.reference(*wide))[case.real()]
    assert error.max() <= 2 * 2.0**-9 * float(jnp.abs(wide[2]).max()) + FLOAT32_TOLERANCE
    exact = gradients(reference_attention, case, tuple(wide))
    for one, other in zip(gradients(kernel, case, inputs), exact, strict=True):
        assert one.dtype == jnp.bfloat16
        difference = jnp.linalg.norm(one.astype(jnp.float32) - other)
        assert float(difference) < 0.01 * float(jnp.linalg.norm(other))


@pytest.mark.parametrize("window", [None, 24])
def test_blocks_that_nobody_sees_are_not_read(window: int | None) -> None:
    """A hidden key's weight is zero, but zero times NaN is NaN: forward and backward, none comes through."""
    case = Case(TreeLayout(64, 2, 32), (32,), heads=2, kv_heads=1, window=window)
    q, k, v = case.inputs()
    towards = jnp.ones(q.shape, jnp.float32)
    index = np.arange(case.layout.tokens)
    mine = index >= 96  # the second response: all of its blocks are its own
    hidden = (index < 32) | ((index >= 64) & ~mine)
    k, v = (jnp.where(jnp.asarray(hidden)[None, :, None, None], jnp.nan, x) for x in (k, v))
    blocks = (KernelBlocks(32, 16, warps=4, stages=1),) * 2
    attend = functools.partial(triton_attention, blocks=blocks, interpret=True, **case.options)

    def loss(q, k, v):
        return jnp.sum((attend(q, k, v) * towards)[:, mine])

    out, (to_q, to_k, to_v) = jit(jax.value_and_grad(loss, argnums=(0, 1, 2)))(q, k, v)
    assert np.isfinite(out)
    assert np.isfinite(np.asarray(to_q)[:, mine]).all()
    # The sums over all queries: of the padding's keys there are none, a sibling's keys its own spoil.
    assert (np.asarray(to_k)[:, :32] == 0).all()
    assert (np.asarray(to_v)[:, :32] == 0).all()
    assert np.isfinite(np.asarray(to_k)[:, mine]).all()


def test_a_decoder_with_it_scores_and_learns_as_with_blocks() -> None:
    """Layers with a window, scanned, and computed again in the backward pass."""
    config = small_config(
        model_type="mistral", architectures=["MistralForSequenceClassification"], sliding_window=24
    )
    params, batch = initial_params(config), batch_of(random_trees(2), rows=2)

    def loss(params, attention):
        options = {"config": config, "dtype": jnp.dtype("float32"), "remat": "dots"}
        scores = score_tree(params, batch, attention=attention, **options)
        return scores.sum(), scores

    both = jit(jax.value_and_grad(loss, has_aux=True), static_argnums=1)
    (_, theirs), by_blocks = both(params, None)
    (_, ours), by_kernel = both(params, functools.partial(triton_attention, interpret=True))
    np.testing.assert_allclose(ours, theirs, atol=2e-5, rtol=0)
    for one, other in zip(jax.tree.leaves(by_kernel), jax.tree.leaves(by_blocks), strict=True):
        np.testing.assert_allclose(one, other, atol=1e-4, rtol=1e-4)


@pytest.mark.parametrize("head_dim", [64, 96, 128, 256])
@pytest.mark.parametrize("dtype", [jnp.bfloat16, jnp.float32], ids=["bfloat16", "float32"])
def test_lowered_for_cuda(head_dim: int, dtype: jnp.dtype) -> None:
    """What Triton is to compile can be written down without a GPU: three kernels, by the table of blocks."""
    case = Case(TreeLayout(300, 3, 128), (300, 50), heads=8, head_dim=head_dim, window=100, softcap=5.0)

    def loss(*qkv: jax.Array) -> jax.Array:
        return triton_attention(*qkv, **case.options).astype(jnp.float32).sum()

    with jax.sharding.use_abstract_mesh(gpus()):
        traced = jax.jit(jax.grad(loss, argnums=(0, 1, 2))).trace(*case.inputs(dtype))
        try:
            text = traced.lower(lowering_platforms=("cuda",)).as_text()
        except ImportError as error:
            pytest.skip(f"this jaxlib has no Triton: {error}")
    assert len(re.findall(r"custom_call @\S*triton", text)) == 3
    for name in ("output", "gradient_by_queries", "gradients_by_keys"):
        assert f"tree_attention_write_{name}" in text
    assert not re.search(rf"tensor<(\d+x)*{case.layout.tokens}x{case.layout.tokens}x", text)


def test_blocks_of_the_table_fit_into_shared_memory() -> None:
    for head_dim, (forward, backward) in BLOCKS.items():
        held, visited = 2 * head_dim * forward.held, 2 * 2 * head_dim * forward.visited * forward.stages
        assert held + visited <= 96 * 1024
        assert 2 * 2 * head_dim * (backward.held + backward.visited * backward.stages) <= 96 * 1024


def test_on_meshes_trees_and_heads_are_split() -> None:
    found = on_mesh("triton")
    assert max(found["differences"]) < 2e-5
    assert found["shard"] == [1, 112, 2, 16]
    assert found["kernels"] == 3


class _Mesh:
    """Devices that are not here."""

    def __init__(self, platform: str, sequence: int = 1) -> None:
        device = type("Device", (), {"platform": platform})()
        self.devices = np.asarray([device], object)
        self.shape = {"data": 1, "fsdp": 1, "sequence": sequence, "tensor": 1}
        self.size = 1


def chosen(platform: str, dtype: str, wanted: str, **shape: int) -> str:
    return choose_attention(_Mesh(platform, **shape), jnp.dtype(dtype), wanted).name  # pyright: ignore[reportArgumentType]


def test_chosen_by_the_user() -> None:
    at_once, by_head = "block-wise XLA, all heads at once", "block-wise XLA, head by head"
    for dtype in ("float32", "bfloat16"):
        assert chosen("gpu", dtype, "kernel") == "tree kernel (Pallas, Triton)"
        assert chosen("gpu", dtype, "auto") == chosen("gpu", dtype, "blockwise") == at_once
        assert chosen("tpu", dtype, "blockwise") == at_once
        assert chosen("cpu", dtype, "auto") == chosen("cpu", dtype, "blockwise") == by_head
    assert (
        chosen("tpu", "bfloat16", "kernel") == chosen("tpu", "bfloat16", "auto") == "splash kernel (Pallas)"
    )


def test_what_no_kernel_can_do_is_an_error() -> None:
    for platform, dtype in (("tpu", "float32"), ("cpu", "bfloat16"), ("cpu", "float32")):
        with pytest.raises(CheckpointError, match=f"attention: .* found {platform} in {dtype}"):
            chosen(platform, dtype, "kernel")
    with pytest.raises(
        CheckpointError, match="attention: expected auto, blockwise, kernel, paged, found 'flash'"
    ):
        chosen("gpu", "bfloat16", "flash")
    with pytest.raises(MeshError, match="found sequence=2: use sequence=1"):
        chosen("gpu", "bfloat16", "kernel", sequence=2)
    case = Case(TreeLayout(16, 2, 8), (16,), head_dim=320)
    with pytest.raises(CheckpointError, match="at most 256 numbers, found 320"):
        triton_attention(*case.inputs(), **case.options, interpret=True)
