"""Trains a reward model: data in, steps, validation, checkpoints, and a model out; resumable."""

from __future__ import annotations

import contextlib
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field, replace
from pathlib import Path
from typing import Any

import numpy as np
from jax.sharding import Mesh

from prb_jax.data.records import Records
from prb_jax.data.writing import write_json
from prb_jax.errors import RunError, short_repr
from prb_jax.processes.agreement import check_agreement
from prb_jax.processes.sharing import on_first_process, process_index
from prb_jax.runs.command_line import command_line
from prb_jax.runs.progress import Display, show_progress
from prb_jax.runs.weights_and_biases import check_wandb
from prb_jax.scoring.prepared_tokens import StoredComparisons, stored_comparisons
from prb_jax.sharding import make_mesh
from prb_jax.text.view import TrainedView
from prb_jax.training.config import Config, flat_settings, load_settings
from prb_jax.training.data import Examples, TreesOnDemand
from prb_jax.training.folder import (
    CHECKPOINTS,
    MODEL,
    SUMMARY,
    check_training_folder,
    is_finished,
    open_training,
    read_summary,
    run_lengths,
)
from prb_jax.training.interruption import watch_signals
from prb_jax.training.logs import MetricsLog
from prb_jax.training.loop import Loop
from prb_jax.training.microbatches import Microbatches, plan_microbatches
from prb_jax.training.order import Order, StepOrder, UserOrder
from prb_jax.training.progress import Board
from prb_jax.training.record import run_inputs, run_session, shared_settings
from prb_jax.training.saved_states import Checkpoints
from prb_jax.training.settings import TrainSettings
from prb_jax.training.splits import Part, TrainingData, read_training_data, user_weights
from prb_jax.training.start import start_from
from prb_jax.training.trainer import Trainer, make_trainer
from prb_jax.trees.tree import Tree


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

    __repr__ = short_repr


def train(
    config: Config,
    *,
    out: str | Path,
    data: Records | None = None,
    validation: Records | None = None,
    overrides: Sequence[str] = (),
    progress: bool = True,
) -> TrainResult:
    """Trains a reward model and writes it to `out`; the same call continues a run that was killed.

    It is refused where anything that decides the result differs from what `out` was started with: the
    settings, the model's files, the data's contents, the versions of the libraries that compute. The mesh,
    the devices, `batch.tokens`, and what is kept and logged may differ, and `steps` may be more than before: see
    `prb_jax.training.folder`.

    Args:
      config: a config file, a ConfigDict (`prb_jax.training.config.default_config`), a mapping of keys, or
        settings.
      out: the run folder; see `prb_jax.training.folder`.
      data, validation: the records themselves, in place of the config's `data` and `validation.data`, which name
        files and data sets.
      overrides: `key=value`, as on the command line.
      progress: shows progress on standard error.

    Raises:
      RunError: a config that cannot be; `out` cannot be used, is full, or holds another run; a loss that is
        not finite (naming the comparisons).
      DataError: the data cannot be used.
      CheckpointError, MeshError: the model cannot be loaded.
    """
    settings = load_settings(config, overrides, data_given=data is not None)
    path = Path(out)
    on_first_process(lambda: _check_wanted(path, settings.log.wandb))
    # Nothing more is shared before the processes are compared: another one may not train at all.
    check_agreement(shared_settings(settings))
    lengths = tuple(on_first_process(lambda: run_lengths(path, settings.steps)))
    mesh = make_mesh(settings.mesh)
    found = read_training_data(settings, data=data, validation=validation)
    start = start_from(settings, found.train, out=path)
    inputs = run_inputs(settings, found, start, lengths=lengths)
    check_agreement(inputs)
    with contextlib.ExitStack() as stack:

        def open_folder() -> bool:
            session = run_session(settings, mesh)
            view = TrainedView(settings.view, settings.method)
            notes = {"command": command_line(), "model": start.name, "view": view.to_json()}
            stack.enter_context(open_training(path, inputs=inputs, session=session, notes=notes))
            return is_finished(path)

        if on_first_process(open_folder):
            summary = on_first_process(lambda: read_summary(path))
            return TrainResult(path, settings.steps, path / MODEL, summary)
        trainer = make_trainer(
            settings, start, mesh=mesh, data=found.train_part.known, out=path, lengths=lengths
        )
        run = _Run(settings, path, mesh, found, trainer)
        return run.go(progress=progress)


def _check_wanted(out: Path, wandb: str | None) -> None:
    check_training_folder(out)
    if wandb is not None:
        check_wandb(f"log.wandb={wandb}")


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
        order = self._order(examples)
        microbatches = self._microbatches(examples, order)
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
            board = Board(self.settings.steps, done)
            shown = show_progress(f"training {self.out}", board, enabled=progress and first)
            display = stack.enter_context(shown)
            say = display.say if first else lambda text: None
            for message in messages:
                say(message)
            if done:
                say(f"continued from the checkpoint of step {done}")
            if len(lengths := self.trainer.lengths) > 1:
                say(
                    f"lengthened from {lengths[-2]} steps to {lengths[-1]}: the learning rate follows the schedule of "
                    f"{lengths[-2]} steps up to there, and that of {lengths[-1]} after it"
                )
            if isinstance(order, UserOrder) and order.split:
                say(
                    f"batch_by=user: split over several steps: {order.split} of the users, who have more than "
                    f"{order.per_step} comparisons (batch.comparisons)"
                )
            interruption = stack.enter_context(watch_signals())
            log = None
            if first:
                log = MetricsLog(
                    self.out, step=done, options=self.settings.log, settings=flat_settings(self.settings)
                )
                stack.callback(log.close)
            loop = Loop(
                self.trainer,
                examples,
                order,
                microbatches,
                validation=self._tokenised(self.data.validation_part),
                checkpoints=checkpoints,
                board=board,
                display=display,
                log=log,
                interruption=interruption,
            )
            stopped = loop.run(done)
            if stopped is not None:
                say(
                    f"{stopped}: saved at step {loop.step} of {self.settings.steps}; the same command continues the run"
                )
                return TrainResult(self.out, loop.step, stopped_by=stopped)
            summary = self._finish(checkpoints, log, display, order)
            return TrainResult(self.out, self.settings.steps, self.out / MODEL, summary)

    def _tokenised(self, part: Part) -> Part:
        """The part by its tokens, where they were prepared."""
        if part.prepared is None:
            return part
        folder, split = part.prepared
        reader, view = self.trainer.reader, self.settings.view
        stored = stored_comparisons(part.comparisons, folder, reader, view, split=split)
        return part if stored is None else replace(part, comparisons=stored)

    def _trees(self, part: Part) -> Sequence[Tree]:
        comparisons = part.comparisons
        if isinstance(comparisons, list):
            return self.trainer.encode(comparisons)
        if not isinstance(comparisons, StoredComparisons):
            self.trainer.truncated = None  # not known before all of them are tokenised
            return TreesOnDemand(comparisons, self.trainer.encode_here)
        store, places = comparisons.store, comparisons.places
        self.trainer.truncated = int(store.truncated()[places].sum())
        shapes = store.shapes()[places] + (self.trainer.method.tokens, 0, 0)
        return TreesOnDemand(comparisons, self.trainer.encode_here, shapes=shapes)

    def _examples(self) -> Examples:
        part = self._tokenised(self.data.train_part)
        train = part.known
        weighted = self.settings.loss.user_weights
        return Examples(
            comparisons=train,
            trees=self._trees(part),
            weights=user_weights(train) if weighted else np.ones(len(train), np.float32),
            rows=self.trainer.method.rows(train),
        )

    def _order(self, examples: Examples) -> StepOrder:
        per_step, seed = self.settings.batch.comparisons, self.settings.seed
        if self.settings.batch_by == "user":
            return UserOrder(examples.comparisons, per_step=per_step, seed=seed)
        return Order(len(examples.comparisons), per_step, seed)

    def _microbatches(self, examples: Examples, order: StepOrder) -> Microbatches:
        return plan_microbatches(
            examples,
            order,
            config=self.trainer.start.config,
            mesh=self.mesh,
            streams=self.trainer.streams,
            batch=self.settings.batch,
            steps=self.trainer.lengths[0],  # a run that is lengthened keeps its shapes, and so its bits
            remat=self.settings.remat,
            prompt_tokens=self.trainer.method.tokens,
        )

    def _finish(
        self, checkpoints: Checkpoints, log: MetricsLog | None, display: Display, order: StepOrder
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
            summary = _summary(log.rows, self, exported=chosen, order=order)
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


def _summary(
    rows: Sequence[Mapping[str, Any]], run: _Run, *, exported: int, order: StepOrder
) -> dict[str, Any]:
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
        **({"lengths": list(run.trainer.lengths)} if len(run.trainer.lengths) > 1 else {}),
        "exported_step": exported,
        "train_comparisons": len(run.data.train),
        "validation_comparisons": len(run.data.validation),
        "validation_split_by": run.data.split_by,
        "truncated": run.trainer.truncated,
        "users": len(run.trainer.method.users) or None,
        **({"split_users": order.split} if isinstance(order, UserOrder) else {}),
        "pairs_seen": order.seen(run.settings.steps),
        "tokens_seen": int(sum(row["tokens"] for row in steps)),
        "parameters": run.trainer.parameters,
        "trained_parameters": run.trainer.trained_parameters,
        "last_tenth": {
            name: float(np.mean([row[name] for row in tail])) for name in ("loss", "accuracy", "margin")
        },
        "validation": of(chosen[-1]) if chosen else None,
    }
