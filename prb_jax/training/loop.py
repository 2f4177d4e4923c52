"""The loop that `prb train` and `prb ppo` share: steps, and metrics, validations and checkpoints in between."""

from __future__ import annotations

import contextlib
import signal
import threading
import time
from collections import deque
from collections.abc import Callable, Generator, Iterator, Mapping
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass, field
from pathlib import Path
from types import FrameType
from typing import Any, Protocol, TypeVar

from prb_jax.data.options import flat_settings
from prb_jax.errors import short_repr
from prb_jax.processes.job import stops_at_a_step
from prb_jax.processes.sharing import process_count, process_index
from prb_jax.runs.progress import Count, Display, Speed, show_progress
from prb_jax.training.folder import CHECKPOINTS
from prb_jax.training.logs import MetricsLog
from prb_jax.training.saved_states import Checkpoints
from prb_jax.training.settings import LogSettings

MEAN_STEPS = 20
"""Numbers jump from step to step: means over so many are shown."""
FORMS: Mapping[str, str] = {
    "loss": ".3f", "accuracy": ".2f", "margin": ".2f", "validation_loss": ".3f", "validation_accuracy": ".2f"
}  # fmt: skip
"""The numbers of `prb train` that are shown, and how."""

Row = Mapping[str, float]
Batch = TypeVar("Batch")


class LoopSettings(Protocol):
    """What the loop reads of the settings of a run."""

    @property
    def steps(self) -> int: ...
    @property
    def seed(self) -> int: ...
    @property
    def checkpoint_every(self) -> int: ...
    @property
    def log(self) -> LogSettings: ...


@dataclass(eq=False, kw_only=True)
class StepLoop:
    """What surrounds the steps of one start of a run. Open with :func:`open_loop`.

    Attributes:
      settings: of the run.
      step: steps made so far.
      facts: what the checkpoint that the run continues from says; empty at the start.
      checkpoints: of the run.
      log: None in all processes but the first.
      board, display: what is shown.
      interruption: whether a signal asked to stop.
    """

    settings: LoopSettings
    step: int
    facts: Mapping[str, Any]
    checkpoints: Checkpoints
    log: MetricsLog | None
    board: Board
    display: Display
    interruption: Interruption

    @property
    def speed(self) -> Speed:
        """Amounts for each second."""
        return self.board.speed

    def say(self, text: str) -> None:
        """Print a message above the figures, once of several processes."""
        if process_index() == 0:
            self.display.say(text)

    def report(self, row: Row) -> None:
        """Show the numbers of a step and keep them."""
        if self.log is not None:
            self.log.write(row)
        self.board.take(int(row["step"]), row)
        self.display.update()


@contextlib.contextmanager
def open_loop(
    out: Path,
    settings: LoopSettings,
    begin: Callable[[Checkpoints], tuple[int, Mapping[str, Any]]],
    *,
    keep_last: int,
    keep_best: int = 0,
    forms: Mapping[str, str] = FORMS,
    progress: bool = True,
) -> Iterator[StepLoop]:
    """Open checkpoints, metrics and progress of a run, and continue it where it stood.

    Args:
      out: the run folder.
      settings: of the run.
      begin: brings the model to the newest checkpoint that can be read, or to its start; returns the steps made by then
        and the facts of the checkpoint.
      keep_last, keep_best: of :class:`prb_jax.training.saved_states.Checkpoints`.
      forms: the numbers that are shown, and how.
      progress: shows progress on standard error.
    """
    first = process_index() == 0
    with contextlib.ExitStack() as stack:
        messages: list[str] = []
        checkpoints = Checkpoints(
            out / CHECKPOINTS, keep_last=keep_last, keep_best=keep_best, say=messages.append
        )
        stack.callback(checkpoints.close)
        done, facts = begin(checkpoints)
        board = Board(settings.steps, done, forms=forms)
        display = stack.enter_context(show_progress(f"training {out}", board, enabled=progress and first))
        interruption = stack.enter_context(watch_signals())
        log = (
            MetricsLog(out, step=done, options=settings.log, settings=flat_settings(settings))
            if first
            else None
        )
        if log is not None:
            stack.callback(log.close)
        loop = StepLoop(
            settings=settings,
            step=done,
            facts=facts,
            checkpoints=checkpoints,
            log=log,
            board=board,
            display=display,
            interruption=interruption,
        )
        for message in [*messages, *([f"continued from the checkpoint of step {done}"] if done else [])]:
            loop.say(message)
        yield loop


@dataclass(frozen=True)
class TrainResult:
    """What `train` or `ppo` leaves.

    Attributes:
      out: the run folder.
      steps: updates made.
      model: the trained model or policy, a Hugging Face folder; None for a run that was stopped before its end.
      summary: what `summary.json` holds; empty for such a run.
      stopped_by: the signal that stopped it, as "SIGTERM".
    """

    out: Path
    steps: int
    model: Path | None = None
    summary: dict[str, Any] = field(default_factory=dict)
    stopped_by: str | None = None

    __repr__ = short_repr


@dataclass(frozen=True)
class StepsEnd:
    """How the steps of one start of a run ended: at the last one, by a signal, or for a reason."""

    step: int
    stopped_by: str | None = None
    reason: str | None = None


def run_steps(
    step_fn: Callable[[Batch], Callable[[], Row]],
    batches: Iterator[Batch],
    loop: StepLoop,
    *,
    save: Callable[[int, Mapping[str, Any]], None],
    validates_at: Callable[[int], bool] = lambda step: False,
    validate: Callable[[], tuple[Mapping[str, float], float]] | None = None,
    reason_to_end: Callable[[], str | None] | None = None,
) -> StepsEnd:
    """Make step after step, until the end or until a signal.

    Args:
      step_fn: starts a step; what it returns waits for the step and gives its row. The device works on a step while the
        row of the one before it is written, unless ``reason_to_end`` has to see every row at once.
      batches: of the steps that are left, in their order.
      loop: what surrounds the steps.
      save: starts writing the checkpoint of a step, with these facts beside it.
      validates_at: whether there is a validation after a step.
      validate: gives the numbers of a validation, and the one, smaller is better, by which a checkpoint is the best.
      reason_to_end: asked at the start and after each step: why the run ends here, or None.
    """
    settings, at_once = loop.settings, reason_to_end is not None
    waiting: list[Callable[[], Row]] = []

    def report(most_waiting: int) -> None:
        while len(waiting) > most_waiting:
            loop.report(waiting.pop(0)())

    reason = reason_to_end() if reason_to_end else None
    while loop.step < settings.steps and reason is None:
        waiting.append(step_fn(next(batches)))
        report(0 if at_once else 1)
        loop.step += 1
        reason = reason_to_end() if reason_to_end else None
        facts: dict[str, Any] = {}
        if validate is not None and validates_at(loop.step):
            report(0)
            with loop.speed.pause():
                numbers, value = validate()
            loop.report(
                {"step": loop.step, **{f"validation_{name}": number for name, number in numbers.items()}}
            )
            facts = {"validation": dict(numbers), "value": value}
        last, stop = loop.step == settings.steps or reason is not None, loop.interruption.reached(loop.step)
        if facts or last or stop or loop.step % settings.checkpoint_every == 0:
            report(0)
            with loop.speed.pause():
                if loop.log is not None:
                    loop.log.sync()
                save(loop.step, {"time": time.time(), "seed": settings.seed, **facts})
        if stop and not last:
            loop.checkpoints.wait()
            loop.say(
                f"{stop}: saved at step {loop.step} of {settings.steps}; the same command continues the run"
            )
            return StepsEnd(loop.step, stopped_by=stop)
    loop.checkpoints.wait()
    return StepsEnd(loop.step, reason=reason)


def prepared_ahead(prepare: Callable[[int], Batch], steps: range) -> Generator[Batch]:
    """Yield the batches of steps; one thread prepares the next while the device works on this one."""
    with ThreadPoolExecutor(1, thread_name_prefix="batch") as pool:
        upcoming = pool.submit(prepare, steps.start) if steps else None
        for step in steps:
            assert upcoming is not None
            batch = upcoming.result()
            if step + 1 < steps.stop:
                upcoming = pool.submit(prepare, step + 1)
            yield batch


@dataclass
class Board(Count):
    """The last numbers beside the steps, as ``forms`` says."""

    unit: str = "steps"
    forms: Mapping[str, str] = field(default_factory=lambda: FORMS)
    _last: dict[str, deque[float]] = field(default_factory=dict)

    def take(self, step: int, row: Row) -> None:
        """Take over one row of metrics."""
        self.done = step
        for name in (*self.forms, "mfu"):
            if name in row:
                length = 1 if name.startswith(("validation_", "mfu")) else MEAN_STEPS
                self._last.setdefault(name, deque(maxlen=length)).append(row[name])

    def parts(self) -> list[str]:
        """Return the count, the means of the last steps, the last validation, and speeds."""
        shown = {name: sum(values) / len(values) for name, values in self._last.items()}
        means = [
            f"{name.replace('_', ' ')} {shown[name]:{form}}"
            for name, form in self.forms.items()
            if name in shown
        ]
        mfu = [f"MFU {shown['mfu']:.0%}"] if shown.get("mfu") else []
        return [*self.head(), *means, *self.speeds("pairs", "tokens"), *mfu]


_SIGNALS = (signal.SIGTERM, signal.SIGINT)


class Interruption:
    """SIGTERM and Ctrl-C as a wish to stop after this step; of several processes one tells the others."""

    def __init__(self) -> None:
        self.received: str | None = None

    def reached(self, step: int) -> str | None:
        """The name of the signal, if this step is the last one; every process says so at the same step."""
        if process_count() == 1:
            return self.received
        from jax.experimental import multihost_utils

        # JAX's own watcher took SIGTERM, which is how a cluster announces that machines will go away.
        return "SIGTERM" if multihost_utils.reached_preemption_sync_point(step) else None


@contextlib.contextmanager
def watch_signals() -> Iterator[Interruption]:
    """Turns the first SIGTERM or Ctrl-C (of several processes SIGTERM alone) into a wish to stop; a second one acts as
    it always does."""
    interruption = Interruption()
    if process_count() > 1:
        with stops_at_a_step():
            yield interruption
        return
    # Only the main thread may set handlers.
    if threading.current_thread() is not threading.main_thread():
        yield interruption
        return
    before = {number: signal.getsignal(number) for number in _SIGNALS}

    def restore() -> None:
        for number, handler in before.items():
            signal.signal(number, handler if handler is not None else signal.SIG_DFL)

    def handle(number: int, frame: FrameType | None) -> None:
        interruption.received = signal.Signals(number).name
        restore()

    for number in _SIGNALS:
        signal.signal(number, handle)
    try:
        yield interruption
    finally:
        restore()
