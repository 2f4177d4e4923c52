"""The backward pass over packed streams, against the mask written down whole and against separate trees."""

from __future__ import annotations

import functools
import re
from dataclasses import replace

import jax
import jax.numpy as jnp
import numpy as np
import pytest

from prb_jax.models.attention.streams import READS, attend_from_stream_reads, stream_attention
from prb_jax.models.random_params import init_params
from prb_jax.readouts.score_tree import score_stream, score_tree
from prb_jax.trees.batches import make_batch
from prb_jax.trees.packing import StreamShape
from prb_jax.trees.shapes import Bucket
from prb_jax.trees.stream_blocks import BLOCK
from tests.models.attention.test_streams import batch_of, dense
from tests.models.test_decoder import family_config
from tests.trees.test_streams import people

UNOPTIMISED = {"xla_backend_optimization_level": 0}


def inputs(tokens: int, dtype=jnp.float32) -> list[jax.Array]:
    """q of eight heads, k and v of two, and the gradient that comes back."""
    rng = np.random.default_rng(0)
    return [jnp.asarray(rng.normal(size=(2, tokens, heads, 8)), dtype) for heads in (8, 2, 2, 8)]


def gradients(attend, q, k, v, towards, real) -> list[jax.Array]:
    def loss(*qkv: jax.Array) -> jax.Array:
        out = attend(*qkv).astype(jnp.float32)
        return jnp.sum(jnp.where(real[..., None, None], out * towards, 0.0))

    return list(jax.jit(jax.grad(loss, argnums=(0, 1, 2)), compiler_options=UNOPTIMISED)(q, k, v))


def off(ours: jax.Array, theirs: jax.Array) -> float:
    """The difference in units of the norm."""
    ours, theirs = ours.astype(jnp.float32), theirs.astype(jnp.float32)
    return float(jnp.linalg.norm(ours - theirs) / jnp.linalg.norm(theirs))


@pytest.mark.parametrize(("window", "softcap"), [(None, None), (40, 3.0), (300, None)])
def test_gradients_equal_those_of_the_whole_mask(window: int | None, softcap: float | None) -> None:
    """A tree with blocks that are seen wholly, several small ones, padding; of all tokens and of the read places."""
    tokens = 1024
    trees = [*people(2, 2), *people(1, 1, profile=900, seed=3)]
    batch, _ = batch_of(trees, StreamShape(tokens, 32), window=window)
    assert (batch.blocks.counts[..., 0] > 0).any()
    q, k, v, towards = inputs(tokens)
    real = jnp.asarray((batch.previous >= 0) | (batch.until > np.arange(1, tokens + 1)))
    options = {"batch": batch, "window": window, "softcap": softcap}
    whole = functools.partial(dense, **options)
    ours = gradients(functools.partial(stream_attention, **options), q, k, v, towards, real)
    for one, other in zip(ours, gradients(whole, q, k, v, towards, real), strict=True):
        assert float(jnp.abs(other).max()) > 0.1
        assert off(one, other) < 3e-6
    # Of twice as many read places as are taken at a time, most of which are no real ones.
    reads = np.tile(batch.reads, (1, 2 * READS // 32))
    more = {**options, "batch": replace(batch, reads=reads)}
    row = jnp.arange(2)[:, None]
    ones = jnp.ones(reads.shape, bool)
    found = gradients(
        lambda q, k, v: attend_from_stream_reads(q[row, reads], k, v, **more),
        q,
        k,
        v,
        towards[:, : 2 * READS],
        ones,
    )
    expected = gradients(lambda q, k, v: whole(q, k, v)[row, reads], q, k, v, towards[:, : 2 * READS], ones)
    for one, other in zip(found, expected, strict=True):
        assert off(one, other) < 3e-6


def test_bfloat16_gradients_are_near_those_of_float32() -> None:
    batch, _ = batch_of(people(2, 2), StreamShape(512, 32))
    real = jnp.asarray(batch.previous >= 0)
    attend = functools.partial(stream_attention, batch=batch)
    exact = gradients(functools.partial(dense, batch=batch, window=None, softcap=None), *inputs(512), real)
    *qkv, towards = inputs(512, jnp.bfloat16)
    for one, other in zip(gradients(attend, *qkv, towards, real), exact, strict=True):
        assert one.dtype == jnp.bfloat16
        assert off(one, other) < 0.01


@pytest.mark.parametrize("family", ["qwen3", pytest.param("gemma2", marks=pytest.mark.slow)])
def test_a_model_has_the_gradients_of_separate_trees(family: str, tmp_path) -> None:
    """Of people with shared beginnings, equal responses and two questions; whatever is computed again."""
    config = family_config(family, tmp_path)
    params = init_params(config, seed=1)
    trees = people(2, 2, profile=150)
    batch, packed = batch_of(trees, StreamShape(768, 32), window=config.sliding_window)
    rng = np.random.default_rng(0)
    towards = rng.normal(size=(len(trees), 4))
    by_read = np.zeros(batch.reads.shape)
    for row, stream in enumerate(packed):
        values = [towards[member, : len(trees[member].responses)] for member in stream.members]
        by_read[row, : sum(map(len, values))] = np.concatenate(values)
    present = np.arange(4)[None] < np.asarray([len(tree.responses) for tree in trees])[:, None]

    def of_streams(params, remat: str) -> jax.Array:
        scores = score_stream(
            params, batch, config=config, dtype=jnp.float32, remat=remat, differentiated=True
        )
        return jnp.sum(scores[..., 0] * by_read)

    def of_trees(params) -> jax.Array:
        alone = make_batch(trees, Bucket(320, 4, 48), batch=len(trees))
        scores = score_tree(params, alone, config=config, dtype=jnp.float32)
        return jnp.sum(jnp.where(present, scores[..., 0] * towards, 0.0))

    expected = jax.jit(jax.grad(of_trees), compiler_options=UNOPTIMISED)(params)
    for remat in ("none", "dots") if family == "qwen3" else ("full",):
        found = jax.jit(jax.grad(functools.partial(of_streams, remat=remat)), compiler_options=UNOPTIMISED)
        for one, other in zip(jax.tree.leaves(found(params)), jax.tree.leaves(expected), strict=True):
            assert off(one, other) < 1e-4


def test_the_backward_pass_holds_no_square_of_the_stream() -> None:
    """Only blocks of scores: twice the stream takes twice the memory."""
    memory = {}
    for tokens in (2048, 4096):
        batch, _ = batch_of(people(1, 2, profile=400), StreamShape(tokens, 16), streams=1)
        shape = jax.ShapeDtypeStruct((1, tokens, 2, 8), jnp.float32)

        def loss(q, k, v, batch=batch):
            return stream_attention(q, k, v, batch=batch).sum()

        compiled = jax.jit(jax.grad(loss, argnums=(0, 1, 2))).lower(shape, shape, shape).compile(UNOPTIMISED)
        memory[tokens] = compiled.memory_analysis().temp_size_in_bytes
        shapes = re.findall(r"\b(?:f32|pred)\[([\d,]+)\]", compiled.as_text())
        assert max(sorted(map(int, shape.split(",")))[-2] for shape in shapes if "," in shape) <= BLOCK
    assert memory[4096] < 2.2 * memory[2048]
