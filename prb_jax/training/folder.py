"""The folder of one training run: killed at any moment, continued by the same command.

``train.json``      what is trained. Its ``inputs`` decide the result: a run is continued only with equal inputs.
                    Its ``sessions`` (devices, mesh, time) say how, one entry for each start.
``metrics.jsonl``   one row a step, and one a validation.
``checkpoints/``    states to continue from.
``model/``          the trained model, a Hugging Face folder; written at the end.
``summary.json``    written last: a folder that has it is finished.

The same command with more ``steps`` lengthens a run, a finished one too; its model and summary are then made anew. The
result is that of the list of lengths, which ``train.json`` records as ``lengths``, wherever the run stood at the time:
steps up to an earlier end are those of a run of that length (learning rate, validations, shapes), and the steps after
it follow the schedule of the next length, without a second warm-up. A schedule that falls thus rises again at the seam;
``optimizer.schedule=constant`` has no seam.
"""

from __future__ import annotations

import contextlib
import shutil
from collections.abc import Iterator, Mapping
from pathlib import Path
from typing import Any

from prb_jax.data.reading import read_object
from prb_jax.data.writing import held_folder, refuse_file, writing
from prb_jax.errors import RunError, quote
from prb_jax.runs.kind import SUMMARY, RunKind, as_recorded, check_same_inputs

TRAIN = "train.json"
CHECKPOINTS = "checkpoints"
MODEL = "model"
TRAINING = RunKind("prb_jax training", "prb train", file=TRAIN, others=("run.json", CHECKPOINTS, MODEL))


def check_training_folder(out: str | Path) -> None:
    """Refuses what no training run could be written to, before anything costly is done.

    Raises:
      RunError: ``out`` is a file, or holds something else than a training run.
    """
    refuse_file(out)
    read_training(out)


def read_training(out: str | Path) -> dict[str, Any] | None:
    """Return what ``train.json`` says; None where there is none.

    Raises:
      RunError: it cannot be read or is of another kind, or the folder holds a run of another verb.
    """
    return TRAINING.read(Path(out))


def run_lengths(out: str | Path, steps: int) -> list[int]:
    """The lengths in steps that a run was given one after another; `steps` is the last.

    Raises:
      RunError: `steps` is less than the run has been given already.
    """
    run = read_training(out)
    if run is None:
        return [steps]
    lengths = run["inputs"].get("lengths") or [_steps_of(run["inputs"])]
    if not isinstance(lengths, list) or not all(type(length) is int for length in lengths):
        raise RunError(f"{Path(out) / TRAIN}: 'lengths': expected numbers of steps, found {quote(lengths)}")
    if steps < lengths[-1]:
        saved = [int(path.name) for path in Path(out).glob(f"{CHECKPOINTS}/*") if path.name.isdigit()]
        raise RunError(
            f"{out}: steps={steps} is less than the {lengths[-1]} of this run, of which {max(saved, default=0)} are "
            "done: a run can be made longer, not shorter; give --out another folder"
        )
    return lengths if steps == lengths[-1] else [*lengths, steps]


def _steps_of(inputs: Mapping[str, Any]) -> Any:
    settings = inputs.get("settings")
    return settings.get("steps") if isinstance(settings, Mapping) else None


@contextlib.contextmanager
def open_training(
    out: str | Path, *, inputs: Mapping[str, Any], session: Mapping[str, Any], notes: Mapping[str, Any]
) -> Iterator[Path]:
    """Creates the folder of a run, or opens it to continue, and holds it against a second writer.

    Args:
      out: the folder; made, with its parents, where it does not exist.
      inputs: everything that decides the result; compared with the folder's own.
      session: how it is run this time.
      notes: what else should stand in ``train.json``; written once, not compared.

    Raises:
      RunError: the folder cannot be used or written, another process is writing to it, or it holds another run.
    """
    path = Path(out)
    check_training_folder(path)
    with held_folder(path):
        wanted = as_recorded(inputs)
        found = read_training(path)
        if found is not None:
            longer = len(wanted.get("lengths", ())) > len(found["inputs"].get("lengths", (0,)))
            old = {**found["inputs"], **_with_length(found["inputs"], wanted)} if longer else found["inputs"]
            check_same_inputs(path, old, wanted, file=TRAIN)
            if longer:
                _remove_result(path)
                found = {**found, "inputs": wanted}
        TRAINING.record(path, found, inputs=wanted, session=session, notes=notes)
        yield path


def _with_length(old: Mapping[str, Any], wanted: Mapping[str, Any]) -> dict[str, Any]:
    """The entries of a run's inputs that lengthening changes."""
    return {"settings": {**old["settings"], "steps": _steps_of(wanted)}, "lengths": wanted["lengths"]}


def _remove_result(path: Path) -> None:
    """Makes a finished run an unfinished one; it is called before the new length is written, and may be repeated."""
    aside = path / f".{MODEL}.old"
    with writing(path):
        (path / SUMMARY).unlink(missing_ok=True)
        shutil.rmtree(aside, ignore_errors=True)
        with contextlib.suppress(FileNotFoundError):
            (path / MODEL).rename(aside)  # it is there as a whole or not at all
        shutil.rmtree(aside, ignore_errors=True)


def is_finished(out: str | Path) -> bool:
    """Whether the run in this folder has come to its end."""
    return (Path(out) / SUMMARY).is_file()


def read_summary(out: str | Path) -> dict[str, Any]:
    """What a finished run sums up to.

    Raises:
      RunError: it is not finished, or its summary cannot be read.
    """
    return read_object(Path(out) / SUMMARY, error=RunError, hint="is the run finished?")
