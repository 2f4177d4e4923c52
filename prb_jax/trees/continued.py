"""Streams that begin behind tokens whose keys and values were kept.

The trees of a stream are laid out whole, as in any other (:mod:`prb_jax.trees.streams`). Tokens of the whole whose keys
and values were kept, in pages, are only looked at; all others are computed.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

import jax
import numpy as np

from prb_jax.errors import short_repr
from prb_jax.trees.packing import PackedStream
from prb_jax.trees.stream_tables import BLOCK
from prb_jax.trees.streams import lay_stream
from prb_jax.trees.tree import Tree

PAGE = 32
"""Tokens of a page: the beginning of a conversation is kept in whole pages."""

_ALIGNED = 64  # bytes: an array of the host that begins at a multiple of this is not copied by JAX


@dataclass(frozen=True, eq=False)
class Page:
    """Keys and values of :data:`PAGE` tokens that follow each other in a conversation, of L layers and G kv heads."""

    keys: np.ndarray  # [L, G, PAGE, H], after the rotary embedding
    values: np.ndarray  # [L, G, H, PAGE]

    __repr__ = short_repr

    @property
    def bytes(self) -> int:
        """Bytes of its arrays."""
        return self.keys.nbytes + self.values.nbytes


@jax.tree_util.register_dataclass
@dataclass(frozen=True)
class ContinuedBatch:
    """A stream of N computed tokens behind at most C kept ones. A JAX pytree; integers are int32.

    The computed tokens have ranks, 0 to N - 1. A key of the C + N, kept ones first, is seen by those whose rank lies
    in ``since <= rank < until``: in a stream these are one run, as in :mod:`prb_jax.trees.streams`.
    """

    tokens: np.ndarray | jax.Array  # [1, N] token ids of those that are computed
    used: np.ndarray | jax.Array  # [1], how many of them are no padding
    reads: np.ndarray | jax.Array  # [1, M], ranks of those that are read
    positions: np.ndarray | jax.Array  # [1, C + N], of each key in its conversation
    since: np.ndarray | jax.Array  # [1, C + N]
    until: np.ndarray | jax.Array  # [1, C + N]; 0 for padding
    keys: np.ndarray | jax.Array  # [C / BLOCK, L, G, BLOCK, H] that were kept
    values: np.ndarray | jax.Array  # [C / BLOCK, L, G, H, BLOCK]

    __repr__ = short_repr


@dataclass(frozen=True, eq=False)
class LaidBehind:
    """A batch, and where the beginnings of its trees stand in it. Build with :func:`lay_behind`."""

    batch: ContinuedBatch
    beginnings: Sequence[tuple[np.ndarray, np.ndarray, Sequence[Page]]]
    """Of each prefix: its ids, the number of the key of each of its tokens, and the pages it had."""

    __repr__ = short_repr

    def pages(self, keys: np.ndarray, values: np.ndarray) -> list[tuple[np.ndarray, list[Page]]]:
        """Return the prefix of each tree and all its pages.

        Args:
          keys: [L, G, N, H] of the computed tokens.
          values: [L, G, H, N].
        """
        old_keys, old_values = np.asarray(self.batch.keys), np.asarray(self.batch.values)
        room = len(old_keys) * BLOCK

        def page_of(columns: np.ndarray) -> Page:
            if columns[0] >= room and columns[-1] - columns[0] == PAGE - 1:  # one run, as nearly always
                run = slice(columns[0] - room, columns[-1] - room + 1)
                return Page(keys[:, :, run].copy(), values[..., run].copy())
            is_new, new = columns >= room, np.maximum(columns - room, 0)
            block, place = np.divmod(np.minimum(columns, room - 1), BLOCK)
            kept_keys = np.moveaxis(old_keys[block, :, :, place], 0, 2)
            kept_values = np.moveaxis(old_values[block, :, :, :, place], 0, 3)
            return Page(
                np.where(is_new[:, None], keys[:, :, new], kept_keys),
                np.where(is_new, values[..., new], kept_values),
            )

        made: dict[bytes, Page] = {}  # by the columns: several prefixes have the same page
        found = []
        for prefix, columns, pages in self.beginnings:
            all_pages = list(pages)
            for start in range(len(pages) * PAGE, len(prefix) - PAGE + 1, PAGE):
                of_page = columns[start : start + PAGE]
                if (page := made.get(of_page.tobytes())) is None:
                    page = made[of_page.tobytes()] = page_of(of_page)
                all_pages.append(page)
            found.append((prefix, all_pages))
        return found


Room = tuple[np.ndarray, np.ndarray]
"""Arrays for the keys and values of a :class:`ContinuedBatch`, into which pages are copied."""


def make_room(empty: Page, tokens: int) -> Room:
    """Return zeros for so many kept tokens, a multiple of BLOCK, that are shaped as those of a page are."""
    layers, heads, _, size = empty.keys.shape
    sizes = (BLOCK, size), (size, BLOCK)
    keys, values = (_zeros((tokens // BLOCK, layers, heads, *last), empty.keys.dtype) for last in sizes)
    return keys, values


def lay_behind(
    trees: Sequence[Tree], stream: PackedStream, pages: Sequence[Sequence[Page]], room: Room
) -> LaidBehind:
    """Lay the trees of a stream out behind what was kept of them.

    Args:
      trees: those that were packed.
      stream: which of them it holds.
      pages: of each tree those of its beginning; with them it was packed.
      room: of :func:`make_room`, as the shape of the stream says; what it holds of earlier batches is not looked at.

    Raises:
      ValueError: the trees do not fit.
    """
    shape = stream.shape
    whole, used, _ = lay_stream(trees, stream)
    columns = np.full(shape.tokens + shape.kept, -1, np.int32)  # of each place the number of its key
    keys, values = room
    count, read = 0, 0
    paths: dict[int, np.ndarray] = {}
    for member in stream.members:
        end = whole["ends"][read]
        paths[member] = np.flatnonzero(whole["until"][: end + 1] > end)[: len(trees[member].prefix)]
        read += len(trees[member].responses)
        for number, page in enumerate(pages[member]):
            places = paths[member][number * PAGE : (number + 1) * PAGE]
            new = np.flatnonzero(columns[places] < 0)[: shape.kept - count]  # the others are computed
            columns[places[new]] = np.arange(count, count + len(new))
            while len(new):  # as much as fits the block
                block, place = divmod(count, BLOCK)
                some, new = new[: BLOCK - place], new[BLOCK - place :]
                keys[block, :, :, place : place + len(some)] = page.keys[:, :, some]
                values[block, :, :, :, place : place + len(some)] = page.values[..., some]
                count += len(some)
    kept, fresh = np.flatnonzero(columns >= 0), np.flatnonzero(columns[:used] < 0)
    if len(fresh) > shape.tokens:
        raise ValueError(f"{len(fresh)} tokens do not fit a stream of {shape}")
    columns[fresh] = np.arange(shape.kept, shape.kept + len(fresh))
    tokens = np.zeros((1, shape.tokens), np.int32)
    tokens[0, : len(fresh)] = whole["tokens"][fresh]
    positions, since, until = np.zeros((3, 1, shape.tokens + shape.kept), np.int32)
    since[:] = shape.tokens
    # How many computed tokens stand before a place is the rank of the first that does not.
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
        trees[member].prefix.tobytes(): (trees[member].prefix, columns[path], pages[member])
        for member, path in paths.items()
    }
    return LaidBehind(batch, list(beginnings.values()))


def _zeros(shape: tuple[int, ...], dtype: np.dtype) -> np.ndarray:
    """Zeros whose memory JAX takes as it is."""
    size = int(np.prod(shape)) * dtype.itemsize
    raw = np.zeros(size + _ALIGNED, np.uint8)
    start = -raw.ctypes.data % _ALIGNED
    return raw[start : start + size].view(dtype).reshape(shape)
