"""Folder of a run of `prb train` or `prb ppo`, which may be killed at any time and continued by the same command.

``train.json``      ``inputs``: everything that affects the result; a run continues only with equal inputs.
                    ``sessions``: devices, mesh and time, one entry per start.
``metrics.jsonl``   one row per step and per validation.
``checkpoints/``    states to continue from.
``model/``          the trained model, a Hugging Face folder; written at the end.
``summary.json``    written last: marks the run as finished.

The same command with more ``steps`` lengthens a run of `prb train`, even a finished one, and rewrites its model and
summary. The result depends only on the list of lengths, recorded in ``train.json`` as ``lengths``, not on the step at
which the run was lengthened. Steps up to an earlier end equal the steps of a run of that length (learning rate,
validations, shapes). Later steps follow the schedule of the next length, without a second warm-up. A decaying schedule
therefore jumps up at an earlier end; ``optimizer.schedule=constant`` does not.
"""

from __future__ import annotations

import contextlib
import shutil
from collections.abc import Iterator, Mapping, Sequence
from pathlib import Path
from typing import TYPE_CHECKING, Any

import jax.numpy as jnp
from jax.sharding import Mesh

from prb_jax.errors import RunError, quote
from prb_jax.models.attention.choice import choose_attention
from prb_jax.models.config.decoder import DecoderConfig
from prb_jax.platform.processes.sharing import on_first_process, process_count
from prb_jax.records.options import Effect, flat_settings, options_of
from prb_jax.records.writing import held_folder, writing
from prb_jax.runs.kind import SUMMARY, RunKind, as_recorded, devices_of, session_now
from prb_jax.runs.training import CHECKPOINTS, MODEL, TRAIN, TRAINING, read_training
from prb_jax.seams import get
from prb_jax.training.config import SCRATCH, RunOptions, TrainSettings
from prb_jax.training.data import TrainingData
from prb_jax.training.start import Start
from prb_jax.version import versions

if TYPE_CHECKING:
    from prb_jax.models.readouts.user_module import ModuleConfig

_COMPUTING = ("numpy", "jax", "jaxlib", "flax", "optax", "transformers", "tokenizers")


def check_start(kind: RunKind, out: Path, settings: RunOptions) -> None:
    """Reject a run that cannot start, before any costly work; a collective.

    Raises:
      RunError: ``out`` is a file or contains another kind of run; wandb is requested but not installed; or another
        process has other settings.
    """

    def check() -> None:
        kind.check(out)
        if settings.log.wandb is not None:
            get("training", "check wandb").value(f"log.wandb={settings.log.wandb}")

    on_first_process(check)
    # No other collective may come before this comparison: another process may not be training at all.
    values = settings_with(settings, "result", "none").items()  # files may have other names on other machines
    shared = {name: value for name, value in values if not name.startswith("log.")}
    if isinstance(settings, TrainSettings):
        shared["model"] = settings.model == SCRATCH
        shared["scratch.tokenizer"] = bool(settings.scratch.tokenizer)
    _check_agreement({"verb": kind.command.removeprefix("prb "), "settings": shared})


def _check_agreement(inputs: Mapping[str, Any]) -> None:
    """Check that all processes have the same inputs; a collective."""
    if process_count() > 1:
        get("processes", "agreement").value(inputs)


def run_lengths(out: Path, steps: int) -> list[int]:
    """Return the successive lengths in steps of a run of `prb train`; `steps` is the last.

    Raises:
      RunError: `steps` is less than an earlier length of the run.
    """
    run = TRAINING.read(out)
    if run is None:
        return [steps]
    inputs = run["inputs"]
    lengths: Any = inputs.get("lengths") or [inputs["settings"].get("steps")]
    if type(lengths[-1]) is not int:
        raise RunError(f"{out / TRAIN}: 'steps': expected a number of steps, found {quote(lengths[-1])}")
    if steps < lengths[-1]:
        saved = [int(path.name) for path in out.glob(f"{CHECKPOINTS}/*") if path.name.isdigit()]
        raise RunError(
            f"{out}: steps={steps} is less than the {lengths[-1]} of this run, of which {max(saved, default=0)} are "
            "done: a run can be made longer, not shorter; choose another folder for --out"
        )
    return lengths if steps == lengths[-1] else [*lengths, steps]


@contextlib.contextmanager
def open_run(
    kind: RunKind,
    out: Path,
    *,
    inputs: Mapping[str, Any],
    session: Mapping[str, Any],
    notes: Mapping[str, Any],
) -> Iterator[dict[str, Any] | None]:
    """Create the folder of a run, or open it to continue, and lock it against a second writer; a collective.

    Args:
      kind, out: Kind and folder of the run.
      inputs: Everything that affects the result; compared with the inputs of the other processes and of the folder.
      session: Devices, mesh and time of this session.
      notes: Further contents of ``train.json``; written once, not compared.

    Yields:
      The summary of a finished run, or None.

    Raises:
      RunError: The folder cannot be used or written, another process is writing to it, or it contains another run.
    """
    _check_agreement(inputs)
    with contextlib.ExitStack() as stack:

        def start() -> dict[str, Any] | None:
            stack.enter_context(held_folder(out))
            wanted, recorded = as_recorded(inputs), kind.read(out)
            if recorded is not None:
                if finished := (out / SUMMARY).is_file():
                    kind.check_files(out, recorded)
                old = recorded["inputs"]
                longer = len(wanted.get("lengths", ())) > len(old.get("lengths", (0,)))
                if longer:
                    lengthened = {**old["settings"], "steps": wanted["settings"]["steps"]}
                    old = {**old, "settings": lengthened, "lengths": wanted["lengths"]}
                if old != wanted:
                    get("runs", "check inputs").value(out, old, wanted, file=TRAIN)
                if longer:
                    kind.reopen(out)
                    _remove_model(out)
                    recorded = {**recorded, "inputs": wanted}
                elif finished:
                    _reopen_without_model(kind, out)
            kind.record(out, recorded, inputs=wanted, session=session, notes=notes)
            summary = read_training(out).summary
            return None if summary is None else dict(summary)

        yield on_first_process(start)


def _reopen_without_model(kind: RunKind, path: Path) -> None:
    """Mark a finished run as unfinished if its model was deleted; the run then exports it again from checkpoints."""
    if (path / MODEL).is_dir():
        return
    if not any(one.name.isdigit() for one in path.glob(f"{CHECKPOINTS}/*")):
        raise RunError(
            f"{path}: the run is finished, but its {MODEL} was deleted, and there is no checkpoint to export it from: "
            "restore one of them, or train again in another folder"
        )
    kind.reopen(path)


def _remove_model(path: Path) -> None:
    """Remove the model of a run before its new, larger length is written; safe to repeat."""
    aside = path / f".{MODEL}.old"
    with writing(path):
        shutil.rmtree(aside, ignore_errors=True)
        with contextlib.suppress(FileNotFoundError):
            (path / MODEL).rename(aside)  # atomic: the model exists completely or not at all
        shutil.rmtree(aside, ignore_errors=True)


def train_inputs(
    settings: TrainSettings, data: TrainingData, start: Start, *, lengths: Sequence[int]
) -> dict[str, Any]:
    """Return everything that affects the result of `prb train`, JSON-ready."""
    chosen = settings_with(settings, "result")
    if settings.model != SCRATCH:
        chosen = {name: value for name, value in chosen.items() if not name.startswith("scratch.")}
    return {
        "settings": chosen,
        **({"lengths": list(lengths)} if len(lengths) > 1 else {}),
        **settings.view.wording,
        "learning_rate": settings.learning_rate(hidden_size=start.config.hidden_size),
        "model": dict(start.identity),
        "data": {
            "sources": dict(data.sources),
            "train": len(data.train),
            "validation": len(data.validation),
        },
        "versions": computing_versions(),
    }


def session_on(mesh: Mesh, settings: RunOptions, config: DecoderConfig | ModuleConfig) -> dict[str, Any]:
    """Return the time, devices and attention of a session, and the settings that do not affect the result."""
    attention = "the module's own"
    if isinstance(config, DecoderConfig):
        dtype = jnp.dtype(settings.dtype)
        attention = choose_attention(mesh, dtype, settings.attention, config=config, trained=True).name
    return {
        **session_now(),
        "settings": settings_with(settings, "contents", "none"),
        "mesh": dict(mesh.shape),
        "devices": devices_of(mesh),
        "attention": attention,
    }


def settings_with(settings: Any, *effects: Effect) -> dict[str, Any]:
    """Return the options with one of these effects, by key."""
    flat = flat_settings(settings)
    return {name: flat[name] for name, known in options_of(type(settings)).items() if known.effect in effects}


def computing_versions() -> dict[str, str | None]:
    """Return the versions of the libraries that compute in training."""
    return versions(_COMPUTING)
