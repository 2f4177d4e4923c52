"""The folder of one training run: killed at any moment, continued by the same command.

``train.json``      what is trained. Its ``inputs`` decide the result: a run is continued only with equal inputs.
                    Its ``sessions`` (devices, mesh, time) say how, one entry for each start.
``metrics.jsonl``   one row a step, and one a validation.
``checkpoints/``    states to continue from.
``model/``          the trained model, a Hugging Face folder; written at the end.
``summary.json``    written last: a folder that has it is finished.
"""

from __future__ import annotations

import contextlib
from collections.abc import Iterator, Mapping
from pathlib import Path
from typing import Any

from prb_jax.data.reading import read_json, read_object
from prb_jax.errors import RunError
from prb_jax.runs.folder import as_recorded, check_same_inputs, held_folder, refuse_file, write_json

TRAIN = "train.json"
CHECKPOINTS = "checkpoints"
MODEL = "model"
SUMMARY = "summary.json"
KIND = "prb_jax training"


def check_training_folder(out: str | Path) -> None:
    """Refuses what no training run could be written to, before anything costly is done.

    Raises:
      RunError: ``out`` is a file, or holds something else than a training run.
    """
    path = Path(out)
    refuse_file(out)
    read_training(path)


def read_training(out: str | Path) -> dict[str, Any] | None:
    """What ``train.json`` says; None where there is none.

    Raises:
      RunError: it cannot be read or is of another kind, or the folder holds a run of another verb.
    """
    path = Path(out) / TRAIN
    if not path.exists():
        for name in ("run.json", CHECKPOINTS, MODEL):
            if (Path(out) / name).exists():
                raise RunError(
                    f"{out} has a {name} but no {TRAIN}, so it is no training run; give --out another folder"
                )
        return None
    run = read_json(path, error=RunError, hint="give --out another folder")
    if not isinstance(run, dict) or run.get("kind") != KIND or not isinstance(run.get("inputs"), dict):
        raise RunError(f"{path}: not a run of `prb train`; give --out another folder")
    return run


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
            check_same_inputs(path, found["inputs"], wanted, file=TRAIN)
        run: dict[str, Any] = dict(
            found or {"kind": KIND, "format": 1, "inputs": wanted, **notes, "sessions": []}
        )
        if not (path / SUMMARY).exists():
            run["sessions"] = [*run["sessions"], session]
            write_json(path / TRAIN, run)
        yield path


def is_finished(out: str | Path) -> bool:
    """Whether the run in this folder has come to its end."""
    return (Path(out) / SUMMARY).is_file()


def read_summary(out: str | Path) -> dict[str, Any]:
    """What a finished run sums up to.

    Raises:
      RunError: it is not finished, or its summary cannot be read.
    """
    return read_object(Path(out) / SUMMARY, error=RunError, hint="is the run finished?")
