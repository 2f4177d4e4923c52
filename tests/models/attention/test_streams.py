"""Attention over packed streams and its derivative, against the mask written down whole and against separate trees."""

from __future__ import annotations

import functools
import itertools
from dataclasses import replace
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
import pytest

from prb_jax.models.attention.blocks import MASKED
from prb_jax.models.attention.reads import READS, READS_OF_A_BLOCK, attend_from_stream_reads
from prb_jax.models.attention.streams import stream_attention
from prb_jax.models.config.decoder import DecoderConfig
from prb_jax.models.head import States
from prb_jax.models.layers import rms_norm
from prb_jax.models.random_params import init_params
from prb_jax.readouts.score_tree import score_stream, score_tree
from prb_jax.trees.batches import Bucket, make_batch
from prb_jax.trees.packing import StreamOptions, StreamShape, pack_streams
from prb_jax.trees.stream_tables import BLOCK
from prb_jax.trees.streams import StreamBatch, make_stream_batch
from prb_jax.trees.tree import build_tree
from tests.models.compiled import jit, largest_square
from tests.models.test_decoder import family_config
from tests.sweeps import sweep
from tests.trees.test_streams import people, who_sees


def batch_of(trees, shape: StreamShape, *, streams: int = 2, window: int | None = None):
    options = StreamOptions(tokens=shape.tokens, streams=streams, window=window)
    (packed,) = pack_streams(trees, shape, options)
    return make_stream_batch(trees, packed, options), packed


def dense(q, k, v, batch: StreamBatch, window: int | None, softcap: float | None) -> jax.Array:
    """The same in O(N^2) memory."""
    streams, tokens, _, size = q.shape
    seen = jnp.asarray(who_sees(batch, window))
    grouped = q.reshape(streams, tokens, k.shape[2], -1, size)
    scores = jnp.einsum("btgrh,bsgh->bgrts", grouped, k, precision="highest")
    scores = scores if softcap is None else softcap * jnp.tanh(scores / softcap)
    weights = jax.nn.softmax(jnp.where(seen[:, None, None], scores, MASKED), axis=-1)
    return jnp.einsum("bgrts,bsgh->btgrh", weights, v, precision="highest").reshape(q.shape)


def inputs(
    tokens: int, dtype=jnp.float32, *, heads: int = 8, kv_heads: int = 2, size: int = 8
) -> list[jax.Array]:
    """q, k, v, and the gradient that comes back."""
    rng, counts = np.random.default_rng(0), (heads, kv_heads, kv_heads, heads)
    return [jnp.asarray(rng.normal(size=(2, tokens, count, size)), dtype) for count in counts]


@pytest.mark.parametrize(
    ("window", "softcap"), sweep(itertools.product((None, 40, 300), (None, 3.0)), few=(0, 3))
)
def test_equals_the_oracle(window: int | None, softcap: float | None) -> None:
    trees = [*people(2, 2), *people(1, 1, profile=1400, seed=3)]
    batch, _ = batch_of(trees, StreamShape(1536, 32), window=window)
    q, k, v, _ = inputs(1536)
    options = {"batch": batch, "window": window, "softcap": softcap}
    expected, real = np.asarray(dense(q, k, v, **options)), batch.tokens > 0
    out = np.asarray(jit(functools.partial(stream_attention, **options))(q, k, v))
    assert np.isfinite(out).all()
    np.testing.assert_allclose(out[real], expected[real], atol=1e-5)
    rows = np.arange(2)[:, None]
    for blocks in (batch.blocks, None):  # with their table, and without, as accelerators compute it
        with_table = options | {"batch": replace(batch, blocks=blocks)}
        attend = functools.partial(attend_from_stream_reads, **with_table)
        from_reads = jit(attend)(q[rows, batch.reads], k, v)
        np.testing.assert_allclose(from_reads, expected[rows, batch.reads], atol=1e-5)


def gradients(attend, q, k, v, towards, real) -> list[jax.Array]:
    def loss(*qkv: jax.Array) -> jax.Array:
        out = attend(*qkv).astype(jnp.float32)
        return jnp.sum(jnp.where(real[..., None, None], out * towards, 0.0))

    return list(jit(jax.grad(loss, argnums=(0, 1, 2)))(q, k, v))


def off(ours: jax.Array, theirs: jax.Array) -> float:
    """The difference in units of the norm."""
    ours, theirs = ours.astype(jnp.float32), theirs.astype(jnp.float32)
    return float(jnp.linalg.norm(ours - theirs) / jnp.linalg.norm(theirs))


@pytest.mark.parametrize(("window", "softcap"), sweep([(None, None), (40, 3.0), (300, None)], few=(1, 2)))
def test_gradients_equal_those_of_the_whole_mask(window: int | None, softcap: float | None) -> None:
    """A tree with blocks that are seen wholly, several small ones, padding; of all tokens and of the read places."""
    tokens = 1024
    trees = [*people(2, 2), *people(1, 1, profile=900, seed=3)]
    batch, _ = batch_of(trees, StreamShape(tokens, 32), window=window)
    assert (batch.blocks.counts[..., 0] > 0).any()
    q, k, v, towards = inputs(tokens)
    real = jnp.asarray(batch.tokens > 0)
    options = {"batch": batch, "window": window, "softcap": softcap}
    whole = functools.partial(dense, **options)
    ours = gradients(functools.partial(stream_attention, **options), q, k, v, towards, real)
    for one, other in zip(ours, gradients(whole, q, k, v, towards, real), strict=True):
        assert float(jnp.abs(other).max()) > 0.1
        assert off(one, other) < 3e-6
    # Of more read places than are taken at a time, most of which are no real ones.
    row = jnp.arange(2)[:, None]
    for blocks, count in ((batch.blocks, 2 * READS_OF_A_BLOCK + 3), (None, 2 * READS)):
        reads = np.tile(batch.reads, (1, 2 * READS // 32))[:, :count]
        more = {**options, "batch": replace(batch, reads=reads, blocks=blocks)}
        at_reads = (towards[:, :count], jnp.ones(reads.shape, bool))
        at_places = gradients(
            lambda q, k, v, reads=reads, more=more: attend_from_stream_reads(q[row, reads], k, v, **more),
            q, k, v, *at_reads,
        )  # fmt: skip
        expected = gradients(lambda q, k, v, reads=reads: whole(q, k, v)[row, reads], q, k, v, *at_reads)
        for one, other in zip(at_places, expected, strict=True):
            assert off(one, other) < 3e-6


def test_bfloat16_gradients_are_near_those_of_float32() -> None:
    batch, _ = batch_of(people(2, 2), StreamShape(512, 32))
    real = jnp.asarray(batch.tokens > 0)
    attend = functools.partial(stream_attention, batch=batch)
    exact = gradients(functools.partial(dense, batch=batch, window=None, softcap=None), *inputs(512), real)
    *qkv, towards = inputs(512, jnp.bfloat16)
    for one, other in zip(gradients(attend, *qkv, towards, real), exact, strict=True):
        assert one.dtype == jnp.bfloat16
        assert off(one, other) < 0.01


@pytest.mark.parametrize(
    ("family", "remat"), sweep([("qwen3", "dots"), ("qwen3", "none"), ("gemma2", "full")], few=(0,))
)
def test_a_model_has_the_gradients_of_separate_trees(family: str, remat: str, tmp_path) -> None:
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

    def of_streams(params) -> jax.Array:
        scores = score_stream(
            params, batch, config=config, dtype=jnp.float32, remat=remat, differentiated=True
        )
        return jnp.sum(scores[..., 0] * by_read)

    def of_trees(params) -> jax.Array:
        alone = make_batch(trees, Bucket(320, 4, 48), batch=len(trees))
        scores = score_tree(params, alone, config=config, dtype=jnp.float32)
        return jnp.sum(jnp.where(present, scores[..., 0] * towards, 0.0))

    gradients_of_streams, expected = (jit(jax.grad(scores))(params) for scores in (of_streams, of_trees))
    for one, other in zip(jax.tree.leaves(gradients_of_streams), jax.tree.leaves(expected), strict=True):
        assert off(one, other) < 1e-4


def assert_scores_are_those_of_trees(config: DecoderConfig, trees, batch: StreamBatch, packed) -> None:
    params = init_params(config, seed=1)
    in_streams = jit(functools.partial(score_stream, config=config, dtype=jnp.float32))(params, batch)
    alone = jit(functools.partial(score_tree, config=config, dtype=jnp.float32))
    scores = alone(params, make_batch(trees, Bucket(320, 4, 48), batch=len(trees)))
    for row, stream in zip(np.asarray(in_streams), packed, strict=False):
        expected = np.concatenate(
            [scores[member, : len(trees[member].responses)] for member in stream.members]
        )
        assert np.std(expected) > 0.05
        np.testing.assert_allclose(row[: len(expected)], expected, atol=1e-5)


def test_heads_find_patterns_and_markers_as_in_trees() -> None:
    """A pattern that crosses from the prefix into a response, one that occurs twice, one that is missing."""
    rng = np.random.default_rng(2)
    shared = [*rng.integers(20, 60, 60), 7, 8, 3, 7]
    trees = [
        build_tree([[*shared, 8, 30, 31], [*shared, 9, 7, 8, 9]]),
        build_tree([[*shared, 10, 11, 7], [*shared, 12]], read=[len(shared), len(shared)]),
        build_tree([[7], [8, 7, 8]]),
    ]
    batch, streams = batch_of(trees, StreamShape(256, 16), streams=1)
    packed = make_batch(trees, Bucket(64, 2, 8), batch=3)
    norm = functools.partial(rms_norm, weight=jnp.ones(3), eps=1e-6, plus_one=False, scale_after_cast=False)

    def states_of(tokens: Any, positions: Any) -> jax.Array:
        """A state that tells the token and its position."""
        return jnp.stack([tokens + 1.0, positions + 1.0, jnp.ones_like(positions)], axis=-1).astype(
            jnp.float32
        )

    ours = States(states_of(batch.tokens, batch.positions), batch, norm)
    theirs = States(states_of(packed.tokens, packed.positions), packed, norm)
    (stream,) = streams

    def same(of_streams: jax.Array, expected: jax.Array) -> None:
        wanted = np.concatenate([expected[m, : len(trees[m].responses)] for m in stream.members])
        np.testing.assert_allclose(of_streams[0, : len(wanted)], wanted, rtol=1e-6)

    same(ours.read(), theirs.read())
    for pattern in ((7,), (7, 8), (7, 8, 3, 7, 8), (8, 7, 8), (99,)):
        same(ours.at_pattern(pattern), theirs.at_pattern(pattern))
    for token in (7, 8, 99):

        def summed(states: States, token: int = token) -> jax.Array:
            values, shown = states.along(token, lambda x: x.sum(axis=-1))
            return jnp.where(shown, values, 0.0).sum(axis=2)

        same(summed(ours), summed(theirs))


def test_neither_pass_holds_a_square_of_the_stream(tmp_path) -> None:
    """Only blocks of scores: twice the stream takes twice the memory. Nor does any array of a whole model's program."""
    memory = {}
    for tokens in (2048, 4096):
        batch, _ = batch_of(people(1, 2, profile=400), StreamShape(tokens, 16), streams=1)
        shape = jax.ShapeDtypeStruct((1, tokens, 2, 8), jnp.float32)

        def loss(q, k, v, batch=batch):
            return stream_attention(q, k, v, batch=batch).sum()

        compiled = jit(jax.grad(loss, argnums=(0, 1, 2))).lower(shape, shape, shape).compile()
        memory[tokens] = compiled.memory_analysis().temp_size_in_bytes
        assert largest_square(compiled.as_text()) <= BLOCK
    assert memory[4096] < 2.2 * memory[2048]
    config = family_config("qwen3", tmp_path)
    batch, _ = batch_of(people(4, 4), StreamShape(4096, 128), streams=1)
    run = jax.jit(functools.partial(score_stream, config=config, dtype=jnp.float32))
    assert "4096x4096" not in run.lower(init_params(config), batch).as_text()
