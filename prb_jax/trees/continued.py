"""Streams that continue prefixes with cached keys and values.

The layout covers the whole trees, as in any stream (:mod:`prb_jax.trees.streams`). Tokens with cached keys and values
are only attended to; all other tokens are computed. Keys and values are cached in pages.
"""

from __future__ import annotations

import itertools
from collections.abc import Callable, Sequence
from dataclasses import dataclass

import jax
import numpy as np

from prb_jax.errors import short_repr
from prb_jax.trees.packing import PackedStream
from prb_jax.trees.stream_tables import BLOCK, round_up
from prb_jax.trees.streams import lay_stream
from prb_jax.trees.tree import Tree

PAGE = 32
"""Tokens of a page; only whole pages of a prefix are cached."""

_ALIGNED = 64  # bytes: JAX does not copy a host array that begins at a multiple of this


@dataclass(frozen=True, eq=False)
class Page:
    """Keys and values of :data:`PAGE` consecutive tokens of a conversation, for L layers and G KV heads."""

    keys: np.ndarray  # [L, G, PAGE, H], after the rotary embedding
    values: np.ndarray  # [L, G, H, PAGE]

    __repr__ = short_repr

    @property
    def bytes(self) -> int:
        """Size of the arrays in bytes."""
        return self.keys.nbytes + self.values.nbytes

    @property
    def is_finite(self) -> bool:
        """Whether all keys and values are finite; found in one pass, because a sum with one that is not is not."""
        with np.errstate(invalid="ignore", over="ignore"):
            return bool(np.isfinite(self.keys.sum(dtype=np.float32) + self.values.sum(dtype=np.float32)))


@dataclass(frozen=True, eq=False)
class KeptPrefix:
    """Cached first tokens of a prefix: whole pages, and perhaps the first tokens of one more page."""

    pages: Sequence[Page] = ()
    tokens: int = 0

    __repr__ = short_repr


@jax.tree_util.register_dataclass
@dataclass(frozen=True)
class ContinuedBatch:
    """A stream of N computed tokens after at most C cached ones. A JAX pytree; integers are int32.

    The computed tokens have ranks 0 to N - 1. There are C + N keys, cached ones first. The tokens that see a key are
    one run of ranks: ``since <= rank < until``, as in :mod:`prb_jax.trees.streams`.
    """

    tokens: np.ndarray | jax.Array  # [1, N], ids of the computed tokens
    used: np.ndarray | jax.Array  # [1], number of computed tokens without padding
    reads: np.ndarray | jax.Array  # [1, M], ranks of the tokens to read
    positions: np.ndarray | jax.Array  # [1, C + N], position of each key in its conversation
    since: np.ndarray | jax.Array  # [1, C + N]
    until: np.ndarray | jax.Array  # [1, C + N]; 0 for padding
    keys: np.ndarray | jax.Array  # [C / BLOCK, L, G, BLOCK, H], cached
    values: np.ndarray | jax.Array  # [C / BLOCK, L, G, H, BLOCK]

    __repr__ = short_repr


@dataclass(frozen=True, eq=False)
class LaidBehind:
    """A batch with the places of its prefixes. Build with :func:`lay_behind`."""

    batch: ContinuedBatch
    beginnings: Sequence[tuple[np.ndarray, np.ndarray, KeptPrefix]]
    """For each prefix: its ids, the key index of each of its tokens, and its cached tokens."""

    __repr__ = short_repr

    def pages(
        self, keys: np.ndarray, values: np.ndarray, new_page: Callable[[], Page]
    ) -> list[tuple[np.ndarray, list[Page]]]:
        """Return each prefix with all its pages.

        Args:
          keys: Keys of the computed tokens, [L, G, N, H].
          values: Values of the computed tokens, [L, G, H, N].
          new_page: Returns a page with any contents, to copy into.
        """
        old_keys, old_values = np.asarray(self.batch.keys), np.asarray(self.batch.values)
        room = len(old_keys) * BLOCK

        def page_of(columns: np.ndarray) -> Page:
            """Copy a page run by run; a run is of computed keys, or lies in one block of old ones."""
            page = new_page()
            begins = (np.diff(columns) != 1) | (columns[1:] == room)
            begins |= (columns[1:] < room) & (columns[1:] % BLOCK == 0)
            for start, end in itertools.pairwise([0, *(np.flatnonzero(begins) + 1).tolist(), PAGE]):
                first = int(columns[start])
                of_keys, of_values, place = keys, values, first - room
                if first < room:
                    block, place = divmod(first, BLOCK)
                    of_keys, of_values = old_keys[block], old_values[block]
                run = slice(place, place + end - start)
                page.keys[:, :, start:end] = of_keys[:, :, run]
                page.values[..., start:end] = of_values[..., run]
            return page

        made: dict[bytes, Page] = {}  # by columns, because several prefixes share a page
        found = []
        for prefix, columns, kept in self.beginnings:
            all_pages = list(kept.pages[: kept.tokens // PAGE])
            for start in range(len(all_pages) * PAGE, len(prefix) - PAGE + 1, PAGE):
                of_page = columns[start : start + PAGE]
                if (page := made.get(of_page.tobytes())) is None:
                    page = made[of_page.tobytes()] = page_of(of_page)
                all_pages.append(page)
            found.append((prefix, all_pages))
        return found


Room = tuple[np.ndarray, np.ndarray]
"""Arrays for the keys and values of a :class:`ContinuedBatch`; pages are copied into them."""


def make_room(empty: Page, tokens: int) -> Room:
    """Return zero arrays for `tokens` cached tokens, a multiple of BLOCK, with the layers and heads of the page."""
    layers, heads, _, size = empty.keys.shape
    sizes = (BLOCK, size), (size, BLOCK)
    keys, values = (_zeros((tokens // BLOCK, layers, heads, *last), empty.keys.dtype) for last in sizes)
    return keys, values


def lay_behind(
    trees: Sequence[Tree], stream: PackedStream, cached: Sequence[KeptPrefix], room: Room
) -> LaidBehind:
    """Lay out the trees of a stream after their cached tokens.

    Args:
      trees: All packed trees.
      stream: Members of the stream.
      cached: Cached tokens of each tree's prefix, the same as for packing.
      room: Arrays from :func:`make_room` for the shape of the stream; their old contents are ignored.

    Raises:
      ValueError: The trees do not fit.
    """
    shape = stream.shape
    whole, used, _ = lay_stream(trees, stream)
    columns = np.full(shape.tokens + shape.kept, -1, np.int32)  # key index of each place
    keys, values = room
    count, read, step = 0, 0, 1
    if sum(cached[member].tokens + BLOCK for member in stream.members) <= shape.kept:
        step = BLOCK  # cached tokens of each tree begin a block, so a block has keys of few conversations
    paths: dict[int, np.ndarray] = {}
    for member in stream.members:
        end = whole["ends"][read]
        paths[member] = np.flatnonzero(whole["until"][: end + 1] > end)[: len(trees[member].prefix)]
        read += len(trees[member].responses)
        count = round_up(count, step)
        for number, page in enumerate(cached[member].pages):
            places = paths[member][number * PAGE : min((number + 1) * PAGE, cached[member].tokens)]
            new = np.flatnonzero(columns[places] < 0)[: shape.kept - count]  # the rest is computed
            columns[places[new]] = np.arange(count, count + len(new))
            while len(new):  # copy one block at a time; what is new of a page is one run
                block, place = divmod(count, BLOCK)
                some, new = new[: BLOCK - place], new[BLOCK - place :]
                run, to = slice(some[0], some[-1] + 1), slice(place, place + len(some))
                keys[block, :, :, to], values[block, ..., to] = page.keys[:, :, run], page.values[..., run]
                count += len(some)
    kept, fresh = np.flatnonzero(columns >= 0), np.flatnonzero(columns[:used] < 0)
    if len(fresh) > shape.tokens:
        raise ValueError(f"{len(fresh)} tokens do not fit a stream of {shape}")
    columns[fresh] = np.arange(shape.kept, shape.kept + len(fresh))
    tokens = np.zeros((1, shape.tokens), np.int32)
    tokens[0, : len(fresh)] = whole["tokens"][fresh]
    positions, since, until = np.zeros((3, 1, shape.tokens + shape.kept), np.int32)
    since[:] = shape.tokens
    # The rank of a place is the number of computed tokens before it.
    for places in (kept, fresh):
        numbers = columns[places]
        positions[0, numbers] = whole["positions"][places]
        since[0, numbers] = np.searchsorted(fresh, places)
        until[0, numbers] = np.searchsorted(fresh, whole["until"][places])
    batch = ContinuedBatch(
        tokens=tokens,
        used=np.asarray([len(fresh)], np.int32),
        reads=np.maximum(columns[whole["reads"]] - shape.kept, 0)[None],  # unused ones may name a kept token
        positions=positions,
        since=since,
        until=until,
        keys=keys,
        values=values,
    )
    beginnings = {
        trees[member].prefix.tobytes(): (trees[member].prefix, columns[path], cached[member])
        for member, path in paths.items()
    }
    return LaidBehind(batch, list(beginnings.values()))


def _zeros(shape: tuple[int, ...], dtype: np.dtype) -> np.ndarray:
    """Return zeros in memory that JAX can use without a copy."""
    size = int(np.prod(shape)) * dtype.itemsize
    raw = np.zeros(size + _ALIGNED, np.uint8)
    start = -raw.ctypes.data % _ALIGNED
    return raw[start : start + size].view(dtype).reshape(shape)
