"""Loop shared by `prb train` and `prb ppo`: steps, metrics, validations and checkpoints."""

from __future__ import annotations

import contextlib
import math
import signal
import threading
import time
from collections import deque
from collections.abc import Callable, Generator, Iterator, Mapping, Sequence
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass, field
from pathlib import Path
from types import FrameType
from typing import Any, TypeVar

from prb_jax.errors import RunError, listed, quote, short_repr
from prb_jax.platform.processes.sharing import on_first_process, process_count, process_index
from prb_jax.runs.kind import RunKind
from prb_jax.runs.progress import Count, Display, Speed, show_progress
from prb_jax.runs.training import CHECKPOINTS, CURVES, run_identity
from prb_jax.seams import get
from prb_jax.training.config import RunOptions
from prb_jax.training.logs import MetricsLog, StepFile
from prb_jax.training.saved_states import Checkpoints
from prb_jax.training.trainer import Trainer

MEAN_STEPS = 20  # the progress display shows means over this many steps because single steps are noisy
FORMS = {
    "reward": ".3f", "loss": ".3f", "accuracy": ".2f", "margin": ".2f", "kl": ".3f", "entropy": ".2f",
    "clip_share": ".2f", "length": ".0f", "validation_loss": ".3f", "validation_accuracy": ".2f",
}  # fmt: skip
"""Metrics in the progress display, with their formats."""

Row = Mapping[str, float]
Batch = TypeVar("Batch")


@dataclass
class Board(Count):
    """Progress of a run: step count and latest metrics."""

    unit: str = "steps"
    _last: dict[str, deque[float]] = field(default_factory=dict)

    def take(self, row: Row) -> None:
        """Add one row of metrics."""
        self.done = int(row["step"])
        for name in (*FORMS, "mfu"):
            if name in row:
                length = 1 if name.startswith(("validation_", "mfu")) else MEAN_STEPS
                self._last.setdefault(name, deque(maxlen=length)).append(row[name])

    def parts(self) -> list[str]:
        """Return the step count, means over the last steps, the last validation, and speeds."""
        shown = {name: sum(values) / len(values) for name, values in self._last.items()}
        means = [
            f"{name.replace('_', ' ')} {shown[name]:{form}}" for name, form in FORMS.items() if name in shown
        ]
        mfu = [f"MFU {shown['mfu']:.0%}"] if shown.get("mfu") else []
        return [*self.head(), *means, *self.speeds("pairs", "tokens"), *mfu]


@dataclass(eq=False)
class Loop:
    """One session of a run: starts at the last saved step. Open with :func:`open_loop`.

    The caller runs the steps in ``for step in loop.steps()``; this class handles metrics, validations and saved
    states.
    """

    out: Path  # run folder
    trainer: Trainer  # model in training
    checkpoints: Checkpoints
    board: Board
    display: Display
    interruption: Interruption  # set by a signal to stop
    step: int  # completed steps
    # saved with each state; initially from the checkpoint that the run continues from, empty in a new run
    facts: Mapping[str, Any]
    log: MetricsLog | None  # None in all processes except the first
    files: list[StepFile]  # synced before each checkpoint, so no checkpoint is newer than its rows
    stopped_by: str | None = None  # signal that stopped the run, e.g. "SIGTERM"
    reason: str | None = None  # why the run ends before its last step
    _waiting: list[Callable[[], Row]] = field(default_factory=list)
    _validation: dict[str, Any] = field(default_factory=dict)  # of the current step

    @property
    def settings(self) -> RunOptions:
        """Settings of the run."""
        return self.trainer.settings

    @property
    def speed(self) -> Speed:
        """Amounts per second."""
        return self.board.speed

    def steps(self) -> Iterator[int]:
        """Yield the number of each step, counted from 0, until the end, a signal (`stopped_by`) or a `reason`.

        A state is saved after the last step, after a step with a validation, and every `checkpoint_every` steps.
        """
        settings = self.settings
        while self.step < settings.steps and self.reason is None:
            yield self.step
            self.step += 1
            last = self.step == settings.steps or self.reason is not None
            stop = self.interruption.reached(self.step)
            if self._validation or last or stop or self.step % settings.checkpoint_every == 0:
                self._save()
            if stop and not last:
                self.stopped_by = stop
                break
        self.checkpoints.wait()
        if self.stopped_by:
            self.say(
                f"{self.stopped_by}: saved at step {self.step} of {settings.steps}; the same command continues the run"
            )

    def later(self, row: Callable[[], Row]) -> None:
        """Report a step later through a function that waits for its metrics, while the device runs the next step."""
        self._waiting.append(row)
        self._report_waiting(1)

    def validate(self, measure: Callable[[], tuple[Mapping[str, float], float]]) -> None:
        """Report a validation after the current step.

        Args:
          measure: Function that returns the metrics, and the value, lower is better, that chooses the best checkpoint.
        """
        self._report_waiting(0)
        with self.speed.pause():
            numbers, value = measure()
        row = {f"validation_{name}": number for name, number in numbers.items()}
        self.report({"step": self.step + 1, **row})
        self._validation = {"validation": dict(numbers), "value": value}

    def _report_waiting(self, most: int) -> None:
        while len(self._waiting) > most:
            self.report(self._waiting.pop(0)())

    def _save(self) -> None:
        self._report_waiting(0)
        with self.speed.pause():
            for file in self.files:
                file.sync()
            facts = {"time": time.time(), "seed": self.settings.seed, **self._validation, **self.facts}
            self.trainer.save(self.checkpoints, self.step, facts)
        self._validation = {}

    def rates(self, **amounts: float) -> dict[str, float]:
        """Count a step and these amounts, and return the speeds by name."""
        self.speed.count(steps=1, **amounts)
        return {f"{name}_per_second": self.speed.rate(name) for name in ("steps", *amounts)}

    def say(self, text: str) -> None:
        """Print a message above the progress display, in the first process only."""
        if process_index() == 0:
            self.display.say(text)

    def report(self, row: Row) -> None:
        """Display and log the metrics of a step."""
        if self.log is not None:
            self.log.write(row)
        self.board.take(row)
        self.display.update()

    def check_finite(self, metrics: dict[str, float], ids: Sequence[str], *, step: int, remedy: str) -> None:
        """Remove ``finite`` from the metrics of an update, and check that all are finite. Steps count from 1.

        Raises:
          RunError: A number is not finite; the message names the comparisons and a possible remedy.
        """
        if metrics.pop("finite", 1.0) and all(map(math.isfinite, metrics.values())):
            return
        saved = self.checkpoints.steps()
        raise RunError(
            f"step {step}: the loss or its gradient is not finite (loss {metrics.get('loss')}, gradient norm "
            f"{metrics.get('grad_norm')}), so nothing was updated; the comparisons: "
            f"{listed([quote(name) for name in ids], most=64)}. "
            + (f"The checkpoint of step {saved[-1]} is kept. " if saved else "")
            + remedy
        )


@contextlib.contextmanager
def open_loop(out: Path, trainer: Trainer, *, progress: bool) -> Iterator[Loop]:
    """Open the checkpoints, metrics and progress display of a run, and restore its model."""
    settings, messages = trainer.settings, list[str]()
    with contextlib.ExitStack() as stack:
        checkpoints = Checkpoints(
            out / CHECKPOINTS,
            keep_last=settings.checkpoint.keep_last,
            keep_best=getattr(settings.checkpoint, "keep_best", 0),
            say=messages.append,
            run=on_first_process(lambda: run_identity(out)),
        )
        stack.callback(checkpoints.close)
        step, facts = trainer.begin(checkpoints)
        board = Board(settings.steps, step)
        display = stack.enter_context(show_progress(f"training {out}", board, enabled=progress))
        interruption = stack.enter_context(watch_signals())
        log = MetricsLog(out, step=step, settings=settings) if process_index() == 0 else None
        if log is not None:
            stack.callback(log.close)
        files: list[StepFile] = [] if log is None else [log]
        loop = Loop(out, trainer, checkpoints, board, display, interruption, step, facts, log, files)
        for message in [*messages, *([f"continued from the checkpoint of step {step}"] if step else [])]:
            loop.say(message)
        yield loop


@dataclass(frozen=True)
class TrainResult:
    """Result of `train` or `ppo`.

    Attributes:
      out: Run folder.
      steps: Number of completed updates.
      model: Trained model or policy, a Hugging Face folder; None for a run that was stopped before its end.
      summary: Contents of `summary.json`; empty for a run that was stopped before its end.
      module: Trained copy of the `flax.nnx.Module` that the run trained; the original module is unchanged.
      stopped_by: Signal that stopped the run, e.g. "SIGTERM".
    """

    out: Path
    steps: int
    model: Path | None = None
    summary: dict[str, Any] = field(default_factory=dict)
    stopped_by: str | None = None
    module: Any = None

    __repr__ = short_repr


def write_summary(
    loop: Loop, kind: RunKind, summarise: Callable[[list[dict[str, Any]]], dict[str, Any]]
) -> dict[str, Any]:
    """Plot the curves of a finished run and write the summary of its metrics; a collective."""

    def write() -> dict[str, Any]:
        assert loop.log is not None
        if loop.settings.log.plot:
            try:
                plot = get("training", "curves").value
                plot(loop.log.rows, loop.out / CURVES, title=loop.out.name)
            except RunError as error:  # the plot is optional
                loop.say(f"no picture: {error}")
        summary = summarise(loop.log.rows)
        kind.finish(loop.out, summary)
        return summary

    return on_first_process(write)


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


_SIGNALS = (signal.SIGTERM, signal.SIGINT)


class Interruption:
    """A request by SIGTERM or Ctrl-C to stop after the current step; one process notifies the others."""

    def __init__(self) -> None:
        self.received: str | None = None

    def reached(self, step: int) -> str | None:
        """Return the name of the signal if this step is the last one; all processes agree on the step."""
        if process_count() == 1:
            return self.received
        from jax.experimental import multihost_utils

        # JAX handles SIGTERM here: clusters send it before they remove machines.
        return "SIGTERM" if multihost_utils.reached_preemption_sync_point(step) else None


@contextlib.contextmanager
def watch_signals() -> Iterator[Interruption]:
    """Turn the first SIGTERM or Ctrl-C (only SIGTERM with several processes) into a request to stop; a second signal
    has its usual effect."""
    interruption = Interruption()
    if process_count() > 1:
        with get("processes", "stops at a step").value():
            yield interruption
        return
    # Only the main thread may set handlers.
    ours = _SIGNALS if threading.current_thread() is threading.main_thread() else ()
    before = {number: signal.getsignal(number) for number in ours}

    def restore() -> None:
        for number, handler in before.items():
            signal.signal(number, handler if handler is not None else signal.SIG_DFL)

    def handle(number: int, frame: FrameType | None) -> None:
        interruption.received = signal.Signals(number).name
        restore()

    for number in ours:
        signal.signal(number, handle)
    try:
        yield interruption
    finally:
        restore()
