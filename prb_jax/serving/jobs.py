"""Requests that wait for their scores: as items that are to be read, and as trees that are to be computed."""

from __future__ import annotations

import contextlib
from collections import deque
from collections.abc import Sequence
from concurrent.futures import Future, InvalidStateError
from dataclasses import dataclass, field

from prb_jax.errors import PrbError
from prb_jax.serving.items import Item, ItemTree, Piece, Score, numbered

PIECE = 20_000  # characters of a request, about, that are read at a time: some 10 ms; one with more is large


class BusyError(PrbError):
    """More waits than may wait, or the server is ending: the client may try again later."""

    def __init__(self, waiting: int, most: int) -> None:
        super().__init__(f"{waiting} responses wait, and at most {most} may: try again later")


@dataclass(eq=False)
class Job:
    """The items of one request; `done` is cancelled when the client no longer waits.

    ``pieces`` are the pieces still without trees.
    """

    items: Sequence[Item]
    pieces: deque[Piece]
    done: Future[list[Score]] = field(default_factory=Future)
    scores: dict[int, Score] = field(default_factory=dict)

    def add(self, place: int, score: Score | PrbError) -> None:
        """Record the score of an item. An error instead of a score fails the request and skips its remaining work."""
        if isinstance(score, PrbError):
            self.fail(numbered(score, place, len(self.items)))
            return
        self.scores[place] = score
        if len(self.scores) == len(self.items):
            with contextlib.suppress(InvalidStateError):
                self.done.set_result([self.scores[place] for place in range(len(self.items))])

    def fail(self, error: BaseException) -> None:
        """Refuse the request."""
        with contextlib.suppress(InvalidStateError):
            self.done.set_exception(error)


Taken = list[tuple[Job, Piece]]
"""Pieces of several requests, to become trees."""


@dataclass(eq=False)
class WaitingTree:
    """A tree that waits for the device, with the owners of its responses.

    ``fresh`` counts its tokens beyond the prefix that it shares with the tree before it. ``large`` is True for a tree
    of a large request.
    """

    made: ItemTree
    owners: list[tuple[Job, int]]
    fresh: int
    large: bool

    @property
    def leans(self) -> bool:
        """Whether the tree before it computes more than half of this tree; both then belong in one batch."""
        return 2 * self.fresh < self.made.tree.tokens

    @property
    def wanted(self) -> bool:
        return not all(job.done.done() for job, _ in self.owners)


def take(jobs: deque[Job], most: int) -> Taken:
    """Take a piece of each job in turn, until the pieces have `most` characters; drop finished or cancelled jobs."""
    taken: Taken = []
    size = 0
    while jobs and size < most:
        job = jobs.popleft()
        if not job.done.done():
            taken.append((job, piece := job.pieces.popleft()))
            size += piece.characters
            if job.pieces:
                jobs.append(job)
    return taken


def fail_all(trees: Sequence[WaitingTree], error: BaseException) -> None:
    for job in {job for ready in trees for job, _ in ready.owners}:
        job.fail(error)
