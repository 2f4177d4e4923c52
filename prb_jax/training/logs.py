"""What a run writes along the way: `metrics.jsonl`, TensorBoard, Weights & Biases."""

from __future__ import annotations

import os
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

from prb_jax.data.reading import parse_json
from prb_jax.data.writing import json_line, whole_file, writing
from prb_jax.errors import RunError
from prb_jax.runs.weights_and_biases import start_wandb
from prb_jax.training.event_file import EventFile
from prb_jax.training.settings import LogSettings

METRICS = "metrics.jsonl"
TENSORBOARD = "tensorboard"
_HINT = "remove the line to continue the run"


class StepFile:
    """A file of JSON lines with a `step`, which grows by whole lines.

    Args:
      path: of the file; it need not be there.
      step: steps made so far: rows beyond it, of a start that was killed later, are dropped, and so is a torn line.
      rows: those of the file, if they are read already.

    Raises:
      RunError: a line that is no such row, or the file cannot be written.
    """

    def __init__(self, path: Path, *, step: int, rows: Sequence[dict[str, Any]] | None = None) -> None:
        self.path = path
        self.rows = [row for row in (read_steps(path) if rows is None else rows) if row["step"] <= step]
        with writing(path), whole_file(path) as file:
            file.writelines(map(json_line, self.rows))

    def write(self, rows: Sequence[Mapping[str, Any]]) -> None:
        """Add rows; every number must be finite."""
        self.rows += map(dict, rows)
        with writing(self.path), self.path.open("ab") as file:
            file.write(b"".join(map(json_line, rows)))

    def sync(self) -> None:
        """Wait for the disk: a checkpoint must not outlive the rows of its steps."""
        with writing(self.path), self.path.open("rb") as file:
            os.fsync(file.fileno())


class MetricsLog:
    """Rows of numbers, each with its step, to a file and to whatever else was asked for.

    Args:
      out: the run folder.
      step: updates made so far: rows beyond it are dropped, so that the file holds every step once.
      options: what else is written.
      settings: of the run, for Weights & Biases.

    Raises:
      RunError: the file cannot be read or written, or lacks a step that was made; wandb is asked for and not installed.
    """

    def __init__(
        self, out: Path, *, step: int, options: LogSettings, settings: Mapping[str, Any] | None = None
    ) -> None:
        path = out / METRICS
        known = read_metrics(path)
        last = max((row["step"] for row in known if "loss" in row and row["step"] <= step), default=0)
        if last < step:
            raise _gap(path, last + 1, step)
        self._file = StepFile(path, step=step, rows=known)
        self._wandb = None
        if options.wandb:
            option = f"log.wandb={options.wandb}"
            self._wandb = start_wandb(options.wandb, out, settings or {}, option=option)
        with writing(path):
            self._events = EventFile(out / TENSORBOARD, first_step=step + 1) if options.tensorboard else None

    @property
    def rows(self) -> list[dict[str, Any]]:
        """All rows so far."""
        return self._file.rows

    def write(self, row: Mapping[str, float]) -> None:
        """Adds one row; it must have a `step`, and every number must be finite."""
        step = int(row["step"])
        scalars = {name: float(value) for name, value in row.items() if name != "step"}
        self._file.write([{"step": step, **scalars}])
        tagged = {_tag(name): value for name, value in scalars.items()}
        if self._events is not None:
            with writing(self._file.path):
                self._events.write(step, tagged)
        if self._wandb is not None:
            self._wandb.log(tagged, step=step)

    def sync(self) -> None:
        """Waits for the disk."""
        self._file.sync()

    def close(self) -> None:
        """Ends the files."""
        if self._events is not None:
            self._events.close()
        if self._wandb is not None:
            self._wandb.finish()


def read_steps(path: Path, *, what: str = "a step") -> list[dict[str, Any]]:
    """The rows of a file, without a torn last line; none where there is no file.

    Raises:
      RunError: a line that is no row with a step.
    """
    try:
        data = path.read_bytes()
    except FileNotFoundError:
        return []
    except OSError as error:
        raise RunError(f"cannot read {path}: {error.strerror or error}") from error
    rows = []
    for number, line in enumerate(data.split(b"\n")[:-1], start=1):
        where = f"{path}:{number}: not a row of {what}"
        row = parse_json(line, where=where, error=RunError, hint=_HINT)
        if not isinstance(row, dict) or type(row.get("step")) is not int:
            raise RunError(f"{where}; {_HINT}")
        rows.append(row)
    return rows


def read_metrics(path: str | Path) -> list[dict[str, Any]]:
    """The rows of a `metrics.jsonl`, without a torn last line; none where there is no file.

    Raises:
      RunError: a line that is no row of numbers; steps that are missing, or stand twice.
    """
    file = Path(path)
    rows, last = read_steps(file, what="metrics"), 0
    for number, row in enumerate(rows, start=1):
        if "loss" in row:
            if row["step"] <= last:
                raise RunError(f"{file}:{number}: a second row of step {row['step']}; {_HINT}")
            if row["step"] > last + 1:
                raise _gap(file, last + 1, row["step"] - 1)
            last = row["step"]
    return rows


def _gap(path: Path, first: int, last: int) -> RunError:
    return RunError(
        f"{path}: the rows of steps {first} to {last} are missing: put back the whole file; or, to compute them again, "
        f"remove the checkpoints of step {first} and later, and the lines of those steps"
    )


def _tag(name: str) -> str:
    """TensorBoard groups by what stands before the slash."""
    first, _, rest = name.partition("_")
    return f"validation/{rest}" if first == "validation" else f"train/{name}"
