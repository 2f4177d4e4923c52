"""Training of a reward model: data, steps, validation, checkpoints and export; resumable."""

from __future__ import annotations

import contextlib
import functools
import warnings
from collections.abc import Mapping, Sequence
from dataclasses import asdict, replace
from pathlib import Path
from typing import TYPE_CHECKING, Any

import jax
import numpy as np
from jax.sharding import Mesh

from prb_jax.errors import PrbWarning, RunError
from prb_jax.models.decoder import Params
from prb_jax.models.flops import device_peak
from prb_jax.personal.method import NULL, OfUser, TrainedMethod
from prb_jax.platform.processes.sharing import on_first_process
from prb_jax.platform.sharding import as_mesh
from prb_jax.records.intake import Records
from prb_jax.records.options import flat_settings
from prb_jax.runs.training import MODEL, TRAINING
from prb_jax.scoring.batching import Batch
from prb_jax.seams import get
from prb_jax.text.trained_view import TrainedView
from prb_jax.training.config import Config, TrainSettings, load_settings
from prb_jax.training.data import Examples, Order, TrainingData, read_training_data
from prb_jax.training.loop import Loop, TrainResult, open_loop, prepared_ahead, write_summary
from prb_jax.training.losses import Extras, LossParts, comparison_loss
from prb_jax.training.record import check_start, open_run, run_lengths, session_on, train_inputs
from prb_jax.training.start import Start, method_of_run, start_from
from prb_jax.training.step import Metrics, TrainStep, make_train_step
from prb_jax.training.trainer import USER, WEIGHTS, RewardTrainer, StepBatch
from prb_jax.training.weights import TrainedModel, Weights
from prb_jax.trees.tree import EQUAL_SIDES, EqualSides, has_equal_sides

if TYPE_CHECKING:
    from prb_jax.scoring.scorer import ScoresTokens


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
    """Train a reward model and write it to `out`; the same call continues a killed run.

    A call with other inputs than `out` was started with is refused. The inputs are the settings, the model's files,
    the data's contents and the versions of the computing libraries. The mesh, the devices, `batch.tokens`, and
    options for checkpoints and logs may differ, and `steps` may be larger: see `prb_jax.training.record`.

    Args:
      config: Config file, ConfigDict (`prb_jax.training.config.default_config`), mapping of keys, or
        settings; None for the defaults.
      out: Run folder; see `prb_jax.training.record`.
      model: A `flax.nnx.Module` with the method of `prb_jax.scoring.scorer.ScoresTokens`; replaces the config's
        `model`. All its floating-point `nnx.Param` are trained, in evaluation mode. See `prb_jax.training.modules`.
      wrt: `nnx` filter that selects the trained variables of this module, e.g. `nnx.LoRAParam`; `nnx.Param` by
        default.
      tokenizer: Tokenizer of this module: a folder, hub id or transformers tokenizer; replaces the config's
        `tokenizer`.
      data, validation: Records that replace the config's `data` and `validation.data`, which name files and data sets.
      overrides: Overrides `key=value`, as on the command line.
      progress: If True, show progress on standard error.

    Raises:
      RunError: The config is invalid; `out` cannot be used, its disk is full, or it contains another run; or a loss is
        not finite (the message names the comparisons).
      DataError: The data cannot be used.
      CheckpointError, MeshError: The model cannot be loaded.
    """
    # Settings.
    objects = {"data": data, "model": model}
    given = tuple(name for name, value in objects.items() if value is not None)
    settings = load_settings(config, overrides, given=given)
    tell_unused(settings, own_validation=validation is not None)
    path = Path(out)
    check_start(TRAINING, path, settings)
    lengths = tuple(on_first_process(lambda: run_lengths(path, settings.steps)))
    # Data and model.
    mesh = as_mesh(settings.mesh)
    read = read_training_data(settings, data=data, validation=validation)
    if model is None:
        for name, value in (("tokenizer", tokenizer), ("wrt", wrt)):
            if value is not None:
                raise RunError(
                    f"{name}: is only for a module given as model; the config describes a named model"
                )
        kind, start = RewardTrainer, start_from(settings, read.train.comparisons, out=path)
    else:
        kind, open_module = (get("training", name).value for name in ("module trainer", "module"))
        start = open_module(model, settings, tokenizer=tokenizer, wrt=wrt, mesh=mesh)
    # The run folder must contain the same run or none.
    inputs = train_inputs(settings, read, start, lengths=lengths)
    notes = {"model": start.name, "view": TrainedView(settings.view, settings.method).to_json()}
    with contextlib.ExitStack() as stack:
        opened = open_run(
            TRAINING, path, inputs=inputs, session=session_on(mesh, settings, start.config), notes=notes
        )
        summary = stack.enter_context(opened)
        if summary is not None:
            return TrainResult(
                path, settings.steps, path / MODEL, summary, module=start.finished_module(path)
            )

        # The model in training, its encoded data, and their order.
        trainer = reward_trainer(
            settings, start, mesh=mesh, data=read.train.known, out=path, lengths=lengths, kind=kind
        )
        held_out, examples = trainer.encode_held_out(read.validation), trainer.encode(read.train)
        equal = _equal_sides(examples)
        per_step, seed = settings.batch.comparisons, settings.seed
        if settings.batch_by == "user":
            of_users = get("training", "user order").value
            order: Order = of_users(examples.known, per_step=per_step, seed=seed)
        else:
            order = Order(len(examples), per_step, seed)
        trainer.plan(examples, order)

        # The loop. One thread prepares the next batch while the device works on this one.
        loop = stack.enter_context(open_loop(path, trainer, progress=progress))
        _say_how(loop, lengths, order, equal)
        with loop.speed.pause():
            peak = mesh.size * (1.0 if loop.log is None else device_peak(settings.dtype))

        def row_of(step: int, batch: StepBatch, metrics: Metrics) -> dict[str, float]:
            values = {name: float(np.asarray(value)) for name, value in metrics.items()}
            members, tokens = batch.members.tolist(), batch.tokens
            ids = [examples.known[member].id for member in members]
            remedy = "A lower optimizer.learning_rate, dtype=float32, or other margins may help"
            loop.check_finite(values, ids, step=step, remedy=remedy)
            rates = loop.rates(pairs=len(members), tokens=tokens, flops=batch.flops(settings.tuning))
            mfu = rates.pop("flops_per_second") / peak
            return {
                "step": step, "epoch": order.epoch_of(step), **values, "tokens": tokens, **rates, "mfu": mfu
            }  # fmt: skip

        ahead = prepared_ahead(
            lambda step: trainer.batch(order.step(step), step=step), range(loop.step, settings.steps)
        )
        batches = stack.enter_context(contextlib.closing(ahead))
        for step in loop.steps():
            batch = next(batches)
            loop.later(functools.partial(row_of, step + 1, batch, trainer.step(batch)))
            loop.facts = {"position": order.seen(step + 1)}
            if len(held_out) and settings.validates_at(step + 1, lengths):
                loop.validate(lambda: trainer.validate(held_out))
        if loop.stopped_by is not None:
            return TrainResult(path, loop.step, stopped_by=loop.stopped_by)

        # Export of the best checkpoint or the last.
        exported, best = settings.steps, loop.checkpoints.best()
        if settings.export.checkpoint == "best" and best is not None and best != exported:
            trainer.load_step(loop.checkpoints, best)
            exported = best
        if not on_first_process(lambda: (path / MODEL).exists()):
            trainer.export(path / MODEL)
        summary = write_summary(
            loop, TRAINING, lambda rows: _summary(rows, trainer, read, order, equal, exported=exported)
        )
        return TrainResult(path, settings.steps, path / MODEL, summary, module=start.finished_module(path))


def tell_unused(settings: TrainSettings, *, own_validation: bool = False) -> None:
    """Warn of options that another option leaves without effect, and that have another value than their default.

    Args:
      settings: Settings of a run.
      own_validation: Whether the caller gives records to validate on.
    """
    held_out = settings.validation.fraction > 0 and (own_validation or settings.validation.data is not None)
    lacking = {
        "lora": "" if settings.tuning == "lora" else "tuning=lora",
        "user_embedding": "" if settings.method == "persona_embedding" else "method=persona_embedding",
        "profile_posts": "" if settings.method == "profile_context" else "method=profile_context",
        "optimizer.decay_share": "" if settings.optimizer.schedule == "wsd" else "optimizer.schedule=wsd",
        "validation.fraction": "a run without validation data of its own" if held_out else "",
    }
    defaults = flat_settings(TrainSettings())
    for key, value in flat_settings(settings).items():
        needed = lacking.get(key) or lacking.get(key.partition(".")[0])
        if needed and value != defaults[key]:
            warnings.warn(f"{key}={value} has no effect: it needs {needed}", PrbWarning, stacklevel=3)


def reward_trainer(
    settings: TrainSettings,
    start: Start,
    *,
    mesh: Mesh,
    data: Sequence[OfUser],
    out: Path,
    lengths: Sequence[int] = (),
    kind: type[RewardTrainer] = RewardTrainer,
) -> RewardTrainer:
    """Return a reward model in training.

    Args:
      settings: Settings of the run.
      start: Model that the run starts from.
      mesh: Devices.
      data: Comparisons whose users are trained; if empty, the users are read from `out`.
      out: Run folder.
      lengths: Lengths of a lengthened run; see :func:`prb_jax.training.weights.learning_rate`.
      kind: Class of the trainer.

    Raises:
      RunError, DataError, CheckpointError, MeshError: The settings do not suit this model or mesh.
    """
    lengths = lengths or (settings.steps,)
    width = start.config.hidden_size
    method = method_of_run(settings, data, out=out, width=width, lengths=lengths, mesh=mesh)
    model = start.in_training(settings, mesh)
    program = make_reward_step(settings, model, mesh=mesh, lengths=lengths, method=method)
    return kind(settings, start, model=model, method=method, program=program, lengths=lengths)


def make_reward_step(
    settings: TrainSettings,
    model: TrainedModel,
    *,
    mesh: Mesh,
    lengths: Sequence[int],
    method: TrainedMethod = NULL,
) -> TrainStep:
    """Return the compiled step of a reward model: rewards, their loss, and AdamW.

    The parameter groups are the weights of the model and the parameters of its users.

    Args:
      settings: Settings of the run.
      model: Trained weights and scores of the model.
      mesh: Devices.
      lengths: Lengths of the run; see :func:`prb_jax.training.weights.learning_rate`.
      method: Method of personalisation.

    Raises:
      MeshError: A mesh axis does not divide a parameter.
    """
    weights = Weights(
        optimizer=settings.optimizer_of(hidden_size=model.width),
        lengths=lengths,
        trainable=model.trained,
        placed=model.trained_shardings,
        mesh=mesh,
    )

    def split(params: Params) -> tuple[dict[str, Any], Params]:
        trained, frozen = model.split(params)
        return {WEIGHTS: trained, USER: params.get("embed", {})}, frozen

    def loss(
        inputs: Mapping[str, Any], frozen: Params, batch: Batch, extras: Extras
    ) -> tuple[jax.Array, LossParts]:
        prompts = method.soft_prompts(inputs[USER])
        loads: list[jax.Array] = []
        rewards = model.rewards(
            inputs[WEIGHTS], frozen, batch, prompts=prompts, differentiated=True, loads=loads
        )
        parts = comparison_loss(**extras.by_comparison(rewards), config=settings.loss)
        if loads:
            parts = replace(parts, expert_loads=loads[0])
        return parts.loss_sum, parts

    return make_train_step(
        loss,
        split=split,
        groups={WEIGHTS: weights, USER: method},
        frozen_shardings=model.frozen_shardings,
        learning_rate=weights.learning_rate,
        mesh=mesh,
    )


def _equal_sides(examples: Examples) -> EqualSides | None:
    """Return the comparisons without a training signal; None without any, or if the data is tokenised on demand."""
    if not examples.trees.in_memory:
        return None
    pairs = zip(examples.known, examples.trees, strict=True)
    return EqualSides.of(one.id for one, tree in pairs if has_equal_sides(tree.equal_to, one.labels or ()))


def _say_how(loop: Loop, lengths: Sequence[int], order: Order, equal: EqualSides | None) -> None:
    if len(lengths) > 1:
        loop.say(
            f"lengthened from {lengths[-2]} steps to {lengths[-1]}: the learning rate follows the schedule of "
            f"{lengths[-2]} steps until then, and the schedule of {lengths[-1]} steps afterwards"
        )
    if equal is not None:
        loop.say(f"{equal}, of which nothing can be learned: remove them")
    if order.split:
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
    """Return the numbers of a finished run, JSON-ready."""
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
        **({"split_users": order.split} if order.split is not None else {}),
        "pairs_seen": order.seen(trainer.settings.steps),
        "tokens_seen": int(sum(row["tokens"] for row in steps)),
        "parameters": trainer.parameters,
        "trained_parameters": trainer.trained_parameters,
        "last_tenth": {
            name: float(np.mean([row[name] for row in tail])) for name in ("loss", "accuracy", "margin")
        },
        "validation": chosen or None,
    }
