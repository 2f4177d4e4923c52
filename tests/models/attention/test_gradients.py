"""The hand-written backward pass of attention: against automatic differentiation of the whole mask."""

from __future__ import annotations

import functools
import re

import jax
import jax.numpy as jnp
import numpy as np
import pytest

from prb_jax.models.attention.blockwise import blockwise_attention
from prb_jax.readouts.score_tree import score_tree
from prb_jax.trees.mask import TreeLayout
from tests.models.attention.dense import reference_attention
from tests.models.attention.test_blockwise import Case
from tests.training.small_batches import batch_of, initial_params, random_trees, small_config

# What is tested is the program before LLVM, which takes most of the time of a compile.
UNOPTIMISED = {"xla_backend_optimization_level": 0}
CASES = [
    # Many blocks of the prefix, responses longer than a block, several in one chunk, a group of four.
    Case(TreeLayout(100, 2, 70), (100, 37), block_rows=48),
    Case(TreeLayout(64, 6, 10), (64, 0), heads=8, kv_heads=2, block_rows=160),
    Case(TreeLayout(0, 3, 20), (0, 0), block_rows=64),
    # Windows within a block, across the edge of the prefix, beyond the response; soft caps.
    Case(TreeLayout(90, 2, 50), (90, 11), window=2),
    Case(TreeLayout(90, 4, 50), (90, 60), window=35, softcap=2.0, block_rows=80),
    Case(TreeLayout(90, 2, 50), (90, 0), window=120, softcap=5.0),
]


def gradients(attend, case: Case, inputs: tuple[jax.Array, ...]) -> list[jax.Array]:
    real = jnp.asarray(case.real())[:, :, None, None]
    towards = jnp.asarray(np.random.default_rng(5).normal(size=inputs[0].shape), jnp.float32)

    def loss(*qkv: jax.Array) -> jax.Array:
        out = attend(*qkv, **case.options)
        return jnp.sum(jnp.where(real, out.astype(jnp.float32) * towards, 0.0))

    return list(jax.jit(jax.grad(loss, argnums=(0, 1, 2)), compiler_options=UNOPTIMISED)(*inputs))


def blocks(case: Case, *, sequential: bool):
    return functools.partial(
        blockwise_attention,
        sequential=sequential,
        block_rows=case.block_rows,
        backward_block_rows=2 * case.block_rows // 3,
    )


@pytest.mark.parametrize("case", CASES, ids=str)
def test_gradients_equal_those_of_the_whole_mask(case: Case) -> None:
    inputs, sequential = case.inputs(), case.layout.responses % 4 == 2
    theirs = gradients(reference_attention, case, inputs)
    ours = gradients(blocks(case, sequential=sequential), case, inputs)
    for one, other in zip(ours, theirs, strict=True):
        assert float(jnp.abs(other).max()) > 0.1
        np.testing.assert_allclose(one, other, atol=2e-5, rtol=1e-5)


def test_bfloat16_gradients_are_as_good_as_those_of_the_whole_mask() -> None:
    case = Case(TreeLayout(100, 2, 40), (100, 37), block_rows=64)
    inputs = case.inputs(jnp.bfloat16)
    truth = gradients(reference_attention, case, tuple(x.astype(jnp.float32) for x in inputs))
    whole = gradients(reference_attention, case, inputs)
    ours = gradients(blocks(case, sequential=True), case, inputs)
    for one, other, exact in zip(ours, whole, truth, strict=True):
        assert one.dtype == jnp.bfloat16
        errors = [float(jnp.linalg.norm(x.astype(jnp.float32) - exact)) for x in (one, other)]
        assert errors[0] < 0.01 * float(jnp.linalg.norm(exact))
        assert errors[0] < 5 * errors[1]  # the dense one works in float32 within


def test_the_backward_pass_holds_no_square_of_the_prefix() -> None:
    """Nor all blocks at once, which would be as much: twice the prefix takes twice the memory."""
    memory = {}
    for prefix in (1024, 2048):
        case = Case(TreeLayout(prefix, 2, 64), (prefix,), block_rows=192)

        def loss(q, k, v, lengths, case=case):
            options = {**case.options, "prefix_lengths": lengths}
            return blocks(case, sequential=True)(q, k, v, **options).sum()

        arguments = [
            jax.ShapeDtypeStruct(x.shape, x.dtype) for x in (*case.inputs(), jnp.zeros(1, jnp.int32))
        ]
        compiled = jax.jit(jax.grad(loss, argnums=(0, 1, 2))).lower(*arguments).compile(UNOPTIMISED)
        memory[prefix] = compiled.memory_analysis().temp_size_in_bytes
        shapes = re.findall(r"\b(?:f32|bf16|pred)\[([\d,]+)\]", compiled.as_text())
        assert max(sorted(map(int, shape.split(",")))[-2] for shape in shapes if "," in shape) <= 192
    assert memory[2048] < 2.6 * memory[1024]


def test_a_soft_prompt_takes_the_place_of_the_first_tokens() -> None:
    """Rows of the embedding given as a soft prompt change nothing; their ids then have no influence."""
    config, trees = small_config(), random_trees(3)
    params, batch = initial_params(config), batch_of(random_trees(3), rows=4)
    first = np.stack([tree.prefix[:3] for tree in trees] + [np.zeros(3, np.int32)])
    run = jax.jit(functools.partial(score_tree, config=config, dtype=jnp.dtype("float32")))
    plain = np.asarray(run(params, batch))[:3]
    prompt = jnp.take(params["embed"], jnp.asarray(first), axis=0)
    np.testing.assert_array_equal(np.asarray(run(params, batch, soft_prompt=prompt))[:3], plain)
    other = [[*tree.prefix.tolist()] for tree in trees]
    for row, ids in enumerate(other):
        start = batch.prefix.shape[1] - len(ids)
        batch.prefix[row, start : start + 3] = 5
    np.testing.assert_array_equal(np.asarray(run(params, batch, soft_prompt=prompt))[:3], plain)
    assert np.abs(np.asarray(run(params, batch))[:3] - plain).max() > 1e-3
    gradient = jax.grad(lambda prompt: run(params, batch, soft_prompt=prompt)[:3].sum())(prompt)
    size = np.abs(np.asarray(gradient)).max(axis=(1, 2))
    assert (size[:3] > 1e-3).all()
    assert size[3] == 0
