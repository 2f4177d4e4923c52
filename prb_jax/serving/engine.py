"""Scores requests of many clients together: all items that wait when the device is free go into the next batch.

One thread makes trees of small requests and starts batches on the device. Full batches go first, but only a few of
them may pass over the oldest request. A second thread makes trees of large requests, taking a piece of each in turn:
small requests never wait for the texts of large ones. Another thread waits for the scores; a CPU that computes several
batches concurrently has one such thread per batch. A partly filled batch runs only when the device is idle; otherwise
later requests fill it. With a prefix cache, a tree waits for the batch that computes its prefix.
"""

from __future__ import annotations

import asyncio
import itertools
import threading
import time
from collections import deque
from collections.abc import Callable, Sequence
from queue import SimpleQueue

import numpy as np

from prb_jax.scoring.batching import lanes
from prb_jax.serving.items import Item, Score, pieces
from prb_jax.serving.jobs import PIECE, BusyError, Job, Taken, WaitingTree, fail_all, take
from prb_jax.serving.shares import take_share
from prb_jax.serving.tree_scorer import TreeScorer
from prb_jax.trees.continued import PAGE
from prb_jax.trees.tree import PlannedBatch, Tree, common_run

SMALL_AT_ONCE = 50_000  # characters of small requests that become trees at once
LARGE_AT_ONCE = 200_000  # and of large requests
AHEAD = 4  # the planner looks for trees that fit together among this many batches' worth of trees
MOST_TREES = (
    256  # limit on those trees, for small and for large requests each: planning this many takes about 20 ms
)
PATIENCE = {
    False: 1,
    True: 4,
}  # most batches that may pass over the oldest tree of a small and of a large request
WAITING = 1  # batches queued on the device beyond the running ones

HOLD, LONGEST_HOLD, HOLD_SHARE = 0.005, 0.05, 0.03
"""Seconds that a batch that is not full waits after others were answered: clients that were answered ask again, and
their requests go along. It waits while the device still has work, or if fewer wait than were answered; for this share
of the time of the answered batch, at least HOLD and at most LONGEST_HOLD."""

_Running = tuple[PlannedBatch, list[WaitingTree], list[Callable[[], np.ndarray]]]


class Engine:
    """Scores items in the background.

    Attributes:
      lanes: Number of batches computed concurrently; see :func:`prb_jax.scoring.batching.lanes`.
      waiting: Number of items that wait for their scores.
      failure: Error that ended the engine; None while the engine works.
    """

    def __init__(self, scorer: TreeScorer, *, most: int, count: Callable[[int], None]) -> None:
        """Start the threads. At most `most` items may wait; `count` is called with the tokens of each batch."""
        self.lanes, self.waiting, self.failure = lanes(scorer.model.mesh), 0, None
        self._scorer, self._batcher, self._most, self._count = scorer, scorer.batcher, most, count
        self._small, self._large = deque[Job](), deque[Job]()
        self._made: list[WaitingTree] = []  # trees of large requests, for the first thread
        self._reads_large = False  # True while the second thread makes trees
        self._running: SimpleQueue[_Running | None] = SimpleQueue()
        self._in_flight, self._wake_below, self._ends = 0, self.lanes, False
        # time until which the clients of the last answered batch may ask again, and the number of its trees
        self._asked_by, self._answered = 0.0, 0
        self._held_until = 0.0  # time from which a partly filled batch may start
        self._tokens_in_flight = 0
        self._computing: list[
            Tree
        ] = []  # trees of the batches in flight, if the cache will keep their prefixes
        # batches since one contained the oldest tree, for small and for large requests
        self._passed = dict.fromkeys(PATIENCE, 0)
        self._news = threading.Condition()
        self._threads = [
            threading.Thread(target=work, name=work.__name__, daemon=True)
            for work in (self._give, self._read_large, *[self._take_back] * self.lanes)
        ]
        for thread in self._threads:
            thread.start()

    async def score(self, items: Sequence[Item]) -> list[Score]:
        """Wait for the score of each item. If cancelled, no work is left behind.

        Raises:
          PrbError: If an item has no score; the message contains the number of the item.
          BusyError: If too many items wait.
        """
        divided = pieces(items, most=self._scorer.maker.most, characters=PIECE)
        job, large = Job(items, deque(divided)), len(divided) > 1 or divided[0].characters > PIECE
        with self._news:
            if self.failure is not None:
                raise RuntimeError("the scorer has ended") from self.failure
            if self._ends or self.waiting + len(items) > self._most:
                raise BusyError(self.waiting, self._most)
            (self._large if large else self._small).append(job)
            self.waiting += len(items)
            self._news.notify_all()
        try:
            return await asyncio.wrap_future(job.done)
        finally:
            with self._news:
                self.waiting -= len(items)

    def close(self, seconds: float | None = None) -> bool:
        """Score all waiting items and end the threads; return whether they ended within this time."""
        with self._news:
            self._ends = True
            self._news.notify_all()
        last = None if seconds is None else time.monotonic() + seconds
        for thread in self._threads:
            thread.join(None if last is None else max(last - time.monotonic(), 0))
        return not any(thread.is_alive() for thread in self._threads)

    def _give(self) -> None:
        """Run the first thread: make trees of small requests, and start batches of trees on the device."""
        pool: list[WaitingTree] = []
        try:
            while (news := self._next(pool)) is not None:
                taken, made = news
                pool += [*self._trees_of(taken, large=False), *made]
                pool = sorted((ready for ready in pool if ready.wanted), key=lambda ready: ready.large)
                while pool and (planned := self._choose(pool)):
                    members = set(planned.members)
                    self._start(planned, [pool[place] for place in planned.members])
                    pool = [ready for place, ready in enumerate(pool) if place not in members]
        except BaseException as error:  # no further scores are possible: every waiting request fails
            fail_all(pool, error)
            self._fail(error)
        finally:
            for _ in range(self.lanes):
                self._running.put(None)

    def _next(self, pool: Sequence[WaitingTree]) -> tuple[Taken, list[WaitingTree]] | None:
        """Wait for work; return pieces that need trees, and finished trees of large requests. None at the end."""
        small, large = (
            sum(ready.fresh for ready in pool if ready.large is kind) <= AHEAD * self._scorer.tokens
            for kind in PATIENCE
        )

        def news() -> bool:
            fresh = bool((small and self._small) or (large and self._made))
            if pool:
                held = time.monotonic() < self._held_until
                return fresh or (self._in_flight < self._wake_below and not held)
            return fresh or (self._ends and not (self._large or self._reads_large))

        with self._news:
            while not news():
                held = self._held_until - time.monotonic()
                self._news.wait(held if pool and held > 0 else None)
            taken, made = take(self._small, SMALL_AT_ONCE) if small else [], self._made if large else []
            if made:
                self._made = []
                self._news.notify_all()
            at_end = self._ends and not (self._small or self._made or self._large or self._reads_large)
            return None if at_end and not (taken or made or pool) else (taken, made)

    def _read_large(self) -> None:
        """Run the second thread: make trees of large requests, only as many as the first thread takes."""
        taken: Taken = []
        try:
            while taken := self._next_large():
                made = self._trees_of(taken, large=True)
                with self._news:
                    self._made, self._reads_large = made, False
                    self._news.notify_all()
                if self.failure is not None:  # the first thread failed and does not take these trees
                    raise self.failure
        except BaseException as error:
            for job, _ in taken:
                job.fail(error)
            self._fail(error)

    def _next_large(self) -> Taken:
        """Wait for large requests and return pieces of them; an empty list at the end."""
        while True:
            with self._news:
                self._news.wait_for(
                    lambda: (self._large and not self._made) or (self._ends and not self._large)
                )
                taken = take(self._large, LARGE_AT_ONCE)
                self._reads_large = bool(taken)
                if not taken:
                    self._news.notify_all()
                if taken or (self._ends and not self._large) or self.failure is not None:
                    return taken

    def _fail(self, error: BaseException) -> None:
        """End every waiting request with this error."""
        with self._news:
            self.failure, self._reads_large = error, False
            waiting = [*self._small, *self._large]
            self._small.clear()
            self._large.clear()
            made, self._made = self._made, []
            self._news.notify_all()
        fail_all(made, error)
        for job in waiting:
            job.fail(error)

    def _trees_of(self, taken: Taken, *, large: bool) -> list[WaitingTree]:
        owners = [(job, place) for job, piece in taken for place in piece.places]
        try:
            trees, errors = self._scorer.maker.make_trees(
                [job.items[place] for job, place in owners], [job for job, _ in owners]
            )
        except Exception as error:
            if len(taken) > 1:  # one failing request must not fail the others
                return [ready for one in taken for ready in self._trees_of([one], large=large)]
            for job, _ in taken:
                job.fail(error)
            return []
        for number, error in sorted(errors.items()):
            job, place = owners[number]
            job.add(place, error)
        recalled = [self._scorer.recall(made) for made in trees]
        for number, score in (known for scores, _ in recalled for known in scores.items()):
            job, place = owners[number]
            job.add(place, score)
        trees = [rest for _, rest in recalled if rest is not None]
        firsts = [made.tree.sequence(0) for made in trees]
        shared = [0, *(common_run(pair) for pair in itertools.pairwise(firsts))]
        return [
            WaitingTree(made, [owners[number] for number in made.members], made.tree.tokens - run, large)
            for made, run in zip(trees, shared, strict=False)
        ]

    def _choose(self, pool: Sequence[WaitingTree]) -> PlannedBatch | None:
        """Return the fullest batch, or the one with the oldest tree if that waited long; None if waiting is better."""
        with self._news:
            in_flight, computing = self._in_flight, list(self._computing)
            answered, asked_by, running = self._answered, self._asked_by, self._tokens_in_flight
            if in_flight >= self.lanes + WAITING:
                self._wake_below = self.lanes + WAITING
                return None
        places, oldest = list[int](), dict[bool, int]()
        for kind in PATIENCE:
            of_kind, size = [place for place, ready in enumerate(pool) if ready.large is kind], 0
            of_kind = [place for place in of_kind if not self._is_computed(pool[place].made.tree, computing)]
            for place in of_kind[:MOST_TREES]:
                if size > AHEAD * self._scorer.tokens and not pool[place].leans:
                    break
                oldest.setdefault(kind, place)
                places.append(place)
                size += pool[place].fresh
        if not places:  # all trees wait for prefixes that are being computed
            self._wake_below = in_flight
            return None
        planned = list(self._batcher([pool[place].made.tree for place in places], places))
        if len(planned) == 1 and (in_flight or len(places) < answered):  # more requests may arrive
            self._wake_below = self.lanes
            self._held_until = asked_by
            if in_flight >= self.lanes or time.monotonic() < self._held_until:
                return None
        # Without a cache, small batches are padded to one of a few shapes.
        if len(planned) == 1 and self.lanes > 1 and self._scorer.cache is not None:
            trees = {place: pool[place].made.tree for place in places}
            shared = take_share(
                planned[0].members,
                trees.__getitem__,
                share=(planned[0].computed + running) / self.lanes,
                kept=lambda tree: self._scorer.kept(tree).tokens,
                first=[place for kind, place in oldest.items() if self._passed[kind] >= PATIENCE[kind]],
            )
            if len(shared) < len(places):
                planned = list(self._batcher([trees[place] for place in shared], shared))
        chosen = max(planned, key=lambda batch: batch.computed)
        for kind, place in reversed(oldest.items()):
            if self._passed[kind] >= PATIENCE[kind]:
                chosen = next(batch for batch in planned if place in batch.members)
        for kind in PATIENCE:
            passed = kind in oldest and oldest[kind] not in chosen.members
            self._passed[kind] = self._passed[kind] + 1 if passed else 0
        return chosen

    def _is_computed(self, tree: Tree, computing: Sequence[Tree]) -> bool:
        """Return whether a running batch computes whole pages of this tree's prefix, which the cache will keep."""
        run = max((common_run([tree.prefix, other.prefix]) for other in computing), default=0)
        return run // PAGE * PAGE > self._scorer.kept(tree).tokens

    def _start(self, planned: PlannedBatch, trees: list[WaitingTree]) -> None:
        """Start a batch on the device."""
        self._count(planned.computed)
        try:  # start here, or in the waiting threads if batches run concurrently
            batches = planned.make()
            start = self._scorer.start
            scores = (
                [lambda batch=batch: start(batch)() for batch in batches]
                if self.lanes > 1
                else [start(batch) for batch in batches]
            )
        except Exception as error:
            fail_all(trees, error)
            return
        with self._news:
            self._in_flight += 1
            self._tokens_in_flight += planned.computed
            if self._scorer.cache is not None:
                self._computing += [ready.made.tree for ready in trees]
        self._running.put((planned, trees, scores))

    def _take_back(self) -> None:
        """Run a waiting thread: read scores from the device and hand them to their requests."""
        while (running := self._running.get()) is not None:
            planned, trees, scores = running
            begun = time.monotonic()
            try:
                rows = planned.take([np.asarray(computed(), np.float32) for computed in scores])
                for ready, row in zip(trees, rows, strict=True):
                    if self._scorer.cache is not None:
                        self._scorer.known.put(ready.made.tree, row)
                    for (job, place), score in zip(ready.owners, ready.made.scores(row), strict=True):
                        job.add(place, score)
            except Exception as error:  # of the device: other batches may still succeed
                fail_all(trees, error)
            done = {id(ready.made.tree) for ready in trees}
            with self._news:
                self._in_flight -= 1
                self._tokens_in_flight -= planned.computed
                now = time.monotonic()
                self._asked_by = now + min(max(HOLD_SHARE * (now - begun), HOLD), LONGEST_HOLD)
                self._answered = len(trees)
                self._computing = [tree for tree in self._computing if id(tree) not in done]
                self._news.notify_all()
