"""Trains a reward model: data in, steps, validation, checkpoints, and a model out; resumable."""

from __future__ import annotations

import contextlib
from collections.abc import Callable, Mapping, Sequence
from dataclasses import asdict
from pathlib import Path
from typing import Any

import numpy as np

from prb_jax.errors import RunError
from prb_jax.models.flops import device_peak
from prb_jax.platform.processes.sharing import on_first_process
from prb_jax.platform.sharding import make_mesh
from prb_jax.records.intake import Records
from prb_jax.runs.training import MODEL, TRAINING
from prb_jax.scoring.scorer import ScoresTokens
from prb_jax.text.view import TrainedView
from prb_jax.training import PASSES
from prb_jax.training.config import Config, load_settings
from prb_jax.training.data import Examples, Order, TrainingData, UserOrder, read_training_data
from prb_jax.training.loop import Loop, TrainResult, open_loop, prepared_ahead, run_steps, write_summary
from prb_jax.training.modules import ModuleTrainer, start_from_module, trained_module
from prb_jax.training.record import check_start, open_run, run_lengths, session_on, train_inputs
from prb_jax.training.start import start_from
from prb_jax.training.trainer import RewardTrainer, StepBatch
from prb_jax.trees.tree import EQUAL_SIDES, EqualSides, has_equal_sides


def train(
    config: Config | None = None,
    *,
    out: str | Path,
    model: ScoresTokens | None = None,
    tokenizer: Any = None,
    wrt: Any = None,
    data: Records | None = None,
    validation: Records | None = None,
    overrides: Sequence[str] = (),
    progress: bool = True,
) -> TrainResult:
    """Trains a reward model and writes it to `out`; the same call continues a run that was killed.

    It is refused where anything that decides the result differs from what `out` was started with: the
    settings, the model's files, the data's contents, the versions of the libraries that compute. The mesh,
    the devices, `batch.tokens`, and what is kept and logged may differ, and `steps` may be more than before: see
    `prb_jax.training.record`.

    Args:
      config: a config file, a ConfigDict (`prb_jax.training.config.default_config`), a mapping of keys, or
        settings; None for the defaults.
      out: the run folder; see `prb_jax.training.record`.
      model: a `flax.nnx.Module` with the method of `prb_jax.scoring.ScoresTokens`, in place of the config's `model`.
        All its floating-point `nnx.Param` are trained, in evaluation mode. See `prb_jax.training.modules`.
      wrt: of this module, a filter of `nnx` for what is trained, such as `nnx.LoRAParam`; `nnx.Param` if not given.
      tokenizer: of this module: a folder, hub id or transformers tokenizer, in place of the config's `tokenizer`.
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
    objects = {"data": data, "model": model}
    given = tuple(name for name, value in objects.items() if value is not None)
    settings = load_settings(config, overrides, given=given)
    path = Path(out)
    check_start(TRAINING, path, settings)
    lengths = tuple(on_first_process(lambda: run_lengths(path, settings.steps)))
    mesh = make_mesh(settings.mesh)
    read = read_training_data(settings, data=data, validation=validation)
    if model is None:
        for name, value in (("tokenizer", tokenizer), ("wrt", wrt)):
            if value is not None:
                raise RunError(
                    f"{name}: is of a module given as model; a named one is described by the config alone"
                )
        start = start_from(settings, read.train.comparisons, out=path)
    else:
        start = start_from_module(model, settings, tokenizer=tokenizer, wrt=wrt, mesh=mesh)
    inputs = train_inputs(settings, read, start, lengths=lengths)
    notes = {"model": start.name, "view": TrainedView(settings.view, settings.method).to_json()}
    with contextlib.ExitStack() as stack:
        opened = open_run(
            TRAINING, path, inputs=inputs, session=session_on(mesh, settings, start.config), notes=notes
        )
        summary = stack.enter_context(opened)
        if summary is not None:
            return TrainResult(
                path, settings.steps, path / MODEL, summary, module=trained_module(start, path)
            )

        kind = RewardTrainer if model is None else ModuleTrainer
        trainer = kind(settings, start, mesh=mesh, data=read.train.known, out=path, lengths=lengths)
        held_out, examples = trainer.encode_held_out(read.validation), trainer.encode(read.train)
        equal = _equal_sides(examples)
        per_step, seed = settings.batch.comparisons, settings.seed
        if settings.batch_by == "user":
            order: Order = UserOrder(examples.known, per_step=per_step, seed=seed)
        else:
            order = Order(len(examples), per_step, seed)
        trainer.plan(examples, order)
        loop = stack.enter_context(open_loop(path, trainer, progress=progress))
        _say_how(loop, lengths, order, equal)
        with loop.speed.pause():
            peak = mesh.size * (1.0 if loop.log is None else device_peak(settings.dtype))

        # One thread makes the next batch while the device works on this one.
        ahead = prepared_ahead(
            lambda step: trainer.batch(order.step(step), step=step), range(loop.step, settings.steps)
        )
        batches = stack.enter_context(contextlib.closing(ahead))

        def step_fn(step: int, batch: StepBatch) -> Callable[[], Mapping[str, float]]:
            metrics, members, tokens = trainer.step(batch), batch.members, batch.tokens
            flops = PASSES[settings.tuning] * batch.flops

            def finish() -> dict[str, float]:
                values = {name: float(np.asarray(value)) for name, value in metrics.items()}
                ids = [examples.known[member].id for member in members.tolist()]
                remedy = "A lower optimizer.learning_rate, dtype=float32, or other margins may help"
                loop.check_finite(values, ids, step=step + 1, remedy=remedy)
                rates = loop.rates(pairs=len(members), tokens=tokens, flops=flops)
                mfu = rates.pop("flops_per_second") / peak
                epoch = order.epoch_of(step + 1)
                return {"step": step + 1, "epoch": epoch, **values, "tokens": tokens, **rates, "mfu": mfu}

            return finish

        run_steps(
            loop,
            batches,
            step_fn,
            facts=lambda step: {"position": order.seen(step)},
            validates_at=lambda step: len(held_out) > 0 and settings.validates_at(step, lengths),
            validate=lambda: trainer.validate(held_out),
        )
        if loop.stopped_by is not None:
            return TrainResult(path, loop.step, stopped_by=loop.stopped_by)
        exported, best = settings.steps, loop.checkpoints.best()
        if settings.export.checkpoint == "best" and best is not None and best != exported:
            trainer.load_step(loop.checkpoints, best)
            exported = best
        if not on_first_process(lambda: (path / MODEL).exists()):
            trainer.export(path / MODEL)
        summary = write_summary(
            loop, TRAINING, lambda rows: _summary(rows, trainer, read, order, equal, exported=exported)
        )
        return TrainResult(path, settings.steps, path / MODEL, summary, module=trained_module(start, path))


def _equal_sides(examples: Examples) -> EqualSides | None:
    """Return the comparisons that teach nothing; None if there are none, or if the data are tokenised on demand."""
    if not isinstance(examples.trees, list):
        return None
    pairs = zip(examples.known, examples.trees, strict=True)
    return EqualSides.of(one.id for one, tree in pairs if has_equal_sides(tree.equal_to, one.labels or ()))


def _say_how(loop: Loop, lengths: Sequence[int], order: Order, equal: EqualSides | None) -> None:
    if len(lengths) > 1:
        loop.say(
            f"lengthened from {lengths[-2]} steps to {lengths[-1]}: the learning rate follows the schedule of "
            f"{lengths[-2]} steps up to there, and that of {lengths[-1]} after it"
        )
    if equal is not None:
        loop.say(f"{equal}, of which nothing can be learned: remove them")
    if isinstance(order, UserOrder) and order.split:
        loop.say(
            f"batch_by=user: split over several steps: {order.split} of the users, who have more than "
            f"{order.per_step} comparisons (batch.comparisons)"
        )


def _summary(
    rows: Sequence[Mapping[str, Any]],
    trainer: RewardTrainer,
    data: TrainingData,
    order: Order,
    equal: EqualSides | None,
    *,
    exported: int,
) -> dict[str, Any]:
    """The numbers of a finished run, JSON-ready."""
    steps = [row for row in rows if "loss" in row]
    tail = steps[-max(1, len(steps) // 10) :]
    validations = [row for row in rows if "validation_loss" in row and row["step"] == exported]
    chosen = {
        name.removeprefix("validation_"): value for row in validations[-1:] for name, value in row.items()
    }
    chosen.pop("step", None)
    return {
        "steps": trainer.settings.steps,
        **({"lengths": list(trainer.lengths)} if len(trainer.lengths) > 1 else {}),
        "exported_step": exported,
        "train_comparisons": len(data.train),
        "validation_comparisons": len(data.validation),
        "validation_split_by": data.split_by,
        "truncated": trainer.truncated,
        **({} if equal is None else {EQUAL_SIDES: asdict(equal)}),
        "users": len(trainer.method.users) or None,
        **({"split_users": order.split} if isinstance(order, UserOrder) else {}),
        "pairs_seen": order.seen(trainer.settings.steps),
        "tokens_seen": int(sum(row["tokens"] for row in steps)),
        "parameters": trainer.parameters,
        "trained_parameters": trainer.trained_parameters,
        "last_tenth": {
            name: float(np.mean([row[name] for row in tail])) for name in ("loss", "accuracy", "margin")
        },
        "validation": chosen or None,
    }
