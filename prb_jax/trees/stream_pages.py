"""The pages of packed streams: which tokens' keys and values a kernel for paged caches finds where.

A stream falls into runs: tokens that stand side by side and follow each other in a conversation. The keys of a run
are its conversation from the first token on: whole pages that an earlier run has already, then pages of its own. The
page in which it leaves the earlier run is copied.
"""

from __future__ import annotations

from dataclasses import dataclass

import jax
import numpy as np

from prb_jax.errors import short_repr

LEAST_PAGE = 64
"""Tokens of a page, at least."""

MOST_ENTRIES = 1 << 16
"""Entries of a table of pages, at most, where pages may grow: it lies in a TPU's scalar memory, 256 KiB of its MiB."""


@jax.tree_util.register_dataclass
@dataclass(frozen=True)
class PageTable:
    """The pages of S streams of N tokens with at most R runs. A JAX pytree of int32 arrays.

    Attributes:
      tokens: [S, pages, page], the place of the token whose key and value stand there; 0 where none does.
      pages: [S, R, N / page], the pages of each run's conversation, in order; 0 behind the last.
      keys: [S, R], tokens of each run's conversation, up to and with the run.
      starts: [S, R + 1], the first place of each run; the number of real tokens from the last run on.
      runs: [S, 1], how many runs there are.
    """

    tokens: np.ndarray | jax.Array
    pages: np.ndarray | jax.Array
    keys: np.ndarray | jax.Array
    starts: np.ndarray | jax.Array
    runs: np.ndarray | jax.Array

    __repr__ = short_repr


def page_size(tokens: int, runs: int) -> int:
    """Return the tokens of a page, a power of two, for streams of so many tokens and runs."""
    size = LEAST_PAGE
    while runs * -(-tokens // size) > MOST_ENTRIES and size < tokens:
        size *= 2
    return size


def page_table(previous: np.ndarray, positions: np.ndarray, used: int, *, runs: int) -> dict[str, np.ndarray]:
    """Return the arrays of one stream, without their axis of streams: see :class:`PageTable`.

    Args:
      previous: int32 [N], the place of the token before each one in its conversation; -1 for a first one.
      positions: int32 [N], of each token in its conversation.
      used: real tokens; what follows is padding.
      runs: R. As many conversations as the stream has are enough, for every run ends with one.

    Raises:
      ValueError: more runs than R.
    """
    count = len(previous)
    page = page_size(count, runs)
    firsts = np.flatnonzero(previous[:used] != np.arange(used) - 1)
    firsts = np.unique(np.concatenate([np.zeros(min(used, 1), np.int64), firsts]))
    if len(firsts) > runs:
        raise ValueError(f"{len(firsts)} runs of tokens do not fit a table of {runs}")
    starts = np.full(runs + 1, used, np.int32)
    starts[: len(firsts)] = firsts
    # A run adds at most two pages that it does not fill.
    tokens = np.zeros((-(-count // page) + 2 * runs, page), np.int32)
    pages, keys = np.zeros((runs, -(-count // page)), np.int32), np.zeros(runs, np.int32)
    owner = np.repeat(np.arange(len(firsts)), np.diff(starts[: len(firsts) + 1]))
    paths: list[np.ndarray] = []
    next_page = 0
    for run, first in enumerate(firsts):
        at, own = int(positions[first]), np.arange(first, starts[run + 1], dtype=np.int32)
        path = own
        whole = at // page
        if at:
            before = owner[previous[first]]
            path = np.concatenate([paths[before][:at], own])
            pages[run, :whole] = pages[before, :whole]
        rest = path[whole * page :]
        added = -(-len(rest) // page)
        tokens[next_page : next_page + added].reshape(-1)[: len(rest)] = rest
        pages[run, whole : whole + added] = np.arange(next_page, next_page + added)
        keys[run] = len(path)
        next_page += added
        paths.append(path)
    return {
        "tokens": tokens, "pages": pages, "keys": keys, "starts": starts, "runs": np.array([len(firsts)], np.int32),
    }  # fmt: skip
