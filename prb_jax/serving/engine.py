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
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass, field
from queue import SimpleQueue

import jax
import numpy as np

from prb_jax.errors import DataError, PrbError, RunError
from prb_jax.scoring.batching import Batch, Batcher, PlannedBatch
from prb_jax.serving.item_scorer import ItemScorer, Scores
from prb_jax.serving.items import ChatItem, Item, ItemTree, Score, TreeMaker
from prb_jax.trees.tree import common_run

AT_ONCE = 256
"""Responses that become trees at a time, about."""

AHEAD = 4
"""So many batches' worth of trees are looked at for what goes well together."""

WAITING = 1
"""Batches given to the device that wait, besides those that run."""


class BusyError(PrbError):
    """More waits than may wait, or the server is ending: the client may come again later."""


@dataclass(eq=False)
class _Job:
    """The items of one request."""

    items: Sequence[Item]
    settle: Callable[[Scores | BaseException], None]
    scores: dict[int, Score | PrbError] = field(default_factory=dict)
    left: bool = False  # nobody waits for it any more

    def add(self, place: int, score: Score | PrbError) -> None:
        self.scores[place] = score
        if len(self.scores) == len(self.items):
            self.settle([self.scores[place] for place in range(len(self.items))])


@dataclass(eq=False)
class _WaitingTree:
    """A tree that waits for the device.

    Attributes:
      made: the tree.
      owners: whose items its responses are.
      fresh: its tokens beyond those that the tree before it begins with too.
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
        return not all(job.left for job, _ in self.owners)


class Engine:
    """Scores items in the background.

    Attributes:
      tokens: of a full batch.
      most: items that may wait for their scores.
      lanes: batches computed side by side; see :func:`prb_jax.scoring.batching.lanes`.
      waiting: items that do.
      failure: what ended the work, if anything did.
    """

    def __init__(
        self,
        tree_maker: TreeMaker,
        batcher: Batcher,
        dispatch: Callable[[Batch], jax.Array],
        *,
        tokens: int,
        most: int,
        count: Callable[[int], None],
        lanes: int = 1,
    ) -> None:
        """Start the threads.

        Args:
          tree_maker: makes trees of items.
          batcher: makes batches of trees.
          dispatch: gives a batch to the device.
          tokens: of a full batch.
          most: items that may wait for their scores.
          count: is told the tokens of each batch.
          lanes: batches computed side by side.
        """
        self.tokens, self.most, self.lanes, self.waiting = tokens, most, lanes, 0
        self.failure: BaseException | None = None
        self._tree_maker, self._batcher, self._dispatch, self._count = tree_maker, batcher, dispatch, count
        self._jobs: deque[_Job] = deque()
        self._running: SimpleQueue[
            tuple[PlannedBatch, list[_WaitingTree], Callable[[], jax.Array]] | None
        ] = SimpleQueue()
        self._in_flight, self._wake_below, self._ends = 0, lanes, False
        self._passed = 0  # batches since one held the oldest tree
        self._news = threading.Condition()
        self._threads = [
            threading.Thread(target=work, name=work.__name__, daemon=True)
            for work in (self._give, *[self._take_back] * lanes)
        ]
        for thread in self._threads:
            thread.start()

    async def score(self, items: Sequence[Item]) -> Scores:
        """Wait for the score of each item, or why it has none. Cancelled, it leaves no work behind.

        Raises:
          TooManyCharactersError: a text that is too long to be tokenised.
          BusyError: too many wait.
        """
        self._tree_maker.check_sizes(items)
        loop = asyncio.get_running_loop()
        done: asyncio.Future[Scores] = loop.create_future()

        def finish(result: Scores | BaseException) -> None:
            if done.done():
                return
            if isinstance(result, BaseException):
                done.set_exception(result)
            else:
                done.set_result(result)

        def settle(result: Scores | BaseException) -> None:
            with contextlib.suppress(RuntimeError):  # the loop has ended, and with it who waited
                loop.call_soon_threadsafe(finish, result)

        job = _Job(items, settle)
        with self._news:
            if self.failure is not None:
                raise RuntimeError("the scorer has ended") from self.failure
            if self._ends or self.waiting + len(items) > self.most:
                raise BusyError(
                    f"{self.waiting} responses wait, and at most {self.most} may: come again later"
                )
            self._jobs.append(job)
            self.waiting += len(items)
            self._news.notify_all()
        try:
            return await done
        finally:
            with self._news:
                job.left = True
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
                while pool and (dealt := self._choose(pool)):
                    members = set(dealt.members)
                    self._start(dealt, [pool[place] for place in dealt.members])
                    pool = [ready for place, ready in enumerate(pool) if place not in members]
        except BaseException as error:
            self._fail(error, pool)
        finally:
            for _ in range(self.lanes):
                self._running.put(None)

    def _next_jobs(self, pool: Sequence[_WaitingTree]) -> list[_Job] | None:
        """Wait for news, and return the requests to be read; None at the end."""
        full = sum(ready.fresh for ready in pool) > AHEAD * self.tokens

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
                if not job.left:
                    jobs.append(job)
                    size += len(job.items)
            return None if self._ends and not (jobs or pool or self._jobs) else jobs

    def _trees_of(self, jobs: Sequence[_Job]) -> list[_WaitingTree]:
        """The trees of requests."""
        owners = [(job, place) for job in jobs for place in range(len(job.items))]
        try:
            trees, errors = self._tree_maker.make_trees([job.items[place] for job, place in owners])
        except Exception as error:
            if len(jobs) > 1:  # one of them must not spoil the others
                return [ready for job in jobs for ready in self._trees_of([job])]
            jobs[0].settle(error)
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
            if size > AHEAD * self.tokens and not ready.leans:
                break
            trees.append(ready.made.tree)
            size += ready.fresh
        dealt = list(self._batcher(trees, range(len(trees))))
        if in_flight >= self.lanes and len(dealt) == 1:  # more may come while the device is busy
            self._wake_below = self.lanes
            return None
        chosen = max(dealt, key=lambda batch: batch.computed)
        if self._passed >= AHEAD:
            chosen = next(batch for batch in dealt if 0 in batch.members)
        self._passed = 0 if 0 in chosen.members else self._passed + 1
        return chosen

    def _start(self, dealt: PlannedBatch, batch: list[_WaitingTree]) -> None:
        """Give a batch to the device."""
        self._count(dealt.computed)
        try:
            scores = self._scores(dealt.make())
        except Exception as error:
            _settle_all(batch, error)
            return
        with self._news:
            self._in_flight += 1
        self._running.put((dealt, batch, scores))

    def _scores(self, batch: Batch) -> Callable[[], jax.Array]:
        """Return what waits for the scores of a batch: started here, or side by side by the threads that wait."""
        if self.lanes > 1:
            return lambda: self._dispatch(batch)
        scores = self._dispatch(batch)
        return lambda: scores

    def _take_back(self) -> None:
        """The work of the other threads: scores from the device to the requests."""
        while (running := self._running.get()) is not None:
            dealt, batch, scores = running
            try:
                rows = dealt.take(np.asarray(scores(), np.float32))
                for ready, row in zip(batch, rows, strict=True):
                    for (job, place), score in zip(ready.owners, ready.made.scores(row), strict=True):
                        job.add(place, score)
            except Exception as error:  # of the device: other batches may go well
                _settle_all(batch, error)
            with self._news:
                self._in_flight -= 1
                self._news.notify_all()

    def _fail(self, error: BaseException, pool: Sequence[_WaitingTree]) -> None:
        """Nothing can be scored any more: everybody who waits is told."""
        with self._news:
            self.failure = error
            waiting = list(self._jobs)
            self._jobs.clear()
        _settle_all(pool, error)
        for job in waiting:
            job.settle(error)


def _settle_all(batch: Sequence[_WaitingTree], error: BaseException) -> None:
    for job in {id(job): job for ready in batch for job, _ in ready.owners}.values():
        job.settle(error)


class ScorerEngine:
    """Scores the items of one request after another, or of some at a time, in the background: by no reward model.

    Attributes:
      waiting: items that wait for their scores.
      failure: None; an error fails its own request alone.
    """

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
            raise BusyError(f"{self.waiting} responses wait, and at most {self._most} may: come again later")
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
