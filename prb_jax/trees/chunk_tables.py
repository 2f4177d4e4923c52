"""Chunks of packed streams, for layers with a recurrent state: one pass over a forest, one state per depth.

A stream is cut into *runs*: no branch and no end of a conversation lies inside a run. Runs are cut into chunks of at
most :data:`prb_jax.trees.tree.CHUNK` tokens. A chunk starts from the state at the end of the previous chunk of
its conversation. Streams are in depth-first order, so this state is the last one written at its depth, and one *slot*
per depth is enough.
"""

from __future__ import annotations

from dataclasses import dataclass, field

import jax
import numpy as np

from prb_jax.errors import short_repr
from prb_jax.trees.tree import CHUNK, round_up

_SLOTS = 4  # the number of slots is a multiple of this, to compile few programs


@jax.tree_util.register_dataclass
@dataclass(frozen=True)
class ChunkTable:
    """Chunks of S streams of N tokens, n per stream. int32 arrays.

    Chunks are in the order of the stream, followed by padding.
    """

    places: np.ndarray | jax.Array  # [S, n, CHUNK], places of the tokens of each chunk; N for padding
    slots: np.ndarray | jax.Array  # [S, N], index of each token among n * CHUNK; n * CHUNK for padding
    # [S, n, K - 1], places of the tokens before each chunk in its conversation, the nearest last; N for none
    history: np.ndarray | jax.Array
    read: np.ndarray | jax.Array  # [S, n], slot of the state before each chunk; slot 0 is all zeros
    write: np.ndarray | jax.Array  # [S, n], slot for the state after each chunk
    slot_count: int = field(metadata={"static": True})  # padding writes to the last slot, which nothing reads

    __repr__ = short_repr


def chunk_table(previous: np.ndarray, ends: np.ndarray, used: np.ndarray, *, taps: int) -> ChunkTable:
    """Cut streams into chunks.

    Args:
      previous: Place of the token before each token in its conversation, int32 [S, N]; -1 for none.
      ends: True at last tokens of conversations, bool [S, N].
      used: Number of tokens of each stream, int [S].
      taps: K, number of tokens that the causal convolution of these layers sees, including the current one.
    """
    streams, tokens = previous.shape
    cut = [_cut(*stream) for stream in zip(previous, ends, used, strict=True)]
    count = _coarse(max(len(firsts) for firsts, *_ in cut), -(-tokens // CHUNK))
    places = np.full((streams, count, CHUNK), tokens, np.int32)
    slots = np.full((streams, tokens), count * CHUNK, np.int32)
    history = np.full((streams, count, taps - 1), tokens, np.int32)
    read = np.zeros((streams, count), np.int32)
    depth = max(int(slot.max(initial=0)) for *_, slot in cut)
    slot_count = round_up(depth + 2, _SLOTS)
    write = np.full((streams, count), slot_count - 1, np.int32)
    for stream, (firsts, lengths, read_of, write_of) in enumerate(cut):
        chunks = len(firsts)
        within = np.arange(CHUNK)
        real = within < lengths[:, None]
        places[stream, :chunks] = np.where(real, firsts[:, None] + within, tokens)
        place, column = np.nonzero(real)
        slots[stream, places[stream, place, column]] = place * CHUNK + column
        before = firsts
        for tap in range(taps - 2, -1, -1):
            before = np.where(before >= 0, previous[stream, np.maximum(before, 0)], -1)
            history[stream, :chunks, tap] = np.where(before >= 0, before, tokens)
        read[stream, :chunks], write[stream, :chunks] = read_of, write_of
    return ChunkTable(places, slots, history, read, write, slot_count)


def _cut(
    previous: np.ndarray, ends: np.ndarray, used: int
) -> tuple[np.ndarray, np.ndarray, np.ndarray, np.ndarray]:
    """Return the first places, lengths, read slots and write slots of the chunks of one stream."""
    previous, places = previous[:used], np.arange(used)
    children = np.bincount(previous[previous >= 0], minlength=used)
    closed = ends[:used] | (children != 1)  # a run ends after these
    starts = np.flatnonzero((previous != places - 1) | np.concatenate([[True], closed[:-1]])[:used])
    lengths = np.diff(starts, append=used)
    counts = -(-lengths // CHUNK)
    within = np.concatenate([np.arange(count) for count in counts]) if used else np.zeros(0, np.int64)
    firsts = np.repeat(starts, counts) + CHUNK * within
    sizes = np.minimum(np.repeat(starts + lengths, counts) - firsts, CHUNK)
    chunk_at_end = np.full(used, -1)
    chunk_at_end[firsts + sizes - 1] = np.arange(len(firsts))
    before = previous[firsts]
    parents = np.where(before >= 0, chunk_at_end[np.maximum(before, 0)], -1) if used else before
    siblings = np.bincount(parents[parents >= 0], minlength=len(firsts))
    read, write = np.zeros(len(firsts), np.int64), np.zeros(len(firsts), np.int64)
    for chunk, parent in enumerate(parents):
        # Only one successor reads the state, so it can overwrite the slot.
        read[chunk] = 0 if parent < 0 else write[parent]
        write[chunk] = 1 if parent < 0 else write[parent] + (siblings[parent] > 1)
    return firsts, sizes, read, write


def _coarse(count: int, least: int) -> int:
    """Round up the number of chunks to at least ``least``, in steps of an eighth to a quarter, for few programs."""
    if count <= least:
        return least
    step = max(1, (1 << max(count.bit_length() - 1, 0)) // 4)
    return round_up(count, step)
