"""Attention over padded trees, a block at a time, and its hand-written derivative, against the mask written out."""

from __future__ import annotations

import functools
import math
from dataclasses import dataclass

import jax
import jax.numpy as jnp
import numpy as np
import pytest

from prb_jax.models.attention.blockwise import blockwise_attention
from prb_jax.models.flops import attention_flops
from prb_jax.trees.batches import Bucket, TreeMask
from tests.models.attention.dense import reference_attention, tree_mask
from tests.models.compiled import jit, largest_square
from tests.sweeps import sweep

FLOAT32_TOLERANCE = 5e-6
"""On outputs of size one: sums of up to 300 float32 products in another order, seen through exp."""


@dataclass(frozen=True)
class Case:
    """A shape, and what is special about it."""

    bucket: Bucket
    lengths: tuple[int, ...]
    heads: int = 4
    kv_heads: int = 2
    head_dim: int = 16
    window: int | None = None
    softcap: float | None = None
    block_rows: int = 64

    def __str__(self) -> str:
        p, k, r = self.bucket.prefix, self.bucket.responses, self.bucket.response_length
        text = f"P{p}-K{k}-R{r}-N{self.heads}-G{self.kv_heads}-H{self.head_dim}"
        text += f"-w{self.window}" if self.window else ""
        return text + (f"-c{self.softcap}" if self.softcap else "")

    def inputs(self, dtype: jnp.dtype = jnp.float32, *, seed: int = 0) -> tuple[jax.Array, ...]:
        """q [B, T, N, H] scaled so that scores have a spread of two, k and v [B, T, G, H]."""
        rng = np.random.default_rng(seed)
        rows, tokens, size = len(self.lengths), self.bucket.tokens, self.head_dim
        q = 2 * rng.normal(size=(rows, tokens, self.heads, size)) / math.sqrt(size)
        k, v = rng.normal(size=(2, rows, tokens, self.kv_heads, size))
        return tuple(jnp.asarray(x, jnp.float32).astype(dtype) for x in (q, k, v))

    @property
    def options(self) -> dict:
        return {
            "bucket": self.bucket,
            "prefix_lengths": jnp.asarray(self.lengths, jnp.int32),
            "window": self.window,
            "softcap": self.softcap,
        }

    def real(self) -> np.ndarray:
        """bool [B, T]: not padding left of a prefix."""
        first = self.bucket.prefix - np.asarray(self.lengths)[:, None]
        return np.arange(self.bucket.tokens)[None] >= first

    def blockwise(self, *inputs: jax.Array, sequential: bool | None = None) -> np.ndarray:
        return np.asarray(compiled_blocks(self, sequential)(*inputs).astype(jnp.float32))

    def reference(self, *inputs: jax.Array) -> np.ndarray:
        options = self.options | {"prefix_lengths": np.asarray(self.lengths)}
        return reference_attention(*map(np.asarray, inputs), **options)

    def check(self, attend, dtype: jnp.dtype = jnp.float32) -> np.ndarray:
        """Compare an attention with the mask written out, in float32 on the same inputs; return its output.

        In bfloat16 the weights and the output are rounded once each. A rounding is at most 2**-9 of what is rounded;
        weights add up to one, so both errors are at most 2**-9 of the largest value.
        """
        inputs, real = self.inputs(dtype), self.real()
        wide = [x.astype(jnp.float32) for x in inputs]
        rounded, whole = attend(*inputs), self.reference(*wide)
        assert (rounded.shape, rounded.dtype) == (inputs[0].shape, dtype)
        out = np.asarray(rounded, np.float32)
        assert np.isfinite(out).all()  # at padding too
        assert np.abs(whole[real]).max() > 0.5
        roundings = 2 * 2.0**-9 * float(jnp.abs(wide[2]).max()) if dtype == jnp.bfloat16 else 0
        np.testing.assert_allclose(out[real], whole[real], atol=FLOAT32_TOLERANCE + roundings, rtol=0)
        return out


@functools.cache
def compiled_blocks(case: Case, sequential: bool | None):
    return jit(functools.partial(blocks(case, sequential=sequential), **case.options))


def blocks(case: Case, *, sequential: bool | None):
    return functools.partial(
        blockwise_attention,
        sequential=sequential,
        block_rows=case.block_rows,
        backward_block_rows=2 * case.block_rows // 3,
    )


def gradients(attend, case: Case, inputs: tuple[jax.Array, ...]) -> list[jax.Array]:
    """By q, k and v, of a product of the output of real tokens."""
    real = jnp.asarray(case.real())[:, :, None, None]
    towards = jnp.asarray(np.random.default_rng(5).normal(size=inputs[0].shape), jnp.float32)

    def loss(*qkv: jax.Array) -> jax.Array:
        out = attend(*qkv, **case.options)
        return jnp.sum(jnp.where(real, out.astype(jnp.float32) * towards, 0.0))

    return list(jit(jax.grad(loss, argnums=(0, 1, 2)))(*inputs))


CASES = [
    # Ragged prefixes, one of them empty and one full; blocks of 32 and of 16 query positions.
    Case(Bucket(96, 2, 32), (0, 1, 50, 96), block_rows=96),
    Case(Bucket(96, 2, 32), (0, 15, 96), heads=8, kv_heads=1, block_rows=128),
    # The prefix is no multiple of a block, a response is longer than one, or many fit in one.
    Case(Bucket(70, 2, 100), (0, 33, 70)),
    Case(Bucket(40, 16, 8), (40, 7), block_rows=64),
    Case(Bucket(40, 16, 8), (40, 0), block_rows=10_000),
    Case(Bucket(16, 5, 24), (16, 3), heads=5, kv_heads=5, head_dim=64),
    Case(Bucket(48, 1, 40), (48, 20), heads=2, kv_heads=1, head_dim=128),
    Case(Bucket(33, 3, 20), (33, 0), heads=4, kv_heads=4, head_dim=256),
    # One query position, or one group of heads, larger than a block.
    Case(Bucket(48, 2, 17), (48, 11), heads=8, kv_heads=1, block_rows=4),
    # Windows: of one token, smaller than a block, across the edge of the prefix, larger than anything.
    Case(Bucket(96, 2, 40), (96, 30, 0), window=1, block_rows=128),
    Case(Bucket(96, 2, 40), (96, 30, 0), window=7, softcap=3.0),
    Case(Bucket(96, 5, 40), (96, 30, 0), window=33, heads=8, kv_heads=2),
    Case(Bucket(96, 2, 40), (96, 30, 0), window=90, block_rows=128),
    Case(Bucket(96, 2, 40), (96, 30, 0), window=1000, block_rows=128),
    Case(Bucket(64, 3, 64), (64, 9), window=40, heads=4, kv_heads=4, head_dim=64, block_rows=32),
    # No place for a prefix at all, and responses of one token.
    Case(Bucket(1, 4, 16), (0, 1), window=5),
    Case(Bucket(32, 16, 1), (32, 0), softcap=2.0),
    Case(Bucket(64, 2, 32), (64, 10), softcap=0.5),
]  # fmt: skip


@pytest.mark.parametrize("sequential", [True, False], ids=["in turn", "at once"])
@pytest.mark.parametrize("case", sweep(CASES, few=(0, 2, 4, 8, 10, 11, 15)), ids=str)
def test_blocks_equal_the_whole_mask(case: Case, sequential: bool) -> None:
    case.check(compiled_blocks(case, sequential))


@pytest.mark.parametrize("case", [CASES[1], CASES[5], CASES[10]], ids=str)
def test_bfloat16_is_within_its_roundings(case: Case) -> None:
    for sequential in (True, False):
        case.check(compiled_blocks(case, sequential), jnp.bfloat16)


def test_a_tree_equals_its_sequences_alone() -> None:
    """The oracle's oracle: plain causal attention of each conversation by itself, in float64."""
    case = Case(Bucket(12, 3, 5), (9,), window=6)
    q, k, v = (np.asarray(x, np.float64)[0] for x in case.inputs())
    whole = case.reference(*case.inputs())[0]
    for response in range(3):
        places = [*range(3, 12), *range(12 + 5 * response, 17 + 5 * response)]
        for at, query in enumerate(places):
            keys = places[max(0, at - 5) : at + 1]
            for head in range(4):
                scores = k[keys, head // 2] @ q[query, head]
                weights = np.exp(scores - scores.max())
                expected = weights @ v[keys, head // 2] / weights.sum()
                np.testing.assert_allclose(whole[query, head], expected, atol=FLOAT32_TOLERANCE)


@pytest.mark.parametrize("sequential", [True, False])
@pytest.mark.parametrize("window", [None, 20])
def test_siblings_padding_and_later_tokens_leave_no_trace(window: int | None, sequential: bool) -> None:
    """Everything that a token may not see is replaced, by huge values: not one bit changes. So padding on the right of
    a response needs no mask: it comes later."""
    case = Case(Bucket(48, 4, 20), (31, 0), window=window, block_rows=64)
    bucket, inputs, huge = case.bucket, case.inputs(), [1e4 * x for x in case.inputs(seed=1)]
    before = case.blockwise(*inputs, sequential=sequential)
    index = np.arange(bucket.tokens)
    response = (index - bucket.prefix) // bucket.response_length
    prefix = (index < bucket.prefix) & case.real()
    for number in range(bucket.responses):
        early = (response == number) & (bucket.inside(index) < 13)
        shown = jnp.asarray(prefix | early)[:, :, None, None]
        changed = [jnp.where(shown, x, other) for x, other in zip(inputs, huge, strict=True)]
        after = case.blockwise(*changed, sequential=sequential)
        np.testing.assert_array_equal(after[:, early], before[:, early])
        np.testing.assert_array_equal(after[prefix], before[prefix])


GRADIENT_CASES = [
    # Many blocks of the prefix, responses longer than a block, several in one chunk, a group of four.
    Case(Bucket(100, 2, 70), (100, 37), block_rows=48),
    Case(Bucket(64, 6, 10), (64, 0), heads=8, kv_heads=2, block_rows=160),
    Case(Bucket(0, 3, 20), (0, 0)),
    # Windows within a block, across the edge of the prefix, beyond the response; soft caps.
    Case(Bucket(90, 2, 50), (90, 11), window=2),
    Case(Bucket(90, 4, 50), (90, 60), window=35, softcap=2.0, block_rows=80),
    Case(Bucket(90, 2, 50), (90, 0), window=120, softcap=5.0),
    # Rows of padding only, whose queries see nothing.
    Case(Bucket(40, 2, 20), (40, 0, 13)),
    Case(Bucket(32, 3, 40), (20, 0), window=9, softcap=2.0),
]


@pytest.mark.parametrize("case", sweep(GRADIENT_CASES, few=(0, 2, 4, 7)), ids=str)
def test_gradients_equal_those_of_the_whole_mask(case: Case) -> None:
    """Finite, and zero for what is not seen."""
    inputs, real = case.inputs(), case.real()[:, :, None, None]
    sequential = case.bucket.responses % 4 == 2
    ours = gradients(blocks(case, sequential=sequential), case, inputs)
    for one, other in zip(ours, gradients(reference_attention, case, inputs), strict=True):
        assert float(jnp.abs(other).max()) > 0.1
        np.testing.assert_allclose(one, other, atol=2e-5, rtol=1e-5)
        assert float(jnp.abs(jnp.where(real, 0, one)).max()) == 0


def test_bfloat16_gradients_are_as_good_as_those_of_the_whole_mask() -> None:
    case = Case(Bucket(100, 2, 40), (100, 37))
    inputs = case.inputs(jnp.bfloat16)
    truth = gradients(reference_attention, case, tuple(x.astype(jnp.float32) for x in inputs))
    whole = gradients(reference_attention, case, inputs)
    ours = gradients(blocks(case, sequential=True), case, inputs)
    for one, other, exact in zip(ours, whole, truth, strict=True):
        assert one.dtype == jnp.bfloat16
        errors = [float(jnp.linalg.norm(x.astype(jnp.float32) - exact)) for x in (one, other)]
        assert errors[0] < 0.01 * float(jnp.linalg.norm(exact))
        assert errors[0] < 5 * errors[1]  # the dense one works in float32 within


def compiled(attend, case: Case, *, backward: bool):
    def run(lengths, *inputs):
        return attend(*inputs, **{**case.options, "prefix_lengths": lengths})

    program = jax.grad(lambda *given: run(*given).sum(), argnums=(1, 2, 3)) if backward else run
    arrays = (jnp.zeros(1, jnp.int32), *case.inputs())
    return jit(program).lower(*(jax.ShapeDtypeStruct(x.shape, x.dtype) for x in arrays)).compile()


@pytest.mark.parametrize("sequential", [True, False])
def test_no_square_of_the_prefix_is_ever_held(sequential: bool) -> None:
    """Neither forward nor backward, nor all blocks at once, which would be as much: twice the prefix takes twice the
    memory. The check itself sees a square where there is one."""
    memory = {}
    for prefix in (512, 1024):
        case = Case(Bucket(prefix, 2, 64), (prefix,), block_rows=192)
        attend = blocks(case, sequential=sequential)
        backward = compiled(attend, case, backward=True)
        for program in (compiled(attend, case, backward=False), backward):
            assert largest_square(program.as_text()) <= 192
        memory[prefix] = backward.memory_analysis().temp_size_in_bytes
    if sequential:
        assert memory[1024] < 2.6 * memory[512]
        assert largest_square(compiled(reference_attention, case, backward=False).as_text()) >= 1024


def test_flops_count_the_pairs_of_the_mask() -> None:
    buckets = {Bucket(20, 3, 7): (None, 5, 21, 500), Bucket(4, 2, 9): (6,), Bucket(13, 1, 1): (13,)}
    for bucket, window in ((bucket, window) for bucket, windows in buckets.items() for window in windows):
        mask = tree_mask(TreeMask(bucket, window), np.asarray([bucket.prefix]))
        # A product of q and k, one of weights and v: two multiply-adds, of two operations each.
        assert attention_flops(bucket, heads=6, head_dim=10, window=window) == 4 * mask.sum() * 6 * 10
