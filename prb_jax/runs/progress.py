"""How far a run is: one bar on a terminal, one line every few seconds elsewhere."""

import contextlib
import sys
import time
from collections import deque
from collections.abc import Callable, Iterator
from dataclasses import dataclass, field
from typing import TextIO

SECONDS_BETWEEN_LINES = 10.0
_WINDOW_SECONDS = 30.0

Advance = Callable[[int, int], None]
"""Called as ``advance(comparisons, tokens)`` after each batch."""


@dataclass
class Meter:
    """Speed over the last half minute, so that a first compile does not spoil the estimate for long."""

    total: int
    done: int
    clock: Callable[[], float] = time.monotonic
    _marks: deque[tuple[float, int, int]] = field(default_factory=deque)
    _tokens: int = 0

    def __post_init__(self) -> None:
        self._marks.append((self.clock(), self.done, 0))

    def advance(self, comparisons: int, tokens: int) -> None:
        """Counts one finished batch."""
        now = self.clock()
        self.done += comparisons
        self._tokens += tokens
        self._marks.append((now, self.done, self._tokens))
        while len(self._marks) > 2 and now - self._marks[0][0] > _WINDOW_SECONDS:
            self._marks.popleft()

    def rates(self) -> tuple[float, float]:
        """Comparisons and tokens for each second; 0 before the first batch."""
        start, done, tokens = self._marks[0]
        seconds = self._marks[-1][0] - start
        if seconds <= 0:
            return 0.0, 0.0
        return (self.done - done) / seconds, (self._tokens - tokens) / seconds

    def line(self) -> str:
        """As "1,200/6,270 pairs (19%), 55.1 pairs/s, 120k tokens/s, 1:32 left"."""
        pairs, tokens = self.rates()
        share = self.done / self.total if self.total else 1.0
        text = f"{self.done:,}/{self.total:,} pairs ({share:.0%})"
        if pairs > 0:
            left = duration((self.total - self.done) / pairs)
            speed = f"{_short(pairs)} pairs/s" + (f", {_short(tokens)} tokens/s" if tokens else "")
            text += f", {speed}, {left} left"
        return text


@contextlib.contextmanager
def progress(
    label: str,
    *,
    total: int,
    done: int = 0,
    enabled: bool = True,
    stream: TextIO | None = None,
    seconds_between_lines: float = SECONDS_BETWEEN_LINES,
) -> Iterator[Advance]:
    """Shows the progress of ``total`` comparisons, ``done`` of which were there before.

    Args:
      label: what is being scored.
      stream: where to show it; standard error if not given.
      seconds_between_lines: how often a line is written where ``stream`` is not a terminal; a last line
        always is.

    Yields:
      Advance: to be called after each batch with the comparisons and tokens in it.
    """
    where: TextIO = sys.stderr if stream is None else stream
    meter = Meter(total, done)
    if not enabled:
        yield meter.advance
    elif where.isatty():
        with _bar(label, meter, where) as advance:
            yield advance
    else:
        with _lines(label, meter, where, seconds_between_lines) as advance:
            yield advance


@contextlib.contextmanager
def _bar(label: str, meter: Meter, stream: TextIO) -> Iterator[Advance]:
    from rich.console import Console
    from rich.progress import BarColumn, Progress, SpinnerColumn, TextColumn, TimeElapsedColumn

    columns = (
        SpinnerColumn(),
        TextColumn("{task.description}", markup=False),
        BarColumn(),
        TextColumn("{task.fields[line]}", markup=False),
        TimeElapsedColumn(),
    )
    with Progress(*columns, console=Console(file=stream)) as bar:
        task = bar.add_task(label, total=meter.total, completed=meter.done, line=meter.line())

        def advance(comparisons: int, tokens: int) -> None:
            meter.advance(comparisons, tokens)
            bar.update(task, completed=meter.done, line=meter.line())

        yield advance


@contextlib.contextmanager
def _lines(label: str, meter: Meter, stream: TextIO, seconds: float) -> Iterator[Advance]:
    shown, last = meter.clock(), -1

    def show() -> None:
        nonlocal shown, last
        print(f"{label}: {meter.line()}", file=stream, flush=True)
        shown, last = meter.clock(), meter.done

    def advance(comparisons: int, tokens: int) -> None:
        meter.advance(comparisons, tokens)
        if meter.clock() - shown >= seconds:
            show()

    show()  # at once: compiling the first batch can take minutes
    yield advance
    if last != meter.done:
        show()


def duration(seconds: float) -> str:
    """As "0:05", "12:30" or "1:02:03"."""
    minutes, rest = divmod(round(seconds), 60)
    hours, minutes = divmod(minutes, 60)
    return f"{hours}:{minutes:02}:{rest:02}" if hours else f"{minutes}:{rest:02}"


def _short(number: float) -> str:
    for size, unit in ((1e9, "G"), (1e6, "M"), (1e3, "k")):
        if number >= size:
            return f"{number / size:.3g}{unit}"
    return f"{number:.3g}"
