"""Scoring of streams that continue tokens with cached keys and values (:mod:`prb_jax.trees.continued`).

For CPUs. A layer processes a stream in chunks up to its last real token, so padding costs nothing. Attention walks
through blocks of the cached tokens in place, then through blocks of the stream. The products are the same as in
:mod:`prb_jax.models.attention.streams`, forward only.

Dimensions: N computed tokens including M read tokens, C cached blocks, L layers, G kv heads, H head dim.
"""

from __future__ import annotations

import functools
from collections.abc import Callable, Mapping, Sequence
from typing import Any, NamedTuple, TypeVar

import jax
import jax.numpy as jnp
import numpy as np
from flax import nnx
from jax import lax
from jax.sharding import Mesh

from prb_jax.models.attention.choice import StreamAttention
from prb_jax.models.attention.streams import (
    LEAST_TOTAL,
    MASKED,
    READS_OF_A_BLOCK,
    Runs,
    take_places,
    turned,
    turned_back,
)
from prb_jax.models.config.decoder import DecoderConfig
from prb_jax.models.config.family import Kind
from prb_jax.models.decoder import Params, stacks_of
from prb_jax.models.decoder_layer import Angles, LayerContext, angles_of_layers
from prb_jax.models.head import States, read_out
from prb_jax.models.layers import (
    from_bits,
    in_bits,
    product,
    rounded,
    soft_capped,
    with_sinks,
)
from prb_jax.models.model import abstract_model, bind
from prb_jax.models.readouts.score_tree import is_pointwise
from prb_jax.platform.sharding import constrainer, replicated
from prb_jax.trees.continued import ContinuedBatch
from prb_jax.trees.tree import BLOCK

CHUNKS = (1024, 512, 256, 128, 64)
"""Tokens of the chunks of a layer: as many of the first size as fit, then at most one of each smaller size. Each chunk
packs the weights for its products again, which takes as long as some twenty tokens; the last chunk may have padding."""

QUERIES = 64
"""Tokens of a block of queries: more would see more keys of other conversations."""

Fresh = tuple[jax.Array, jax.Array]
"""Keys [L, G, N, H] and values [L, G, H, N] of the computed tokens; N is at least the tokens of a stream."""

Continued = tuple[jax.Array, *Fresh]
"""Rewards float32 [1, M], and the keys and values of the computed tokens."""

_Arrays = TypeVar("_Arrays")
_Cut = Callable[[jax.Array], jax.Array]


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


class _Table(NamedTuple):
    """Blocks of keys for each block of queries; blocks that all its queries see come first."""

    ranks: jax.Array  # int32 [blocks, c], indices of the queries among the computed tokens
    positions: jax.Array  # int32 [blocks, c]
    keys: jax.Array  # [blocks, C + N / BLOCK] indices of blocks
    counts: jax.Array  # [blocks, 2], number of blocks seen completely, and number seen partly


class _Facts(NamedTuple):
    """What the layers of a batch have in common."""

    real: jax.Array  # number of computed tokens, with the padding of the last chunk
    tables: Mapping[bool, _Table]  # for blocks of QUERIES tokens, by whether a layer slides
    reads: _Table  # for the read tokens, in the last layer
    angles: Mapping[tuple[bool, bool], tuple[Angles, Angles]]  # by whether a layer slides, and rotates


class ContinuedScorer:
    """Scorer of streams after cached tokens: one program for each kind of layer, called layer by layer.

    A program of all layers would copy each layer's weights out of their stack for every batch. Here a layer is a view
    of the stack, without a copy.

    Args:
      params: Parameters on a single CPU device.
      config: Architecture.
      mesh: Mesh of the device.
      dtype: Dtype of activations.
      readout: Read-out; see :func:`prb_jax.models.head.choose_readout`.

    Attributes:
      layers: State of each layer.
      programs: The jitted parts, shared by all scorers of such a model.
    """

    def __init__(
        self, params: Params, *, config: DecoderConfig, mesh: Mesh, dtype: jnp.dtype, readout: str
    ) -> None:
        place = replicated(mesh)

        def view(stack: jax.Array, number: int | jax.Array) -> jax.Array:
            # Rows that begin at a multiple of 64 bytes are not copied.
            return jax.device_put(np.asarray(stack)[number], place)

        stacks = stacks_of(bind(config, params).layers)
        self._params, self._config, self._place = params, config, place
        self.layers = [stacks.at(number, view) for number in range(config.num_hidden_layers)]
        self.programs = _programs(config, mesh, dtype, readout, frozenset(params["layers"]))

    def __call__(self, batch: ContinuedBatch, fresh: Fresh) -> Continued:
        """Score a stream.

        Args:
          batch: The stream, with the cached tokens.
          fresh: Arrays into which the keys and values of the computed tokens are written; they are donated, and what
            they held before is ignored. New arrays for each batch would cost about as much as a tenth of its products:
            all of their memory is touched.
        """
        programs, config = self.programs, self._config
        batch = jax.device_put(batch, self._place)
        keys, values = fresh
        x, values, facts = programs.begin(self._params, batch, values)
        kinds = [*zip(config.kinds, config.layer_windows, config.layer_rotates, strict=True)]
        for number, (layer, (kind, slides, rotates)) in enumerate(zip(self.layers[:-1], kinds)):
            table, angles = facts.tables[slides], facts.angles[slides, rotates]
            of_kind = programs.middle[kind, slides]
            x, keys, values = of_kind(layer, x, keys, values, number, batch, facts.real, table, angles)
        _, slides, rotates = kinds[-1]
        angles = facts.angles[slides, rotates]
        return programs.last(
            self.layers[-1], self._params, x, keys, values, batch, facts.real, facts.reads, angles
        )


class _Programs(NamedTuple):
    """Jitted parts of a scorer."""

    begin: Callable[..., tuple[jax.Array, jax.Array, _Facts]]
    middle: Mapping[tuple[Kind, bool], Callable[..., tuple[jax.Array, jax.Array, jax.Array]]]
    last: Callable[..., Continued]


@functools.lru_cache(maxsize=16)
def _programs(
    config: DecoderConfig, mesh: Mesh, dtype: jnp.dtype, readout: str, names: frozenset[str]
) -> _Programs:
    """Return the programs of a model with these parameters of layers."""
    graphs = stacks_of(abstract_model(config, layers=tuple(names)).layers).graphs
    compiled = functools.partial(jax.jit, out_shardings=replicated(mesh))
    middle = {}
    for kind, slides in dict.fromkeys(zip(config.kinds[:-1], config.layer_windows[:-1], strict=True)):
        window = config.sliding_window if slides else None
        layer = functools.partial(_layer, graph=graphs[kind], dtype=dtype, window=window)
        middle[kind, slides] = compiled(layer, donate_argnums=(1, 2, 3))
    begin = functools.partial(_begin, config=config, dtype=dtype)
    last = functools.partial(
        _last, graph=graphs[config.kinds[-1]], config=config, dtype=dtype, readout=readout
    )
    return _Programs(compiled(begin, donate_argnums=2), middle, compiled(last, donate_argnums=(3, 4)))


def _begin(
    params: Params,
    batch: ContinuedBatch,
    values: jax.Array,
    *,
    config: DecoderConfig,
    dtype: jnp.dtype,
) -> tuple[jax.Array, jax.Array, _Facts]:
    """Return the input of the first layer, in bits, the array for values, and the facts of the batch."""
    decoder, count = bind(config, params), batch.tokens.shape[1]
    x = in_bits(decoder.scaled(decoder.rows(jnp.asarray(batch.tokens), dtype)))
    angles = angles_of_layers(config, jnp.asarray(batch.positions)[:, -count:])
    slides, rotates = config.layer_windows, config.layer_rotates

    def table(ranks: jax.Array, slides: bool) -> _Table:
        return _table(batch, ranks, config.sliding_window if slides else None)

    reads = jnp.pad(batch.reads[0], (0, -batch.reads.shape[1] % READS_OF_A_BLOCK))
    chunk = _chunks(count)[-1]
    real = -(-batch.used[0] // chunk) * chunk
    facts = _Facts(
        jnp.asarray(real),
        {kind: table(jnp.arange(count).reshape(-1, QUERIES), kind) for kind in set(slides)},
        table(reads.reshape(-1, READS_OF_A_BLOCK), slides[-1]),
        {kind: angles(*kind) for kind in set(zip(slides, rotates, strict=True))},
    )
    # The last block may have places after the last chunk, which are masked. Their old values could be infinite.
    clean = jnp.zeros((*values.shape[:3], BLOCK), values.dtype)
    values = lax.dynamic_update_slice(values, clean, (0, 0, 0, (real - 1) // BLOCK * BLOCK))
    return x, values, facts


def _chunks(count: int) -> list[int]:
    """Return the sizes of chunks for streams of so many tokens."""
    return [size for size in CHUNKS if size <= count]


def _layer(
    state: nnx.State,
    x: jax.Array,
    keys: jax.Array,
    values: jax.Array,
    number: jax.Array,
    batch: ContinuedBatch,
    real: jax.Array,
    table: _Table,
    angles: tuple[Angles, Angles],
    *,
    graph: Any,
    dtype: jnp.dtype,
    window: int | None,
) -> tuple[jax.Array, jax.Array, jax.Array]:
    """Run a layer chunk by chunk, as later chunks need the keys and values of earlier ones; x is in bits."""

    def some(start: jax.Array, cut: _Cut, carry: tuple[jax.Array, *Fresh]) -> tuple[jax.Array, *Fresh]:
        x, held = carry[0], carry[1:]

        def attend(q: jax.Array, k: jax.Array, v: jax.Array, **options: Any) -> jax.Array:
            nonlocal held
            of_chunk = jax.tree.map(
                lambda x: lax.dynamic_slice_in_dim(x, start // QUERIES, q.shape[1] // QUERIES), table
            )
            held = _put(held, k, v, number, start)  # once, so the arrays are changed in place
            return _attend(q, held, batch=batch, layer=number, table=of_chunk, window=window, **options)

        y = _run(graph, state, from_bits(cut(x), dtype), attend, jax.tree.map(cut, angles))
        return lax.dynamic_update_slice_in_dim(x, in_bits(y), start, 1), *held

    return _by_chunks(some, (x, keys, values), count=x.shape[1], real=real)


def _by_chunks(
    some: Callable[[jax.Array, _Cut, _Arrays], _Arrays], carry: _Arrays, *, count: int, real: jax.Array
) -> _Arrays:
    """Change arrays by (first token, cut, arrays) -> arrays for each chunk of the real tokens, of at most `count`;
    `cut` takes a chunk's tokens from an array [1, N, ...]."""
    done = jnp.zeros((), jnp.int32)
    for size in _chunks(count):
        chunks = (real - done) // size

        def of_size(chunk: jax.Array, carry: _Arrays, first: jax.Array = done, size: int = size) -> _Arrays:
            start = first + chunk * size
            cut = functools.partial(lax.dynamic_slice_in_dim, start_index=start, slice_size=size, axis=1)
            return some(start, cut, carry)

        carry = lax.fori_loop(0, chunks, of_size, carry)
        done = done + chunks * size
    return carry


def _last(
    state: nnx.State,
    params: Params,
    x: jax.Array,
    keys: jax.Array,
    values: jax.Array,
    batch: ContinuedBatch,
    real: jax.Array,
    table: _Table,
    angles: tuple[Angles, Angles],
    *,
    graph: Any,
    config: DecoderConfig,
    dtype: jnp.dtype,
    readout: str,
) -> Continued:
    """Run the last layer, with its queries and mlp only at the read tokens, and the head."""
    last, reads = config.num_hidden_layers - 1, jnp.asarray(batch.reads)
    padding = table.ranks.size - reads.shape[1]
    window = config.sliding_window if config.layer_windows[last] else None

    def keep(start: jax.Array, cut: _Cut, held: Fresh) -> Fresh:
        def put(q: jax.Array, k: jax.Array, v: jax.Array, **options: Any) -> jax.Array:
            nonlocal held
            held = _put(held, k, v, last, start)
            return jnp.zeros_like(q)  # the compiler leaves out what would be computed from it

        _run(graph, state, from_bits(cut(x), dtype), put, jax.tree.map(cut, angles))
        return held

    held = _by_chunks(keep, (keys, values), count=x.shape[1], real=real)

    def attend(q: jax.Array, k: jax.Array, v: jax.Array, **options: Any) -> jax.Array:
        q = jnp.pad(q, ((0, 0), (0, padding), (0, 0), (0, 0)))
        out = _attend(q, held, batch=batch, layer=last, table=table, window=window, **options)
        return out[:, : reads.shape[1]]

    at_reads, angles_at_reads = jax.tree.map(lambda x: take_places(x, reads), (x, angles))
    y = _run(graph, state, from_bits(at_reads, dtype), attend, angles_at_reads)
    read = config.head(params, States(y, None, bind(config, params).normed, at_reads=True))
    return read_out(read, readout), *held


def _run(graph: Any, state: nnx.State, x: jax.Array, attend: Any, angles: tuple[Angles, Angles]) -> jax.Array:
    context = LayerContext(
        query_angles=angles[0], key_angles=angles[1], attend=attend, constrain=constrainer(None)
    )
    return nnx.merge(graph, state)(x, context)[0]


def _put(
    held: Sequence[jax.Array], k: jax.Array, v: jax.Array, number: Any, start: Any
) -> tuple[jax.Array, jax.Array]:
    """Write the keys and values of consecutive tokens of a layer, [1, c, G, H], into those of all layers."""
    keys, values = held
    return (
        lax.dynamic_update_slice(keys, in_bits(k).swapaxes(1, 2), (number, 0, start, 0)),
        lax.dynamic_update_slice(values, turned(v), (number, 0, 0, start)),
    )


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
    window: int | None,
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
    runs = Runs(heads // keys.shape[1], width)
    queries, kept = turned(q)[0], len(batch.rows)  # cached blocks

    def of_block(
        run: jax.Array, head: jax.Array, block: jax.Array, carry: tuple[jax.Array, jax.Array]
    ) -> tuple[jax.Array, jax.Array]:
        out, log = carry
        query, own = (
            from_bits(runs.cut(queries, run, block), q.dtype),
            jax.tree.map(lambda x: x[block], table),
        )
        rank, at = (jnp.tile(x, runs.heads) for x in (own.ranks, own.positions))

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

        def step(index: jax.Array, carry: tuple[jax.Array, ...], *, masked: bool) -> tuple[jax.Array, ...]:
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
        first = jnp.full(rows, MASKED / 10), jnp.zeros(rows), jnp.zeros((size, rows))
        whole, partly = own.counts[0], own.counts[1]
        some = lax.fori_loop(0, whole, functools.partial(step, masked=False), first)
        top, total, result = lax.fori_loop(whole, whole + partly, functools.partial(step, masked=True), some)
        total = jnp.maximum(total, LEAST_TOTAL)
        out = runs.put(out, in_bits((result / total).astype(q.dtype)), run, block)
        return out, runs.put(log, top + jnp.log(total), run, block)

    nothing = jnp.zeros_like(queries), jnp.zeros((heads, blocks * width))
    out, log = runs.each(keys.shape[1], blocks, of_block, nothing)
    return with_sinks(turned_back(out[None], q.dtype), log.T[None], sinks)
