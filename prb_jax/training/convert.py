"""Conversion of a training run, or of any checkpoint this library reads, to a Hugging Face folder: `prb convert`."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import jax.numpy as jnp
from numpy.typing import DTypeLike

from prb_jax.errors import CheckpointError, RunError, quote
from prb_jax.models import DTYPES
from prb_jax.models.checkpoints.load import abstract_params, load_params
from prb_jax.models.checkpoints.save import save_params
from prb_jax.models.checkpoints.weight_file import FLOAT_DTYPES
from prb_jax.models.checkpoints.weight_index import index_folder
from prb_jax.models.head import Linear
from prb_jax.models.model import parameter_shardings
from prb_jax.models.readouts.language_model import LANGUAGE_MODEL, open_reward_or_language_model
from prb_jax.models.readouts.load_options import LoadOptions
from prb_jax.models.readouts.open_model import OpenedModel
from prb_jax.models.vocabulary_heads import Vocabulary
from prb_jax.personal.prompts import NAMES, TABLE
from prb_jax.platform.meshes import make_mesh
from prb_jax.records.items import Held
from prb_jax.records.options import choice_named
from prb_jax.records.reading import read_object
from prb_jax.runs.other_inputs import check_same_inputs
from prb_jax.runs.training import CHECKPOINTS, TRAIN, TRAINING, read_training, run_identity
from prb_jax.text.template import PLAIN_RULES
from prb_jax.text.view import TRAINED_VIEW
from prb_jax.training import LAYOUTS
from prb_jax.training.config import load_settings
from prb_jax.training.export import TOKENIZER_FILES, copy_file, copy_tokenizer, write_whole
from prb_jax.training.layouts import (
    ConvertedModel,
    as_standard,
    as_value_head,
    check_convertible,
    standard_tokenizer,
)
from prb_jax.training.saved_states import Checkpoints
from prb_jax.training.start import start_from
from prb_jax.training.train import reward_trainer


def convert(
    source: str | Path,
    target: str | Path,
    *,
    adapter: bool = False,
    step: str | int | None = None,
    dtype: DTypeLike | None = None,
    revision: str | None = None,
    base: str | None = None,
    tokenizer: str | None = None,
    chat_template: str | None = None,
    readout: str | None = None,
    drop_bias: bool = False,
    layout: str = "standard",
) -> Path:
    """Write a model as a Hugging Face folder that `prb_jax.load` and transformers load.

    Args:
      source: Run of `prb train`, finished or not; model that `prb_jax.load` accepts; language model; or run of `prb
        ppo`.
      target: Folder to write. It must not exist, or must be the result of the same call.
      adapter: If True, write a PEFT adapter with its head instead of a whole model; requires a run with
        `tuning="lora"`.
      step: Checkpoint of a run: "best" by validation (the default; the last one without validation), "last", or a
        step.
      dtype: Dtype of all weights except the head; by default the dtype of the run or the checkpoint.
      revision, base, tokenizer, chat_template, readout: Options of a checkpoint, as for `prb_jax.load`.
      drop_bias: If True, omit the bias of a head that has one.
      layout: Layout for a checkpoint: "standard", a `*ForSequenceClassification`; or "value-head", the layout of TRL
        and LLaMA-Factory.

    Raises:
      RunError: The run lacks this checkpoint, its starting model has changed, or `target` exists or cannot be written.
      CheckpointError: The checkpoint cannot be used, has no adapter, has more than an adapter, or its head is not
        linear.
    """
    if layout not in LAYOUTS:
        raise CheckpointError(f"layout: expected {' or '.join(LAYOUTS)}, found {quote(layout)}")
    chosen: str | None = choice_named(dtype, DTYPES)
    if chosen is not None and chosen not in DTYPES:
        raise CheckpointError(f"dtype: expected {' or '.join(DTYPES)}, found {quote(dtype)}")
    path, goal = Path(source).expanduser(), Path(target)
    if goal.exists() and not any((goal / name).is_file() for name in ("config.json", "adapter_config.json")):
        raise RunError(f"{goal}: exists already; choose another folder")
    given: dict[str, Any] = {
        "revision": revision,
        "base": base,
        "tokenizer": tokenizer,
        "chat_template": chat_template,
        "readout": readout,
    }
    if (path / TRAIN).is_file() and read_object(path / TRAIN, error=RunError).get("kind") == TRAINING.name:
        named = [name for name, value in given.items() if value is not None]
        named += [] if layout == "standard" else ["layout"]
        if named:
            raise RunError(
                f"{', '.join(named)}: not for a run of `prb train`, but {path} is one; leave it out, or convert its "
                "model folder"
            )
        return _convert_run(path, goal, adapter=adapter, step=step, dtype=chosen)
    if adapter or step is not None:
        raise RunError(f"{path}: adapter and step are for runs of `prb train`, which this is not")
    opened, _ = open_reward_or_language_model(source, LoadOptions(dtype=chosen, **given))
    if opened.row is LANGUAGE_MODEL and (drop_bias or layout != "standard"):
        raise CheckpointError(f"{source}: a language model has no head: leave out drop_bias and layout")
    return _convert_checkpoint(opened, goal, drop_bias=drop_bias, layout=layout)


def _convert_run(
    path: Path, target: Path, *, adapter: bool, step: str | int | None, dtype: str | None
) -> Path:
    run = read_training(path).record
    started = (run.get("sessions") or [{}])[-1].get("settings")
    if not isinstance(started, dict):
        raise RunError(
            f"{path / TRAIN}: field 'sessions': expected the settings of the last start, found none"
        )
    # The settings of the last session apply, but the mesh is chosen for the devices present now.
    last = {**run["inputs"]["settings"], **started, "mesh": None, "attention": "auto"}
    settings = load_settings(last, complete=False)  # the data may have been passed as records
    # Frozen weights are read in the dtype they are written in, to avoid rounding twice.
    kept = dtype or settings.exported_dtype
    settings = load_settings(settings, [f"dtype={kept}", f"export.dtype={kept}"], complete=False)
    start = start_from(settings, Held(), out=path)
    check_same_inputs(path, {"model": run["inputs"]["model"]}, {"model": dict(start.identity)}, file=TRAIN)
    if adapter and settings.tuning != "lora":
        raise CheckpointError(f"{path}: tuning={settings.tuning} trains no adapter; leave out --adapter")
    if adapter and settings.method == "persona_embedding":
        raise CheckpointError(
            f"{path}: method=persona_embedding trained soft prompts of its users, which an adapter for PEFT has no "
            "place for; leave out --adapter: a whole model keeps them"
        )
    checkpoints = Checkpoints(path / CHECKPOINTS, read_only=True, run=run_identity(path))
    try:
        chosen = _chosen_step(checkpoints, step, path)
        trainer = reward_trainer(settings, start, mesh=make_mesh(None), data=(), out=path)
        trainer.load_step(checkpoints, chosen)
    finally:
        checkpoints.close()
    (trainer.export_adapter if adapter else trainer.export)(target)
    return target


def _chosen_step(checkpoints: Checkpoints, step: str | int | None, path: Path) -> int:
    steps = checkpoints.steps()
    if not steps:
        raise RunError(f"{path}: there is no checkpoint in it")
    if step in (None, "best"):
        best = checkpoints.best()
        return steps[-1] if best is None else best
    if step == "last":
        return steps[-1]
    if str(step).isdigit() and int(step) in steps:
        return int(step)
    known = ", ".join(map(str, steps))
    raise RunError(f"{path}: no checkpoint of step {step}; there are best, last, {known}")


def _convert_checkpoint(opened: OpenedModel, target: Path, *, drop_bias: bool, layout: str) -> Path:
    resolved, folder = opened.decoder, opened.folder.path
    config = resolved.config
    language = opened.row is LANGUAGE_MODEL
    if not language:
        check_convertible(resolved, where=opened.name)
    index = index_folder(folder, side_files=config.layout.side_files)
    stored = config.torch_dtype if config.torch_dtype in DTYPES else None
    head = index.tensors.get(config.head.key) if isinstance(config.head, Linear | Vocabulary) else None
    params = load_params(
        folder,
        config,
        dtype=jnp.dtype(opened.options.dtype or stored or "float32"),
        head_dtype=FLOAT_DTYPES.get(head.dtype) if head is not None else None,
        shardings=parameter_shardings(abstract_params(config), opened.mesh, config=config),
    ).params
    if language:
        model = ConvertedModel(config, params)
    else:
        rewrite = as_standard if layout == "standard" else as_value_head
        model = rewrite(resolved, params, drop_bias=drop_bias, where=opened.name)
    place = opened.tokenizer_folder.path
    as_it_is = resolved.text == PLAIN_RULES and opened.options.chat_template is None and place == folder
    spoken = None if as_it_is else standard_tokenizer(opened)

    def write(partial: Path) -> None:
        save_params(model.params, model.config, partial)
        for name in (TRAINED_VIEW, TABLE, NAMES, "generation_config.json"):
            copy_file(folder / name, partial / name)
        if spoken is not None:
            copy_tokenizer(spoken, place, partial)
            return
        for name in TOKENIZER_FILES:
            copy_file(folder / name, partial / name)

    write_whole(target, write)
    return target
