"""The kernel for TPUs, its steps run by XLA, against the mask written out."""

from __future__ import annotations

import functools

import jax
import jax.numpy as jnp
import numpy as np
import pytest

from prb_jax.models.attention.splash import splash_attention, visited_share
from prb_jax.trees.batches import Bucket, TreeMask
from tests.models.attention.dense import reference_attention
from tests.models.attention.test_blockwise import Case, gradients
from tests.sweeps import sweep

# Ragged prefixes, one empty and one full; several blocks; T a multiple of the block and not; groups of one
# and of eight; windows within a block, across blocks and across the edge of the prefix; soft caps.
CASES = [
    Case(Bucket(96, 2, 32), (0, 1, 50, 96), head_dim=64),
    Case(Bucket(320, 3, 64), (320, 7), heads=8, kv_heads=1),
    Case(Bucket(200, 2, 100), (150, 200), head_dim=128, window=90, softcap=3.0),
    Case(Bucket(130, 16, 9), (130, 64), heads=5, kv_heads=5, window=20),
    Case(Bucket(256, 1, 128), (256, 130), heads=2, kv_heads=1, head_dim=256, softcap=0.5),
    Case(Bucket(16, 4, 1), (16, 0)),
]
splash = functools.partial(splash_attention, block=128, interpret=True)


@pytest.mark.parametrize("case", sweep(CASES, few=(0, 2, 5)), ids=str)
def test_equals_the_mask_written_out(case: Case) -> None:
    case.check(jax.jit(functools.partial(splash, **case.options)))


@pytest.mark.parametrize("case", CASES[1:3], ids=str)
def test_gradients_equal_those_of_the_whole_mask(case: Case) -> None:
    inputs = case.inputs()
    gradients_of = (gradients(attend, case, inputs) for attend in (splash, reference_attention))
    for one, other in zip(*gradients_of, strict=True):
        assert float(jnp.abs(other).max()) > 0.1
        np.testing.assert_allclose(one, other, atol=2e-5, rtol=1e-5)


def test_bfloat16_is_as_good_as_rounding_allows() -> None:
    case = CASES[0]
    inputs = case.inputs(jnp.bfloat16)
    exact = case.reference(*(x.astype(jnp.float32) for x in inputs))
    ours = jax.jit(functools.partial(splash, **case.options))(*inputs)
    assert ours.dtype == jnp.bfloat16
    error = np.abs(np.asarray(ours, np.float32) - exact)[case.real()]
    # Outputs of size one are rounded to 8 bits, and the products of bfloat16 factors are exact in float32.
    assert error.max() < 2**-7


def test_blocks_that_nobody_sees_are_not_visited() -> None:
    # 8 blocks of 512: 28 of the 64 lie above the diagonal, and the responses are in one block.
    assert visited_share(TreeMask(Bucket(3840, 2, 128))) == 36 / 64
    # Each of 8 responses fills a block: it sees the prefix's 2 and itself. The grid is as wide as the most.
    siblings = Bucket(256, 8, 128)
    assert visited_share(TreeMask(siblings), block=128) == (1 + 2 + 8 * 3) / (10 * 3)
    assert visited_share(TreeMask(siblings, window=128), block=128) == (1 + 2 + 8 * 2) / (10 * 2)
