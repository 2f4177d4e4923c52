"""Draw samples of many prompts with a fixed number of rows: a finished sample makes room for the next one.

The prompts are processed in *units*: parts of the input that depend only on the input and the number of rows. Rows are
refilled within a unit, never across two. A unit that is repeated after an interruption has the same neighbours in the
same rows, so it gives the same bytes.
"""

from __future__ import annotations

from collections import deque
from collections.abc import Callable, Iterable, Iterator, Sequence
from dataclasses import dataclass, replace
from functools import cached_property
from itertools import chain, groupby, pairwise

import numpy as np

from prb_jax.behaviour.generation.programs import Programs, Task
from prb_jax.behaviour.generation.steps import Prompts, Rows
from prb_jax.errors import short_repr
from prb_jax.models.decoder import Params
from prb_jax.platform.processes.sharing import fetch

STEPS = 32
"""Maximum tokens to draw before the host checks the rows."""

STEPS_WITH_TEXTS = 8
"""The same limit if texts end a sample, because only the host can detect texts."""

_ARRAYS = ("tokens", "logprobs", "sampled_logprobs")


@dataclass(frozen=True, eq=False)
class Drawn:
    """One sample."""

    prompt: int  # position among the prompts
    sample: int  # number among the samples of the prompt
    tokens: np.ndarray  # int32 [T], including the token that ended the sample
    # logprobs, sampled_logprobs: float32 [T], of each token: under the model, and under the distribution that
    # the token was drawn from
    logprobs: np.ndarray
    sampled_logprobs: np.ndarray
    finish: str  # "stop" (a stop id), "text" (a stop text) or "length"

    __repr__ = short_repr

    def cut(self, size: int, *, finish: str) -> Drawn:
        """Return only the first ``size`` tokens of the sample."""
        arrays = {name: getattr(self, name)[:size].copy() for name in _ARRAYS}
        return replace(self, **arrays, finish=finish)

    def followed_by(self, more: Drawn) -> Drawn:
        """Return the sample extended by the tokens and the finish of another one."""
        joined = {name: np.concatenate([getattr(self, name), getattr(more, name)]) for name in _ARRAYS}
        return replace(self, **joined, finish=more.finish)


class DrawnRows:
    """Rows as the host reads them; each array is fetched on first use."""

    def __init__(self, rows: Rows, task: Task) -> None:
        self._rows, self._stop_ids = rows, task.stop_ids

    @cached_property
    def done(self) -> np.ndarray:
        """Bool [B, S]."""
        return fetch(self._rows.done)

    @cached_property
    def _lengths_and_tokens(self) -> tuple[np.ndarray, np.ndarray]:
        return fetch(self._rows.cache.lengths), fetch(self._rows.tokens)

    @cached_property
    def _logprobs(self) -> tuple[np.ndarray, np.ndarray]:
        return fetch(self._rows.logprobs), fetch(self._rows.sampled_logprobs)

    def ids(self, tree: int, place: int) -> np.ndarray:
        """The tokens of a row so far."""
        lengths, tokens = self._lengths_and_tokens
        return tokens[tree, place, : lengths[tree, place]]

    def drawn(self, tree: int, place: int, *, prompt: int, sample: int, cut: int | None = None) -> Drawn:
        """Return the sample of a row; if a stop text ended it, ``cut`` is the number of tokens to keep."""
        ids = self.ids(tree, place)
        finish = "text" if cut is not None else "stop" if ids[-1] in self._stop_ids else "length"
        logprobs, sampled = (array[tree, place, : len(ids)] for array in self._logprobs)
        whole = Drawn(prompt, sample, ids, logprobs, sampled, finish)
        return whole.cut(len(ids) if cut is None else cut, finish=finish)


def draw(
    programs: Programs, params: Params, task: Task, *, skip: Callable[[range], bool] = lambda unit: False
) -> Iterator[list[Drawn]]:
    """Draw all samples of a task; yield them in batches as they finish.

    Units for which ``skip`` returns True are left out, which does not change the other units.
    """
    count, size, task = len(task.prompts), programs.shape.unit, programs.planned(task)
    for start in range(0, count, size):
        unit = range(start, min(start + size, count))
        if not skip(unit):
            yield from _Unit(programs, params, task, unit).run()


def collect(batches: Iterable[list[Drawn]]) -> list[list[Drawn]]:
    """Return all samples of each prompt, in order."""
    every = sorted((one for batch in batches for one in batch), key=lambda one: (one.prompt, one.sample))
    return [list(samples) for _, samples in groupby(every, key=lambda one: one.prompt)]


def deal(order: Sequence[int], free: Sequence[int]) -> list[deque[int]]:
    """Deal prompts to the parts of a mesh in order: each part gets a run of neighbours.

    Args:
      order: The prompts.
      free: Number of free trees in each part: these are filled first, and the rest is dealt in equal shares.
    """
    turns = sorted((turn, part) for part, count in enumerate(free) for turn in range(count))[: len(order)]
    counts = (
        np.bincount([part for _, part in turns], minlength=len(free)) if turns else np.zeros(len(free), int)
    )
    rest = len(order) - len(turns)
    counts = counts + rest // len(free) + (np.arange(len(free)) < rest % len(free))
    starts = [0, *np.cumsum(counts).tolist()]
    return [deque(order[start:stop]) for start, stop in pairwise(starts)]


class _Unit:
    """The rows of one unit, and the sample that each row is drawing."""

    def __init__(self, programs: Programs, params: Params, task: Task, unit: range) -> None:
        self.programs, self.params, self.task = programs, params, task
        shape = programs.shape
        self.reader = programs.reader(params, task, unit)
        self.waiting = deal(self.reader.policy.packer.order, [0] * shape.parts)
        self.tree = np.full(shape.trees, -1)  # prompt of each tree; -1 for none
        self.begun = np.zeros(shape.trees, int)  # number of started samples of this prompt
        self.row = np.full((shape.trees, shape.samples), -1)  # sample of each row; -1 for none

    @property
    def _more(self) -> np.ndarray:
        """Mask of trees with samples left to start."""
        return (self.tree >= 0) & (self.begun < self.task.options.n)

    def run(self) -> Iterator[list[Drawn]]:
        """Draw all samples of the unit."""
        task = self.task
        prompts, rows = self.programs.empty(task)
        most = STEPS if task.cut is None else STEPS_WITH_TEXTS
        while True:
            prompts = self._fill_trees(prompts)
            rows = self._fill_rows(prompts, rows)
            if (self.row < 0).all():
                return
            # Stop for a finished row only if another sample can use it: the tree's next one, or, for the last busy row
            # of its tree, the first one of a waiting prompt. Other finished rows wait.
            last = any(self.waiting) & ((self.row >= 0).sum(axis=1) == 1)
            watched = (self._more | last)[:, None] & (self.row >= 0)
            rows = self.programs.run(self.params, prompts, rows, task, most=most, watched=watched)
            drawn, ended = self._finished(DrawnRows(rows, task))
            if drawn:
                yield drawn
            if ended.any():
                rows = self.programs.end(rows, ended)

    def _fill_trees(self, prompts: Prompts) -> Prompts:
        """Assign waiting prompts to trees without a busy row."""
        free = np.flatnonzero((self.row < 0).all(axis=1) & ~self._more)
        of_part = free // (self.programs.shape.trees // self.programs.shape.parts)
        trees = [free[of_part == part].tolist() for part in range(len(self.waiting))]
        if any(len(places) > len(queue) for places, queue in zip(trees, self.waiting, strict=True)):
            left = set(chain.from_iterable(self.waiting))
            order = [prompt for prompt in self.reader.policy.packer.order if prompt in left]
            self.waiting = deal(order, list(map(len, trees)))
        places = {
            tree: queue.popleft()
            for queue, of_queue in zip(self.waiting, trees, strict=True)
            for tree in of_queue[: len(queue)]
        }
        for tree, prompt in places.items():
            self.tree[tree], self.begun[tree] = prompt, 0
        return self.reader.fill(prompts, places, [list(queue) for queue in self.waiting])

    def _fill_rows(self, prompts: Prompts, rows: Rows) -> Rows:
        """Start samples in free rows of trees that have samples left."""
        which = np.zeros(self.row.shape, bool)
        for tree, place in np.argwhere(self.row < 0):
            if self._more[tree]:
                self.row[tree, place] = self.begun[tree]
                self.begun[tree] += 1
                which[tree, place] = True
        if not which.any():
            return rows
        return self.programs.restart(rows, prompts, which, np.maximum(self.row, 0).astype(np.int32))

    def _finished(self, rows: DrawnRows) -> tuple[list[Drawn], np.ndarray]:
        """Return the finished samples, and the mask of rows that only a stop text ended."""
        drawn, ended = [], np.zeros(self.row.shape, bool)
        busy, cut_at = self.row >= 0, self.task.cut
        for tree, place in np.argwhere(busy if cut_at is not None else busy & rows.done):
            cut = None if cut_at is None else cut_at(rows.ids(tree, place))
            if cut is None and not rows.done[tree, place]:
                continue
            prompt, sample = int(self.tree[tree]), int(self.row[tree, place])
            drawn.append(rows.drawn(tree, place, prompt=prompt, sample=sample, cut=cut))
            ended[tree, place] = not rows.done[tree, place]
            self.row[tree, place] = -1
        return drawn, ended
