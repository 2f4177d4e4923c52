"""Trains a reward model: data in, steps, validation, checkpoints, and a model out; resumable."""

from __future__ import annotations

import contextlib
import math
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any

import numpy as np

from prb_jax.data.records import Records
from prb_jax.data.writing import write_json
from prb_jax.errors import RunError, listed, quote
from prb_jax.models.flops import device_peak
from prb_jax.personal.method import StepRows
from prb_jax.processes.agreement import check_agreement
from prb_jax.processes.sharing import on_first_process
from prb_jax.runs.command_line import command_line
from prb_jax.runs.weights_and_biases import check_wandb
from prb_jax.scoring.prepared_tokens import StoredComparisons, stored_comparisons
from prb_jax.sharding import make_mesh
from prb_jax.sources.large import Joined
from prb_jax.text.view import TrainedView
from prb_jax.training import PASSES
from prb_jax.training.config import Config, load_settings
from prb_jax.training.curves import draw_learning_curves
from prb_jax.training.data import Examples, TreesOnDemand
from prb_jax.training.folder import (
    MODEL,
    SUMMARY,
    check_training_folder,
    is_finished,
    open_training,
    read_summary,
    run_lengths,
)
from prb_jax.training.loop import StepLoop, TrainResult, open_loop, prepared_ahead, run_steps
from prb_jax.training.microbatches import Microbatch, plan_microbatches
from prb_jax.training.order import Order, StepOrder, UserOrder
from prb_jax.training.record import run_inputs, run_session, shared_settings
from prb_jax.training.saved_states import Checkpoints
from prb_jax.training.settings import TrainSettings
from prb_jax.training.splits import Part, TrainingData, read_training_data, user_weights
from prb_jax.training.start import start_from
from prb_jax.training.trainer import Trainer
from prb_jax.trees.tree import Tree


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
    parts = read_training_data(settings, data=data, validation=validation)
    start = start_from(settings, parts.train, out=path)
    inputs = run_inputs(settings, parts, start, lengths=lengths)
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
        trainer = Trainer(settings, start, mesh=mesh, data=parts.train_part.known, out=path, lengths=lengths)
        held_out = _tokenised(parts.validation_part, trainer)
        examples = _examples(_tokenised(parts.train_part, trainer), trainer)
        order = _order(examples, settings)
        microbatches = plan_microbatches(
            examples,
            order,
            config=start.config,
            mesh=mesh,
            streams=trainer.streams,
            batch=settings.batch,
            steps=lengths[0],  # a run that is lengthened keeps its shapes, and so its bits
            remat=settings.remat,
            prompt_tokens=trainer.method.tokens,
        )
        kept = settings.checkpoint
        loop = stack.enter_context(
            open_loop(
                path,
                settings,
                trainer.begin,
                keep_last=kept.keep_last,
                keep_best=kept.keep_best,
                progress=progress,
            )
        )
        _say_how(loop, lengths, order)
        with loop.speed.pause():
            peak = mesh.size * (1.0 if loop.log is None else device_peak(settings.dtype))

        def prepare(step: int) -> PreparedStep:
            members = order.step(step)
            examples.ahead(members)
            rows = trainer.method.rows_of_step(examples.rows, members, step=step)
            batches = microbatches.of_step(members, rows.slots)
            tokens = sum(examples.trees[member].tokens for member in members)
            return PreparedStep(step, members, rows, batches, tokens)

        def make_step(batch: PreparedStep) -> Callable[[], Mapping[str, float]]:
            metrics = trainer.step(batch.microbatches, batch.rows)
            return lambda: finish_step(batch, metrics)

        def finish_step(batch: PreparedStep, metrics: Mapping[str, Any]) -> dict[str, float]:
            values, number = (
                {name: float(np.asarray(value)) for name, value in metrics.items()},
                batch.step + 1,
            )
            if not values.pop("finite", 1.0) or not all(map(math.isfinite, values.values())):
                ids = [examples.comparisons[member].id for member in batch.members.tolist()]
                raise _not_finite(number, values, ids, loop.checkpoints.steps())
            flops = PASSES[settings.tuning] * sum(part.flops for part in batch.microbatches)
            loop.speed.count(steps=1, pairs=len(batch.members), tokens=batch.tokens, flops=flops)
            return {
                "step": number,
                "epoch": order.epoch_of(number),
                **values,
                "tokens": batch.tokens,
                **{f"{name}_per_second": loop.speed.rate(name) for name in ("steps", "pairs", "tokens")},
                "mfu": loop.speed.rate("flops") / peak,
            }

        def save(step: int, facts: Mapping[str, Any]) -> None:
            trainer.save(loop.checkpoints, step, {**facts, "position": order.seen(step)})

        batches = stack.enter_context(
            contextlib.closing(prepared_ahead(prepare, range(loop.step, settings.steps)))
        )
        end = run_steps(
            make_step,
            batches,
            loop,
            save=save,
            validates_at=lambda step: bool(held_out.known) and settings.validates_at(step, lengths),
            validate=lambda: trainer.validate(held_out),
        )
        if end.stopped_by is not None:
            return TrainResult(path, end.step, stopped_by=end.stopped_by)
        exported = _export(trainer, loop.checkpoints, path)
        summary = {}
        if loop.log is not None:
            if settings.log.plot:
                draw_learning_curves(loop.log.rows, path, say=loop.say)
            summary = _summary(loop.log.rows, trainer, parts, exported=exported, order=order)
            write_json(path / SUMMARY, summary)
        summary = on_first_process(lambda: summary)
        return TrainResult(path, settings.steps, path / MODEL, summary)


@dataclass(frozen=True)
class PreparedStep:
    """What one step sees, ready for the device: its comparisons, the rows of their users, microbatches and tokens."""

    step: int
    members: np.ndarray
    rows: StepRows
    microbatches: list[Microbatch]
    tokens: int


def _check_wanted(out: Path, wandb: str | None) -> None:
    check_training_folder(out)
    if wandb is not None:
        check_wandb(f"log.wandb={wandb}")


def _tokenised(part: Part, trainer: Trainer) -> Part:
    """The part by its tokens, where they were prepared."""
    if part.prepared is None:
        return part
    folder, split = part.prepared
    assert isinstance(part.comparisons, Joined)
    stored = stored_comparisons(
        folder, trainer.reader, trainer.settings.view, split=split, places=part.comparisons.places
    )
    return part if stored is None else replace(part, comparisons=stored)


def _examples(part: Part, trainer: Trainer) -> Examples:
    comparisons, known = part.comparisons, part.known
    if isinstance(comparisons, list):
        trees: Sequence[Tree] = trainer.encode(comparisons)
    elif isinstance(comparisons, StoredComparisons):
        store, places = comparisons.store, comparisons.places
        trainer.truncated = int(store.truncated()[places].sum())
        shapes = store.shapes()[places] + (trainer.method.tokens, 0, 0)
        trees = TreesOnDemand(comparisons, trainer.encode_here, shapes=shapes)
    else:
        trainer.truncated = None  # not known before all of them are tokenised
        trees = TreesOnDemand(comparisons, trainer.encode_here)
    weighted = trainer.settings.loss.user_weights
    weights = user_weights(known) if weighted else np.ones(len(known), np.float32)
    return Examples(comparisons=known, trees=trees, weights=weights, rows=trainer.method.rows(known))


def _order(examples: Examples, settings: TrainSettings) -> StepOrder:
    per_step, seed = settings.batch.comparisons, settings.seed
    if settings.batch_by == "user":
        return UserOrder(examples.comparisons, per_step=per_step, seed=seed)
    return Order(len(examples.comparisons), per_step, seed)


def _say_how(loop: StepLoop, lengths: Sequence[int], order: StepOrder) -> None:
    if len(lengths) > 1:
        loop.say(
            f"lengthened from {lengths[-2]} steps to {lengths[-1]}: the learning rate follows the schedule of "
            f"{lengths[-2]} steps up to there, and that of {lengths[-1]} after it"
        )
    if isinstance(order, UserOrder) and order.split:
        loop.say(
            f"batch_by=user: split over several steps: {order.split} of the users, who have more than "
            f"{order.per_step} comparisons (batch.comparisons)"
        )


def _not_finite(
    step: int, values: Mapping[str, float], ids: Sequence[str], checkpoints: Sequence[int]
) -> RunError:
    comparisons = listed([quote(name) for name in ids], most=64)
    return RunError(
        f"step {step}: the loss or its gradient is not finite (loss {values.get('loss')}, gradient "
        f"norm {values.get('grad_norm')}); the comparisons of this step: {comparisons}. "
        + (f"The checkpoint of step {checkpoints[-1]} is kept. " if checkpoints else "")
        + "A lower optimizer.learning_rate, dtype=float32, or other margins may help"
    )


def _export(trainer: Trainer, checkpoints: Checkpoints, out: Path) -> int:
    """Write the model of the best checkpoint, or of the last; its step."""
    chosen, best = trainer.settings.steps, checkpoints.best()
    if trainer.settings.export.checkpoint == "best" and best is not None and best != chosen:
        trainer.load_step(checkpoints, best)
        chosen = best
    if not on_first_process(lambda: (out / MODEL).exists()):
        trainer.export(out / MODEL)
    return chosen


def _summary(
    rows: Sequence[Mapping[str, Any]],
    trainer: Trainer,
    data: TrainingData,
    *,
    exported: int,
    order: StepOrder,
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
        "steps": trainer.settings.steps,
        **({"lengths": list(trainer.lengths)} if len(trainer.lengths) > 1 else {}),
        "exported_step": exported,
        "train_comparisons": len(data.train),
        "validation_comparisons": len(data.validation),
        "validation_split_by": data.split_by,
        "truncated": trainer.truncated,
        "users": len(trainer.method.users) or None,
        **({"split_users": order.split} if isinstance(order, UserOrder) else {}),
        "pairs_seen": order.seen(trainer.settings.steps),
        "tokens_seen": int(sum(row["tokens"] for row in steps)),
        "parameters": trainer.parameters,
        "trained_parameters": trainer.trained_parameters,
        "last_tenth": {
            name: float(np.mean([row[name] for row in tail])) for name in ("loss", "accuracy", "margin")
        },
        "validation": of(chosen[-1]) if chosen else None,
    }
