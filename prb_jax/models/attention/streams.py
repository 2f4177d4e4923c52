"""Attention over packed streams (:mod:`prb_jax.trees.streams`): the XLA program, and the choice of a kernel.

The last layer needs attention only from the read places: :func:`attend_from_stream_reads`.
"""

from __future__ import annotations

import functools
import warnings
from collections.abc import Callable
from dataclasses import dataclass, field, replace
from typing import Any, Literal

import jax
import jax.numpy as jnp
from jax import lax
from jax.sharding import Mesh

from prb_jax.errors import CheckpointError, PrbWarning, quote
from prb_jax.models import ATTENTIONS
from prb_jax.models.attention.walk import MASKED, StreamFacts, attend_blocks, divisor, with_sinks
from prb_jax.models.config.decoder import DecoderConfig
from prb_jax.models.layers import float32_einsum, soft_capped, without_unit_axes
from prb_jax.platform.sharding import sequence_parts
from prb_jax.seams import BUILTIN, get
from prb_jax.trees.packing import StreamOptions
from prb_jax.trees.streams import BlockTable, StreamBatch, query_order
from prb_jax.trees.tree import BLOCK


def walks(batch: StreamBatch, mesh: Mesh | None) -> bool:
    """Return True if streams are computed by the program for CPUs, one block after another."""
    platform = jax.default_backend() if mesh is None else mesh.devices.flat[0].platform
    return isinstance(batch.blocks, BlockTable) and platform == "cpu"


def on_mesh(attend: Callable[..., Any], mesh: Mesh | None, *, split: bool = True) -> Callable[..., Any]:
    """Return attention for a mesh: see :func:`prb_jax.models.attention.mesh.over_mesh`."""
    if mesh is None or mesh.size == 1:
        return attend
    return get("attention", "over mesh").value(attend, mesh, split=split)


def stream_attention(
    q: jax.Array,
    k: jax.Array,
    v: jax.Array,
    *,
    batch: StreamBatch,
    window: int | None = None,
    softcap: float | None = None,
    sinks: jax.Array | None = None,
    mesh: Mesh | None = None,
) -> jax.Array:
    """Return the attention of every token to the tokens that it sees, [S, N, heads, H] in q's dtype.

    The softmax is float32, and all products accumulate in float32. Results for padding are finite but meaningless.

    Args:
        q: Scaled queries [S, N, heads, H].
        k, v: Keys and values [S, N, G, H].
        batch: Streams with the table of blocks for this window.
        window: Number of most recent tokens that a token sees, itself included.
        softcap: Scores s become ``softcap * tanh(s / softcap)`` before masking.
        sinks: Attention sinks [heads]: an additional logit per softmax, without a value.
        mesh: Mesh that splits streams, heads and queries; None for one device.
    """
    table = batch.table(window)
    if not isinstance(table, BlockTable):
        raise ValueError(f"these streams have no table of blocks for a window of {window}")
    places = jnp.broadcast_to(jnp.arange(q.shape[1]).reshape(-1, BLOCK), (*table.keys.shape[:2], BLOCK))
    of_queries = [jnp.asarray(x) for x in (table.keys, table.counts, places)]
    if (parts := sequence_parts(mesh)) > 1:
        order = query_order(table.keys.shape[1], parts).reshape(-1)
        of_queries = [jnp.take(x, order, axis=1) for x in of_queries]
    attend = attend_blocks if walks(batch, mesh) else get("attention", "many blocks").value

    def run(q: jax.Array, k: jax.Array, v: jax.Array, of_queries: Any, of_keys: Any) -> Any:
        return attend(window, softcap, q, k, v, StreamFacts(*of_queries, *of_keys))

    of_keys = [jnp.asarray(x) for x in (batch.until, batch.positions)]
    out, log = on_mesh(run, mesh)(q, k, v, of_queries, of_keys)
    return with_sinks(out, log, sinks)


READS = 64  # read places whose scores with all keys of a stream exist at once
READS_OF_A_BLOCK = 16  # read places that walk through the keys of their trees together

MANY_READS = 8
"""If one in so many tokens or more is read, reads are next to each other, as those of all tokens of responses: a block
of BLOCK reads then sees hardly more keys than each of them, and its products are larger."""


def take_places(x: jax.Array, places: jax.Array) -> jax.Array:
    """Return x [B, T, D] at places int32 [B, K]: [B, K, D]."""
    return jnp.take_along_axis(x, places[:, :, None], axis=1)


def attend_from_stream_reads(
    q: jax.Array,
    k: jax.Array,
    v: jax.Array,
    *,
    batch: StreamBatch,
    window: int | None = None,
    softcap: float | None = None,
    sinks: jax.Array | None = None,
    mesh: Mesh | None = None,
) -> jax.Array:
    """Same as :func:`prb_jax.models.attention.streams.stream_attention`, but only for the tokens at the read places.

    Args:
        q: Scaled queries [S, M, heads, H].
        k, v, batch, window, softcap, sinks, mesh: Same as there.

    Returns:
        [S, M, heads, H] in q's dtype.
    """
    if not walks(batch, mesh):
        return with_sinks(*_attend_to_all_keys(q, k, v, batch=batch, window=window, softcap=softcap), sinks)
    streams, reads, *_ = q.shape
    many = reads >= BLOCK and MANY_READS * reads >= k.shape[1]
    width = BLOCK if many else READS_OF_A_BLOCK
    padding = -reads % width
    places = jnp.pad(jnp.asarray(batch.reads), ((0, 0), (0, padding)))
    seen = _seen(batch, places, window).reshape(streams, -1, width, k.shape[1] // BLOCK, BLOCK)
    some, every = seen.any(axis=(2, 4)), seen.all(axis=(2, 4))
    # Blocks of keys that are seen completely come before blocks seen partly.
    keys = jnp.argsort(2 - some.astype(jnp.int32) - every, axis=2)
    counts = jnp.stack([every.sum(axis=2), (some & ~every).sum(axis=2)], axis=2)
    of_queries = (keys, counts, places.reshape(streams, -1, width))
    q = jnp.pad(q, ((0, 0), (0, padding), (0, 0), (0, 0)))

    def attend(q: jax.Array, k: jax.Array, v: jax.Array, of_queries: Any, of_keys: Any) -> Any:
        return attend_blocks(window, softcap, q, k, v, StreamFacts(*of_queries, *of_keys))

    of_keys = (jnp.asarray(batch.until), jnp.asarray(batch.positions))
    out, log = on_mesh(attend, mesh, split=False)(q, k, v, of_queries, of_keys)
    return with_sinks(out, log, sinks)[:, :reads]


def _attend_to_all_keys(
    q: jax.Array,
    k: jax.Array,
    v: jax.Array,
    *,
    batch: StreamBatch,
    window: int | None,
    softcap: float | None,
) -> tuple[jax.Array, jax.Array]:
    """Compute the same in one product of read places and all keys of a stream, which is fast on accelerators."""
    streams, reads, _, head_dim = q.shape
    kv_heads = k.shape[2]
    chunk = divisor(reads, READS)

    def some(args: tuple[jax.Array, jax.Array]) -> tuple[jax.Array, jax.Array]:
        queries, places = args  # [S, c, G, group, H], [S, c]
        scores = soft_capped(float32_einsum("scgnh,stgh->sgnct", queries, k), softcap)
        seen = _seen(batch, places, window)[:, None, None]
        masked = without_unit_axes(jnp.where(seen, scores, MASKED))
        weights = jax.nn.softmax(masked, axis=-1).astype(q.dtype).reshape(scores.shape)
        log = jax.nn.logsumexp(masked, axis=-1).reshape(scores.shape[:-1])
        return float32_einsum("sgnct,stgh->scgnh", weights, v).astype(q.dtype), log.transpose(0, 3, 1, 2)

    folded = q.reshape(streams, reads // chunk, chunk, kv_heads, -1, head_dim).swapaxes(0, 1)
    places = jnp.asarray(batch.reads).reshape(streams, reads // chunk, chunk).swapaxes(0, 1)
    if chunk == reads:
        out, log = (x[None] for x in some((folded[0], places[0])))
    else:  # the backward pass recomputes the weights of each part: all at once would need reads times tokens
        out, log = lax.map(jax.checkpoint(some, prevent_cse=False), (folded, places))
    return out.swapaxes(0, 1).reshape(q.shape), log.swapaxes(0, 1).reshape(q.shape[:-1])


def _seen(batch: StreamBatch, places: jax.Array, window: int | None) -> jax.Array:
    """Return a mask, bool [S, c, N]: the token at each place, int32 [S, c], sees these keys of its stream."""
    until, positions = (jnp.asarray(x)[:, None] for x in (batch.until, batch.positions))
    place = places[:, :, None]
    seen = (jnp.arange(until.shape[-1]) <= place) & (place < until)
    if window is not None:
        seen &= jnp.take_along_axis(positions, place, axis=2) - positions < window
    return seen


Attention = Callable[..., jax.Array]
"""Function of q, k, v, window, softcap, and sinks if the model has them; see
:func:`prb_jax.models.attention.streams.stream_attention`."""

Table = Literal["blocks", "steps", "keys"]
"""Kinds of tables in :mod:`prb_jax.trees.streams` and :mod:`prb_jax.trees.kernel_tables`."""


@dataclass(frozen=True)
class StreamAttention:
    """An implementation of attention over packed streams: its name and its stream layout.

    The XLA program is defined here; kernels are found by platform, as `attention` in `prb_jax.seams`. The tables of a
    batch determine the implementation: see :func:`attend_streams`.
    """

    name: str  # name in logs and reports
    table: Table
    parts: int = 1  # parts of a stream's queries, split by the mesh axis `sequence`
    one_length: bool = (
        True  # if True, no shorter shapes for streams with few tokens, because compiling is expensive
    )
    has_sinks: bool = False  # for a kernel: True if it supports attention sinks
    refused: str | None = None  # reason why the machine's kernel is not used, if it has one
    refusal: Callable[..., str | None] | None = field(default=None, compare=False, repr=False)
    """For a kernel: function (configuration, mesh, dtype, trained) -> reason why it cannot compute the model, or
    None."""

    def shaped(self, options: StreamOptions) -> StreamOptions:
        """Return the options adapted to the implementation."""
        options = replace(options, parts=self.parts)
        if self.table != "blocks":
            return get("kernel tables", "options").value(options, self.table)
        shaped = options.of_blocks(options.block)
        return shaped if self.one_length else replace(shaped, program_cost=options.program_cost)


def choose_attention(
    mesh: Mesh | None,
    dtype: jnp.dtype,
    wanted: str = "auto",
    *,
    config: DecoderConfig,
    trained: bool = False,
) -> StreamAttention:
    """Return the implementation for programs on ``mesh``, for scoring and training.

    In bfloat16, "auto" selects our Pallas kernel on TPUs, and cuDNN on GPUs if it supports the model. In all other
    cases, and for "xla", an XLA program is used. The first use of a kernel on a machine compares it with the XLA
    program. If a kernel is refused, one warning gives the reason.

    Args:
        mesh: Mesh of the program, whose devices need not be present; None for one device of this process.
        dtype: Dtype of activations.
        wanted: One of :data:`ATTENTIONS`.
        config: Architecture of the model, which cuDNN may refuse.
        trained: If True, the program computes gradients.

    Raises:
        CheckpointError: ``wanted`` is unknown.
    """
    if wanted not in ATTENTIONS:
        raise CheckpointError(f"attention: expected {' or '.join(ATTENTIONS)}, found {quote(wanted)}")
    platform = jax.default_backend() if mesh is None else mesh.devices.flat[0].platform
    parts, refused = sequence_parts(mesh), None
    if dtype == jnp.bfloat16 and wanted == "auto" and platform in BUILTIN["attention"]:
        kernel = get("attention", platform).value
        refused = (
            f"the {kernel.name} has no attention sinks" if config.sinks and not kernel.has_sinks else None
        )
        refused = refused or kernel.refusal(config, mesh=mesh, dtype=dtype, trained=trained)
        if refused is None:
            return replace(kernel, parts=parts)
    on_cpu = platform == "cpu"
    name = "block-wise XLA over packed streams" + ("" if on_cpu else ", many blocks at a time")
    if refused is not None:
        _warn_once(f"attention: {refused}: it is computed by {name}, which is slower")
    return StreamAttention(name, "blocks", parts, one_length=not on_cpu, refused=refused)


@functools.cache
def _warn_once(text: str) -> None:
    warnings.warn(text, PrbWarning, stacklevel=3)


def attend_streams(
    q: jax.Array, k: jax.Array, v: jax.Array, *, batch: StreamBatch, mesh: Mesh | None = None, **options: Any
) -> jax.Array:
    """Same as :func:`prb_jax.models.attention.streams.stream_attention`, with the implementation that the streams were
    laid out for."""
    table = type(batch.blocks)
    # Imported here because kernels import slowly and only some machines have them.
    attend = stream_attention if table is BlockTable else get("attention", table.__name__).value
    return attend(q, k, v, batch=batch, mesh=mesh, **options)
