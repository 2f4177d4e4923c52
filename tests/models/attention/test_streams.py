"""Attention over packed streams and its derivative, against the mask written down whole and against separate trees."""

from __future__ import annotations

import functools
import itertools
import re
from dataclasses import replace
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
import pytest

from prb_jax.models.attention import batched, streams
from prb_jax.models.attention.streams import (
    MANY_READS,
    MASKED,
    READS_OF_A_BLOCK,
    attend_from_stream_reads,
    stream_attention,
)
from prb_jax.models.config.decoder import DecoderConfig
from prb_jax.models.head import States
from prb_jax.models.layers import rms_norm
from prb_jax.models.model import init_params
from prb_jax.models.readouts.heads import along, at_pattern
from prb_jax.models.readouts.score_tree import score_stream
from prb_jax.trees.packing import pack_streams
from prb_jax.trees.streams import StreamBatch, StreamOptions, StreamShape, make_stream_batch
from prb_jax.trees.tree import BLOCK, build_tree
from tests.models.compiled import jit, largest_square
from tests.models.test_decoder import family_config
from tests.packed import batch_alone, packed_batch, read_trees
from tests.sweeps import sweep
from tests.trees.test_streams import people, who_sees


def batch_of(trees, shape: StreamShape, *, streams: int = 2, window: int | None = None):
    options = StreamOptions(tokens=shape.tokens, streams=streams, window=window)
    (packed,) = pack_streams(trees, shape, options)
    return make_stream_batch(trees, packed, options), packed


SINKS = jnp.linspace(-1.0, 2.0, 8)  # of the heads, in cases with a softcap


def dense(
    q, k, v, batch: StreamBatch, window: int | None, softcap: float | None, sinks: jax.Array | None = None
) -> jax.Array:
    """The same in O(N^2) memory."""
    streams, tokens, _, size = q.shape
    seen = jnp.asarray(who_sees(batch, window))
    grouped = q.reshape(streams, tokens, k.shape[2], -1, size)
    scores = jnp.einsum("btgrh,bsgh->bgrts", grouped, k, precision="highest")
    scores = scores if softcap is None else softcap * jnp.tanh(scores / softcap)
    scores = jnp.where(seen[:, None, None], scores, MASKED)
    if sinks is not None:
        columns = jnp.broadcast_to(sinks.reshape(1, k.shape[2], -1, 1, 1), (*scores.shape[:-1], 1))
        scores = jnp.concatenate([scores, columns], axis=-1)
    weights = jax.nn.softmax(scores, axis=-1)[..., :tokens]
    return jnp.einsum("bgrts,bsgh->btgrh", weights, v, precision="highest").reshape(q.shape)


@pytest.fixture(params=["walk", "batched"])
def program(request: pytest.FixtureRequest, monkeypatch: pytest.MonkeyPatch) -> str:
    """The program for CPUs, and that for accelerators in rounds of five blocks with a rest."""
    if request.param == "batched":
        monkeypatch.setattr(streams, "walks", lambda batch, mesh: False)
        monkeypatch.setattr(batched, "SCORE_BYTES", 5 * 4 * 8 * batched.WALKED * BLOCK**2)
    return request.param


def inputs(
    tokens: int, dtype=jnp.float32, *, heads: int = 8, kv_heads: int = 2, size: int = 8
) -> list[jax.Array]:
    """q, k, v, and the gradient that comes back."""
    rng, counts = np.random.default_rng(0), (heads, kv_heads, kv_heads, heads)
    return [jnp.asarray(rng.normal(size=(2, tokens, count, size)), dtype) for count in counts]


@pytest.mark.parametrize(
    ("window", "softcap"), sweep(itertools.product((None, 40, 300), (None, 3.0)), few=(0, 3))
)
@pytest.mark.usefixtures("program")
def test_equals_the_oracle(window: int | None, softcap: float | None) -> None:
    trees = [*people(2, 2), *people(1, 1, profile=1400, seed=3)]
    batch, _ = batch_of(trees, StreamShape(1536, 32), window=window)
    q, k, v, _ = inputs(1536)
    options = {"batch": batch, "window": window, "softcap": softcap, "sinks": SINKS if softcap else None}
    expected, real = np.asarray(dense(q, k, v, **options)), batch.tokens > 0
    out = np.asarray(jit(functools.partial(stream_attention, **options))(q, k, v))
    assert np.isfinite(out).all()
    np.testing.assert_allclose(out[real], expected[real], atol=1e-5)
    rows = np.arange(2)[:, None]
    from_reads = jit(functools.partial(attend_from_stream_reads, **options))(q[rows, batch.reads], k, v)
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


@pytest.mark.parametrize(("window", "softcap"), sweep([(None, None), (40, 3.0), (300, None)], few=(1,)))
def test_gradients_equal_those_of_the_whole_mask(
    window: int | None, softcap: float | None, program: str
) -> None:
    """A tree with blocks that are seen wholly, several small ones, padding; of all tokens and of the read places."""
    tokens = 1024
    trees = [*people(2, 2), *people(1, 1, profile=900, seed=3)]
    batch, _ = batch_of(trees, StreamShape(tokens, 32), window=window)
    assert (batch.blocks.counts[..., 0] > 0).any()
    q, k, v, towards = inputs(tokens)
    real = jnp.asarray(batch.tokens > 0)
    options = {"batch": batch, "window": window, "softcap": softcap, "sinks": SINKS if softcap else None}
    whole = functools.partial(dense, **options)
    ours = gradients(functools.partial(stream_attention, **options), q, k, v, towards, real)
    for one, other in zip(ours, gradients(whole, q, k, v, towards, real), strict=True):
        assert float(jnp.abs(other).max()) > 0.1
        assert off(one, other) < 3e-6
    # Of more read places than are taken at a time, most of which are no real ones; and of many next to each other.
    row, count = jnp.arange(2)[:, None], 2 * READS_OF_A_BLOCK + 3 if program == "walk" else 2 * batched.READS
    few = np.tile(batch.reads, (1, 2 * batched.READS // 32))[:, :count]
    many = np.stack([np.flatnonzero(ids > 0)[-250:] for ids in batch.tokens])
    assert tokens < 250 * MANY_READS
    for places in (few, many):
        more = {**options, "batch": replace(batch, reads=places)}
        at_reads = (towards[:, : places.shape[1]], jnp.ones(places.shape, bool))
        at_places = gradients(
            lambda q, k, v, places=places, more=more: attend_from_stream_reads(
                q[row, places], k, v, **more
            ), q, k, v, *at_reads,
        )  # fmt: skip
        expected = gradients(lambda q, k, v, places=places: whole(q, k, v)[row, places], q, k, v, *at_reads)
        for one, other in zip(at_places, expected, strict=True):
            assert off(one, other) < 3e-6


@pytest.mark.usefixtures("program")
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
    window = config.sliding_window
    batches = (
        packed_batch(trees, options=StreamOptions(tokens=768, streams=2, window=window)),
        batch_alone(trees, window=window),
    )
    rng = np.random.default_rng(0)
    counts = np.asarray([len(tree.responses) for tree in trees])
    towards = rng.normal(size=batches[0].places.shape) * (np.arange(counts.max()) < counts[:, None])

    def total(params, batch, **options) -> jax.Array:
        scores = read_trees(params, batch, config=config, dtype=jnp.float32, **options)
        return jnp.sum(scores[..., 0] * towards)

    streams = jit(jax.grad(functools.partial(total, remat=remat, differentiated=True)))(params, batches[0])
    expected = jit(jax.grad(total))(params, batches[1])
    for one, other in zip(jax.tree.leaves(streams), jax.tree.leaves(expected), strict=True):
        assert off(one, other) < 1e-4


def assert_scores_are_those_of_trees(config: DecoderConfig, trees, batch: StreamBatch, packed) -> None:
    """Of every conversation alone, by the program for CPUs."""
    params = init_params(config, seed=1)
    in_streams = jit(functools.partial(score_stream, config=config, dtype=jnp.float32))(params, batch)
    alone = jit(functools.partial(read_trees, config=config, dtype=jnp.float32))
    scores = alone(params, batch_alone(trees, window=config.sliding_window))
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
    batches = packed_batch(trees), batch_alone(trees)
    norm = functools.partial(rms_norm, weight=jnp.ones(3), eps=1e-6, plus_one=False, scale_after_cast=False)

    def states_of(tokens: Any, positions: Any) -> jax.Array:
        """A state that tells the token and its position."""
        return jnp.stack([tokens + 1.0, positions + 1.0, jnp.ones_like(positions)], axis=-1).astype(
            jnp.float32
        )

    both = [States(states_of(batch.tokens, batch.positions), batch, norm) for batch in batches]

    def same(read: Any) -> None:
        """In the packed batch and in the conversations alone; by hand in test_decoder and tests/models/readouts."""
        values = [np.asarray(read(states)) for states in both]
        ours, theirs = (
            value.reshape(-1, *value.shape[2:])[batch.places]
            for value, batch in zip(values, batches, strict=True)
        )
        np.testing.assert_allclose(ours, theirs, rtol=1e-6)

    same(States.read)
    for pattern in ((7,), (7, 8), (7, 8, 3, 7, 8), (8, 7, 8), (99,)):
        same(lambda states, pattern=pattern: at_pattern(states, pattern))
    for token in (7, 8, 99):

        def summed(states: States, token: int = token) -> jax.Array:
            values, shown = along(states, token, lambda x: x.sum(axis=-1))
            return jnp.where(shown, values, 0.0).sum(axis=2)

        same(summed)


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


@pytest.mark.parametrize("dtype", [jnp.float32, jnp.bfloat16])
def test_whole_arrays_are_transposed_as_they_are(dtype: Any) -> None:
    """XLA for CPUs takes ten times as long to transpose numbers that it converts on the way, or unsigned ones, and for
    two axes that move apart."""
    tokens, heads, kv_heads, size = 1024, 4, 2, 128
    batch, _ = batch_of(people(1, 2, profile=300), StreamShape(tokens, 16), streams=1)
    q, k = (jax.ShapeDtypeStruct((1, tokens, count, size), dtype) for count in (heads, kv_heads))

    def program(q: jax.Array, k: jax.Array, v: jax.Array) -> Any:
        out, pull = jax.vjp(functools.partial(stream_attention, batch=batch), 2 * q, 2 * k, 2 * v)
        return out, pull(3 * q)

    text = jit(program).lower(q, k, k).compile().as_text()
    bodies = [body for body in re.split(r"\n\}\n", text) if re.search(r"\stranspose\(", body)]
    found = [
        (kind, shape, body)
        for body in bodies
        for kind, shape, axes in re.findall(
            r"= (\w+)\[([\d,]+)\]\S* transpose\(.*dimensions=\{([\d,]+)\}", body
        )
        if np.prod([*map(int, shape.split(","))]) >= tokens * kv_heads * size
        and int(axes.split(",")[-1]) != axes.count(",")  # the last axis moves
    ]
    turned = [(kind, shape, body) for kind, shape, body in found if shape.endswith(f",{tokens}")]
    assert len(turned) >= 4  # q, v, the gradient of the result, and k in the backward pass
    for kind, shape, body in turned:
        assert kind == ("f32" if dtype == jnp.float32 else "s16")
        assert len([side for side in shape.split(",") if side != "1"]) <= 3
        assert " convert(" not in body
        assert "bitcast-convert(" not in body
