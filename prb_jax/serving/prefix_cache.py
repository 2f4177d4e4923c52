"""Keys and values of the beginnings of recent conversations, found by their token ids."""

from __future__ import annotations

import itertools
import threading
from collections import OrderedDict
from collections.abc import Sequence

import numpy as np

from prb_jax.trees.continued import PAGE, Page

_Key = tuple[int, bytes]  # number of the page before it, 0 for none, and token ids


class PrefixCache:
    """Pages of keys and values; those go first that were not asked for longest. Threads may share it.

    A page is known by its token ids and those of all pages before it.

    Args:
      most: bytes that are held at most.

    Attributes:
      bytes: bytes that are held.
    """

    def __init__(self, most: int) -> None:
        self.most, self.bytes = most, 0
        self._pages: OrderedDict[_Key, tuple[int, Page]] = OrderedDict()  # those asked for last stand last
        self._numbers = itertools.count(1)
        self._lock = threading.Lock()

    def __len__(self) -> int:
        return len(self._pages)

    def find(self, ids: np.ndarray, *, most: int) -> list[Page]:
        """Return the pages of the beginning of these ids, int32 [n], of at most so many tokens."""
        with self._lock:
            found = self._walk(ids, min(len(ids), most) // PAGE)
            return [page for _, page in found.values()]

    def put(self, ids: np.ndarray, pages: Sequence[Page]) -> None:
        """Hold the pages of the beginning of these ids, all from the first one on.

        A page with a value that is not finite is not held, nor is what follows it: it would spoil all that begins so.
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
        """The pages of this beginning that are held, in order; they are the last ones to go now."""
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
        """No page goes before one that follows it, so that each one is found."""
        for key in reversed(chain):
            self._pages.move_to_end(key)


def _ids_of(ids: np.ndarray, place: int) -> bytes:
    return ids[place * PAGE : (place + 1) * PAGE].tobytes()
