"""Memory for the pages of a prefix cache."""

from __future__ import annotations

import weakref
from collections import deque
from functools import partial

import numpy as np

from prb_jax.trees.continued import Page

BLOCK_BYTES = 1 << 25
"""Memory that is allocated at once: the kernel gives it in large pages, so the first touch costs little."""


class PageStore:
    """Memory for pages of one shape. The memory of a page that nothing refers to is used again. Thread-safe.

    Args:
      like: A page with the shape and the dtype of all pages.
    """

    def __init__(self, like: Page) -> None:
        self._like, self._count = like, max(1, BLOCK_BYTES // like.bytes)
        self._free = deque[tuple[np.ndarray, np.ndarray]]()

    def new(self) -> Page:
        """Return a page with any contents."""
        while True:
            try:
                keys, values = self._free.pop()
                break
            except IndexError:
                arrays = (np.empty((self._count, *x.shape), x.dtype) for x in (self._like.keys, self._like.values))
                self._free += zip(*arrays, strict=True)
        page = Page(keys, values)
        weakref.finalize(page, partial(self._free.append, (keys, values))).atexit = False
        return page
