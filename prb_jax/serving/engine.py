"""Requests of many clients scored together: whatever waits when the device is free goes into the next batch.

One thread makes trees of the requests and gives batches to the device, full ones first, though the oldest request is
passed over a few times at most; another one waits for the scores, or one for each batch that a CPU computes side by
side. A batch that is not full is computed only where the device has nothing else to do: what comes in meanwhile
fills the next one.
"""

from __future__ import annotations

import asyncio
import contextlib
import itertools
import threading
from collections import deque
from collections.abc import Callable, Sequence
from concurrent.futures import Future, InvalidStateError, ThreadPoolExecutor
from dataclasses import dataclass, field
from queue import SimpleQueue

import jax
import numpy as np

from prb_jax.errors import DataError, PrbError, RunError
from prb_jax.scoring.batching import Batch, PlannedBatch, lanes
from prb_jax.serving.item_scorer import ItemScorer
from prb_jax.serving.items import ChatItem, Item, ItemTree, Score, Scores
from prb_jax.serving.tree_scorer import TreeScorer
from prb_jax.trees.tree import common_run

AT_ONCE = 256  # responses that become trees at a time, about
AHEAD = 4  # so many batches' worth of trees are looked at for what goes well together
WAITING = 1  # batches given to the device that wait, besides those that run


class BusyError(PrbError):
    """More waits than may wait, or the server is ending: the client may come again later."""

    def __init__(self, waiting: int, most: int) -> None:
        super().__init__(f"{waiting} responses wait, and at most {most} may: come again later")


@dataclass(eq=False)
class _Job:
    """The items of one request; `done` is cancelled when nobody waits for them any more."""

    items: Sequence[Item]
    done: Future[Scores] = field(default_factory=Future)
    scores: dict[int, Score | PrbError] = field(default_factory=dict)

    def add(self, place: int, score: Score | PrbError) -> None:
        self.scores[place] = score
        if len(self.scores) == len(self.items):
            with contextlib.suppress(InvalidStateError):
                self.done.set_result([self.scores[place] for place in range(len(self.items))])

    def fail(self, error: BaseException) -> None:
        with contextlib.suppress(InvalidStateError):
            self.done.set_exception(error)


@dataclass(eq=False)
class _WaitingTree:
    """A tree that waits for the device, with the owners of its responses.

    ``fresh`` counts its tokens beyond those that the tree before it begins with too.
    """

    made: ItemTree
    owners: list[tuple[_Job, int]]
    fresh: int

    @property
    def leans(self) -> bool:
        """Whether more than half of it is computed for the tree before it, so that they belong into one batch."""
        return 2 * self.fresh < self.made.tree.tokens

    @property
    def wanted(self) -> bool:
        return not all(job.done.done() for job, _ in self.owners)


class Engine:
    """Scores items in the background.

    Attributes:
      lanes: batches computed side by side; see :func:`prb_jax.scoring.batching.lanes`.
      waiting: items that wait for their scores.
      failure: the error that ended the work; None while it goes on.
    """

    def __init__(self, scorer: TreeScorer, *, most: int, count: Callable[[int], None]) -> None:
        """Start the threads; `most` items may wait for their scores, and `count` is told the tokens of each batch."""
        self.lanes, self.waiting, self.failure = lanes(scorer.model.mesh), 0, None
        self._scorer, self._batcher, self._most, self._count = scorer, scorer.batcher, most, count
        self._jobs: deque[_Job] = deque()
        self._running: SimpleQueue[
            tuple[PlannedBatch, list[_WaitingTree], list[Callable[[], jax.Array]]] | None
        ] = SimpleQueue()
        self._in_flight, self._wake_below, self._ends = 0, self.lanes, False
        self._passed = 0  # batches since one held the oldest tree
        self._news = threading.Condition()
        self._threads = [
            threading.Thread(target=work, name=work.__name__, daemon=True)
            for work in (self._give, *[self._take_back] * self.lanes)
        ]
        for thread in self._threads:
            thread.start()

    async def score(self, items: Sequence[Item]) -> Scores:
        """Wait for the score of each item, or why it has none. Cancelled, it leaves no work behind.

        Raises:
          TooManyCharactersError: a text that is too long to be tokenised.
          BusyError: too many wait.
        """
        self._scorer.maker.check_sizes(items)
        job = _Job(items)
        with self._news:
            if self.failure is not None:
                raise RuntimeError("the scorer has ended") from self.failure
            if self._ends or self.waiting + len(items) > self._most:
                raise BusyError(self.waiting, self._most)
            self._jobs.append(job)
            self.waiting += len(items)
            self._news.notify_all()
        try:
            return await asyncio.wrap_future(job.done)
        finally:
            with self._news:
                self.waiting -= len(items)

    def close(self) -> None:
        """Score what waits, and end the threads."""
        with self._news:
            self._ends = True
            self._news.notify_all()
        for thread in self._threads:
            thread.join()

    def _give(self) -> None:
        """The work of the first thread: requests to trees to batches to the device."""
        pool: list[_WaitingTree] = []
        try:
            while (jobs := self._next_jobs(pool)) is not None:
                pool += self._trees_of(jobs)
                pool = [ready for ready in pool if ready.wanted]
                while pool and (planned := self._choose(pool)):
                    members = set(planned.members)
                    self._start(planned, [pool[place] for place in planned.members])
                    pool = [ready for place, ready in enumerate(pool) if place not in members]
        except BaseException as error:  # nothing can be scored any more: everybody who waits is told
            with self._news:
                self.failure = error
                waiting = list(self._jobs)
                self._jobs.clear()
            _fail_all(pool, error)
            for job in waiting:
                job.fail(error)
        finally:
            for _ in range(self.lanes):
                self._running.put(None)

    def _next_jobs(self, pool: Sequence[_WaitingTree]) -> list[_Job] | None:
        """Wait for news, and return the requests to be read; None at the end."""
        full = sum(ready.fresh for ready in pool) > AHEAD * self._scorer.tokens

        def news() -> bool:
            if pool:
                return self._in_flight < self._wake_below or bool(self._jobs and not full)
            return bool(self._jobs) or self._ends

        with self._news:
            self._news.wait_for(news)
            jobs: list[_Job] = []
            size = 0
            while self._jobs and not full and size < AT_ONCE:
                job = self._jobs.popleft()
                if not job.done.done():
                    jobs.append(job)
                    size += len(job.items)
            return None if self._ends and not (jobs or pool or self._jobs) else jobs

    def _trees_of(self, jobs: Sequence[_Job]) -> list[_WaitingTree]:
        owners = [(job, place) for job in jobs for place in range(len(job.items))]
        try:
            trees, errors = self._scorer.maker.make_trees([job.items[place] for job, place in owners])
        except Exception as error:
            if len(jobs) > 1:  # one of them must not spoil the others
                return [ready for job in jobs for ready in self._trees_of([job])]
            jobs[0].fail(error)
            return []
        for number, error in errors.items():
            job, place = owners[number]
            job.add(place, error)
        firsts = [made.tree.sequence(0) for made in trees]
        shared = [0, *(common_run(pair) for pair in itertools.pairwise(firsts))]
        return [
            _WaitingTree(made, [owners[number] for number in made.members], made.tree.tokens - run)
            for made, run in zip(trees, shared, strict=False)
        ]

    def _choose(self, pool: Sequence[_WaitingTree]) -> PlannedBatch | None:
        """The fullest batch, or after some of these the one with the oldest tree; None while it is better to wait."""
        with self._news:
            in_flight = self._in_flight
            if in_flight >= self.lanes + WAITING:
                self._wake_below = self.lanes + WAITING
                return None
        trees, size = [], 0
        for ready in pool:
            if size > AHEAD * self._scorer.tokens and not ready.leans:
                break
            trees.append(ready.made.tree)
            size += ready.fresh
        planned = list(self._batcher(trees, range(len(trees))))
        if in_flight >= self.lanes and len(planned) == 1:  # more may come while the device is busy
            self._wake_below = self.lanes
            return None
        chosen = max(planned, key=lambda batch: batch.computed)
        if self._passed >= AHEAD:
            chosen = next(batch for batch in planned if 0 in batch.members)
        self._passed = 0 if 0 in chosen.members else self._passed + 1
        return chosen

    def _start(self, planned: PlannedBatch, trees: list[_WaitingTree]) -> None:
        """Give a batch to the device."""
        self._count(planned.computed)
        try:
            scores = [self._scores(batch) for batch in planned.make()]
        except Exception as error:
            _fail_all(trees, error)
            return
        with self._news:
            self._in_flight += 1
        self._running.put((planned, trees, scores))

    def _scores(self, batch: Batch) -> Callable[[], jax.Array]:
        """Return what waits for the scores of a batch: started here, or side by side by the threads that wait."""
        if self.lanes > 1:
            return lambda: self._scorer.model.dispatch(batch)
        scores = self._scorer.model.dispatch(batch)
        return lambda: scores

    def _take_back(self) -> None:
        """The work of the other threads: scores from the device to the requests."""
        while (running := self._running.get()) is not None:
            planned, trees, scores = running
            try:
                rows = planned.take([np.asarray(computed(), np.float32) for computed in scores])
                for ready, row in zip(trees, rows, strict=True):
                    for (job, place), score in zip(ready.owners, ready.made.scores(row), strict=True):
                        job.add(place, score)
            except Exception as error:  # of the device: other batches may go well
                _fail_all(trees, error)
            with self._news:
                self._in_flight -= 1
                self._news.notify_all()


def _fail_all(trees: Sequence[_WaitingTree], error: BaseException) -> None:
    for job in {job for ready in trees for job, _ in ready.owners}:
        job.fail(error)


class ScorerEngine:
    """Scores the items of one request after another, or of some at a time, in the background: by no reward model."""

    failure: BaseException | None = None

    def __init__(self, scorer: ItemScorer, *, most: int, at_once: int = 1) -> None:
        self.waiting, self._most, self._scorer = 0, most, scorer
        self._threads = ThreadPoolExecutor(at_once, "score")

    async def score(self, items: Sequence[Item]) -> Scores:
        """Wait for the score of each item, or why it has none.

        Raises:
          BusyError: too many wait.
          DataError: a conversation that is rendered already.
        """
        if self.waiting + len(items) > self._most:
            raise BusyError(self.waiting, self._most)
        self.waiting += len(items)
        try:
            return await asyncio.get_running_loop().run_in_executor(self._threads, self._score, items)
        finally:
            self.waiting -= len(items)

    def _score(self, items: Sequence[Item]) -> Scores:
        chats = [item for item in items if isinstance(item, ChatItem)]
        if len(chats) < len(items):
            raise DataError(
                "input: this model reads a prompt and a response as texts: send messages, or a query and documents"
            )
        try:
            return list(self._scorer(chats))
        except RunError as error:  # nothing that a client could mend
            raise RuntimeError("the scorer failed") from error

    def close(self) -> None:
        """Score what waits, and end the threads."""
        self._threads.shutdown()
