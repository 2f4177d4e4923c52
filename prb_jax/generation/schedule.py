"""Samples of many prompts through a fixed number of rows: whoever is done makes room for the next one.

The prompts are taken in *units*, parts of the input that depend on the input and the number of rows alone. Rows are
filled again within a unit, never across two: a unit that is repeated after an interruption meets the same neighbours
in the same rows, so it gives the same bytes.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass, field

import jax.numpy as jnp
import numpy as np

from prb_jax.errors import short_repr
from prb_jax.generation.programs import Programs
from prb_jax.generation.rules import Rules
from prb_jax.generation.steps import Prompts, Rows, Stops
from prb_jax.models.decoder import Params
from prb_jax.processes.sharing import fetch

STEPS = 32
"""Tokens that are drawn before the host looks at the rows, at most."""

STEPS_WITH_TEXTS = 8
"""The same where texts end a sample, which only the host can see."""

TREES_OF_A_UNIT = 8
"""How often the trees of a batch change in a unit: many, so that few rows wait at its end."""

Cut = Callable[[np.ndarray], int | None]
"""Takes the tokens of a sample so far; says how many of them are kept where a text in them ends it, else None."""


@dataclass(frozen=True, eq=False)
class Drawn:
    """One sample.

    Attributes:
      prompt: its position among the prompts.
      sample: its number among the samples of the prompt.
      tokens: int32 [T], with the token that ended it.
      logprobs, sampled_logprobs: float32 [T], of each token: under the model, and under the distribution that it
        was drawn from.
      finish: "stop" (a stop id), "text" (a stop text) or "length".
    """

    prompt: int
    sample: int
    tokens: np.ndarray
    logprobs: np.ndarray
    sampled_logprobs: np.ndarray
    finish: str

    __repr__ = short_repr


@dataclass(frozen=True, kw_only=True)
class Task:
    """All that decides the samples of some prompts.

    Attributes:
      prompts: token ids of each prompt, at least one.
      samples: of each prompt.
      rules: how tokens are drawn.
      stop_ids: tokens after which a sample ends.
      tokens: most tokens of a sample.
      seed: of the random keys.
      cut: ends samples by their text; None where no text does.
      numbers: of the prompts, for the random keys; their positions if not given.
    """

    prompts: Sequence[np.ndarray] = field(repr=False)
    samples: int
    rules: Rules
    stop_ids: tuple[int, ...]
    tokens: int
    seed: int
    cut: Cut | None = None
    numbers: Sequence[int] | None = None


def units(count: int, trees: int) -> list[range]:
    """The prompts in consecutive parts that are drawn one after another."""
    size = trees * TREES_OF_A_UNIT
    return [range(start, min(start + size, count)) for start in range(0, count, size)]


def draw(
    programs: Programs, params: Params, task: Task, *, skip: Callable[[range], bool] = lambda unit: False
) -> Iterator[list[Drawn]]:
    """Draw all samples, some at a time, as they are done.

    Args:
      programs: made for the task.
      params: of the policy.
      task: its prompts and rules.
      skip: tells of a unit that it is not wanted. The other units stay as they are.
    """
    for unit in units(len(task.prompts), programs.shape.trees):
        if not skip(unit):
            yield from _Unit(programs, params, task, unit).run()


class _Unit:
    """The rows of one unit, and what each of them is drawing."""

    def __init__(self, programs: Programs, params: Params, task: Task, unit: range) -> None:
        self.programs, self.params, self.task = programs, params, task
        shape = programs.shape
        self.waiting = list(unit)[::-1]
        self.tree = np.full(shape.trees, -1)  # the prompt of each tree; -1 for none
        self.begun = np.zeros(shape.trees, int)  # samples of it that were begun
        self.row = np.full((shape.trees, shape.samples), -1)  # the sample of each row; -1 for none

    def run(self) -> Iterator[list[Drawn]]:
        """Draw all samples of the unit."""
        task = self.task
        prompts, rows = self.programs.empty()
        stops = Stops(
            ids=np.asarray(task.stop_ids or (-1,), np.int32),  # pyright: ignore[reportArgumentType]
            tokens=np.int32(task.tokens),  # pyright: ignore[reportArgumentType]
        )
        most = np.int32(STEPS if task.cut is None else STEPS_WITH_TEXTS)
        while True:
            prompts = self._fill_trees(prompts)
            rows = self._fill_rows(prompts, rows)
            if (self.row < 0).all():
                return
            # A row that is done matters where another sample can take it: its tree's next one, or, if it is the last
            # row of its tree, the first one of a waiting prompt. Other rows are waited for.
            more = (self.begun < task.samples) & (self.tree >= 0)
            last = bool(self.waiting) & ((self.row >= 0).sum(axis=1) == 1)
            watched = np.broadcast_to((more | last)[:, None], self.row.shape) & (self.row >= 0)
            rows = self.programs.run(
                self.params,
                prompts,
                rows,
                rules=task.rules,
                stops=stops,
                seed=np.int32(task.seed),
                most=most,
                watched=np.ascontiguousarray(watched),
            )
            drawn, ended = self._finished(self.programs.of_policy(rows))
            if drawn:
                yield drawn
            if ended is not None:
                rows = self.programs.end(rows, ended)

    def _fill_trees(self, prompts: Prompts) -> Prompts:
        """Put waiting prompts where no row is busy."""
        shape = self.programs.shape
        while self.waiting and (free := np.flatnonzero((self.row < 0).all(axis=1) & self._spent())).size:
            first = self.task.prompts[self.waiting[-1]]
            columns, together = shape.reading(len(first))
            chosen: list[int] = []
            while self.waiting and len(chosen) < min(together, len(free)):
                if shape.reading(len(self.task.prompts[self.waiting[-1]]))[0] != columns:
                    break
                chosen.append(self.waiting.pop())
            tokens = np.zeros((together, columns + 1), np.int32)
            lengths = np.ones(together, np.int32)
            trees = np.full(together, shape.trees, np.int32)
            for place, number in enumerate(chosen):
                ids = self.task.prompts[number]
                tokens[place, columns + 1 - len(ids) :] = ids
                lengths[place], trees[place] = len(ids), free[place]
                self.tree[free[place]], self.begun[free[place]] = number, 0
            keyed = chosen if self.task.numbers is None else [self.task.numbers[number] for number in chosen]
            numbers = np.asarray(keyed + [0] * (together - len(chosen)), np.int32)
            prompts = self.programs.read(self.params, prompts, tokens, lengths, numbers, trees)
        return prompts

    def _spent(self) -> np.ndarray:
        """Which trees have no sample left to begin."""
        return (self.tree < 0) | (self.begun >= self.task.samples)

    def _fill_rows(self, prompts: Prompts, rows: Rows) -> Rows:
        """Begin samples in free rows of trees that have some left."""
        which = np.zeros(self.row.shape, bool)
        for tree, place in np.argwhere(self.row < 0):
            if self.tree[tree] >= 0 and self.begun[tree] < self.task.samples:
                self.row[tree, place] = self.begun[tree]
                self.begun[tree] += 1
                which[tree, place] = True
        if not which.any():
            return rows
        return self.programs.restart(rows, prompts, which, np.maximum(self.row, 0).astype(np.int32))

    def _finished(self, rows: Rows) -> tuple[list[Drawn], np.ndarray | None]:
        """Samples that are done, and the rows that only their text ended."""
        busy = self.row >= 0
        done = fetch(rows.done) & busy
        if self.task.cut is None and not done.any():
            return [], None
        lengths, tokens = fetch(rows.cache.lengths), fetch(rows.tokens)
        drawn, ended = [], np.zeros(self.row.shape, bool)
        logprobs = sampled = None
        for tree, place in np.argwhere(busy if self.task.cut else done):
            ids = tokens[tree, place, : lengths[tree, place]]
            cut = None if self.task.cut is None else self.task.cut(ids)
            if cut is None and not done[tree, place]:
                continue
            if logprobs is None or sampled is None:
                logprobs, sampled = fetch(rows.logprobs), fetch(rows.sampled_logprobs)
            if cut is not None:
                finish, ended[tree, place] = "text", not done[tree, place]
            else:
                finish = "stop" if ids[-1] in self.task.stop_ids else "length"
            size = len(ids) if cut is None else cut
            drawn.append(
                Drawn(
                    prompt=int(self.tree[tree]),
                    sample=int(self.row[tree, place]),
                    tokens=ids[:size].copy(),
                    logprobs=logprobs[tree, place, :size].copy(),
                    sampled_logprobs=sampled[tree, place, :size].copy(),
                    finish=finish,
                )
            )
            self.row[tree, place] = -1
        return drawn, ended if ended.any() else None


def as_rules(rules: Rules) -> Rules:
    """The rules as they go to the device, checked."""
    checked = rules.checked()
    return Rules(**{name: jnp.asarray(value) for name, value in vars(checked).items()})
