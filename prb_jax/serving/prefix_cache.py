"""Cache of keys and values for prefixes of recent conversations, found by their token ids."""

from __future__ import annotations

import itertools
import threading
from collections import OrderedDict
from collections.abc import Sequence

import numpy as np

from prb_jax.trees.continued import PAGE, Page

_Key = tuple[int, bytes]  # number of the preceding page (0 if none), and token ids


class PrefixCache:
    """Pages of keys and values; the least recently used pages are evicted first. Thread-safe.

    The key of a page is its token ids and the token ids of all pages before it.

    Args:
      most: Maximum number of bytes in the cache.

    Attributes:
      bytes: Number of bytes in the cache.
    """

    def __init__(self, most: int) -> None:
        self.most, self.bytes = most, 0
        self._pages: OrderedDict[_Key, tuple[int, Page]] = OrderedDict()  # most recently used pages last
        self._numbers = itertools.count(1)
        self._lock = threading.Lock()

    def __len__(self) -> int:
        return len(self._pages)

    def find(self, ids: np.ndarray, *, most: int) -> list[Page]:
        """Return the cached pages of the prefix of these ids, int32 [n], up to `most` tokens."""
        with self._lock:
            found = self._walk(ids, min(len(ids), most) // PAGE)
            return [page for _, page in found.values()]

    def put(self, ids: np.ndarray, pages: Sequence[Page]) -> None:
        """Add the pages of the prefix of these ids, starting with the first page.

        A page with a value that is not finite is skipped with all later pages: it would spoil every score after it.
        """
        with self._lock:
            known = self._walk(ids, len(pages))
            chain = list(known)
            before = known[chain[-1]][0] if chain else 0
            for place in range(len(chain), len(pages)):
                page = pages[place]
                if not (np.isfinite(page.keys).all() and np.isfinite(page.values).all()):
                    break
                key = before, _ids_of(ids, place)
                before = next(self._numbers)
                self._pages[key] = before, page
                self.bytes += page.bytes
                chain.append(key)
            self._touch(chain)
            while self.bytes > self.most:
                _, (_, page) = self._pages.popitem(last=False)
                self.bytes -= page.bytes

    def _walk(self, ids: np.ndarray, most: int) -> dict[_Key, tuple[int, Page]]:
        """Return the cached pages of this prefix, in order, and mark them as the most recently used."""
        found: dict[_Key, tuple[int, Page]] = {}
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


def _ids_of(ids: np.ndarray, place: int) -> bytes:
    return ids[place * PAGE : (place + 1) * PAGE].tobytes()
