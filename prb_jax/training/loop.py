"""Step after step: batches to the device, numbers back, validations and checkpoints in between."""

from __future__ import annotations

import math
import time
from collections.abc import Mapping
from concurrent.futures import ThreadPoolExecutor
from dataclasses import asdict, dataclass
from typing import Any

import jax
import numpy as np

from prb_jax.errors import RunError, listed, quote
from prb_jax.personal.method import StepRows
from prb_jax.runs.progress import Display
from prb_jax.training.data import Examples
from prb_jax.training.interruption import Interruption
from prb_jax.training.logs import MetricsLog
from prb_jax.training.microbatches import Microbatch, Microbatches
from prb_jax.training.order import StepOrder
from prb_jax.training.progress import Board
from prb_jax.training.saved_states import Checkpoints
from prb_jax.training.splits import Part
from prb_jax.training.trainer import Trainer
from prb_jax.training.utilisation import PASSES, device_peak
from prb_jax.training.validation import Validation, validate


@dataclass(frozen=True)
class _HostStep:
    """One step, ready for the device."""

    members: np.ndarray
    rows: StepRows
    batches: list[Microbatch]
    tokens: int
    flops: float


@dataclass(frozen=True)
class _Dispatched:
    """A step that the device is working on."""

    number: int
    host: _HostStep
    metrics: Mapping[str, jax.Array]


class Loop:
    """Steps until the end, or until a signal.

    Attributes:
      step: how many are done.
    """

    def __init__(
        self,
        trainer: Trainer,
        examples: Examples,
        order: StepOrder,
        microbatches: Microbatches,
        *,
        validation: Part,
        checkpoints: Checkpoints,
        board: Board,
        display: Display,
        log: MetricsLog | None,
        interruption: Interruption,
    ) -> None:
        self.settings, self.trainer = trainer.settings, trainer
        self.examples, self.order, self.microbatches = examples, order, microbatches
        self.validation = validation
        self.checkpoints, self.log = checkpoints, log
        self.board, self.display, self.speed = board, display, board.speed
        self.interruption = interruption
        self.step = 0
        self._pending: _Dispatched | None = None
        with self.speed.pause():
            peak = device_peak(self.settings.dtype) if log is not None else 1.0
        self._peak = peak * trainer.mesh.size

    def run(self, done: int) -> str | None:
        """From step `done` to the end; the name of the signal that stopped it, if one did."""
        self.step = done
        settings = self.settings
        # One thread prepares the arrays of the next step while the device works on this one.
        with ThreadPoolExecutor(1, thread_name_prefix="batch") as pool:
            upcoming = pool.submit(self._prepare, done) if done < settings.steps else None
            while self.step < settings.steps:
                assert upcoming is not None
                host = upcoming.result()
                if self.step + 1 < settings.steps:
                    upcoming = pool.submit(self._prepare, self.step + 1)
                self._dispatch(host)
                self.step += 1
                last = self.step == settings.steps
                result = None
                if self.validation.known and settings.validates_at(self.step, self.trainer.lengths):
                    self._flush()
                    result = self._validate()
                stop = self.interruption.reached(self.step)
                if result is not None or last or stop or self.step % settings.checkpoint_every == 0:
                    self._flush()
                    with self.speed.pause():
                        self._save(result)
                if stop and not last:
                    self.checkpoints.wait()
                    return stop
        return None

    def _prepare(self, step: int) -> _HostStep:
        members = self.order.step(step)
        self.examples.ahead(members)
        rows = self.trainer.method.rows_of_step(self.examples.rows, members, step=step)
        batches = self.microbatches.of_step(members, rows.slots)
        return _HostStep(
            members=members,
            rows=rows,
            batches=batches,
            tokens=sum(self.examples.trees[member].tokens for member in members),
            flops=PASSES[self.settings.tuning] * sum(each.flops for each in batches),
        )

    def _dispatch(self, host: _HostStep) -> None:
        metrics = self.trainer.step(host.batches, host.rows)
        before, self._pending = self._pending, _Dispatched(self.step + 1, host, metrics)
        if before is not None:
            self._finish_step(before)

    def _flush(self) -> None:
        """Waits for the last step."""
        if self._pending is not None:
            pending, self._pending = self._pending, None
            self._finish_step(pending)

    def _finish_step(self, dispatched: _Dispatched) -> None:
        values = {name: float(np.asarray(value)) for name, value in dispatched.metrics.items()}
        host = dispatched.host
        if not values.pop("finite", 1.0) or not all(math.isfinite(value) for value in values.values()):
            raise self._not_finite(dispatched, values)
        self.speed.count(steps=1, pairs=len(host.members), tokens=host.tokens, flops=host.flops)
        row = {
            "step": dispatched.number,
            "epoch": self.order.epoch_of(dispatched.number),
            **values,
            "tokens": host.tokens,
            **{f"{name}_per_second": self.speed.rate(name) for name in ("steps", "pairs", "tokens")},
            "mfu": self.speed.rate("flops") / self._peak,
        }
        self._report(dispatched.number, row)

    def _not_finite(self, dispatched: _Dispatched, values: Mapping[str, float]) -> RunError:
        ids = [quote(self.examples.comparisons[member].id) for member in dispatched.host.members.tolist()]
        kept = self.checkpoints.steps()
        return RunError(
            f"step {dispatched.number}: the loss or its gradient is not finite (loss {values.get('loss')}, gradient "
            f"norm {values.get('grad_norm')}); the comparisons of this step: {listed(ids, most=64)}. "
            + (f"The checkpoint of step {kept[-1]} is kept. " if kept else "")
            + "A lower optimizer.learning_rate, dtype=float32, or other margins may help"
        )

    def _validate(self) -> Validation:
        with self.speed.pause():
            result = validate(self.trainer, self.validation, settings=self.settings)
        row = {f"validation_{name}": value for name, value in asdict(result).items()}
        self._report(self.step, {"step": self.step, **row})
        return result

    def _report(self, step: int, row: Mapping[str, float]) -> None:
        """Shows the numbers of a step and keeps them."""
        self.board.take(step, row)
        self.display.update()
        if self.log is not None:
            self.log.write(row)

    def _save(self, result: Validation | None) -> None:
        facts: dict[str, Any] = {"time": time.time(), "position": self.order.seen(self.step)}
        if result is not None:
            metric = self.settings.validation.metric
            facts["validation"] = asdict(result)
            # Smaller is better.
            facts["value"] = result.loss if metric == "loss" else -result.accuracy
        if self.log is not None:
            self.log.sync()
        self.trainer.save(self.checkpoints, self.step, facts)
