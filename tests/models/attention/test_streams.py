"""Attention over packed streams, against the mask written down whole; the heads of streams against trees."""

from __future__ import annotations

import functools
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
import pytest

from prb_jax.models.attention.blocks import MASKED
from prb_jax.models.attention.streams import attend_from_stream_reads, stream_attention
from prb_jax.models.decoder import tree_positions, tree_tokens
from prb_jax.models.layers import rms_norm
from prb_jax.models.random_params import init_params
from prb_jax.models.states import StreamStates, TreeStates
from prb_jax.readouts.score_tree import score_stream, score_tree
from prb_jax.trees.batches import make_batch
from prb_jax.trees.packing import StreamOptions, StreamShape, pack_streams
from prb_jax.trees.shapes import Bucket
from prb_jax.trees.streams import StreamBatch, make_stream_batch
from prb_jax.trees.tree import build_tree
from tests.models.test_decoder import family_config
from tests.trees.test_streams import people

jit = functools.partial(jax.jit, compiler_options={"xla_backend_optimization_level": 0})


def batch_of(trees, shape: StreamShape, *, streams: int = 2, window: int | None = None):
    options = StreamOptions(tokens=shape.tokens, streams=streams, window=window)
    (packed,) = pack_streams(trees, shape, options)
    return make_stream_batch(trees, packed, options), packed


def dense(q, k, v, batch: StreamBatch, window: int | None, softcap: float | None) -> jax.Array:
    """The same in O(N^2) memory."""
    streams, tokens, _, size = q.shape
    place = jnp.arange(tokens)
    seen = (place[None] <= place[:, None]) & (place[:, None] < batch.until[:, None, :])
    if window is not None:
        seen &= batch.positions[:, :, None] - batch.positions[:, None] < window
    grouped = q.reshape(streams, tokens, k.shape[2], -1, size)
    scores = jnp.einsum("btgrh,bsgh->bgrts", grouped, k, precision="highest")
    scores = scores if softcap is None else softcap * jnp.tanh(scores / softcap)
    weights = jax.nn.softmax(jnp.where(seen[:, None, None], scores, MASKED), axis=-1)
    return jnp.einsum("bgrts,bsgh->btgrh", weights, v, precision="highest").reshape(q.shape)


@pytest.mark.parametrize("window", [None, 40, 300])
@pytest.mark.parametrize("softcap", [None, 3.0])
def test_equals_the_oracle(window: int | None, softcap: float | None) -> None:
    trees = [*people(2, 2), *people(1, 1, profile=1400, seed=3)]
    batch, _ = batch_of(trees, StreamShape(1536, 32), window=window)
    rng = np.random.default_rng(0)
    q = jnp.asarray(rng.normal(size=(2, 1536, 8, 8)), jnp.float32)
    k, v = (jnp.asarray(rng.normal(size=(2, 1536, 2, 8)), jnp.float32) for _ in range(2))
    options = {"batch": batch, "window": window, "softcap": softcap}
    expected = np.asarray(dense(q, k, v, batch, window, softcap))
    found = np.asarray(jit(functools.partial(stream_attention, **options))(q, k, v))
    assert np.isfinite(found).all()
    real = batch.previous >= 0
    np.testing.assert_allclose(found[real], expected[real], atol=1e-5)
    rows = np.arange(2)[:, None]
    from_reads = jit(functools.partial(attend_from_stream_reads, **options))(q[rows, batch.reads], k, v)
    np.testing.assert_allclose(from_reads, expected[rows, batch.reads], atol=1e-5)


@pytest.mark.parametrize("family", ["qwen3", "gemma2", "gemma3", "mistral"])
def test_a_model_scores_streams_as_single_trees(family: str, tmp_path) -> None:
    """Windows, soft-caps, two ropes; one program for all trees."""
    config = family_config(family, tmp_path)
    params = init_params(config, seed=1)
    trees = people(2, 2, profile=150)
    batch, packed = batch_of(trees, StreamShape(768, 32), window=config.sliding_window)
    run = jit(functools.partial(score_stream, config=config, dtype=jnp.float32))
    found = np.asarray(run(params, batch))
    alone = jit(functools.partial(score_tree, config=config, dtype=jnp.float32))
    expected = alone(params, make_batch(trees, Bucket(320, 4, 48), batch=len(trees)))
    for row, stream in zip(found, packed, strict=False):
        wanted = [expected[member, : len(trees[member].responses)] for member in stream.members]
        wanted = np.concatenate(wanted)
        np.testing.assert_allclose(row[: len(wanted)], wanted, atol=1e-5)


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

    ours = StreamStates(states_of(batch.tokens, batch.positions), batch, norm)
    theirs = TreeStates(states_of(tree_tokens(packed), tree_positions(packed)), packed, norm)
    (stream,) = streams

    def same(found: jax.Array, expected: jax.Array) -> None:
        wanted = np.concatenate([expected[m, : len(trees[m].responses)] for m in stream.members])
        np.testing.assert_allclose(found[0, : len(wanted)], wanted, rtol=1e-6)

    same(ours.read(), theirs.read())
    for pattern in ((7,), (7, 8), (7, 8, 3, 7, 8), (8, 7, 8), (99,)):
        same(ours.at_pattern(pattern), theirs.at_pattern(pattern))
    for token in (7, 8, 99):

        def summed(states: StreamStates | TreeStates, token: int = token) -> jax.Array:
            values, shown = states.along(token, lambda x: x.sum(axis=-1))
            return jnp.where(shown, values, 0.0).sum(axis=2)

        same(summed(ours), summed(theirs))


def test_loops_hold_blocks_and_never_the_whole(tmp_path) -> None:
    """No array of the program has a square of the stream's length."""
    config = family_config("qwen3", tmp_path)
    trees = people(4, 4)
    batch, _ = batch_of(trees, StreamShape(4096, 128), streams=1)
    run = jax.jit(functools.partial(score_stream, config=config, dtype=jnp.float32))
    text = run.lower(init_params(config), batch).as_text()
    assert "4096x4096" not in text
