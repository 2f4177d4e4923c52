"""Progress of a run: a live display on a terminal, else a line every few seconds; both start with the time left."""

from __future__ import annotations

import contextlib
import sys
import time
from collections import Counter, deque
from collections.abc import Callable, Hashable, Iterable, Iterator, Sequence
from dataclasses import dataclass, field
from typing import TYPE_CHECKING, Any, TextIO, TypeVar
from weakref import WeakKeyDictionary

from prb_jax.errors import printable
from prb_jax.platform.paths import shown
from prb_jax.platform.processes.sharing import process_index

if TYPE_CHECKING:
    from rich.console import Group
    from rich.live import Live

    from prb_jax.metrics.rows import ScoredRow
    from prb_jax.records.items import Items

SECONDS_BETWEEN_LINES = 10.0
WIDTH = 80
_WINDOW_SECONDS = 30.0

Item = TypeVar("Item")


@dataclass
class Speed:
    """Rates per second over the last 30 seconds, without the time spent in `pause`."""

    clock: Callable[[], float] = time.monotonic
    _marks: deque[tuple[float, Counter[str]]] = field(default_factory=deque)
    _paused: float = 0.0
    _pauses: int = 0

    def __post_init__(self) -> None:
        self._marks.append((self._now(), Counter()))

    def count(self, **amounts: float) -> None:
        """Add amounts that were just finished."""
        now, totals = self._now(), self._marks[-1][1].copy()
        totals.update(amounts)  # pyright: ignore[reportCallIssue, reportArgumentType]
        self._marks.append((now, totals))
        while len(self._marks) > 2 and now - self._marks[0][0] > _WINDOW_SECONDS:
            self._marks.popleft()

    def rate(self, name: str) -> float:
        """Return the amount of this name per second; 0 before the first count."""
        (start, before), (end, now) = self._marks[0], self._marks[-1]
        return (now[name] - before[name]) / (end - start) if end > start else 0.0

    @contextlib.contextmanager
    def pause(self) -> Iterator[None]:
        """Exclude the time of the body, such as compiling or a validation."""
        start, self._pauses = self.clock(), self._pauses + 1
        try:
            yield
        finally:
            self._pauses -= 1
            if not self._pauses:  # a nested pause is part of the outer one
                self._paused += self.clock() - start

    def _now(self) -> float:
        return self.clock() - self._paused


@dataclass
class Count:
    """Number done, total and speed; with ``about`` the total is an estimate, or 0 before the first estimate."""

    total: int
    done: int = 0
    about: bool = field(default=False, kw_only=True)
    unit: str = "pairs"
    speed: Speed = field(default_factory=Speed)

    def advance(self, done: int, tokens: int = 0) -> None:
        """Add one finished batch."""
        self.done += done
        self.speed.count(**{self.unit: done, "tokens": tokens})

    def parts(self) -> list[str]:
        """Return figures such as "1:32 left", "1,200 of 6,270 pairs (19%)", "55.1 pairs/s", "120k tokens/s"."""
        return [*self.head(), *self.speeds(self.unit, "tokens")]

    def head(self) -> list[str]:
        """Return the time left, once it is known, and the number done."""
        if self.about and not self.total:
            return [f"{self.done:,} {self.unit}"]
        rate, share = self.speed.rate(self.unit), self.done / self.total if self.total else 1.0
        left = [f"{duration((self.total - self.done) / rate)} left"] if rate else []
        of = "of about" if self.about else "of"
        return [*left, f"{self.done:,} {of} {self.total:,} {self.unit} ({share:.0%})"]

    def speeds(self, *names: str) -> list[str]:
        """Return the known ones of these rates."""
        return [f"{short(rate)} {name}/s" for name in names if (rate := self.speed.rate(name))]


@dataclass(eq=False)
class Display:
    """Display of a count. Build with `show_progress`."""

    label: str
    count: Count
    enabled: bool
    stream: TextIO
    seconds_between_lines: float
    state: str = ""
    _live: Live | None = None
    _shown: str = ""
    _when: float = 0.0

    def advance(self, done: int, tokens: int = 0) -> None:
        """Add one finished batch, and show it."""
        self.count.advance(done, tokens)
        self.update()

    def each(self, items: Iterable[Item]) -> Iterator[Item]:
        """Yield the items, and count each one when the next is requested."""
        for item in items:
            yield item
            self.advance(1)

    def update(self, *, now: bool = False) -> None:
        """Show the current figures; without a terminal, write a line only if one is due or ``now`` is True."""
        if self._live is not None:
            self._live.refresh() if now else None
        elif self.enabled and (now or time.monotonic() - self._when >= self.seconds_between_lines):
            text = self.text()
            if text != self._shown:
                self.say(text)
                self._shown, self._when = text, time.monotonic()

    def say(self, text: str) -> None:
        """Print a message above the figures, even if progress is not shown."""
        text = printable(text)
        if self._live is not None:
            self._live.console.print(text, markup=False, highlight=False)
        else:
            print(text, file=self.stream, flush=True)

    def text(self) -> str:
        """Return the figures in lines of at most 80 characters, without splitting a figure."""
        lines = [""]
        for part in [*self.count.parts(), *([self.state] if self.state else [])]:
            longer = f"{lines[-1]}, {part}" if lines[-1] else part
            if len(longer) < WIDTH:
                lines[-1] = longer
            else:
                lines[-1:] = [f"{lines[-1]},", part]
        return "\n".join(lines)

    def render(self) -> Group:
        """Return the live display for a terminal."""
        from rich.console import Group
        from rich.text import Text

        return Group(Text(self.label, style="bold", no_wrap=True, overflow="ellipsis"), Text(self.text()))


_displays: list[Display] = []


@contextlib.contextmanager
def show_progress(
    label: str,
    count: Count,
    *,
    enabled: bool = True,
    stream: TextIO | None = None,
    seconds_between_lines: float = SECONDS_BETWEEN_LINES,
) -> Iterator[Display]:
    """Show the progress of ``count`` on standard error; with several processes, only on the first.

    Args:
      label: Name of the work.
      count: Count to show; call `Display.advance`, or change the count and call `Display.update`.
      enabled: If False, only messages are shown.
      stream: Stream instead of standard error.
      seconds_between_lines: Seconds between lines if ``stream`` is not a terminal; the last line is always written.
    """
    enabled = enabled and process_index() == 0
    label = printable(shown(label))
    display = Display(label, count, enabled, stream or sys.stderr, seconds_between_lines)
    _displays.append(display)
    try:
        if enabled and display.stream.isatty():
            from rich.console import Console
            from rich.live import Live

            with Live(get_renderable=display.render, console=Console(file=display.stream)) as display._live:
                yield display
        else:
            if enabled:
                display._shown, display._when = display.text(), time.monotonic()
                display.say(f"{label}: {display._shown}")
            yield display
            display.update(now=True)
    finally:
        _displays.remove(display)


@contextlib.contextmanager
def show_rows(
    label: str, comparisons: Items[Any], *, done: int, enabled: bool
) -> Iterator[Callable[[Sequence[ScoredRow]], None]]:
    """Show the progress of scoring; yield a function that adds the rows of a batch.

    Args:
      label: Name of the run.
      comparisons: Comparisons to score, whose number is an estimate until all files are read.
      done: Number of rows that earlier sessions finished.
      enabled: If False, only messages are shown.
    """
    count = Count(0, done)

    def estimate() -> None:
        count.about, count.total = not comparisons.complete, round(comparisons.about())

    estimate()
    with show_progress(label, count, enabled=enabled) as display:

        def show(rows: Sequence[ScoredRow]) -> None:
            estimate()
            display.advance(len(rows), sum(row.tokens for row in rows))

        yield show


_compiled: WeakKeyDictionary[Any, set[Hashable]] = WeakKeyDictionary()


@contextlib.contextmanager
def compiling(program: Callable[..., Any], *shapes: Hashable) -> Iterator[None]:
    """Show "compiling" during a jitted function's first call with these shapes, and exclude its time from rates."""
    known = _compiled.setdefault(program, set())
    if shapes in known or not _displays:
        known.add(shapes)
        yield
        return
    display = _displays[-1]
    with display.count.speed.pause():
        display.state = "compiling"
        display.update(now=True)
        try:
            yield
            known.add(shapes)
        finally:
            display.state = ""


def duration(seconds: float) -> str:
    """Format seconds as "0:05", "12:30" or "1:02:03"."""
    minutes, rest = divmod(round(seconds), 60)
    hours, minutes = divmod(minutes, 60)
    return f"{hours}:{minutes:02}:{rest:02}" if hours else f"{minutes}:{rest:02}"


def short(number: float) -> str:
    """Format a number with three digits, e.g. "55.1" or "120k"."""
    for size, unit in ((1e9, "G"), (1e6, "M"), (1e3, "k")):
        if number >= size:
            return f"{number / size:.3g}{unit}"
    return f"{number:.3g}"
