"""Caches of recent conversations, found by their token ids: keys and values of prefixes, and scores."""

from __future__ import annotations

import itertools
import threading
from collections import Counter, OrderedDict
from collections.abc import Sequence
from hashlib import blake2b

import numpy as np

from prb_jax.trees.continued import PAGE, CachedBlock, KeptPrefix
from prb_jax.trees.tree import Tree, common_run

_FOLLOWERS = 32
"""How many of the latest pages after a page are compared with the rest of a prefix."""

_Key = tuple[int, bytes]  # number of the preceding page (0 if none), and token ids


MOST_SCORES = 100_000
"""Scores that are cached at most; each takes about 200 bytes."""


class ScoreCache:
    """Scores of whole conversations, so an equal one is not computed again. Thread-safe."""

    def __init__(self) -> None:
        self._scores: OrderedDict[bytes, float] = OrderedDict()  # most recently used scores last
        self._lock = threading.Lock()

    def find(self, tree: Tree) -> list[float | None]:
        """Return the score of each response of a tree, None if it is not cached."""
        keys = _conversations_of(tree)
        with self._lock:
            for key in keys:
                if key in self._scores:
                    self._scores.move_to_end(key)
            return [self._scores.get(key) for key in keys]

    def put(self, tree: Tree, scores: np.ndarray) -> None:
        """Add the scores of a tree's responses, float [K]. A score that is not finite is skipped."""
        with self._lock:
            for key, score in zip(_conversations_of(tree), scores.tolist(), strict=True):
                if np.isfinite(score):
                    self._scores[key] = score
                    self._scores.move_to_end(key)
            while len(self._scores) > MOST_SCORES:
                self._scores.popitem(last=False)


class PrefixCache:
    """Pages of keys and values; the least recently used pages are evicted first. Thread-safe.

    The key of a page is its token ids and the token ids of all pages before it. Up to four pages are in one block of
    memory, which is free when all of them are evicted.

    Args:
      most: Maximum number of bytes in the cache.

    Attributes:
      bytes: Number of bytes in the cache.
    """

    def __init__(self, most: int) -> None:
        self.most, self.bytes = most, 0
        # number and block of each page, the most recently used pages last
        self._pages: OrderedDict[_Key, tuple[int, CachedBlock]] = OrderedDict()
        self._followers: dict[
            int, list[_Key]
        ] = {}  # of each page by number, the latest last; 0 for first pages
        self._blocks = Counter[CachedBlock]()  # number of cached pages of each block
        self._numbers = itertools.count(1)
        self._lock = threading.Lock()

    def __len__(self) -> int:
        return len(self._pages)

    def find(self, ids: np.ndarray, *, most: int) -> KeptPrefix:
        """Return the cached part of the prefix of these ids, int32 [n], up to `most` tokens.

        The last page may be one that only begins like the prefix.
        """
        with self._lock:
            most = min(len(ids), most)
            found = self._walk(ids, most // PAGE)
            blocks, count = [block for _, block in found.values()], len(found) * PAGE
            last = next(reversed(found.values()))[0] if found else 0
            rest = ids[count : min(most, count + PAGE)]
            latest = self._followers.get(last, [])[-_FOLLOWERS:]
            runs = {common_run([rest, np.frombuffer(key[1], np.int32)]): key for key in latest}
            if (run := max(runs, default=0)) > 0:
                blocks.append(self._pages[runs[run]][1])
                self._touch([*found, runs[run]])
            return KeptPrefix(blocks, count + run)

    def put(self, ids: np.ndarray, blocks: Sequence[CachedBlock]) -> None:
        """Add the first pages of the prefix of these ids, each with its block."""
        with self._lock:
            known = self._walk(ids, len(blocks))
            chain = list(known)
            before = known[chain[-1]][0] if chain else 0
            for place in range(len(chain), len(blocks)):
                key, block = (before, _ids_of(ids, place)), blocks[place]
                before = next(self._numbers)
                self._pages[key] = before, block
                self._followers.setdefault(key[0], []).append(key)
                self.bytes += 0 if block in self._blocks else block.bytes
                self._blocks[block] += 1
                chain.append(key)
            self._touch(chain)
            while self.bytes > self.most:
                self._evict()

    def _evict(self) -> None:
        key, (number, block) = self._pages.popitem(last=False)
        self._blocks[block] -= 1
        if not self._blocks[block]:
            del self._blocks[block]
            self.bytes -= block.bytes
        self._followers.pop(number, None)
        self._followers[key[0]].remove(key)

    def _walk(self, ids: np.ndarray, most: int) -> dict[_Key, tuple[int, CachedBlock]]:
        """Return the cached pages of this prefix, in order, and mark them as the most recently used."""
        found: dict[_Key, tuple[int, CachedBlock]] = {}
        before = 0
        for place in range(most):
            key = before, _ids_of(ids, place)
            if (held := self._pages.get(key)) is None:
                break
            found[key] = held
            before = held[0]
        self._touch(list(found))
        return found

    def _touch(self, chain: Sequence[_Key]) -> None:
        """Mark pages as used, later pages first: a page is then never evicted before the pages that follow it."""
        for key in reversed(chain):
            self._pages.move_to_end(key)


def _conversations_of(tree: Tree) -> list[bytes]:
    """Return a digest of each conversation of a tree and of the place of its score."""
    begun, digests = blake2b(tree.prefix.tobytes(), digest_size=16), []
    for response, read in zip(tree.responses, tree.read, strict=True):
        whole = begun.copy()
        whole.update(response.tobytes())
        whole.update((len(tree.prefix) + read).to_bytes(8))
        digests.append(whole.digest())
    return digests


def _ids_of(ids: np.ndarray, place: int) -> bytes:
    return ids[place * PAGE : (place + 1) * PAGE].tobytes()
