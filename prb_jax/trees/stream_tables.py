"""The tables of packed streams: which blocks of tokens meet in attention, and which pages a kernel reads.

A program that walks through blocks has a table of the blocks of keys that each block of queries sees. A kernel for
paged caches has a table of pages: a stream falls into runs, tokens that stand side by side and follow each other in a
conversation. The keys of a run are its conversation from the first token on: whole pages that an earlier run has
already, then pages of its own. The page in which it leaves the earlier run is copied. The kernel goes through all keys
of a sequence for all of its queries. So a run is cut into sequences, and each one's keys end where it ends: few keys
are visited in vain. The steps of the kernel for training are in :mod:`prb_jax.trees.kernel_tables`.
"""

from __future__ import annotations

from dataclasses import dataclass

import jax
import numpy as np

from prb_jax.errors import short_repr

BLOCK = 128
"""Tokens of a block of queries, and of a block of keys: what two such blocks need fits the caches of a core."""

LEAST_PAGE = 64  # tokens of a page, at least

CUT = 512
"""Places of a stream at whose multiples runs are cut into sequences: whole blocks of a kernel's queries."""

MOST_ENTRIES = 1 << 16
"""Entries of a table of pages, at most, where pages may grow: it lies in a TPU's scalar memory, 256 KiB of its MiB."""


@jax.tree_util.register_dataclass
@dataclass(frozen=True)
class BlockTable:
    """Which blocks of S streams of N tokens meet, see :func:`block_table`. int32 arrays."""

    # [S, N / BLOCK, N / BLOCK], for each block of queries numbers of blocks of keys
    keys: np.ndarray | jax.Array
    # [S, N / BLOCK, 2], how many of them are seen wholly, and how many are not
    counts: np.ndarray | jax.Array

    __repr__ = short_repr


def block_table(
    until: np.ndarray, positions: np.ndarray, used: int, *, window: int | None
) -> tuple[np.ndarray, np.ndarray]:
    """Return, for every block of queries of one stream, the blocks of keys of which one of its queries sees something.

    Args:
      until, positions, used, window: as of :func:`meeting_blocks`, with blocks of :data:`BLOCK`.

    Returns:
      int32 [N / BLOCK, N / BLOCK], the numbers of blocks of keys: first those of which all queries see all, so that
      nothing has to be masked, then the others; and int32 [N / BLOCK, 2], how many there are of both kinds. A block of
      padding has none.
    """
    some, every = meeting_blocks(until, positions, used, block=BLOCK, window=window)
    table = np.zeros(some.shape, np.int32)
    counts = np.zeros((len(some), 2), np.int32)
    for query in range(-(-used // BLOCK)):
        whole, partly = np.flatnonzero(every[query]), np.flatnonzero(some[query] & ~every[query])
        table[query, : len(whole)] = whole
        table[query, len(whole) : len(whole) + len(partly)] = partly
        counts[query] = len(whole), len(partly)
    return table, counts


def meeting_blocks(
    until: np.ndarray, positions: np.ndarray, used: int, *, block: int, window: int | None
) -> tuple[np.ndarray, np.ndarray]:
    """Return which blocks of queries and keys of one stream meet.

    Token i sees token j if ``j <= i < until[j]`` and ``positions[i] - positions[j] < window``.

    Args:
      until: int32 [N], N a multiple of the block.
      positions: int32 [N].
      used: tokens of the stream; what follows is padding.
      block: tokens of a block of queries, and of one of keys.
      window: None for no window.

    Returns:
      bool [N / block, N / block] of queries and keys, twice: some query sees some key, and all queries see all keys.
      Blocks of padding meet themselves, or none.
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
    """bool [queries, keys] twice: some pair of tokens that see each other is within the window; all pairs are."""
    count = len(until) // block
    places = np.arange(len(until))
    near, whole = np.zeros((count, count), bool), np.zeros((count, count), bool)
    for query in range(real):
        low, high = query * block, (query + 1) * block
        # Keys before the block: queries of the trees that begin within it see none of them. The nearest of the
        # others bounds the distance from below.
        of_queries = positions[low:high]
        begins = np.flatnonzero(of_queries == 0)
        before = of_queries[: begins[0]] if len(begins) else of_queries
        nearest = positions.copy()
        nearest[:low] = before.min(initial=np.iinfo(np.int32).max)
        seen = (until > low) & (places < high)
        near[query] = (seen & (nearest - positions < window)).reshape(count, block).any(axis=1)
        whole[query] = (of_queries.max() - positions < window).reshape(count, block).all(axis=1)
    return near, whole


@jax.tree_util.register_dataclass
@dataclass(frozen=True)
class PageTable:
    """The pages of S streams of N tokens with at most Q sequences. A JAX pytree of int32 arrays."""

    tokens: np.ndarray | jax.Array
    """[S, pages, page], the place of the token whose key and value stand there; 0 where none does."""
    pages: np.ndarray | jax.Array
    """[S, Q, N / page], the pages of each sequence's conversation, in order; 0 behind the last."""
    # [S, Q], tokens of each sequence's conversation, up to and with the sequence
    keys: np.ndarray | jax.Array
    starts: np.ndarray | jax.Array
    """[S, Q + 1], the first place of each sequence; the number of real tokens behind the last."""
    sequences: np.ndarray | jax.Array  # [S, 1], how many there are

    __repr__ = short_repr


def most_sequences(tokens: int, runs: int) -> int:
    """Return how many sequences there are at most in a stream of so many tokens and runs: Q."""
    return runs + (tokens - 1) // CUT


def page_size(tokens: int, runs: int) -> int:
    """Return the tokens of a page, a power of two, for streams of so many tokens and runs."""
    size = LEAST_PAGE
    while most_sequences(tokens, runs) * -(-tokens // size) > MOST_ENTRIES and size < tokens:
        size *= 2
    return size


def page_table(previous: np.ndarray, positions: np.ndarray, used: int, *, runs: int) -> dict[str, np.ndarray]:
    """Return the arrays of one stream, without their axis of streams: see :class:`PageTable`.

    Args:
      previous: int32 [N], the place of the token before each one in its conversation; -1 for a first one.
      positions: int32 [N], of each token in its conversation.
      used: real tokens; what follows is padding.
      runs: at most. As many conversations as the stream has are enough, for every run ends with one.

    Raises:
      ValueError: more runs than that.
    """
    count = len(previous)
    page = page_size(count, runs)
    firsts = np.flatnonzero(previous[:used] != np.arange(used) - 1)
    firsts = np.unique(np.concatenate([np.zeros(min(used, 1), np.int64), firsts]))
    if len(firsts) > runs:
        raise ValueError(f"{len(firsts)} runs of tokens do not fit a table of {runs}")
    ends = np.append(firsts[1:], used)[: len(firsts)]
    # A run adds at most two pages that it does not fill.
    tokens = np.zeros((-(-count // page) + 2 * runs, page), np.int32)
    of_runs = np.zeros((len(firsts), -(-count // page)), np.int32)
    owner = np.repeat(np.arange(len(firsts)), ends - firsts)
    paths: list[np.ndarray] = []
    next_page = 0
    for run, (first, end) in enumerate(zip(firsts, ends, strict=True)):
        at, path = int(positions[first]), np.arange(first, end, dtype=np.int32)
        whole = at // page
        if at:
            before = owner[previous[first]]
            path = np.concatenate([paths[before][:at], path])
            of_runs[run, :whole] = of_runs[before, :whole]
        rest = path[whole * page :]
        added = -(-len(rest) // page)
        tokens[next_page : next_page + added].reshape(-1)[: len(rest)] = rest
        of_runs[run, whole : whole + added] = np.arange(next_page, next_page + added)
        next_page += added
        paths.append(path)
    begins = np.union1d(firsts, np.arange(0, used, CUT)).astype(np.int64)
    most, sequences = most_sequences(count, runs), len(begins)
    starts = np.full(most + 1, used, np.int32)
    starts[:sequences] = begins
    pages, keys = np.zeros((most, of_runs.shape[1]), np.int32), np.zeros(most, np.int32)
    pages[:sequences] = of_runs[owner[begins]]
    keys[:sequences] = positions[starts[1 : sequences + 1] - 1] + 1
    return {
        "tokens": tokens, "pages": pages, "keys": keys, "starts": starts,
        "sequences": np.array([sequences], np.int32),
    }  # fmt: skip
