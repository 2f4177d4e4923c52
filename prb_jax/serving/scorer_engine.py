"""Scores requests by any scorer except reward models: a baseline, a function, a fitted method, a judge."""

from __future__ import annotations

import asyncio
import sys
import threading
from collections.abc import Sequence
from concurrent.futures import ThreadPoolExecutor

from prb_jax.errors import DataError, PrbError, RunError
from prb_jax.serving.item_scorer import ItemScorer
from prb_jax.serving.items import ChatItem, Item, Score, Scores, numbered, pieces
from prb_jax.serving.jobs import PIECE, BusyError


class ScorerEngine:
    """Scores requests in the background, sequentially or several at once.

    Sequential scoring takes a piece of each request in turn: small requests do not wait for large ones.
    """

    failure: BaseException | None = None

    def __init__(self, scorer: ItemScorer, *, most: int, at_once: int = 1) -> None:
        self.waiting, self._most, self._scorer = 0, most, scorer
        self._piece = PIECE if at_once == 1 else sys.maxsize
        self._threads = ThreadPoolExecutor(at_once, "score")

    async def score(self, items: Sequence[Item]) -> list[Score]:
        """Wait for the score of each item.

        Raises:
          PrbError: If an item has no score; the message contains the number of the item.
          BusyError: If too many items wait.
          DataError: If a conversation is already rendered.
        """
        chats = [item for item in items if isinstance(item, ChatItem)]
        if len(chats) < len(items):
            raise DataError(
                "input: this model reads a prompt and a response as texts: send messages, or a query and documents"
            )
        if self.waiting + len(items) > self._most:
            raise BusyError(self.waiting, self._most)
        self.waiting += len(items)
        scores: dict[int, Score] = {}
        try:
            for piece in pieces(items, most=len(items), characters=self._piece):
                asked = [chats[place] for place in piece.places]
                found = await asyncio.get_running_loop().run_in_executor(self._threads, self._score, asked)
                for place, score in zip(piece.places, found, strict=True):
                    if isinstance(score, PrbError):
                        raise numbered(score, place, len(items))
                    scores[place] = score
            return [scores[place] for place in range(len(items))]
        finally:
            self.waiting -= len(items)

    def _score(self, chats: Sequence[ChatItem]) -> Scores:
        try:
            return list(self._scorer(chats))
        except RunError as error:  # a client cannot correct this error
            raise RuntimeError("the scorer failed") from error

    def close(self, seconds: float | None = None) -> bool:
        """Score all waiting items and end the threads; return whether they ended within this time."""
        if seconds is None:
            self._threads.shutdown()
            return True
        ending = threading.Thread(target=self._threads.shutdown, daemon=True)
        ending.start()
        ending.join(seconds)
        return not ending.is_alive()
