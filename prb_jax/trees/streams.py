"""Packed streams: their shape and options, their arrays, and the table of their blocks that see each other.

Trees stand back to back without gaps, in a fixed number of tokens. Tables for kernels are in
:mod:`prb_jax.trees.kernel_tables`.

A stream is a forest, and every conversation is a path in it. Tokens are in depth-first order: a common prefix, then
each of its continuations. So all tokens that follow a token in any conversation are one run of places after it, which
ends at ``until``. This one number defines visibility:

    the token at place i sees the token at place j   if and only if   j <= i < until[j]

(and, in layers with a sliding window, if ``positions[i] - positions[j] < window``). The rule holds for any depth, e.g.
a profile, its questions, and the responses to each question.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, replace
from typing import TYPE_CHECKING, Any

import jax
import numpy as np

from prb_jax.errors import short_repr
from prb_jax.seams import get
from prb_jax.trees.tree import BLOCK, Tree, round_up

if TYPE_CHECKING:
    from prb_jax.trees.chunk_tables import ChunkTable
    from prb_jax.trees.kernel_tables import KeyLayout, KeyTable, StepTable


@dataclass(frozen=True, order=True)
class StreamShape:
    """Static shape of a stream: N tokens, M read places, and room for tokens with cached keys and values
    (:mod:`prb_jax.trees.continued`)."""

    tokens: int
    reads: int
    kept: int = 0


@dataclass(frozen=True)
class StreamOptions:
    """Options that shape streams."""

    tokens: int  # approximate tokens of a stream
    streams: int = 1  # streams of a batch: one per batch shard of the mesh
    block: int = BLOCK  # tokens of a block of queries
    parts: int = 1  # parts into which the mesh axis `sequence` splits the queries of a stream
    window: int | None = None  # window of the model's sliding layers, if any
    taps: int | None = None  # taps of the causal convolutions of the model's recurrent layers, if any
    rope_switch: int | None = None
    """Conversations of more tokens than this have other rotary angles and share no prefix with shorter ones (LongRoPE);
    None if all have the same."""
    kernel: bool = (
        False  # True for an attention kernel with step tables: see :mod:`prb_jax.trees.kernel_tables`
    )
    keys: KeyLayout | None = None
    """Layout for an attention kernel with key tables: see :mod:`prb_jax.trees.kernel_tables`."""
    share: bool = True  # if True, common prefixes of comparisons are computed once
    program_cost: int | None = None
    """Cost of compiling one more program, in tokens of the model. A few streams that are less full get a shorter shape
    if this saves more tokens. None if all streams of a shape must have one length."""
    fixed: tuple[StreamShape, ...] = ()
    """Allowed shapes, the smallest first, e.g. those that a server compiles before its first request. Only trees that
    fit none of them get other shapes."""

    @property
    def multiple(self) -> int:
        """Divisor of every stream length: each part has whole blocks, in two runs if there are several parts."""
        return self.block * (1 if self.parts == 1 else 2 * self.parts)

    def of_blocks(self, block: int, **changed: Any) -> StreamOptions:
        """Return the options with another block size; streams are whole blocks and have one length."""
        chosen = replace(self, block=block, program_cost=None, **changed)
        return replace(chosen, tokens=round_up(chosen.tokens, chosen.multiple))


@dataclass(frozen=True)
class PackedStream:
    """The trees of one stream, in their order."""

    shape: StreamShape  # the same for all streams of a batch
    members: tuple[int, ...]  # indices in the list of packed trees, in the order of their prefixes
    shared: tuple[int, ...]  # number of first tokens that each tree shares with the tree before it
    tokens: int  # computed tokens: shared ones count once, cached ones do not count

    __repr__ = short_repr


PackedBatch = tuple[PackedStream, ...]  # streams of one batch, at most `StreamOptions.streams`


def query_order(blocks: int, parts: int) -> np.ndarray:
    """Return the blocks of queries for each part of the mesh axis ``sequence``, int64 [parts, blocks / parts].

    The blocks form 2 * parts runs. Each part computes one run from the front and one from the back, so all parts have
    equal work in a causal stream. The run with the even number comes first: of the two halves of a part's own tokens
    one has an even number, so each half moves as a whole to one part."""
    if parts == 1:
        return np.arange(blocks)[None]
    runs = np.arange(blocks).reshape(2 * parts, -1)
    return np.stack(
        [runs[sorted((part, 2 * parts - 1 - part), key=lambda run: run % 2)] for part in range(parts)]
    ).reshape(parts, -1)


@jax.tree_util.register_dataclass
@dataclass(frozen=True)
class BlockTable:
    """Visible pairs of blocks of S streams of N tokens. int32 arrays."""

    keys: np.ndarray | jax.Array
    """[S, N / BLOCK, N / BLOCK], for each block of queries the indices of the blocks of keys that it sees at least
    partly; first the blocks that all its queries see completely, which need no mask."""
    # [S, N / BLOCK, 2], numbers of completely and of partly visible blocks of keys; 0 for a block of padding
    counts: np.ndarray | jax.Array

    __repr__ = short_repr


def block_table(
    until: np.ndarray, positions: np.ndarray, used: np.ndarray, *, window: int | None
) -> BlockTable:
    """Return the visible pairs of blocks of streams.

    Args:
      until, positions: Arrays of a stream batch, int32 [S, N]; N is a multiple of :data:`BLOCK`.
      used: Number of tokens of each stream.
      window: Window, as in :func:`meeting_blocks`.
    """
    ranks = []
    for stream in zip(until, positions, used, strict=True):
        some, every = meeting_blocks(*stream, block=BLOCK, window=window)
        rank = np.where(every, 0, np.where(some, 1, 2))
        rank[-(-stream[2] // BLOCK) :] = 2
        ranks.append(rank)
    rank = np.stack(ranks)
    counts = np.stack([(rank == 0).sum(axis=2), (rank == 1).sum(axis=2)], axis=2).astype(np.int32)
    keys = np.argsort(rank, axis=2, kind="stable").astype(np.int32)
    return BlockTable(np.where(np.sort(rank, axis=2) < 2, keys, 0), counts)


def meeting_blocks(
    until: np.ndarray, positions: np.ndarray, used: int, *, block: int, window: int | None
) -> tuple[np.ndarray, np.ndarray]:
    """Return the visible pairs of blocks of queries and keys of one stream.

    Token i sees token j if ``j <= i < until[j]`` and ``positions[i] - positions[j] < window``.

    Args:
      until: Array of a stream, int32 [N]; N is a multiple of the block.
      positions: Positions in conversations, int32 [N].
      used: Number of tokens of the stream, without padding.
      block: Tokens of a block of queries, and of a block of keys.
      window: Window of sliding layers; None for no window.

    Returns:
      Two arrays bool [N / block, N / block] over queries and keys: some query sees some key; all queries see all keys.
      A block of padding sees itself or nothing.
    """
    starts = np.arange(len(until) // block) * block
    last, first = until.reshape(-1, block).max(axis=1), until.reshape(-1, block).min(axis=1)
    some = (starts[None] <= starts[:, None]) & (last[None] > starts[:, None])
    every = (starts[None] < starts[:, None]) & (first[None] >= starts[:, None] + block)
    if window is not None:
        near, whole = _within_window(until, positions, -(-used // block), block, window)
        some, every = some & near, every & whole
    return some, every


def _within_window(
    until: np.ndarray, positions: np.ndarray, real: int, block: int, window: int
) -> tuple[np.ndarray, np.ndarray]:
    """Return two arrays bool [queries, keys]: some visible pair of tokens is within the window; all pairs are."""
    count = len(until) // block
    near, whole = np.zeros((count, count), bool), np.zeros((count, count), bool)
    for query in range(real):
        low, high = query * block, (query + 1) * block
        of_queries, keys = positions[low:high], np.flatnonzero(until[:low] > low)
        # Queries see a key up to its end; the nearest one has the smallest position.
        nearest = np.minimum.accumulate(of_queries)[np.minimum(until[keys] - low, block) - 1]
        near[query, keys[nearest - positions[keys] < window] // block] = True
        near[query, query] = True
        whole[query, : query + 1] = (
            (of_queries.max() - positions[:high] < window).reshape(-1, block).all(axis=1)
        )
    return near, whole


@jax.tree_util.register_dataclass
@dataclass(frozen=True)
class StreamBatch:
    """S streams of N tokens with M read places each. A JAX pytree of int32 arrays.

    Padding at the end of a stream is token 0 at position 0, which only sees itself. Unused read places are 0.
    """

    tokens: np.ndarray | jax.Array  # [S, N], token ids
    positions: np.ndarray | jax.Array  # [S, N], position of each token in its conversation
    until: np.ndarray | jax.Array  # [S, N]: a token is visible from its own place up to this place, exclusive
    # [S, N], place of the preceding token in the conversation; -1 for a first token
    previous: np.ndarray | jax.Array
    reads: np.ndarray | jax.Array  # [S, M], places of the tokens at which heads read scores
    ends: np.ndarray | jax.Array  # [S, M], places of the last tokens of the same conversations
    blocks: BlockTable | StepTable | KeyTable
    """Visibility table of attention: for the XLA program, for a kernel with steps, or for a kernel with keys."""
    window_blocks: BlockTable | StepTable | KeyTable | None
    """The same table for layers with a sliding window; None for a model without such layers."""
    chunks: ChunkTable | None = None  # chunks of recurrent layers; None for a model without such layers
    long: np.ndarray | jax.Array | None = None
    """[S, N], bool: tokens of conversations beyond `StreamOptions.rope_switch`; None for a model without one."""
    places: np.ndarray | jax.Array | None = None
    """[B, K], index among the S * M read places of each response of B trees; arbitrary for absent responses. If None,
    scores are returned by read place."""

    __repr__ = short_repr

    def table(self, window: int | None) -> BlockTable | StepTable | KeyTable | None:
        """Return the visibility table of layers with this window; None stands for full attention."""
        return self.blocks if window is None else self.window_blocks


def make_stream_batch(trees: Sequence[Tree], packed: PackedBatch, options: StreamOptions) -> StreamBatch:
    """Lay out the trees of a batch.

    Args:
      trees: All packed trees.
      packed: Members of each stream; missing streams are all padding.
      options: Options of streams: S, the model's window, and the kind of its tables.

    Raises:
      ValueError: There are more than S streams, or trees do not fit.
    """
    if len(packed) > options.streams:
        raise ValueError(f"{len(packed)} streams do not fit a batch of {options.streams}")
    shape = packed[0].shape
    empty = PackedStream(shape, (), (), 0)
    streams = [*packed, *[empty] * (options.streams - len(packed))]
    laid = [lay_stream(trees, stream, options.rope_switch) for stream in streams]
    arrays: dict[str, Any] = {name: np.stack([stream[name] for stream, *_ in laid]) for name in laid[0][0]}
    used = np.asarray([tokens for _, tokens, _ in laid])

    def table(window: int | None) -> BlockTable | StepTable | KeyTable:
        until, positions = arrays["until"], arrays["positions"]
        if options.kernel or options.keys is not None:
            make = get("kernel tables", "table").value
            return make(until, positions, used, options=options, window=window)
        return block_table(until, positions, used, window=window)

    in_window = None if options.window is None else table(options.window)
    chunks = None
    if options.taps is not None:
        ends = np.zeros(arrays["tokens"].shape, bool)
        for row, (_, _, conversations) in enumerate(laid):
            ends[row, arrays["ends"][row, :conversations]] = True
        cut = get("recurrent layers", "chunks").value
        chunks = cut(arrays["previous"], ends, used, taps=options.taps)
    long = None
    if options.rope_switch is not None:
        long = _of_long(arrays["until"], arrays["positions"], options.rope_switch)
    return StreamBatch(**arrays, blocks=table(None), window_blocks=in_window, chunks=chunks, long=long)


def _of_long(until: np.ndarray, positions: np.ndarray, longest: int) -> np.ndarray:
    """Return the mask of tokens that are seen by a token of a later position than ``longest`` allows, bool [S, N]."""
    before = np.pad(np.cumsum(positions >= longest, axis=1), ((0, 0), (1, 0)))
    return np.take_along_axis(before, until, axis=1) > before[:, :-1]


def places_of_trees(trees: Sequence[Tree], packed: PackedBatch) -> np.ndarray:
    """Return :attr:`StreamBatch.places`, int32 [B, K], for the B packed trees."""
    places = np.zeros((len(trees), max(len(tree.responses) for tree in trees)), np.int32)
    for row, stream in enumerate(packed):
        read = row * stream.shape.reads
        for member in stream.members:
            count = len(trees[member].responses)
            places[member, :count] = np.arange(read, read + count)
            read += count
    return places


def lay_stream(
    trees: Sequence[Tree], stream: PackedStream, rope_switch: int | None = None
) -> tuple[dict[str, np.ndarray], int, int]:
    """Return the arrays of one stream (without the axis S), its number of tokens including cached ones, and its
    number of conversations.

    Args:
      trees: All packed trees.
      stream: Members of the stream.
      rope_switch: :attr:`StreamOptions.rope_switch`. A tree with conversations on both sides is laid as two, the
        shorter ones first.

    Raises:
      ValueError: The trees do not fit.
    """
    shape = stream.shape
    room = shape.tokens + shape.kept
    count = sum(len(trees[index].responses) for index in stream.members)
    if stream.tokens > shape.tokens or count > shape.reads:
        raise ValueError(f"trees of {stream.tokens} tokens do not fit a stream of {shape}")
    tokens, positions = np.zeros((2, room), np.int32)
    until = np.arange(1, room + 1, dtype=np.int32)
    previous = np.full(room, -1, np.int32)
    reads, ends = np.zeros((2, shape.reads), np.int32)
    at = read = 0
    path: list[tuple[int, int]] = []  # runs of the open prefix: (first position, its place)
    length = 0  # tokens of the open prefix
    # response to the open prefix -> its place, because equal responses are computed once
    known: dict[bytes, int] = {}

    def place_of(position: int) -> int:
        """Return the place of the token at this position of the open prefix."""
        start, place = next(run for run in reversed(path) if run[0] <= position)
        return place + position - start

    def close(keep: int) -> None:
        """End the visibility of the open prefix after its first ``keep`` tokens."""
        nonlocal length
        while length > keep:
            start, place = path[-1]
            low = max(start, keep)
            until[place + low - start : place + length - start] = at
            length = low
            if low == start:
                path.pop()

    def write(ids: np.ndarray, position: int) -> int:
        """Append tokens that continue the open prefix at ``position``; return their first place."""
        nonlocal at
        first, at = at, at + len(ids)
        tokens[first:at] = ids
        positions[first:at] = np.arange(position, position + len(ids))
        previous[first:at] = np.arange(first - 1, at - 1)
        previous[first] = place_of(position - 1) if position else -1
        return first

    for index, shared in zip(stream.members, stream.shared, strict=True):
        tree = trees[index]
        if shared != length or len(tree.prefix) != length or not shared:
            known.clear()
        close(shared)
        for group in tree.groups(rope_switch):
            if group != tree.groups(rope_switch)[0]:  # the longer ones have another prefix
                close(0)
            if len(tree.prefix) > length:
                first = write(tree.prefix[length:], length)
                path.append((length, first))
                length = len(tree.prefix)
            for number in group:
                response = tree.responses[number]
                ids = response.tobytes()
                if ids not in known:
                    known[ids] = write(response, len(tree.prefix))
                    until[known[ids] : at] = at
                slot = read + number
                reads[slot], ends[slot] = known[ids] + tree.read[number], known[ids] + len(response) - 1
        read += len(tree.responses)
    close(0)
    arrays = {
        "tokens": tokens, "positions": positions, "until": until, "previous": previous, "reads": reads, "ends": ends,
    }  # fmt: skip
    return arrays, at, read
