"""How training goes: one bar on a terminal, one line every few seconds elsewhere."""

from __future__ import annotations

import contextlib
import sys
import time
from collections import deque
from collections.abc import Callable, Iterator, Mapping
from dataclasses import dataclass, field
from typing import TextIO

from prb_jax.runs.progress import duration

SECONDS_BETWEEN_LINES = 10.0
_WINDOW_SECONDS = 30.0
_SMOOTHING = 0.9


@dataclass
class Speed:
    """Steps, pairs, tokens and FLOPs for each second, over the last half minute of training.

    Time spent on validation and checkpoints is taken out with `pause`.
    """

    clock: Callable[[], float] = time.monotonic
    _marks: deque[tuple[float, int, int, int, float]] = field(default_factory=deque)
    _paused: float = 0.0
    _totals: tuple[int, int, int, float] = (0, 0, 0, 0.0)

    def __post_init__(self) -> None:
        self._marks.append((self._now(), *self._totals))

    def step(self, *, pairs: int, tokens: int, flops: float) -> None:
        """Counts one step; from the first one on, which compiles, the time is taken."""
        if len(self._marks) == 1 and self._totals[0] == 0:
            self._marks[0] = (self._now(), 1, pairs, tokens, flops)
        steps, all_pairs, all_tokens, all_flops = self._totals
        self._totals = (steps + 1, all_pairs + pairs, all_tokens + tokens, all_flops + flops)
        self._marks.append((self._now(), *self._totals))
        while len(self._marks) > 2 and self._now() - self._marks[0][0] > _WINDOW_SECONDS:
            self._marks.popleft()

    def rates(self) -> tuple[float, float, float, float]:
        """Steps, pairs, tokens and FLOPs for each second; 0 before the first step."""
        first, last = self._marks[0], self._marks[-1]
        seconds = last[0] - first[0]
        if seconds <= 0:
            return 0.0, 0.0, 0.0, 0.0
        steps, pairs, tokens, flops = (b - a for a, b in zip(first[1:], last[1:], strict=True))
        return steps / seconds, pairs / seconds, tokens / seconds, flops / seconds

    @contextlib.contextmanager
    def pause(self) -> Iterator[None]:
        """What is done meanwhile is no training."""
        start = self.clock()
        try:
            yield
        finally:
            self._paused += self.clock() - start

    def _now(self) -> float:
        return self.clock() - self._paused


@dataclass
class Board:
    """The last numbers, smoothed where single steps jump about."""

    total: int
    done: int = 0
    shown: dict[str, float] = field(default_factory=dict)

    def update(self, step: int, row: Mapping[str, float]) -> None:
        """Takes over one row of metrics."""
        self.done = step
        for name, value in row.items():
            if name in ("loss", "accuracy", "margin") and name in self.shown:
                value = _SMOOTHING * self.shown[name] + (1 - _SMOOTHING) * value
            self.shown[name] = value

    def line(self) -> str:
        """As "step 120/1,000, loss 0.612, accuracy 0.66, margin 0.21, 55 pairs/s, 120k tokens/s, ..."."""
        parts = [f"step {self.done:,}/{self.total:,}"]
        for name, form in (("loss", ".3f"), ("accuracy", ".2f"), ("margin", ".2f")):
            if name in self.shown:
                parts.append(f"{name} {self.shown[name]:{form}}")
        if "validation_loss" in self.shown:
            parts.append(
                f"validation {self.shown['validation_loss']:.3f} / {self.shown['validation_accuracy']:.2f}"
            )
        if self.shown.get("pairs_per_second"):
            parts.append(f"{_short(self.shown['pairs_per_second'])} pairs/s")
            parts.append(f"{_short(self.shown['tokens_per_second'])} tokens/s")
        if self.shown.get("mfu"):
            parts.append(f"MFU {self.shown['mfu']:.0%}")
        if self.shown.get("steps_per_second"):
            parts.append(f"{duration((self.total - self.done) / self.shown['steps_per_second'])} left")
        return ", ".join(parts)


@dataclass(frozen=True)
class Display:
    """`update(step, row)` shows new numbers; `say(text)` prints a line above the bar."""

    update: Callable[[int, Mapping[str, float]], None]
    say: Callable[[str], None]


@contextlib.contextmanager
def show_training(
    *,
    total: int,
    done: int = 0,
    enabled: bool = True,
    stream: TextIO | None = None,
    seconds_between_lines: float = SECONDS_BETWEEN_LINES,
) -> Iterator[Display]:
    """Shows how training goes, from step `done` to `total`, on standard error.

    Args:
      enabled: if not, only messages are shown.
      stream: where, instead of standard error.
      seconds_between_lines: how often a line is written where `stream` is not a terminal.
    """
    where: TextIO = sys.stderr if stream is None else stream
    board = Board(total, done)

    def say(text: str) -> None:
        print(text, file=where, flush=True)

    if not enabled:
        yield Display(board.update, say)
    elif where.isatty():
        with _bar(board, where) as display:
            yield display
    else:
        with _lines(board, say, seconds_between_lines) as display:
            yield display


@contextlib.contextmanager
def _bar(board: Board, stream: TextIO) -> Iterator[Display]:
    from rich.console import Console
    from rich.progress import BarColumn, Progress, SpinnerColumn, TextColumn

    columns = (SpinnerColumn(), BarColumn(20), TextColumn("{task.fields[line]}", markup=False))
    with Progress(*columns, console=Console(file=stream)) as bar:
        task = bar.add_task("train", total=board.total, completed=board.done, line=board.line())

        def update(step: int, row: Mapping[str, float]) -> None:
            board.update(step, row)
            bar.update(task, completed=board.done, line=board.line())

        yield Display(update, lambda text: bar.console.print(text, markup=False, highlight=False))


@contextlib.contextmanager
def _lines(board: Board, say: Callable[[str], None], seconds: float) -> Iterator[Display]:
    shown, last = time.monotonic(), board.done

    def update(step: int, row: Mapping[str, float]) -> None:
        nonlocal shown, last
        board.update(step, row)
        if time.monotonic() - shown >= seconds:
            say(board.line())
            shown, last = time.monotonic(), board.done

    say(f"{board.line()} (compiling)")
    yield Display(update, say)
    if board.done != last:
        say(board.line())


def _short(number: float) -> str:
    for size, unit in ((1e9, "G"), (1e6, "M"), (1e3, "k")):
        if number >= size:
            return f"{number / size:.3g}{unit}"
    return f"{number:.3g}"
