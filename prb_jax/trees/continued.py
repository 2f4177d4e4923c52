"""Streams that continue prefixes with cached keys and values.

The layout covers the whole trees, as in any stream (:mod:`prb_jax.trees.streams`). Tokens with cached keys and values
are only attended to; all other tokens are computed. Keys and values are cached in pages.
"""

from __future__ import annotations

import itertools
import weakref
from collections.abc import Sequence
from dataclasses import dataclass

import jax
import numpy as np

from prb_jax.errors import short_repr
from prb_jax.trees.streams import PackedStream, lay_stream
from prb_jax.trees.tree import BLOCK, Tree

PAGE = 32
"""Tokens of a page; only whole pages of a prefix are cached."""

PAGES = BLOCK // PAGE
"""Pages of a block. A cached block holds the first pages of a block of a prefix, at least one."""

_HUGE_PAGE = 1 << 21  # bytes; and JAX does not copy a host array that begins at a multiple of 64


@dataclass(frozen=True, eq=False)
class CachedBlock:
    """Keys and values of up to BLOCK consecutive tokens, in this row of a :class:`BlockStore`.

    The row is used again when nothing refers to the block any more.
    """

    row: int
    bytes: int = 0


class BlockStore:
    """Memory for cached keys and values. Programs read it in place, and blocks are never moved. Thread-safe.

    Args:
      like: Keys [L, G, BLOCK, H] and values [L, G, H, BLOCK] of a block: only their shapes and dtypes count.
      dtype: Dtype of the numbers, whose bits they hold if it is another; None for theirs.
      most: Bytes of all blocks.
      spare: Number of blocks beyond these, for batches that run.

    Attributes:
      keys: [rows, L, G, BLOCK, H], after the rotary embedding.
      values: [rows, L, G, H, BLOCK].
    """

    def __init__(
        self,
        like: tuple[jax.ShapeDtypeStruct, jax.ShapeDtypeStruct],
        *,
        most: int,
        spare: int,
        dtype: np.dtype | None = None,
    ) -> None:
        self._dtype = like[0].dtype if dtype is None else dtype
        self._bytes = sum(x.size * x.dtype.itemsize for x in like)
        rows = most // self._bytes + spare
        self.keys, self.values = (_zeros((rows, *x.shape), x.dtype) for x in like)
        # The last one is used next: a row that was just given back, whose memory is touched already.
        self._free = [*reversed(range(rows))]

    def new(self) -> CachedBlock | None:
        """Return a block with any contents; None if all are in use."""
        try:
            block = CachedBlock(self._free.pop(), self._bytes)
        except IndexError:
            return None
        weakref.finalize(block, self._free.append, block.row).atexit = False
        return block

    def touch(self, rows: int) -> None:
        """Make the system give memory for the first rows now, and not to the first batches."""
        self.keys[:rows] = 0
        self.values[:rows] = 0

    def is_finite(self, row: int, tokens: int) -> bool:
        """Return whether the first keys and values of a row are finite, in one pass: a sum with infinity is not."""
        with np.errstate(invalid="ignore", over="ignore"):
            parts = self.keys[row, :, :, :tokens], self.values[row, ..., :tokens]
            return bool(np.isfinite(sum(part.view(self._dtype).sum(dtype=np.float32) for part in parts)))


@dataclass(frozen=True, eq=False)
class KeptPrefix:
    """Cached first tokens of a prefix: whole pages, and perhaps the first tokens of one more page.

    ``blocks`` has the block of each page. It also holds all earlier pages of the same BLOCK tokens of the prefix.
    """

    blocks: Sequence[CachedBlock] = ()
    tokens: int = 0

    __repr__ = short_repr


@jax.tree_util.register_dataclass
@dataclass(frozen=True)
class ContinuedBatch:
    """A stream of N computed tokens after at most C blocks of cached ones. A JAX pytree; integers are int32.

    The computed tokens have ranks 0 to N - 1. There are K = C * BLOCK + N keys, cached ones first. The tokens that see
    a key are one run of ranks: ``since <= rank < until``, as in :mod:`prb_jax.trees.streams`.
    """

    tokens: np.ndarray | jax.Array  # [1, N], ids of the computed tokens
    used: np.ndarray | jax.Array  # [1], number of computed tokens without padding
    reads: np.ndarray | jax.Array  # [1, M], ranks of the tokens to read
    positions: np.ndarray | jax.Array  # [1, K], position of each key in its conversation
    since: np.ndarray | jax.Array  # [1, K]
    until: np.ndarray | jax.Array  # [1, K]; 0 for padding
    rows: np.ndarray | jax.Array  # [C], row of each cached block in `keys` and `values`
    keys: np.ndarray | jax.Array  # [rows, L, G, BLOCK, H], of a store
    values: np.ndarray | jax.Array  # [rows, L, G, H, BLOCK]

    __repr__ = short_repr


@dataclass(frozen=True, eq=False)
class LaidBehind:
    """A batch with the places of its prefixes. Build with :func:`lay_behind`.

    It must be alive while its program runs: it holds the blocks that the program reads.
    """

    batch: ContinuedBatch
    store: BlockStore
    beginnings: Sequence[tuple[np.ndarray, np.ndarray, KeptPrefix]]
    """For each prefix: its ids, the key index of each of its tokens, and its cached tokens."""

    __repr__ = short_repr

    def blocks(self, keys: np.ndarray, values: np.ndarray) -> list[tuple[np.ndarray, list[CachedBlock]]]:
        """Copy what was computed into blocks of the store; return each prefix with the block of each page.

        A prefix ends before the first block that is not finite, or for which the store has no memory.

        Args:
          keys: Keys of the computed tokens, [L, G, N, H].
          values: Values of the computed tokens, [L, G, H, N].
        """
        store, rows = self.store, np.asarray(self.batch.rows)
        cached = len(rows) * BLOCK

        def block_of(columns: np.ndarray) -> CachedBlock | None:
            """Copy the tokens of a block run by run; a run is of computed keys, or of one cached block."""
            if (block := store.new()) is None:
                return None
            begins = (np.diff(columns) != 1) | (columns[1:] == cached)
            begins |= (columns[1:] < cached) & (columns[1:] % BLOCK == 0)
            for start, end in itertools.pairwise([0, *(np.flatnonzero(begins) + 1).tolist(), len(columns)]):
                first = int(columns[start])
                of_keys, of_values, place = keys, values, first - cached
                if first < cached:
                    number, place = divmod(first, BLOCK)
                    of_keys, of_values = store.keys[rows[number]], store.values[rows[number]]
                run = slice(place, place + end - start)
                store.keys[block.row, :, :, start:end] = of_keys[:, :, run]
                store.values[block.row, ..., start:end] = of_values[..., run]
            return block if store.is_finite(block.row, len(columns)) else None

        made: dict[bytes, CachedBlock | None] = {}  # by columns, because several prefixes share a block
        found = []
        for prefix, columns, kept in self.beginnings:
            all_pages = list(kept.blocks[: kept.tokens // PAGE])
            count = len(prefix) // PAGE
            while len(all_pages) < count:
                number = len(all_pages) // PAGES
                end = min(count, (number + 1) * PAGES)
                of_block = columns[number * BLOCK : end * PAGE]
                if (key := of_block.tobytes()) not in made:
                    made[key] = block_of(of_block)
                if (block := made[key]) is None:
                    break
                all_pages += [block] * (end - len(all_pages))
            found.append((prefix, all_pages))
        return found


def lay_behind(
    trees: Sequence[Tree], stream: PackedStream, cached: Sequence[KeptPrefix], store: BlockStore
) -> LaidBehind:
    """Lay out the trees of a stream after their cached tokens.

    Args:
      trees: All packed trees.
      stream: Members of the stream.
      cached: Cached tokens of each tree's prefix, the same as for packing.
      store: Memory of the cached tokens.

    Raises:
      ValueError: The trees do not fit.
    """
    shape = stream.shape
    whole, used, _ = lay_stream(trees, stream)
    columns = np.full(shape.tokens + shape.kept, -1, np.int32)  # key index of each place
    # The cached tokens of each tree begin in a block and end in a block, which may be used in part only.
    rows = np.zeros(shape.kept // BLOCK + 2 * shape.reads, np.int32)
    count, read = 0, 0
    paths: dict[int, np.ndarray] = {}
    for member in stream.members:
        end = whole["ends"][read]
        paths[member] = np.flatnonzero(whole["until"][: end + 1] > end)[: len(trees[member].prefix)]
        read += len(trees[member].responses)
        kept = cached[member]
        for number in range(-(-kept.tokens // BLOCK)):
            places = paths[member][number * BLOCK : min((number + 1) * BLOCK, kept.tokens)]
            new = np.flatnonzero(columns[places] < 0)
            if len(new):
                columns[places[new]] = count * BLOCK + new
                rows[count] = kept.blocks[min((number + 1) * PAGES, len(kept.blocks)) - 1].row
                count += 1
    old, fresh = np.flatnonzero(columns >= 0), np.flatnonzero(columns[:used] < 0)
    if len(fresh) > shape.tokens:
        raise ValueError(f"{len(fresh)} tokens do not fit a stream of {shape}")
    first = len(rows) * BLOCK  # key index of the first computed token
    columns[fresh] = np.arange(first, first + len(fresh))
    tokens = np.zeros((1, shape.tokens), np.int32)
    tokens[0, : len(fresh)] = whole["tokens"][fresh]
    positions, since, until = np.zeros((3, 1, first + shape.tokens), np.int32)
    since[:] = shape.tokens
    # The rank of a place is the number of computed tokens before it.
    for places in (old, fresh):
        numbers = columns[places]
        positions[0, numbers] = whole["positions"][places]
        since[0, numbers] = np.searchsorted(fresh, places)
        until[0, numbers] = np.searchsorted(fresh, whole["until"][places])
    batch = ContinuedBatch(
        tokens=tokens,
        used=np.asarray([len(fresh)], np.int32),
        reads=np.maximum(columns[whole["reads"]] - first, 0)[None],  # unused ones may name a kept token
        positions=positions,
        since=since,
        until=until,
        rows=rows,
        keys=store.keys,
        values=store.values,
    )
    beginnings = {
        trees[member].prefix.tobytes(): (trees[member].prefix, columns[path], cached[member])
        for member, path in paths.items()
    }
    return LaidBehind(batch, store, list(beginnings.values()))


def _zeros(shape: tuple[int, ...], dtype: np.dtype) -> np.ndarray:
    """Return zeros in memory that JAX can use without a copy, and that the kernel can give in huge pages."""
    size = int(np.prod(shape)) * dtype.itemsize
    raw = np.zeros(size + _HUGE_PAGE, np.uint8)
    start = -raw.ctypes.data % _HUGE_PAGE
    return raw[start : start + size].view(dtype).reshape(shape)
