"""Scoring of streams that continue tokens with cached keys and values (:mod:`prb_jax.trees.continued`).

For CPUs. A layer processes a stream in chunks up to its last real token, so padding costs nothing. Attention walks
through blocks of the cached tokens in place, then through blocks of the stream. The products are the same as in
:mod:`prb_jax.models.attention.streams`, forward only.

Dimensions: N computed tokens including M read tokens, C cached blocks, L layers, G kv heads, H head dim.
"""

from __future__ import annotations

import functools
from collections.abc import Callable, Sequence
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp
from flax import nnx
from jax import lax
from jax.sharding import Mesh

from prb_jax.models.attention.choice import StreamAttention
from prb_jax.models.attention.streams import HEADS, LEAST_TOTAL, MASKED, READS_OF_A_BLOCK, divisor
from prb_jax.models.config.decoder import DecoderConfig
from prb_jax.models.decoder import Params
from prb_jax.models.decoder_layer import Angles, LayerContext, angles_of_layers
from prb_jax.models.head import States, read_out
from prb_jax.models.layers import (
    from_bits,
    in_bits,
    product,
    rounded,
    row_of,
    soft_capped,
    with_sinks,
)
from prb_jax.models.model import bind
from prb_jax.models.readouts.score_tree import is_pointwise
from prb_jax.platform.sharding import constrainer, replicated
from prb_jax.trees.continued import ContinuedBatch
from prb_jax.trees.tree import BLOCK

CHUNKS = (1024, 512, 256, 128, 64)
"""Tokens of the chunks of a layer: as many of the first size as fit, then at most one of each smaller size. Each chunk
packs the weights for its products again, which takes as long as some twenty tokens; the last chunk may have padding."""

_EVERYWHERE = 2**30  # window of a layer without one

QUERIES = 64
"""Tokens of a block of queries: more would see more keys of other conversations."""

Fresh = tuple[jax.Array, jax.Array]
"""Keys [L, G, N, H] and values [L, G, H, N] of the computed tokens; N is at least the tokens of a stream."""

Continued = tuple[jax.Array, *Fresh]
"""Rewards float32 [1, M], and the keys and values of the computed tokens."""

ContinuedFn = Callable[[Params, ContinuedBatch, Fresh], Continued]


def why_not_kept(config: DecoderConfig, mesh: Mesh, attention: StreamAttention) -> str | None:
    """Return why keys and values are not cached for a model on these devices; None if they are."""
    platform = mesh.devices.flat[0].platform
    if mesh.size > 1 or platform != "cpu" or attention.table != "blocks":
        return f"they are kept on a single CPU device; this mesh has {mesh.size} of {platform}"
    if not is_pointwise(config):
        return "the head reads other tokens than the one of the score"
    if config.rope_switch is not None:
        return "keys of longer conversations have other rotary angles"
    if config.recurrence is not None:
        return "recurrent layers have a state in place of keys and values of each token"
    return None


def block_shapes(
    config: DecoderConfig, dtype: jnp.dtype, tokens: int = BLOCK
) -> tuple[jax.ShapeDtypeStruct, jax.ShapeDtypeStruct]:
    """Return the shapes of the keys and values of a cached block, or of so many tokens; bfloat16 is kept in bits."""
    layers, heads, size = config.num_hidden_layers, config.num_key_value_heads, config.head_dim
    keys, values = (layers, heads, tokens, size), (layers, heads, size, tokens)
    kept = functools.partial(jax.eval_shape, in_bits)
    return kept(jax.ShapeDtypeStruct(keys, dtype)), kept(jax.ShapeDtypeStruct(values, dtype))


def make_fresh(config: DecoderConfig, mesh: Mesh, dtype: jnp.dtype, tokens: int) -> Fresh:
    """Return arrays into which a program writes the keys and values of at most so many computed tokens."""
    place = replicated(mesh)  # like the results of a program, so that both kinds of arrays need one program
    keys, values = block_shapes(config, dtype, tokens)
    return jnp.zeros_like(keys, device=place), jnp.zeros_like(values, device=place)


@functools.lru_cache(maxsize=16)
def make_continued_fn(config: DecoderConfig, *, dtype: jnp.dtype, readout: str) -> ContinuedFn:
    """Return the jitted scorer of streams after cached tokens: (params, batch, fresh) -> rewards, keys and values.

    The keys and values are written into the arrays `fresh`, which are donated; what they held before is ignored. New
    arrays for each batch would cost about as much as a tenth of its products: all of their memory is touched.

    Args:
      config: Architecture.
      dtype: Dtype of activations.
      readout: Read-out; see :func:`prb_jax.models.head.choose_readout`.
    """
    scorer = functools.partial(_score, config=config, dtype=dtype, readout=readout)
    return jax.jit(scorer, donate_argnums=2)


class _Table(NamedTuple):
    """Blocks of keys for each block of queries; blocks that all its queries see come first."""

    ranks: jax.Array  # int32 [blocks, c], indices of the queries among the computed tokens
    positions: jax.Array  # int32 [blocks, c]
    keys: jax.Array  # [blocks, C + N / BLOCK] indices of blocks
    counts: jax.Array  # [blocks, 2], number of blocks seen completely, and number seen partly


def _score(
    params: Params,
    batch: ContinuedBatch,
    fresh: Fresh,
    *,
    config: DecoderConfig,
    dtype: jnp.dtype,
    readout: str,
) -> Continued:
    decoder = bind(config, params)
    batch = jax.tree.map(jnp.asarray, batch)
    count = batch.tokens.shape[1]
    x = in_bits(decoder.scaled(decoder.rows(jnp.asarray(batch.tokens), dtype)))
    angles = angles_of_layers(config, jnp.asarray(batch.positions)[:, -count:])
    graph, layers = nnx.split(decoder.layers)
    slides, rotates = config.layer_windows, config.layer_rotates
    window = config.sliding_window
    mixed = any(slides) and not all(slides)
    ranks = jnp.arange(count).reshape(-1, QUERIES)
    tables = {slide: _table(batch, ranks, window if slide else None) for slide in set(slides)}
    padding = -batch.reads.shape[1] % READS_OF_A_BLOCK
    reads = jnp.pad(batch.reads[0], (0, padding)).reshape(-1, READS_OF_A_BLOCK)
    last = config.num_hidden_layers - 1
    read_table = _table(batch, reads, window if slides[last] else None)
    sizes = [size for size in CHUNKS if size <= count]
    real = -(-batch.used[0] // sizes[-1]) * sizes[-1]  # tokens, with the padding of the last chunk

    def weights(number: Any) -> Any:
        """Return the state of a layer, a copy: its chunks share it."""
        return jax.tree.map(lambda leaf: row_of(leaf, number), layers)

    def layer(
        state: Any, x: jax.Array, attend: Any, angles: tuple[Angles, Angles], places: Any = None
    ) -> Any:
        context = LayerContext(
            query_angles=angles[0],
            key_angles=angles[1],
            attend=attend,
            constrain=constrainer(None),
            places=places,
        )
        return nnx.merge(graph, state)(x, context)

    def put(held: Sequence[jax.Array], k: jax.Array, v: jax.Array, number: Any, start: Any) -> Any:
        """Write the keys and values of consecutive tokens of a layer, [1, c, G, H], into those of all layers."""
        keys, values = held
        k, v = in_bits(k), in_bits(v)
        return (
            lax.dynamic_update_slice(keys, k.transpose(0, 2, 1, 3), (number, 0, start, 0)),
            lax.dynamic_update_slice(values, v.transpose(0, 2, 3, 1), (number, 0, 0, start)),
        )

    def run(number: Any, carry: tuple[jax.Array, ...]) -> tuple[jax.Array, ...]:
        """Run the layer chunk by chunk: later chunks need the keys and values of earlier ones."""
        slide, rotated = jnp.asarray(slides)[number], jnp.asarray(rotates)[number]

        def chosen(of_kind: Callable[[bool], Any]) -> Any:
            """Return the value for the kind of this layer."""
            if not mixed:
                return of_kind(slides[0])
            return jax.tree.map(lambda a, b: jnp.where(slide, a, b), of_kind(True), of_kind(False))

        table, state = chosen(tables.__getitem__), weights(number)
        of_layer = chosen(lambda slides: angles(slides, rotated))
        within = chosen(lambda slides: window if slides else _EVERYWHERE) if any(slides) else None

        def some(
            chunk: jax.Array, carry: tuple[jax.Array, ...], *, first: jax.Array, size: int
        ) -> tuple[jax.Array, ...]:
            x, *held = carry
            start = first + chunk * size

            def cut(array: jax.Array) -> jax.Array:
                return lax.dynamic_slice_in_dim(array, start, size, 1)

            def attend(q: jax.Array, k: jax.Array, v: jax.Array, **options: Any) -> jax.Array:
                of_chunk = jax.tree.map(
                    lambda x: lax.dynamic_slice_in_dim(x, start // QUERIES, size // QUERIES), table
                )
                held[:] = put(held, k, v, number, start)  # once, so the arrays are changed in place
                return _attend(q, held, batch=batch, layer=number, table=of_chunk, window=within, **options)

            y, _ = layer(state, from_bits(cut(x), dtype), attend, jax.tree.map(cut, of_layer))
            return lax.dynamic_update_slice_in_dim(x, in_bits(y), start, 1), *held

        done = jnp.zeros((), jnp.int32)
        for size in sizes:
            chunks = (real - done) // size
            carry = lax.fori_loop(0, chunks, functools.partial(some, first=done, size=size), carry)
            done = done + chunks * size
        return carry

    keys, values = fresh
    # The last block may have places after the last chunk, which are masked. Their old values could be infinite.
    clean = jnp.zeros((*values.shape[:3], BLOCK), values.dtype)
    values = lax.dynamic_update_slice(values, clean, (0, 0, 0, (real - 1) // BLOCK * BLOCK))
    x, *held = lax.fori_loop(0, last, run, (x, keys, values))
    x = from_bits(x, dtype)

    def attend_reads(q: jax.Array, k: jax.Array, v: jax.Array, **options: Any) -> jax.Array:
        held[:] = put(held, k, v, last, 0)
        out = _attend(
            jnp.pad(q, ((0, 0), (0, padding), (0, 0), (0, 0))),
            held,
            batch=batch,
            layer=last,
            table=read_table,
            window=window if slides[last] else None,
            **options,
        )
        return out[:, : out.shape[1] - padding]

    x, _ = layer(weights(last), x, attend_reads, angles(slides[last], rotates[last]), batch.reads)
    read = config.head(params, States(x, None, decoder.normed, at_reads=True))
    return read_out(read, readout), *held


def _table(batch: Any, ranks: jax.Array, window: int | None) -> _Table:
    """Return the blocks of keys for the computed tokens with these ranks, int32 [blocks, c].

    The partly seen blocks may include blocks that no query sees, because their keys are masked one by one."""
    at = jnp.take(batch.positions[0], batch.positions.shape[1] - batch.tokens.shape[1] + ranks)
    first, last = ranks.min(axis=1)[:, None], ranks.max(axis=1)[:, None]
    since, until, positions = (
        x.reshape(-1, BLOCK) for x in (batch.since[0], batch.until[0], batch.positions[0])
    )
    some = (since.min(axis=1) <= last) & (until.max(axis=1) > first)
    every = (since.max(axis=1) <= first) & (until.min(axis=1) > last)
    if window is not None:
        some &= at.min(axis=1)[:, None] - positions.max(axis=1) < window
        every &= at.max(axis=1)[:, None] - positions.min(axis=1) < window
    every &= some
    keys = jnp.argsort(2 - some.astype(jnp.int32) - every, axis=1)
    return _Table(ranks, at, keys, jnp.stack([every.sum(axis=1), (some & ~every).sum(axis=1)], axis=1))


def _attend(
    q: jax.Array,
    held: Sequence[jax.Array],
    *,
    batch: Any,
    layer: jax.Array | int,
    table: _Table,
    window: jax.Array | int | None,
    softcap: float | None,
    sinks: jax.Array | None = None,
) -> jax.Array:
    """Return attention of queries to cached and stream tokens, [1, blocks * c, heads, H] in q's dtype.

    Args:
      q: Scaled queries of the table [1, blocks * c, heads, H].
      held: Keys [L, G, N, H] and values [L, G, H, N] of the stream computed so far.
      batch: Batch with the cached keys and values, in bits like those of `held`.
      layer: Index of the layer.
      table: Blocks of keys for each block of queries.
      window: Sliding window of the layer.
      softcap: Scores s become ``softcap * tanh(s / softcap)``.
      sinks: Attention sinks; see :func:`prb_jax.models.layers.with_sinks`.
    """
    keys, values = held
    _, _, heads, size = q.shape
    blocks, width = table.ranks.shape
    together = divisor(heads // keys.shape[1], HEADS)  # query heads that share a kv head
    runs = heads // together
    queries = in_bits(q[0]).reshape(blocks, width, runs, together, size).transpose(2, 0, 4, 1, 3)
    queries = queries.reshape(runs, blocks, size, width * together)
    kept = len(batch.rows)  # blocks

    def of_run(inputs: tuple[jax.Array, jax.Array]) -> tuple[jax.Array, jax.Array]:
        run, queries = inputs
        head = run // (runs // keys.shape[1])

        def of_block(inputs: tuple[jax.Array, _Table]) -> tuple[jax.Array, jax.Array]:
            query, own = from_bits(inputs[0], q.dtype), inputs[1]
            rank, at = (jnp.repeat(x, together) for x in (own.ranks, own.positions))

            def pair(number: jax.Array) -> tuple[jax.Array, jax.Array]:
                """Return keys [BLOCK, H] and values [H, BLOCK] of a block."""

                def old() -> tuple[jax.Array, jax.Array]:
                    place = batch.rows[number], layer, head, 0, 0
                    k = lax.dynamic_slice(batch.keys, place, (1, 1, 1, BLOCK, size))
                    v = lax.dynamic_slice(batch.values, place, (1, 1, 1, size, BLOCK))
                    return k[0, 0, 0], v[0, 0, 0]

                def new() -> tuple[jax.Array, jax.Array]:
                    start = (number - kept) * BLOCK
                    k = lax.dynamic_slice(keys, (layer, head, start, 0), (1, 1, BLOCK, size))
                    v = lax.dynamic_slice(values, (layer, head, 0, start), (1, 1, size, BLOCK))
                    return k[0, 0], v[0, 0]

                k, v = lax.cond(number < kept, old, new)
                return from_bits(k, q.dtype), from_bits(v, q.dtype)

            def step(
                index: jax.Array, carry: tuple[jax.Array, ...], *, masked: bool
            ) -> tuple[jax.Array, ...]:
                top, total, result = carry
                number = own.keys[index]
                k, v = pair(number)
                scores = soft_capped(product(k, query), softcap)
                if masked:
                    since, until, positions = (
                        lax.dynamic_slice_in_dim(x[0], number * BLOCK, BLOCK)[:, None]
                        for x in (batch.since, batch.until, batch.positions)
                    )
                    seen = (since <= rank) & (rank < until)
                    if window is not None:
                        seen &= at - positions < window
                    scores = jnp.where(seen, scores, MASKED)
                higher = jnp.maximum(top, scores.max(axis=0))
                weights, fading = jnp.exp(scores - higher), jnp.exp(top - higher)
                result = result * fading + product(v, rounded(weights, q.dtype))
                return higher, total * fading + weights.sum(axis=0), result

            rows = query.shape[1]
            # Above a masked score, so a row that sees nothing in a block gives the block zero weight.
            carry = jnp.full(rows, MASKED / 10), jnp.zeros(rows), jnp.zeros((size, rows))
            whole, partly = own.counts[0], own.counts[1]
            carry = lax.fori_loop(0, whole, functools.partial(step, masked=False), carry)
            top, total, result = lax.fori_loop(
                whole, whole + partly, functools.partial(step, masked=True), carry
            )
            total = jnp.maximum(total, LEAST_TOTAL)
            return in_bits((result / total).astype(q.dtype)), top + jnp.log(total)

        return lax.map(of_block, (queries, table))

    out, log = lax.map(of_run, (jnp.arange(runs), queries))
    out = from_bits(out.reshape(runs, blocks, size, width, together).transpose(1, 3, 0, 4, 2), q.dtype)
    log = log.reshape(runs, blocks, width, together).transpose(1, 2, 0, 3)
    return with_sinks(out.reshape(q.shape), log.reshape(q.shape[:-1]), sinks)
