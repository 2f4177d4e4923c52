"""Trains a reward model: data in, steps, validation, checkpoints, and a model out; resumable."""

from __future__ import annotations

import contextlib
import math
import time
from collections.abc import Mapping, Sequence
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import jax
import numpy as np
from jax.sharding import Mesh

from prb_jax.errors import RunError
from prb_jax.scoring.processes import on_first_process, process_index
from prb_jax.scoring.runs import write_json
from prb_jax.sharding import make_mesh
from prb_jax.training.config import Config, load_settings
from prb_jax.training.data import Examples, Order, Shapes, choose_shapes
from prb_jax.training.interruption import Interruption, watch_signals
from prb_jax.training.logs import MetricsLog
from prb_jax.training.model import Trainer, make_trainer
from prb_jax.training.progress import Display, Speed, show_training
from prb_jax.training.record import run_inputs, run_session
from prb_jax.training.run import (
    CHECKPOINTS,
    MODEL,
    SUMMARY,
    check_training_folder,
    is_finished,
    open_training,
    read_summary,
)
from prb_jax.training.settings import TrainSettings
from prb_jax.training.splits import TrainingData, read_training_data, user_weights
from prb_jax.training.start import start_from
from prb_jax.training.state import Checkpoints
from prb_jax.training.step import Extras
from prb_jax.training.utilisation import device_peak, training_flops
from prb_jax.training.validation import Validation, validate
from prb_jax.trees.batches import TreeBatch

_IDS_SHOWN = 64


@dataclass(frozen=True)
class TrainResult:
    """What `train` leaves.

    Attributes:
      out: the run folder.
      steps: updates made.
      model: the trained model, a Hugging Face folder; None for a run that was stopped before its end.
      summary: what `summary.json` holds; empty for such a run.
      stopped_by: the signal that stopped it, as "SIGTERM".
    """

    out: Path
    steps: int
    model: Path | None = None
    summary: dict[str, Any] = field(default_factory=dict)
    stopped_by: str | None = None


def train(
    config: Config,
    *,
    out: str | Path,
    overrides: Sequence[str] = (),
    progress: bool = True,
    command: Sequence[str] = (),
) -> TrainResult:
    """Trains a reward model and writes it to `out`; the same call continues a run that was killed.

    It is refused where anything that decides the result differs from what `out` was started with: the
    settings, the model's files, the data's contents, the versions of the libraries that compute. The mesh,
    the devices, `batch.tokens`, and what is kept and logged may differ.

    Args:
      config: a config file, a ConfigDict (`prb_jax.training.config.default_config`), a mapping of keys, or
        settings.
      out: the run folder; see `prb_jax.training.run`.
      overrides: `key=value`, as on the command line.
      progress: shows progress on standard error.
      command: the command line, for the record.

    Raises:
      RunError: a config that cannot be; `out` cannot be used, is full, or holds another run; a loss that is
        not finite (naming the comparisons).
      DataError: the data cannot be used.
      CheckpointError, MeshError: the model cannot be loaded.
    """
    settings = load_settings(config, overrides)
    path = Path(out)
    on_first_process(lambda: check_training_folder(path))
    mesh = make_mesh(settings.mesh)
    data = read_training_data(settings)
    start = start_from(settings, data.train, out=path)
    inputs = run_inputs(settings, data, start)
    with contextlib.ExitStack() as stack:

        def open_folder() -> bool:
            session = run_session(settings, mesh)
            notes = {"command": list(command), "model": start.name}
            stack.enter_context(open_training(path, inputs=inputs, session=session, notes=notes))
            return is_finished(path)

        if on_first_process(open_folder):
            summary = on_first_process(lambda: read_summary(path))
            return TrainResult(path, settings.steps, path / MODEL, summary)
        run = _Run(settings, path, mesh, data, make_trainer(settings, start, data, mesh=mesh))
        return run.go(progress=progress)


@dataclass(eq=False)
class _Run:
    """One start of a run: everything between its folder and its end."""

    settings: TrainSettings
    out: Path
    mesh: Mesh
    data: TrainingData
    trainer: Trainer

    def go(self, *, progress: bool) -> TrainResult:
        examples = self._examples()
        order = Order(len(examples.comparisons), self.settings.batch.comparisons, self.settings.seed)
        shapes = self._shapes(examples, order)
        first = process_index() == 0
        with contextlib.ExitStack() as stack:
            messages: list[str] = []
            checkpoints = Checkpoints(
                self.out / CHECKPOINTS,
                keep_last=self.settings.checkpoint.keep_last,
                keep_best=self.settings.checkpoint.keep_best,
                say=messages.append,
            )
            stack.callback(checkpoints.close)
            done = self.trainer.begin(checkpoints)
            shown = show_training(total=self.settings.steps, done=done, enabled=progress and first)
            display = stack.enter_context(shown)
            say = display.say if first else lambda text: None
            for message in messages:
                say(message)
            if done:
                say(f"continued from the checkpoint of step {done}")
            interruption = stack.enter_context(watch_signals())
            log = None
            if first:
                log = MetricsLog(
                    self.out, step=done, options=self.settings.log, settings=self.trainer.flat_settings
                )
                stack.callback(log.close)
            loop = _Loop(self, examples, order, shapes, checkpoints, display, log, interruption)
            stopped = loop.run(done)
            if stopped is not None:
                say(
                    f"{stopped}: saved at step {loop.step} of {self.settings.steps}; the same command continues the run"
                )
                return TrainResult(self.out, loop.step, stopped_by=stopped)
            summary = self._finish(checkpoints, log, loop, display)
            return TrainResult(self.out, self.settings.steps, self.out / MODEL, summary)

    def _examples(self) -> Examples:
        train = self.data.train
        weighted = self.settings.loss.user_weights
        return Examples(
            comparisons=train,
            trees=self.trainer.encode(train),
            weights=user_weights(train) if weighted else np.ones(len(train), np.float32),
            users=self.trainer.user_rows(train),
        )

    def _shapes(self, examples: Examples, order: Order) -> Shapes:
        options = self.trainer.scorer.shape_options()
        # A backward pass holds the activations of all layers: less at a time than in scoring.
        given = self.settings.batch.tokens
        tokens = options.tokens_per_batch // 2 if given is None else given * options.divisor
        return choose_shapes(
            examples.trees,
            order,
            tokens=tokens,
            divisor=options.divisor,
            multiple=options.multiple,
            max_buckets=self.settings.batch.max_buckets,
            attention_length=options.attention_length,
        )

    def _finish(
        self, checkpoints: Checkpoints, log: MetricsLog | None, loop: _Loop, display: Display
    ) -> dict[str, Any]:
        """Exports the model, draws the curves and writes the summary."""
        checkpoints.wait()
        chosen = self.settings.steps
        best = checkpoints.best()
        if self.settings.export.checkpoint == "best" and best is not None and best != chosen:
            self.trainer.load_step(checkpoints, best)
            chosen = best
        if not on_first_process(lambda: (self.out / MODEL).exists()):
            self.trainer.export(self.out / MODEL)
        summary: dict[str, Any] = {}
        if log is not None:
            self._draw(log, display)
            summary = _summary(log.rows, self, exported=chosen)
            write_json(self.out / SUMMARY, summary)
        return on_first_process(lambda: summary)

    def _draw(self, log: MetricsLog, display: Display) -> None:
        if not self.settings.log.plot:
            return
        from prb_jax.training.curves import plot_curves

        try:
            plot_curves(log.rows, self.out / "learning_curves.png", title=self.out.name)
        except RunError as error:  # a picture less is no reason to fail
            display.say(f"no picture: {error}")


@dataclass(frozen=True)
class _HostStep:
    """One step, ready for the device."""

    members: np.ndarray
    users: np.ndarray | None
    batches: list[tuple[TreeBatch, Extras]]
    tokens: int
    flops: float


@dataclass(frozen=True)
class _Dispatched:
    """A step that the device is working on."""

    number: int
    host: _HostStep
    metrics: Mapping[str, jax.Array]


class _Loop:
    """Steps until the end, or until a signal."""

    def __init__(
        self,
        run: _Run,
        examples: Examples,
        order: Order,
        shapes: Shapes,
        checkpoints: Checkpoints,
        display: Display,
        log: MetricsLog | None,
        interruption: Interruption,
    ) -> None:
        self.settings, self.trainer = run.settings, run.trainer
        self.data, self.mesh = run.data, run.mesh
        self.examples, self.order, self.shapes = examples, order, shapes
        self.checkpoints, self.display, self.log = checkpoints, display, log
        self.interruption = interruption
        self.speed = Speed()
        self.step = 0
        self._flops: dict[int, float] = {}
        self._pending: _Dispatched | None = None
        peak = device_peak(self.settings.dtype) if log is not None else 1.0
        self._peak = peak * self.mesh.size

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
                if self.data.validation and (last or self.step % settings.validation_every == 0):
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
        users, slots = self.trainer.step_users(self.examples, members, step)
        microbatches = self.shapes.deal(members.tolist(), self.examples.trees)
        return _HostStep(
            members=members,
            users=users,
            batches=[self.examples.batch(one, slots=slots) for one in microbatches],
            tokens=sum(self.examples.trees[member].tokens for member in members),
            flops=sum(self._flops_of(member) for member in members.tolist()),
        )

    def _flops_of(self, member: int) -> float:
        if member not in self._flops:
            tree, config = self.examples.trees[member], self.trainer.start.config
            self._flops[member] = training_flops([tree], config, self.settings.tuning)
        return self._flops[member]

    def _dispatch(self, host: _HostStep) -> None:
        metrics = self.trainer.step(host.batches, host.users)
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
        self.speed.step(pairs=len(host.members), tokens=host.tokens, flops=host.flops)
        steps, pairs, tokens, flops = self.speed.rates()
        row = {
            "step": dispatched.number,
            "epoch": self.order.epoch_of(dispatched.number),
            **values,
            "tokens": host.tokens,
            "steps_per_second": steps,
            "pairs_per_second": pairs,
            "tokens_per_second": tokens,
            "mfu": flops / self._peak,
        }
        self.display.update(dispatched.number, row)
        if self.log is not None:
            self.log.write(row)

    def _not_finite(self, dispatched: _Dispatched, values: Mapping[str, float]) -> RunError:
        ids = [self.examples.comparisons[member].id for member in dispatched.host.members.tolist()]
        shown = ", ".join(repr(name) for name in ids[:_IDS_SHOWN])
        more = f" and {len(ids) - _IDS_SHOWN} more" if len(ids) > _IDS_SHOWN else ""
        kept = self.checkpoints.steps()
        return RunError(
            f"step {dispatched.number}: the loss or its gradient is not finite (loss {values.get('loss')}, gradient "
            f"norm {values.get('grad_norm')}); the comparisons of this step: {shown}{more}. "
            + (f"The checkpoint of step {kept[-1]} is kept. " if kept else "")
            + "A lower optimizer.learning_rate, dtype=float32, or other margins may help"
        )

    def _validate(self) -> Validation:
        with self.speed.pause():
            result = validate(self.trainer, self.data.validation, settings=self.settings)
        row = {f"validation_{name}": value for name, value in result.numbers().items()}
        self.display.update(self.step, row)
        if self.log is not None:
            self.log.write({"step": self.step, **row})
        return result

    def _save(self, result: Validation | None) -> None:
        facts: dict[str, Any] = {"time": time.time(), "position": self.step * self.order.per_step}
        if result is not None:
            metric = self.settings.validation.metric
            facts["validation"] = result.numbers()
            # Smaller is better.
            facts["value"] = result.loss if metric == "loss" else -result.accuracy
        self.trainer.save(self.checkpoints, self.step, facts)


def _summary(rows: Sequence[Mapping[str, Any]], run: _Run, *, exported: int) -> dict[str, Any]:
    """The numbers of a finished run, JSON-ready."""
    steps = [row for row in rows if "loss" in row]
    tail = steps[-max(1, len(steps) // 10) :]
    validations = [row for row in rows if "validation_loss" in row]
    chosen = [row for row in validations if row["step"] == exported]

    def of(row: Mapping[str, Any]) -> dict[str, Any]:
        named = {name: value for name, value in row.items() if name != "step"}
        return {name.removeprefix("validation_"): value for name, value in named.items()}

    return {
        "steps": run.settings.steps,
        "exported_step": exported,
        "train_comparisons": len(run.data.train),
        "validation_comparisons": len(run.data.validation),
        "validation_split_by": run.data.split_by,
        "truncated": run.trainer.truncated,
        "pairs_seen": run.settings.steps * run.settings.batch.comparisons,
        "tokens_seen": int(sum(row["tokens"] for row in steps)),
        "parameters": run.trainer.parameters,
        "trained_parameters": run.trainer.trained_parameters,
        "last_tenth": {
            name: float(np.mean([row[name] for row in tail])) for name in ("loss", "accuracy", "margin")
        },
        "validation": of(chosen[-1]) if chosen else None,
    }
