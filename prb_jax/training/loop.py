"""The loop that `prb train` and `prb ppo` share: steps, and metrics, validations and checkpoints in between."""

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
from prb_jax.platform.processes.job import stops_at_a_step
from prb_jax.platform.processes.sharing import on_first_process, process_count, process_index
from prb_jax.runs.kind import RunKind
from prb_jax.runs.progress import Count, Display, Speed, show_progress
from prb_jax.runs.training import CHECKPOINTS, run_identity
from prb_jax.training.config import RunOptions
from prb_jax.training.logs import CURVES, MetricsLog, StepFile, plot_curves
from prb_jax.training.saved_states import Checkpoints
from prb_jax.training.trainer import Trainer

MEAN_STEPS = 20  # numbers jump from step to step: means over so many are shown
FORMS = {
    "reward": ".3f", "loss": ".3f", "accuracy": ".2f", "margin": ".2f", "kl": ".3f", "entropy": ".2f",
    "clip_share": ".2f", "length": ".0f", "validation_loss": ".3f", "validation_accuracy": ".2f",
}  # fmt: skip
"""The numbers that are shown of a run on its way, and how."""

Row = Mapping[str, float]
Batch = TypeVar("Batch")


@dataclass
class Board(Count):
    """The last numbers of a run beside its steps."""

    unit: str = "steps"
    _last: dict[str, deque[float]] = field(default_factory=dict)

    def take(self, row: Row) -> None:
        """Take over one row of metrics."""
        self.done = int(row["step"])
        for name in (*FORMS, "mfu"):
            if name in row:
                length = 1 if name.startswith(("validation_", "mfu")) else MEAN_STEPS
                self._last.setdefault(name, deque(maxlen=length)).append(row[name])

    def parts(self) -> list[str]:
        """Return the count, the means of the last steps, the last validation, and speeds."""
        shown = {name: sum(values) / len(values) for name, values in self._last.items()}
        means = [
            f"{name.replace('_', ' ')} {shown[name]:{form}}" for name, form in FORMS.items() if name in shown
        ]
        mfu = [f"MFU {shown['mfu']:.0%}"] if shown.get("mfu") else []
        return [*self.head(), *means, *self.speeds("pairs", "tokens"), *mfu]


@dataclass(eq=False)
class Loop:
    """One session of a run, from the last saved step on. Open with :func:`open_loop`.

    The caller's ``for step in loop.steps()`` makes the steps; numbers, validations and saved states are in here.
    """

    out: Path  # the run folder
    trainer: Trainer  # the model in training
    checkpoints: Checkpoints
    board: Board
    display: Display
    interruption: Interruption  # whether a signal asked to stop
    step: int  # steps made so far
    # what is saved beside the state; at first from the checkpoint that the run continues from, empty at the start
    facts: Mapping[str, Any]
    log: MetricsLog | None  # None in all processes but the first
    files: list[StepFile]  # of rows, which a checkpoint must not outlive
    stopped_by: str | None = None  # the signal that stopped it, as "SIGTERM"
    reason: str | None = None  # why it ends before its last step
    _waiting: list[Callable[[], Row]] = field(default_factory=list)
    _validation: dict[str, Any] = field(default_factory=dict)  # of the step at hand

    @property
    def settings(self) -> RunOptions:
        """Of the run."""
        return self.trainer.settings

    @property
    def speed(self) -> Speed:
        """Amounts for each second."""
        return self.board.speed

    def steps(self) -> Iterator[int]:
        """Yield the number of each step, counted from 0, until the end, a signal (`stopped_by`) or a `reason`.

        After each step a state is saved where it is due: at the end, for a validation, or every so many steps.
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
        """Report a step by a function that waits for it: the device works on the next step by then."""
        self._waiting.append(row)
        self._report_waiting(1)

    def validate(self, measure: Callable[[], tuple[Mapping[str, float], float]]) -> None:
        """Report a validation after the step at hand.

        Args:
          measure: returns its numbers, and the one, smaller is better, by which a checkpoint is the best.
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
        """Count what a step did, beside the step itself, and return the speeds by name."""
        self.speed.count(steps=1, **amounts)
        return {f"{name}_per_second": self.speed.rate(name) for name in ("steps", *amounts)}

    def say(self, text: str) -> None:
        """Print a message above the figures, once of several processes."""
        if process_index() == 0:
            self.display.say(text)

    def report(self, row: Row) -> None:
        """Show the numbers of a step and keep them."""
        if self.log is not None:
            self.log.write(row)
        self.board.take(row)
        self.display.update()

    def check_finite(self, metrics: dict[str, float], ids: Sequence[str], *, step: int, remedy: str) -> None:
        """Take ``finite`` out of the numbers of an update of a step, counted from 1.

        Raises:
          RunError: a number is not finite; names the comparisons and what may help.
        """
        if metrics.pop("finite", 1.0) and all(map(math.isfinite, metrics.values())):
            return
        saved = self.checkpoints.steps()
        raise RunError(
            f"step {step}: the loss or its gradient is not finite (loss {metrics.get('loss')}, gradient norm "
            f"{metrics.get('grad_norm')}), so that nothing was updated; the comparisons: "
            f"{listed([quote(name) for name in ids], most=64)}. "
            + (f"The checkpoint of step {saved[-1]} is kept. " if saved else "")
            + remedy
        )


@contextlib.contextmanager
def open_loop(out: Path, trainer: Trainer, *, progress: bool) -> Iterator[Loop]:
    """Open checkpoints, metrics and progress of a run, and bring its model to where it stood."""
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
    """What `train` or `ppo` leaves.

    Attributes:
      out: the run folder.
      steps: updates made.
      model: the trained model or policy, a Hugging Face folder; None for a run that was stopped before its end.
      summary: what `summary.json` holds; empty for such a run.
      module: of a run that trained a `flax.nnx.Module`, the trained one; the module that was given is as it was.
      stopped_by: the signal that stopped it, as "SIGTERM".
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
    """Draw the curves of a finished run and write its summary, made of the rows of its metrics; a collective."""

    def write() -> dict[str, Any]:
        assert loop.log is not None
        if loop.settings.log.plot:
            try:
                plot_curves(loop.log.rows, loop.out / CURVES, title=loop.out.name)
            except RunError as error:  # the run is whole without the picture
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
